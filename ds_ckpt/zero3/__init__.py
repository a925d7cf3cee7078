"""The only code that touches DeepSpeed's privates: two hooks, their compatibility, the counters."""
