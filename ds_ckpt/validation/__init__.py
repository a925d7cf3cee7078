"""Is compression safe for this run? Training with virtual workers, and the statistics of verdicts.

Stands above `harness`, whose models and corpus it trains.
"""
