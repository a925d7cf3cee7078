"""Attach the plugin in every later `deepspeed.initialize`: `import ds_ckpt.auto`.

For scripts of the HF Trainer, trl and accelerate, and for files that a trainer imports by name.
"""

from ds_ckpt.engine.entry import install

install()
