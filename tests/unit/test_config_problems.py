"""One table of configurations and the problems that each is refused with, by JSON path.

A row of golden/config_problems.txt: `keys -> path: word | path: word`. Keys are `path=value` with
JSON or a bare word as value; a. c. w. t. stand for the sections of `ds_ckpt`, d. for
`activation_checkpointing`, z. for `zero_optimization`, whose stage is 3 unless the row has another.
The paths are all that are reported; a word is part of what was found, why, or the remedy. No path:
the row is accepted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.config import parse
from ds_ckpt.errors import ConfigError

_OURS = ("activation", "compression", "weights", "telemetry")
_SECTIONS = {name[0]: f"ds_ckpt.{name}" for name in _OURS}
_SECTIONS |= {"d": "activation_checkpointing", "z": "zero_optimization"}
GOLDEN = Path(__file__).with_name("golden")
ROWS = (GOLDEN / "config_problems.txt").read_text().splitlines()
CONFLICTS = (GOLDEN / "config_conflicts.txt").read_text().splitlines()
"""Rows: parts that refuse, key, refused values, accepted values."""
_PARTS = {"a": "a.policy=block", "c": "c.method=topk", "w": "w.resident=true"}


def full(path: str) -> str:
    first, dot, rest = path.partition(".")
    path = f"{_SECTIONS.get(first, first)}{dot}{rest}"
    return path if path.startswith("$") else f"$.{path}"


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def config_of(keys: str) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    for written in keys.replace(" AUTO ", "\0").split():
        path, _, value = written.replace("\0", " AUTO ").partition("=")
        node = config
        *parents, last = full(path).removeprefix("$.").split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value_of(value)
    return config


def problems(config: Any) -> dict[str, str]:
    try:
        parse(config)
    except ConfigError as error:
        return {p.where: str(p) for p in error.problems}
    return {}


def short(text: str) -> str:
    """The text in the table's notation."""
    for letter, section in _SECTIONS.items():
        text = text.replace(f"$.{section}.", f"{letter}.")
    return text.replace(" ", "_")


def read_row(row: str) -> tuple[str, dict[str, str]]:
    keys, _, reported = row.partition("->")
    return keys, dict(one.strip().split(": ") for one in reported.split(" | ") if one.strip())


def check_row(row: str) -> None:
    keys, expected = read_row(row)
    found = problems(config_of(keys))
    assert found.keys() == {full(path) for path in expected}
    for path, word in expected.items():
        assert word in short(found[full(path)])


@pytest.mark.parametrize("row", ROWS)
def test_problems_by_path(row: str) -> None:
    check_row(row)


@pytest.mark.parametrize("row", CONFLICTS)
def test_unsupported_settings_of_deepspeed(row: str) -> None:
    refusing, key, bad, good = row.split()
    for part, on in _PARTS.items():
        for value in json.loads(f"[{bad}]"):
            found = problems(config_of(f"{on} {key}={json.dumps(value)}".replace(": ", ":")))
            assert list(found) == ([full(key)] if part in refusing else []), (part, value)
        for value in json.loads(f"[{good}]"):
            assert not problems(config_of(f"{on} {key}={json.dumps(value)}"))
    every = " ".join(_PARTS[part] for part in refusing)
    bad = json.dumps(json.loads(f"[{bad}]")[0]).replace(": ", ":")
    (text,) = problems(config_of(f"{every} {key}={bad}")).values()
    assert text.count("set $.ds_ckpt.") == len(refusing), "one problem, with every remedy"
    assert not problems(config_of(f"{key}={bad}")), "without the plugin the key is DeepSpeed's"


def test_keys_of_deepspeed_pass() -> None:
    keys = ("checkpoint", "compile", "pipeline", "compression", "telemetry")
    assert problems({key: {} for key in keys}) == {}


def test_a_number_as_a_key_is_a_wrong_key() -> None:
    """Configurations from Python may have one."""
    (text,) = problems({"ds_ckpt": {"activation": {1: 2}}}).values()
    assert '"1" is not a key of $.ds_ckpt.activation' in text


def test_mistakes_are_reported_together() -> None:
    config = config_of(
        "a.policy=blok a.share_gather=1 c.method=topk c.topk.density=3 c.typo=null "
        "t.every_n_steps=0 activation_checkpointing=3"
    )
    with pytest.raises(ConfigError) as caught:
        parse(config, source="my.json")
    at = "a.policy a.share_gather c.topk.density c.typo t.every_n_steps $.activation_checkpointing"
    assert {p.where for p in caught.value.problems} == {full(path) for path in at.split()}
    assert str(caught.value).startswith("my.json cannot be used: 6 problems")
