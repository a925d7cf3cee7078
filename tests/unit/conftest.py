"""Fixtures that tests of reports share."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without their plots, which take half a second each: where others draw the same."""
    monkeypatch.setattr("ds_ckpt.lab.report.document.svg", lambda panels: "")
