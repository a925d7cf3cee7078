"""Resident weights: copies on every node, and how changes to them are encoded."""
