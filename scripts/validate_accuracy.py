"""Is compression safe for this run? The same as `ds-ckpt validate-accuracy`.

python scripts/validate_accuracy.py ds_configs/zero3_4bit.json [--seeds 5] [--data FILE] ...
"""

from __future__ import annotations

import typer

from ds_ckpt.cli.validate_accuracy import validate_accuracy

if __name__ == "__main__":
    typer.run(validate_accuracy)
