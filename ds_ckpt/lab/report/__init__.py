"""Documents and charts. Independent of what was measured."""
