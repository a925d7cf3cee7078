"""Atomic replacement of files."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that replaces it if the block ends without an error."""
    unfinished = path.with_suffix(".unfinished")
    yield unfinished
    os.replace(unfinished, path)
