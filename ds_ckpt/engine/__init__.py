"""The plugin on one DeepSpeed engine: assembly, step state, tuner, guard."""
