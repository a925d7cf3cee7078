"""JSON paths, values as JSON, the nearest known name, and lookups in a DeepSpeed configuration."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ds_ckpt.fields import is_auto as is_auto

OURS = "$.ds_ckpt"
DEEPSPEEDS = "$.activation_checkpointing"
BF16 = ("bf16", "bfloat16")
"""DeepSpeed reads the second key if the first is absent."""


def join(path: str, key: object) -> str:
    """Append a key or a position: `$.a` and `b` -> `$.a.b`, 0 -> `$.a[0]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if str(key).isidentifier() else f"{path}[{key!r}]"


def show(value: object) -> str:
    """Return the value as JSON, shortened if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 120 else f"{text[:116]} ..."


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar, or None."""
    by_letters = {_letters(k): k for k in known}
    close = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=cutoff)
    return by_letters[close[0]] if close else None


def _letters(name: object) -> str:
    return "".join(filter(str.isalnum, str(name).lower()))


def lookup(config: Any, keys: Iterable[str]) -> Any:
    """Return the value under nested keys; None if any of them is absent or null."""
    for key in keys:
        if not isinstance(config, Mapping):
            return None
        config = config.get(key)
    return config


def precision(config: Any) -> Literal["bf16", "fp16", "auto"] | None:
    """Return the precision of a DeepSpeed file; "auto" if Hugging Face sets it; None: fp32."""
    key = next((key for key in BF16 if lookup(config, (key,)) is not None), BF16[0])
    bf16, fp16 = lookup(config, (key, "enabled")), lookup(config, ("fp16", "enabled"))
    if bf16 is True:
        return "bf16"
    if fp16 is True:
        return "fp16"
    return "auto" if is_auto(bf16) or is_auto(fp16) else None
