"""The tests of ds_ckpt."""
