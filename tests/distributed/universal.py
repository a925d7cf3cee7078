"""DeepSpeed's conversion to a universal checkpoint, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def convert(folder: Path, tag: str) -> Path:
    """Convert the checkpoint `tag` of `folder`."""
    universal = folder / f"{tag}_universal"
    subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
            *("--input_folder", str(folder / tag)),
            *("--output_folder", str(universal)),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    return universal
