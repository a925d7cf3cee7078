"""Where an experiment runs and how it is watched: launch backends, preflight, folder."""
