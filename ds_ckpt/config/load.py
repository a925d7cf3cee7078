"""Strict JSON from a file: duplicate keys, comments, NaN and Infinity are refused with their place.

Keys that have another name now are accepted for one release.

DeepSpeed reads its file with hjson, Hugging Face with `json.load`: only strict JSON means the same
to both. Duplicate keys pass Python's parser silently, the last one winning.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
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
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[A-Za-z0-9][A-Za-z0-9.+\-]*|[{}\[\]:,]')


def load_file(path: str | Path) -> dict[str, Any]:
    """The file's JSON object.

    Raises:
        ConfigError: unreadable, not strict JSON, or not an object; places as `file:line:column`.
    """
    name = str(path)

    def refused(*problem: str) -> ConfigError:
        return ConfigError(Problem(*problem), headline=f"{name} cannot be used")

    give = "give the path of a DeepSpeed JSON file"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        raise refused(name, "no readable file", why, give) from None
    except UnicodeDecodeError as error:
        why = f"JSON is UTF-8; byte {error.start} is not"
        raise refused(name, "other bytes", why, "save the file as UTF-8") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(_syntax(name, text, error), headline=f"{name} is not JSON") from None
    except (RecursionError, ValueError):
        why = "it is nested too deeply, or holds a number of thousands of digits"
        raise refused(name, "no configuration", why, give) from None
    problems = list(_beyond_strict(name, text))
    if problems:
        raise ConfigError(problems, headline=f"{name} is not strict JSON")
    if not isinstance(data, dict):
        why = "a DeepSpeed configuration is one JSON object"
        raise refused("$", show(data), why, 'write {"zero_optimization": {"stage": 3}, ...}')
    return {**data, "ds_ckpt": with_new_names(data["ds_ckpt"])} if "ds_ckpt" in data else data


def with_new_names(section: Any, path: str = "") -> Any:
    """Our raw section with former keys under their new names; each is told of once in the log.

    Where a section has both, the former one stays: to `parse` it is a wrong key.
    """
    if not isinstance(section, Mapping):
        return section
    found: dict[Any, Any] = {}
    for key, value in section.items():
        former = f"{path}{key}"
        new = RENAMED.get(former, "").removeprefix(path)
        if new and section.get(new) is None:
            _tell_of(former)
            found[new] = value
        elif value is not None or key not in found:
            found[key] = with_new_names(value, f"{former}.")
    return found


@functools.cache
def _tell_of(former: str) -> None:
    log.warning(
        "ds_ckpt: $.ds_ckpt.%s is called %s now; the former name is accepted in this release, and "
        "not in the next",
        former,
        RENAMED[former].rpartition(".")[2],
    )


def _place(name: str, text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"{name}:{line}:{position - text.rfind(chr(10), 0, position)}"


def _syntax(name: str, text: str, error: json.JSONDecodeError) -> Problem:
    position = min(error.pos, max(len(text) - 1, 0))
    rest = text[position:].lstrip()
    before = text[:position].rstrip()
    where = _place(name, text, position)
    found = show(rest.splitlines()[0][:40]) if rest else "the end of the file"
    why, remedy = f"JSON does not allow this here ({error.msg.lower()})", "correct this line"
    if text.startswith("\ufeff"):
        why, remedy = "the file starts with a byte order mark", "save it as UTF-8 without one"
    elif rest.startswith(("//", "/*", "#")):
        why, remedy = "strict JSON has no comments", "remove the comment"
    elif before.endswith(",") and rest.startswith(("}", "]")):
        why, remedy = "JSON has no comma after the last entry", "remove the comma before it"
    elif rest.startswith("'"):
        why, remedy = "JSON text stands in double quotes", 'write "..." instead'
    elif rest.startswith(("True", "False", "None")):
        why, remedy = "this is Python's spelling", "write true, false or null"
    elif not rest:
        remedy = "complete the file: a bracket or brace is not closed"
    return Problem(where, found, why, remedy)


def _beyond_strict(name: str, text: str) -> Iterator[Problem]:
    """Duplicate keys and numbers that are none, in text that Python's parser accepted."""
    # one entry a level: (path, keys so far) in an object, (path, position) in a list
    levels: list[tuple[str, dict[str, int] | int]] = []
    key: str | None = None
    path = "$"
    tokens = list(_TOKEN.finditer(text))
    for index, match in enumerate(tokens):
        token = match.group()
        following = tokens[index + 1].group() if index + 1 < len(tokens) else ""
        level = levels[-1] if levels else None
        if level is not None and isinstance(level[1], dict) and following == ":":
            key = str(json.loads(token))
            path = join(level[0], key)
            if key in level[1]:
                first = _place(name, text, level[1][key])
                why = f"{path} stands twice (first at {first}); the last one would win silently"
                where = _place(name, text, match.start())
                yield Problem(where, f"a second {show(key)}", why, "remove one of the two")
            level[1].setdefault(key, match.start())
        elif token in "{[":
            if level is not None and isinstance(level[1], int):
                path = join(level[0], level[1])
            levels.append((path, {} if token == "{" else 0))
        elif token in "}]":
            levels.pop()
        elif token == "," and level is not None and isinstance(level[1], int):
            levels[-1] = (level[0], level[1] + 1)
        elif token[0] not in '":,' and not _is_strict(token):
            if level is not None and isinstance(level[1], int):
                path = join(level[0], level[1])
            why = f"{path} is not a finite number, and JSON has no other"
            yield Problem(_place(name, text, match.start()), token, why, "write a finite number")


def _is_strict(token: str) -> bool:
    if token in ("true", "false", "null"):
        return True
    return math.isfinite(float(token)) if re.search(r"[.eEa-zA-Z]", token) else True
