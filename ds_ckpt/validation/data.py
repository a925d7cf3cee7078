"""Data that a user brings: text files, JSON lines, data sets of Hugging Face by name.

Texts are split by piece or line into train and held-out by their content's hash, as the embedded
corpus is by topic. Labelled lines are `{"text": ..., "label": ...}`. `datasets` and `transformers`
are imported when they are needed, and said to be missing in words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.harness.corpus import Corpus, split_topics
from ds_ckpt.validation.language import Tokens

_OPTION = "--data"
_PIECE_BYTES = 2048
_MIN_PIECES = 20
_TEXT_KEYS, _LABEL_KEYS = ("text", "sentence", "content"), ("label", "labels")
_HELD_OUT_SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Labelled:
    """Texts with their classes; labels are 0 and up."""

    train: list[tuple[str, int]]
    heldout: list[tuple[str, int]]
    classes: int
    source: str


def read_text(source: str) -> Corpus:
    """The corpus behind `--data`: a text file, JSON lines with "text", or a data set's name.

    Raises:
        ConfigError: it cannot be read or is too short to split.
        UnsupportedError: it is a name, and `datasets` is not installed.
    """
    path = Path(source)
    if path.suffix == ".jsonl" and path.is_file():
        pieces = [_text_of(line, place) for place, line in _lines(path)]
    elif path.is_file():
        pieces = _pieces(path)
    else:
        splits = _dataset(source)
        train = "\n\n".join(_text_of(row, source) for row in splits[0])
        heldout = "\n\n".join(_text_of(row, source) for row in splits[1])
        return Corpus(source, train.encode(), heldout.encode())
    if len(pieces) < _MIN_PIECES:
        raise _wrong(
            f"{source} with {len(pieces)} pieces of text",
            f"about a tenth is held out, which needs {_MIN_PIECES} of about 2 kB or as many lines",
            "give more text",
        )
    named = {f"{i:07d} {_hash(p)}": f"{p}\n\n".encode() for i, p in enumerate(pieces)}
    return split_topics(named, source=path.name)


def read_labelled(source: str) -> Labelled:
    """The examples behind `--data`: JSON lines with "text" and "label", or a data set's name.

    Raises:
        ConfigError, UnsupportedError: as `read_text`.
    """
    path = Path(source)
    if path.is_file():
        rows = [(_text_of(line, place), _label_of(line, place)) for place, line in _lines(path)]
        sides = ([], []) if not rows else _tenths(rows)
        name = path.name
    else:
        found = _dataset(source)
        sides = tuple(  # type: ignore[assignment]
            [(_text_of(row, source), _label_of(row, source)) for row in split] for split in found
        )
        name = source
    classes = sorted({label for side in sides for _, label in side}, key=str)
    if len(classes) < 2 or min(map(len, sides)) < 2:
        raise _wrong(
            f"{source} with {len(classes)} classes, {len(sides[0])} examples to train on and "
            f"{len(sides[1])} held out",
            "a classifier needs two classes, and examples on both sides",
            'give more lines like {"text": "...", "label": "..."}',
        )
    number = {label: i for i, label in enumerate(classes)}
    train, heldout = ([(text, number[label]) for text, label in side] for side in sides)
    return Labelled(train, heldout, len(classes), name)


def has_labels(source: str) -> bool:
    """Whether `--data` names JSON lines of which the first has a label."""
    path = Path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    _, first = next(_lines(path), ("", {}))
    return any(key in first for key in _LABEL_KEYS)


def tokenized(corpus: Corpus, tokenizer: Any) -> Tokens:
    """The corpus as ids of another model's tokenizer."""

    def ids(text: bytes) -> Tensor:
        found = tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        return torch.tensor(found, dtype=torch.int64)

    return Tokens(ids(corpus.train), ids(corpus.heldout))


def _tenths(rows: list[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
    """About a tenth held out, by the text's hash: equal texts are on one side."""
    sides: tuple[list[Any], list[Any]] = ([], [])
    for row in rows:
        sides[int(_hash(row[0]), 16) % 10 == 0].append(row)
    return sides


def _pieces(path: Path) -> list[str]:
    """Paragraphs, put together to 2 kB or more."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        raise _wrong(str(path), why, "give the path of a text file") from error
    pieces, gathered = [], ""
    for paragraph in re.split(r"\n[ \t]*\n", text):
        gathered += paragraph + "\n\n"
        if len(gathered) >= _PIECE_BYTES:
            pieces.append(gathered)
            gathered = ""
    return [*pieces, gathered] if gathered.strip() else pieces


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and object of each line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        raise _wrong(str(path), why, "give the path of a file of JSON lines") from error
    except UnicodeDecodeError as error:
        why = f"JSON is UTF-8; byte {error.start} is not"
        raise _wrong(str(path), why, "save the file as UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise _wrong(place, f"the line is not JSON: {error.msg}", "correct it") from None
        if not isinstance(found, dict):
            raise _wrong(place, "the line is no JSON object", 'write {"text": "..."}')
        yield place, found


def _text_of(row: Mapping[str, Any], place: str) -> str:
    for key in _TEXT_KEYS:
        if isinstance(row.get(key), str):
            return str(row[key])
    raise _wrong(
        f"{place} with {', '.join(map(repr, row)) or 'nothing'}",
        f"none of {', '.join(_TEXT_KEYS)} is there as text",
        'name the text "text"',
    )


def _label_of(row: Mapping[str, Any], place: str) -> Any:
    for key in _LABEL_KEYS:
        if isinstance(row.get(key), int | str):
            return row[key]
    raise _wrong(
        f"{place} with {', '.join(map(repr, row)) or 'nothing'}",
        "no label is there",
        'name the class "label", a number or a word',
    )


def _dataset(name: str) -> tuple[Iterable[Mapping[str, Any]], Iterable[Mapping[str, Any]]]:
    """Train and held-out split of a Hugging Face data set, `NAME` or `NAME:CONFIGURATION`."""
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where=_OPTION,
                found=name,
                why="no such file is there, and data sets by name need the package datasets",
                remedy="give the path of a text or JSON Lines file, or pip install datasets",
            )
        ) from error
    wanted, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(wanted, configuration or None)
    except Exception as error:  # whatever the hub, the disk or the parser raise
        why = f"no such file is there, and the data set cannot be loaded: {error}"
        raise _wrong(name, why, "check the name, or give the path of a file") from error
    held_out = next((s for s in _HELD_OUT_SPLITS if s in splits), None)
    if "train" not in splits or held_out is None:
        why = f"it has the splits {', '.join(splits)}"
        raise _wrong(name, why, "choose a data set with a train split and a validation or test one")
    return splits["train"], splits[held_out]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _wrong(found: str, why: str, remedy: str) -> ConfigError:
    problem = Problem(where=_OPTION, found=found, why=why, remedy=remedy)
    return ConfigError(problem, headline="the data cannot be used")
