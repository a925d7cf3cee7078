"""Strict JSON from a file: comments, duplicate keys, NaN and Infinity are refused.

DeepSpeed reads its file with hjson, Hugging Face with `json.load`: only strict JSON has the same
meaning for both. Former names of keys are accepted for one release.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_ckpt.config.paths import join, show
from ds_ckpt.errors import ConfigError, Problem

log = logging.getLogger("ds_ckpt")
RENAMED = {
    "compression.start_step": "compression.warmup_steps",
    "compression.exchange.gate": "compression.exchange.autotune",
}
"""Former name -> name, both of one section, as paths below `ds_ckpt`."""
_NOT_JSON = {
    "\ufeff": ("the file starts with a byte order mark", "save it as UTF-8 without one"),
    "//": ("strict JSON has no comments", "remove the comment"),
    "/*": ("strict JSON has no comments", "remove the comment"),
    "#": ("strict JSON has no comments", "remove the comment"),
    "'": ("JSON text is written in double quotes", 'write "..." instead'),
    "True": ("this is Python's spelling", "write true"),
    "False": ("this is Python's spelling", "write false"),
    "None": ("this is Python's spelling", "write null"),
}
"""Reason and remedy, by the text where the parser stops."""


def load_file(path: str | Path) -> dict[str, Any]:
    """Return the file's JSON object.

    Raises:
        ConfigError: the file is unreadable, not strict JSON, or not an object.
    """
    name = str(path)

    def refused(*problem: str) -> ConfigError:
        return ConfigError(Problem(*problem), headline=f"{name} cannot be used")

    give = "give the path of a DeepSpeed JSON file"
    repeated: list[tuple[dict[str, Any], str]] = []

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        keys = [key for key, _ in pairs]
        repeated.extend((found, key) for key in found if keys.count(key) > 1)
        return found

    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=read_object)
        problems = list(_beyond_strict(data, repeated, "$"))
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        raise refused(name, "no readable file", why, give) from None
    except UnicodeDecodeError as error:
        why = f"JSON is UTF-8; byte {error.start} is not"
        raise refused(name, "other bytes", why, "save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(_syntax(name, text, error), headline=f"{name} is not JSON") from None
    except (RecursionError, ValueError):
        why = "it is nested too deeply, or has a number of thousands of digits"
        raise refused(name, "no configuration", why, give) from None
    if problems:
        raise ConfigError(problems, headline=f"{name} is not strict JSON")
    if not isinstance(data, dict):
        why = "a DeepSpeed configuration is one JSON object"
        raise refused("$", show(data), why, 'write {"zero_optimization": {"stage": 3}, ...}')
    return {**data, "ds_ckpt": with_new_names(data["ds_ckpt"])} if "ds_ckpt" in data else data


def with_new_names(section: Any, path: str = "") -> Any:
    """Return our raw section with former keys under their new names; each is logged once.

    If a section has both, the former key stays: `parse` reports it.
    """
    if not isinstance(section, Mapping):
        return section
    found: dict[Any, Any] = {}
    for key, value in section.items():
        former = f"{path}{key}"
        new = RENAMED.get(former, "").removeprefix(path)
        if new and section.get(new) is None:
            _warn_of(former)
            found[new] = value
        elif value is not None or key not in found:
            found[key] = with_new_names(value, f"{former}.")
    return found


@functools.cache
def _warn_of(former: str) -> None:
    log.warning(
        "$.ds_ckpt.%s is the former name of %s; the next release will refuse it",
        former,
        RENAMED[former].rpartition(".")[2],
    )


def _syntax(name: str, text: str, error: json.JSONDecodeError) -> Problem:
    position = min(error.pos, max(len(text) - 1, 0))
    rest, before = text[position:].lstrip(), text[:position].rstrip()
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    found = show(rest.splitlines()[0][:40]) if rest else "the end of the file"
    why, remedy = f"JSON does not allow this here ({error.msg.lower()})", "correct this line"
    if not rest:
        remedy = "complete the file: a bracket or brace is not closed"
    elif before.endswith(",") and rest[0] in "}]":
        why, remedy = "JSON has no comma after the last entry", "remove the comma before it"
    for start, words in _NOT_JSON.items():
        if rest.startswith(start):
            why, remedy = words
    return Problem(f"{name}:{line}:{column}", found, why, remedy)


def _beyond_strict(
    value: Any, repeated: list[tuple[dict[str, Any], str]], path: str
) -> Iterator[Problem]:
    """Yield duplicate keys and numbers that JSON cannot have."""
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, show(value), "JSON has finite numbers only", "write a finite number")
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        if any(one is value and name == key for one, name in repeated):
            why = "the key is written twice in one object; the last one would win silently"
            yield Problem(join(path, key), f"a second {show(key)}", why, "remove one of the two")
        yield from _beyond_strict(item, repeated, join(path, key))
