"""What training a model costs: `profile` observes one step, `plan` searches over settings."""
