"""Log lines that ds_ckpt prints while a case runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Capture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect the messages of this rank, from level INFO on."""
    capture, log = _Capture(), logging.getLogger("ds_ckpt")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(capture)
    try:
        yield capture.messages
    finally:
        log.removeHandler(capture)
        log.setLevel(level)
