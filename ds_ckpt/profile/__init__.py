"""What training a model costs: memory, recompute, launches, and which setting changes it.

The command is in `command.py`, what is profiled in `subject.py`, one step under observation in
`watch.py` and `measure.py`, the records in `records.py`, what follows from them in `findings.py`.
"""
