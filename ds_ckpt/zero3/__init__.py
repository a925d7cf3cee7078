"""The only code that reads or patches DeepSpeed's internals, except the reads of `sharded.py`."""
