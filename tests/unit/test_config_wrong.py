"""Hundreds of generated wrong configurations: each refused, with the mutated path and a remedy.

A case is a valid preset with one to three mistakes: wrong types, values out of range, misspelt or
invented keys, "auto", lists for objects. Rules across keys are in test_config_problems.py.
"""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.config import json_schema, parse
from ds_ckpt.config.paths import join
from ds_ckpt.errors import ConfigError

PRESETS = [
    json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
]
Keys = tuple[str, ...]

_BOOL_LIKE = st.sampled_from([0, 1, "true", "false", "yes", 1.0, [], [True], {}, {"enabled": True}])
_NOT_A_NUMBER = st.sampled_from(["1", "0.5", True, False, [], [1], {}, {"value": 1}])
_TEXT = st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)
_WHOLE = _NOT_A_NUMBER | st.floats(0, 1e6) | st.just(float("inf"))
_BY_HAND: dict[str, list[Any]] = {
    "save_ops": [[], "", True, 3, {}, [3], [""]],
    "rules": ["0-3", True, 3, [3], [{"match": "0"}], [{"policy": "block"}], {"match": "0"}],
    "momentum": [0, 1, 1.0, -0.1, float("nan"), float("inf"), True, "", "Matched", "0.3", [], {}],
    "check_determinism": [0, -1, 1.0, 2.5, "true", "yes", [], [True], {}, {"enabled": True}],
    "modules": ["Block", [], True, 3, {"Block": 1}, {}, 1.5],
    "resident": [0, 1, 1.0, "true", "yes", [], {}],
    "path": ["", 3, True, [], ["t.jsonl"], {}],
}
"""Wrong values of keys that take no number, switch or name alone."""
_SCHEMA = json_schema()
_TAKES_AUTO = ("ds_ckpt", "dtype", "when", "levels", "policy", "deltas", "resident")


def _wrong_for(key: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a key does not take, by its JSON schema."""
    if key in _BY_HAND:
        return st.sampled_from(_BY_HAND[key])
    choices = schema.get("enum")
    if choices is not None:
        if numbers := [c for c in choices if isinstance(c, int)]:
            words = st.sampled_from(["1", "two", *(str(n) for n in numbers)])
            return _WHOLE | words | st.integers().filter(lambda n: n not in numbers)
        near = [*(c.upper() for c in choices), *(f"{c} " for c in choices), 0, 1, True, {}]
        return _TEXT.filter(lambda t: t not in choices) | st.sampled_from(near)
    if schema["type"] == "boolean":
        return _BOOL_LIKE
    least, above, most = (schema.get(k) for k in ("minimum", "exclusiveMinimum", "maximum"))
    if schema["type"] == "integer":
        wrong = _WHOLE if least is None else _WHOLE | st.integers(max_value=least - 1)
        return wrong if most is None else wrong | st.integers(min_value=most + 1)
    wrong = _NOT_A_NUMBER | st.floats(max_value=above) | st.integers(max_value=above)
    if most is None:
        return wrong | st.just(float("inf"))
    return wrong | st.floats(min_value=most, exclude_min=True) | st.integers(most + 1, 100)


def _places(schema: dict[str, Any], keys: Keys = ()) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Every key below an object, and the schema of its value."""
    for key, one in schema["properties"].items():
        option = one.get("anyOf", [one])[0]
        at, name = (*keys, key), option.get("$ref", "").rpartition("/")[2]
        yield at, _SCHEMA["$defs"].get(name, option)
        if name:
            yield from _places(_SCHEMA["$defs"][name], at)


_ALL = {keys: schema for keys, schema in _places(_SCHEMA) if keys[0] == "ds_ckpt"}
SECTIONS: list[Keys] = [keys for keys, schema in _ALL.items() if "properties" in schema]
LEAVES = {k: _wrong_for(k[-1], schema) for k, schema in _ALL.items() if k not in SECTIONS}
NOT_AUTO = [keys for keys in (*LEAVES, *SECTIONS) if keys[-1] not in _TAKES_AUTO]
_ALL_ON: dict[str, Any] = {
    "activation": {"policy": "block"},
    "compression": {"method": "topk"},
    "weights": {"resident": True},
    "telemetry": {"enabled": True},
}


def _put(config: dict[str, Any], keys: Keys, value: Any) -> None:
    node = config
    for key in keys[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    node[keys[-1]] = value


def _path(keys: Keys) -> str:
    path = "$"
    for key in keys:
        path = join(path, key)
    return path


@st.composite
def _misspelt(draw: st.DrawFn, word: str) -> str:
    position = draw(st.integers(0, len(word) - 1))
    kind = draw(st.sampled_from(["drop", "letter", "swap", "case", "plural"]))
    if kind == "drop":
        return word[:position] + word[position + 1 :]
    if kind == "letter":
        return word[:position] + draw(st.sampled_from("xqz")) + word[position + 1 :]
    if kind == "swap":
        return word[:position] + word[position : position + 2][::-1] + word[position + 2 :]
    return word[:position] + word[position:].upper() if kind == "case" else f"{word}s"


@st.composite
def _mistake(draw: st.DrawFn) -> tuple[Keys, Any]:
    """One mistake in our sections: its keys, and the wrong value."""
    kind = draw(st.sampled_from(["value", "value", "misspelt", "invented", "auto", "no_object"]))
    if kind == "value":
        keys = draw(st.sampled_from(list(LEAVES)))
        return keys, draw(LEAVES[keys])
    if kind == "auto":
        return draw(st.sampled_from(NOT_AUTO)), "auto"
    section = draw(st.sampled_from(SECTIONS))
    if kind == "no_object":
        return section, draw(st.sampled_from([[], [1], True, "block", 3, 0.5]))
    known = set(_ALL[section]["properties"])
    word = _misspelt(draw(st.sampled_from(sorted(known)))) if kind == "misspelt" else _TEXT
    name = draw(word.filter(lambda w: w not in known))
    return (*section, name), draw(st.sampled_from([None, True, 1, "topk", {}, []]))


@st.composite
def wrong_configs(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A configuration and the paths that its refusal has to name."""
    config = copy.deepcopy(draw(st.sampled_from(PRESETS)))
    if draw(st.booleans()):
        config["ds_ckpt"] = copy.deepcopy(_ALL_ON)
    mistakes: list[Keys] = []
    for keys, value in draw(st.lists(_mistake(), min_size=1, max_size=3)):
        if any(keys[: len(k)] == k or k[: len(keys)] == keys for k in mistakes):
            continue  # one would hide the other
        _put(config, keys, value)
        mistakes.append(keys)
    return config, [_path(keys) for keys in mistakes]


FOREIGN = re.compile(
    r"pydantic|validation error|traceback|input should|type=|deepspeed\.runtime", re.I
)


def test_generated_wrong_configs_are_refused_with_words() -> None:
    seen: set[str] = set()

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(wrong_configs())
    def check(case: tuple[dict[str, Any], list[str]]) -> None:
        config, paths = case
        with pytest.raises(ConfigError) as caught:
            parse(config)
        reported = {p.where for p in caught.value.problems}
        missing = [p for p in paths if not any(t == p or t.startswith(f"{p}[") for t in reported)]
        assert not missing, f"{missing} not named in {reported}"
        for problem in caught.value.problems:
            assert problem.where.startswith("$")
            assert problem.where in str(caught.value)
            assert problem.found
            assert len(problem.why) > 10
            assert len(problem.remedy) > 5
        assert not FOREIGN.search(str(caught.value))
        assert len(reported) == len(caught.value.problems), "one problem a place"
        seen.add(json.dumps(config, sort_keys=True))

    check()
    assert len(seen) >= 200
    assert len(LEAVES) >= 40
