"""The command `ds-ckpt`: one thin file a command, put together in `main`."""

from ds_ckpt.cli.main import EXAMPLES, app

__all__ = ["EXAMPLES", "app"]
