"""Is compression safe for this run? Training with virtual workers, and the statistics of verdicts.

It trains what `ds_ckpt.lab.workload` has.
"""
