"""Fixtures that tests of reports share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without their plots, which take half a second each: where others draw the same."""
    monkeypatch.setattr("ds_ckpt.lab.report.document.svg", lambda panels: "<svg/>")


@pytest.fixture
def is_golden() -> Callable[[str, str], bool]:
    """Compare a text with the named file; REWRITE_GOLDEN=1 writes it: read the change."""

    def compare(name: str, text: str) -> bool:
        path = Path(__file__).with_name("golden") / name
        if os.environ.get("REWRITE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        return text == path.read_text(encoding="utf-8")

    return compare
