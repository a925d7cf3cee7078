"""Plugin of axolotl: `plugins: [ds_ckpt.integrations.axolotl.Plugin]` in its YAML file."""

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin

from ds_ckpt.engine.entry import install
from ds_ckpt.errors import log


class Plugin(BasePlugin):
    """Attaches ds_ckpt to the engine of each rank; the section is in the file of `deepspeed:`."""

    def register(self, cfg: Any) -> None:
        """Install the plugin; axolotl calls this before it builds the trainer."""
        install()
        # axolotl drops lines of other loggers below a warning, and so the line at the start
        log.name, log.parent = "axolotl.ds_ckpt", logging.getLogger("axolotl")
        log.setLevel(logging.INFO)
