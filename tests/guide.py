"""Code and JSON of docs/add_a_compressor.md, as used from outside the package."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_ckpt.compression import Method, unregister

PAGE = Path(__file__).resolve().parents[1] / "docs" / "add_a_compressor.md"


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return "\n\n".join(found)


def section() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(block("json"))["ds_ckpt"]["compression"]
    return found


@contextmanager
def registered() -> Iterator[type[Method]]:
    """Register the page's classes while the context lasts; the first one is returned."""
    module = sys.modules["my_signs"] = ModuleType("my_signs")
    try:
        exec(compile(block("python"), str(PAGE), "exec"), module.__dict__)
        yield module.Sign
    finally:
        unregister("sign")
        unregister("vote")
        del sys.modules["my_signs"]
