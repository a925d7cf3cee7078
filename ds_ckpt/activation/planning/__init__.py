"""Measures a model with fake tensors, and chooses what is kept and recomputed within a budget."""
