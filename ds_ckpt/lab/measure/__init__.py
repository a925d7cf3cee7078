"""The experiment of `ds-ckpt measure`: configurations, parts of a step, figures, report."""
