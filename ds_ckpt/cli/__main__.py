"""`python -m ds_ckpt.cli`."""

from ds_ckpt.cli import app

app()
