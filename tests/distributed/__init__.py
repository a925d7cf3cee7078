"""Tests on several real processes. `cases_*.py` run in the workers, `test_*.py` in pytest."""
