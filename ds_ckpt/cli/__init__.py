"""The command `ds-ckpt`: one thin file a command, assembled in `main`."""

from ds_ckpt.cli.main import EXAMPLES, app

__all__ = ["EXAMPLES", "app"]
