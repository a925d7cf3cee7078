"""The only code that touches DeepSpeed's privates: two seams, their contract, the counters."""
