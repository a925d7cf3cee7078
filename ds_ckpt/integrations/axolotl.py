"""Plugin of axolotl: `plugins: [ds_ckpt.integrations.axolotl.Plugin]` in its YAML file."""

from typing import Any

from axolotl.integrations.base import BasePlugin

from ds_ckpt.engine.entry import install


class Plugin(BasePlugin):
    """Attaches ds_ckpt to the engine of each rank; the section is in the file of `deepspeed:`."""

    def register(self, cfg: Any) -> None:
        """Install the plugin; axolotl calls this before it builds the trainer."""
        install()
