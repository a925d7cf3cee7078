"""Strict JSON: what hjson or Python's parser would let pass is refused with its place."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.config import load, load_file, parse
from ds_ckpt.errors import ConfigError, Problem


def refused(tmp_path: Path, text: str | bytes) -> list[Problem]:
    path = tmp_path / "c.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    problems = list(caught.value.problems)
    assert all(p.why and p.remedy and p.found for p in problems)
    assert "Traceback" not in str(caught.value)
    return problems


def test_reads_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(
        '{"a": [1, -2.5e3, {"a": null}, [[], {}]], "b": "x, \\"a\\": NaN // no {comment}", "": {}}'
    )
    expected = {
        "a": [1, -2500.0, {"a": None}, [[], {}]],
        "b": 'x, "a": NaN // no {comment}',
        "": {},
    }
    assert load_file(path) == load_file(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('{\n  // why\n  "a": 1\n}', "2:3", "comment"),
        ('{\n  "a": 1 # why\n}', "2:10", "comment"),
        ('{"a": 1 /* why */}', "1:9", "comment"),
        ('{\n  "a": 1,\n}', "3:1", "comma"),
        ('{"a": [1, 2,]}', "1:13", "comma"),
        ("{'a': 1}", "1:2", "double quotes"),
        ('{"a": True}', "1:7", "Python"),
        ('{"a": 1', "1:7", "does not allow"),
        ("", "1:1", "does not allow"),
        ("\ufeff{}", "1:1", "byte order mark"),
        ('{"a" 1}', "1:6", "does not allow"),
    ],
)
def test_what_is_not_json_is_named_with_its_place(
    tmp_path: Path, text: str, place: str, words: str
) -> None:
    (problem,) = refused(tmp_path, text)
    assert problem.where == f"{tmp_path / 'c.json'}:{place}"
    assert words in problem.why


def test_duplicate_keys(tmp_path: Path) -> None:
    text = '{"a": {"b": 1, "c": [{"d": 1}, {"d": 2, "d": 3}], "b": 2}, "\\u0065": 1, "e": 2}'
    problems = refused(tmp_path, text)
    assert [p.where for p in problems] == ["$.a.b", "$.a.c[1].d", "$.e"]
    assert [p.found for p in problems] == ['a second "b"', 'a second "d"', 'a second "e"']


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_have(tmp_path: Path, number: str) -> None:
    problems = refused(tmp_path, f'{{"a": 1, "b": [0, {number}], "c": {number}}}')
    assert [p.where for p in problems] == ["$.b[1]", "$.c"]


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null"])
def test_the_file_holds_one_object(tmp_path: Path, text: str) -> None:
    (problem,) = refused(tmp_path, text)
    assert problem.where == "$"


@pytest.mark.parametrize("text", [b"\xff\xfe{}", b'{"a": "\xe4"}'])
def test_other_encodings(tmp_path: Path, text: bytes) -> None:
    (problem,) = refused(tmp_path, text)
    assert "UTF-8" in problem.remedy


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' + "1" * 5000 + "}"])
def test_absurd_files(tmp_path: Path, text: str) -> None:
    assert len(refused(tmp_path, text)) == 1


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_file(path)
        assert caught.value.problems[0].where == str(path)


@pytest.mark.parametrize(
    ("former", "new"),
    [
        ({"start_step": 7}, {"warmup_steps": 7}),
        ({"exchange": {"gate": False}}, {"exchange": {"autotune": False}}),
    ],
)
def test_a_former_name_is_accepted_for_a_release_with_one_warning(
    former: dict[str, Any],
    new: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load._warn_of.cache_clear()
    caplog.set_level(logging.WARNING, logger="ds_ckpt")
    old, now = (
        {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": {"method": "topk", **keys}}}
        for keys in (former, new)
    )
    assert parse(old) == parse(now)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(old))
    assert load_file(path) == now
    (record,) = caplog.records
    assert "is the former name of" in record.message
