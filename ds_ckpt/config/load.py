"""Strict JSON from a file: comments, duplicate keys, NaN and Infinity are refused.

DeepSpeed reads its file with hjson, Hugging Face with `json.load`: only strict JSON has the same
meaning for both.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_ckpt.config.paths import join, show
from ds_ckpt.errors import ConfigError, Problem


class _NotStrict(NamedTuple):
    """Value that Python's parser accepts and strict JSON does not have."""

    found: str
    why: str
    remedy: str


_WRITE = 'write {"zero_optimization": {"stage": 3}, ...}'


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the file's JSON object; ConfigError if it is unreadable or not strict JSON."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(
            text, object_pairs_hook=_object, parse_float=_number, parse_constant=_number
        )
        problems = list(_not_strict(data, "$"))
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        problems = [Problem(name, "no readable file", why, "correct the path")]
    except json.JSONDecodeError as error:
        found = show(text[error.pos :].split("\n")[0][:40]) if text[error.pos :] else "the end"
        remedy = (
            "correct it: strict JSON is UTF-8 in double quotes, without comments, trailing commas, "
            "a byte order mark, and Python's True, False and None"
        )
        where, why = f"{name}:{error.lineno}:{error.colno}", f"not strict JSON: {error.msg.lower()}"
        problems = [Problem(where, found, why, remedy)]
        if not text.strip():
            why = "a configuration is one JSON object"
            problems = [Problem(name, "an empty file", why, _WRITE)]
    except (RecursionError, ValueError) as error:  # UnicodeDecodeError included
        problems = [Problem(name, "no JSON", str(error)[:200], "save the file as JSON in UTF-8")]
    if not problems and not isinstance(data, dict):
        why = "a DeepSpeed configuration is one JSON object"
        problems = [Problem("$", show(data), why, _WRITE)]
    if problems:
        raise ConfigError(problems, headline=f"{name} cannot be used")
    return dict(data)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    keys = [key for key, _ in pairs]
    for key in {key for key in keys if keys.count(key) > 1} if len(found) < len(keys) else ():
        why = "the key is written twice in one object; the last one would win silently"
        found[key] = _NotStrict(f"a second {show(key)}", why, "remove one of the two")
    return found


def _number(text: str) -> float | _NotStrict:
    number = float(text)
    if math.isfinite(number):
        return number
    return _NotStrict(text, "JSON has finite numbers only", "write a finite number")


def _not_strict(value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, _NotStrict):
        yield Problem(path, *value)
        return
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from _not_strict(item, join(path, key))
