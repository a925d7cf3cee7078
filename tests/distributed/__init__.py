"""Tests on several real processes: under `@ranks` they run in the workers, else in pytest."""
