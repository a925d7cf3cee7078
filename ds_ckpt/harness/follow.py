"""Reads a file of JSON lines while another process writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Lines:
    """The whole lines that a growing file of JSON lines has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # Half-written: next time.
                    self._offset += len(line)
                    yield json.loads(line)
        except FileNotFoundError:
            return
