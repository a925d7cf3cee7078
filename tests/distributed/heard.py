"""Log lines that ds_ckpt prints while a case runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def hearing() -> Iterator[list[str]]:
    """The messages of this process meanwhile, from INFO on."""
    heard, log = _Heard(), logging.getLogger("ds_ckpt")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(heard)
    try:
        yield heard.messages
    finally:
        log.removeHandler(heard)
        log.setLevel(level)
