"""Strict JSON: what hjson or Python's parser would let pass is refused with its place."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.config import load, load_file, parse
from ds_ckpt.config.load import RENAMED
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
    text = '{\n "a": {"b": 1,\n  "c": [{"d": 1}, {"d": 2, "d": 3}],\n  "b": 2},\n "a": 1\n}'
    problems = refused(tmp_path, text)
    base = str(tmp_path / "c.json")
    assert [p.where for p in problems] == [f"{base}:3:28", f"{base}:4:3", f"{base}:5:2"]
    assert [p.why.split()[0] for p in problems] == ["$.a.c[1].d", "$.a.b", "$.a"]
    assert f"first at {base}:2:8" in problems[1].why


def test_escaped_duplicates_are_the_same_key(tmp_path: Path) -> None:
    assert len(refused(tmp_path, '{"ab": 1, "\\u0061b": 2}')) == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none(tmp_path: Path, number: str) -> None:
    problems = refused(tmp_path, f'{{"a": 1,\n "b": [0, {number}], "c": {number}}}')
    assert [p.found for p in problems] == [number, number]
    assert [p.why.split()[0] for p in problems] == ["$.b[1]", "$.c"]
    assert problems[0].where.endswith(":2:11")


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


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the log says of former names, as in a program that has not used one yet."""
    load._tell_of.cache_clear()
    caplog.set_level(logging.WARNING, logger="ds_ckpt")
    return caplog


@pytest.mark.parametrize("former", RENAMED)
def test_a_former_name_means_the_new_one_for_a_release(
    former: str, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    value = {"start_step": 7, "gate": False}[former.rpartition(".")[2]]
    old, new = (nested(path, value) for path in (former, RENAMED[former]))
    assert parse(old) == parse(new) != parse(nested(RENAMED[former], None))
    (record,) = warned.records
    assert (
        f"$.ds_ckpt.{former} is called {RENAMED[former].rpartition('.')[2]} now" in record.message
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(old))
    assert load_file(path) == new
    assert len(warned.records) == 1, "once"


@pytest.mark.parametrize("former", RENAMED)
def test_a_former_name_beside_the_new_one_is_refused(former: str) -> None:
    both = nested(former, 0)
    section = both["ds_ckpt"]["compression"]
    section = section.get("exchange", section)
    section[RENAMED[former].rpartition(".")[2]] = 1
    with pytest.raises(ConfigError) as caught:
        parse(both)
    problem = next(p for p in caught.value.problems if p.where == f"$.ds_ckpt.{former}")
    new = RENAMED[former]
    assert problem.why == f"it is the former name of $.ds_ckpt.{new}, which is written too"
    assert problem.remedy == "remove it"


def nested(path: str, value: object) -> dict[str, Any]:
    """A configuration that compresses, with one value."""
    compression: dict[str, Any] = {"method": "topk"}
    *sections, key = path.removeprefix("compression.").split(".")
    place = compression
    for name in sections:
        place = place.setdefault(name, {})
    place[key] = value
    return {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": compression}}
