"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, beside `path`, that takes its place when the block ends well.

    What was at `path` stays when the block fails or the process is killed.
    """
    unfinished = path.with_suffix(".unfinished")
    yield unfinished
    os.replace(unfinished, path)
