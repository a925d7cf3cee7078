"""The experiment of `ds-ckpt measure`: cells, parts of a step, derived figures, report."""
