"""Fixtures that tests of reports share."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _builtins_are_patched_once() -> None:
    """Triton's interpreter looks for its operators in every call of a function: half its time."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language import standard
    from triton.runtime import interpreter

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope()

    def patched_once(function: Any) -> Any:
        if scope._changes:  # until the launch ends
            return interpreter._LangPatchScope()
        for each in (function, standard.sum.fn):
            scope._changes += patch(each)._changes
        return scope

    interpreter._patch_lang = patched_once


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
