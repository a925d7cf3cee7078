"""Everything that measures, estimates or judges. Only `cli` imports it."""
