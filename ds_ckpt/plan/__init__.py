"""`ds-ckpt plan`: which settings train a model fastest on a cluster, within memory and loss."""
