"""From a bucket of gradients to the sums of their owners."""
