"""JSON paths, values as JSON, the nearest known name, and lookups in a DeepSpeed configuration."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ds_ckpt.fields import is_auto as is_auto

OURS = "$.ds_ckpt"
DEEPSPEEDS = "$.activation_checkpointing"
BF16 = ("bf16", "bfloat16")
"""DeepSpeed reads the second key if the first is absent."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LONGEST_FOUND = 120


def join(path: str, key: object) -> str:
    """Append a key: `$.a` and `b` -> `$.a.b`; positions and odd keys in brackets (RFC 9535)."""
    if isinstance(key, int) and not isinstance(key, bool):
        return f"{path}[{key}]"
    text = str(key)
    return f"{path}.{text}" if _NAME.match(text) else f"{path}[{text!r}]"


def show(value: object) -> str:
    """Return the value as JSON, shortened if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _LONGEST_FOUND else text[: _LONGEST_FOUND - 4] + " ..."


def plain(name: object) -> str:
    """Return lower case, letters and digits only: `DS-Ckpt` -> `dsckpt`."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar, or None."""
    by_plain = {plain(k): k for k in known}
    close = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=0.6)
    return by_plain[close[0]] if close else None


def lookup(config: Any, keys: Iterable[str]) -> Any:
    """Return the value under nested keys; None if any of them is absent or null."""
    for key in keys:
        if not isinstance(config, Mapping):
            return None
        config = config.get(key)
    return config


def precision(config: Any) -> Literal["bf16", "fp16", "auto"] | None:
    """Return the precision of a DeepSpeed file; "auto" if Hugging Face sets it; None: fp32."""
    bf16 = next((key for key in BF16 if lookup(config, (key,)) is not None), BF16[0])
    enabled = {
        "bf16": lookup(config, (bf16, "enabled")),
        "fp16": lookup(config, ("fp16", "enabled")),
    }
    if enabled["bf16"] is True:
        return "bf16"
    if enabled["fp16"] is True:
        return "fp16"
    return "auto" if any(map(is_auto, enabled.values())) else None
