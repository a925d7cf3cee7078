"""Cost estimates: `profile` traces one training step, `plan` searches over settings."""
