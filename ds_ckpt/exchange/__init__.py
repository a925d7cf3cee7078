"""Moves gradients: who owns which shard, the packets of a bucket, and how they travel."""
