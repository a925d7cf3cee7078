"""What tasks train on: a text, or labelled examples; built in, or brought by a user.

A micro-batch is a function of (seed, number, worker) alone, so runs of one seed see the same data
in the same order, whoever trains. Nothing is downloaded but data sets that a user names: `datasets`
is imported when one is, and said to be missing in words.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.lab.workload import (
    Corpus,
    content_hash,
    contents,
    evaluation_batches,
    file_corpus,
    pieces_corpus,
    python_topics,
    training_batch,
)

Inputs = dict[str, Tensor]
"""What a model is called with, `labels` among it."""

PASSAGE = 32
"""Words of a passage of `topics`."""
WORDS = 2048
"""Different ids of words."""
FAMILIES = 5
PER_FAMILY = (240, 250)
"""Passages of a family to train on and held out, at most."""
_DIGITS_HELD_OUT = 800
_EVALUATION_EXAMPLES = 100
_EVALUATION_SEQUENCES = 8
_OPTION = "--data"
_TEXT_KEYS, _LABEL_KEYS = ("text", "sentence", "content"), ("label", "labels")
_HELD_OUT_SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Text:
    """A text to learn as a language: windows at random places, fixed ones to be judged by.

    Attributes:
        train, heldout: two vectors of ids.
        length: of a sequence.
        sha256: digest over both: equal digests mean equal data.
        evaluation_batches: of 8 sequences each, spread evenly over the held-out text.

    Raises:
        ConfigError: the text is too short for the sequences.
    """

    train: Tensor
    heldout: Tensor
    length: int
    source: str
    sha256: str
    evaluation_batches: int = 24

    def __post_init__(self) -> None:
        if len(self.heldout) <= self.length:
            raise _wrong(
                f"{len(self.heldout)} held-out tokens, a tenth of the text",
                f"a sequence takes {self.length} of them",
                "give more text or a shorter --length",
            )

    @classmethod
    def of_bytes(cls, corpus: Corpus, length: int, evaluation_batches: int = 24) -> Text:
        """Bytes are the tokens."""
        train, heldout = (
            torch.frombuffer(bytearray(side), dtype=torch.uint8)
            for side in (corpus.train, corpus.heldout)
        )
        return cls(train, heldout, length, corpus.source, corpus.sha256, evaluation_batches)

    @classmethod
    def of_tokens(cls, train: Tensor, heldout: Tensor, length: int, source: str) -> Text:
        """Ids of another model's tokenizer, int64."""
        first, second = (ids.numpy().tobytes() for ids in (train, heldout))
        return cls(train, heldout, length, source, Corpus("tokens", first, second).sha256)

    def batch(self, seed: int, number: int, worker: int, workers: int, rows: int) -> Inputs:
        """Micro-batch `number` of a worker."""
        ids = training_batch(
            self.train,
            sequences=rows,
            sequence_length=self.length,
            seed=seed,
            step=number,
            process=worker,
        )
        return {"input_ids": ids, "labels": ids}

    def evaluation(self) -> Iterator[Inputs]:
        """Batches of the held-out side, the same every time."""
        for ids in evaluation_batches(
            self.heldout,
            sequences=_EVALUATION_SEQUENCES,
            sequence_length=self.length,
            batches=self.evaluation_batches,
            process=0,
            processes=1,
        ):
            yield {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Examples:
    """Labelled examples. They come in permutations, one after the other, each a function of
    (seed, epoch), and are dealt out to the workers.

    Small data is where compression was reported to cost accuracy.

    Attributes:
        train, heldout: all rows, `labels` among it.
        classes: their number.
        source: where they come from, in words.
    """

    train: Inputs
    heldout: Inputs
    classes: int
    source: str

    @property
    def sizes(self) -> tuple[int, int]:
        """Examples to train on and held out."""
        return len(self.train["labels"]), len(self.heldout["labels"])

    @property
    def held_out(self) -> int:
        """Held-out examples that are asked for: those that fill batches of 100."""
        count = self.sizes[1]
        return count - count % min(_EVALUATION_EXAMPLES, count)

    @property
    def sha256(self) -> str:
        """Digest over both sides: equal digests mean equal data."""
        digest = hashlib.sha256()
        for side in (self.train, self.heldout):
            for name, values in sorted(side.items()):
                digest.update(name.encode())
                digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def batch(self, seed: int, number: int, worker: int, workers: int, rows: int) -> Inputs:
        """Micro-batch `number` of a worker."""
        first = (number * workers + worker) * rows
        count = self.sizes[0]
        places = (divmod(place, count) for place in range(first, first + rows))
        chosen = torch.tensor([int(_order(seed, epoch, count)[at]) for epoch, at in places])
        return {name: values[chosen] for name, values in self.train.items()}

    def evaluation(self) -> Iterator[Inputs]:
        """Batches of the held-out side, the same every time."""
        size = min(_EVALUATION_EXAMPLES, self.sizes[1])
        for first in range(0, self.held_out, size):
            yield {name: values[first : first + size] for name, values in self.heldout.items()}


@functools.lru_cache(maxsize=16)
def _order(seed: int, epoch: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(count)


# What is built in


def digits() -> Examples:
    """scikit-learn's 1,797 images of 8x8 grey values, 997 to train on: `pixel_values` [n, 1, 8, 8]
    from 0 to 1. UnsupportedError without the package."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where="--tasks digits",
                found="no scikit-learn",
                why="the images are part of it",
                remedy="pip install 'ds_ckpt[validation]', or --tasks language,topics",
            ),
            headline="the digits cannot be loaded",
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    rows = {
        "pixel_values": torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)[order],
        "labels": torch.tensor(data.target, dtype=torch.int64)[order],
    }
    train = {name: values[_DIGITS_HELD_OUT:] for name, values in rows.items()}
    heldout = {name: values[:_DIGITS_HELD_OUT] for name, values in rows.items()}
    return Examples(train, heldout, 10, "digits")


def topics() -> Examples:
    """Passages of the library's larger packages and of the language reference, by which it is.

    `input_ids` [n, 32] are words by their hash. Every third passage of a file can be held out:
    files are on both sides, passages are not.
    """
    families: dict[str, list[Tensor]] = {}
    for name, text in sorted(python_topics().items()):
        kind, _, rest = name.partition(": ")
        family = "reference" if kind == "reference" else rest.partition("/")[0]
        families.setdefault(family, []).append(words(text))
    sizes = {f: sum(map(len, parts)) for f, parts in families.items() if len(parts) > 2}
    chosen = sorted(sizes, key=lambda f: (-sizes[f], f))[:FAMILIES]
    sides: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]] = ([], [])
    for label, family in enumerate(sorted(chosen)):
        passages = [p for text in families[family] for p in text.split(PASSAGE)[:-1]]
        order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(label))
        mixed = order.tolist()
        parts = [i for i in mixed if i % 3 < 2], [i for i in mixed if i % 3 == 2]
        for side, part, most in zip(sides, parts, PER_FAMILY, strict=True):
            side += [(passages[i], label) for i in part[:most]]

    def rows(side: list[tuple[Tensor, int]]) -> Inputs:
        order = torch.randperm(len(side), generator=torch.Generator().manual_seed(0))
        ids = torch.stack([passage for passage, _ in side])
        return {"input_ids": ids[order], "labels": torch.tensor([n for _, n in side])[order]}

    train, heldout = map(rows, sides)
    return Examples(train, heldout, len(chosen), "topics of the embedded corpus")


def words(text: bytes) -> Tensor:
    """Ids of the words and marks of a text, int64: 1 and up, by their hash, whatever the case."""
    found = re.findall(rb"[a-z_]+|[^\sa-z_]", text.lower())
    return torch.tensor([1 + zlib.crc32(word) % (WORDS - 1) for word in found], dtype=torch.int64)


# What a user brings: texts are split by piece or line into train and held-out by their content's
# hash, as the embedded corpus is by topic; labelled lines are {"text": ..., "label": ...}


Row = Mapping[str, Any]
Places = Iterable[tuple[str, Row]]
"""Rows, each with where it stands, for messages."""


def read_text(source: str) -> Corpus:
    """The corpus behind `--data`: a text file, JSON lines with "text", or a data set's name.

    Raises:
        ConfigError: it cannot be read or is too short to split.
        UnsupportedError: it is a name, and `datasets` is not installed.
    """
    path = Path(source)
    if not path.is_file():
        train, heldout = ("\n\n".join(map(_text_of, side)).encode() for side in _dataset(source))
        return Corpus(source, train, heldout)
    if path.suffix == ".jsonl":
        return pieces_corpus(list(map(_text_of, _lines(path))), path, _OPTION)
    return file_corpus(path, _OPTION)


def read_labelled(
    source: str, encode: Callable[[str], list[int]], length: int, padding: int = 0
) -> Examples:
    """The examples behind `--data`: JSON lines with "text" and "label", or a data set's name.

    Args:
        encode: ids of the tokens of a text; cut or filled up to `length`, with a mask.

    Raises:
        ConfigError, UnsupportedError: as `read_text`.
    """
    path = Path(source)
    sides: tuple[list[tuple[str, Any]], ...] = ([], [])
    if path.is_file():
        for line in _lines(path):
            text = _text_of(line)
            held_out = int(content_hash(text), 16) % 10 == 0  # equal texts are on one side
            sides[held_out].append((text, _label_of(line)))
    else:
        sides = tuple([(_text_of(r), _label_of(r)) for r in side] for side in _dataset(source))
    classes = sorted({label for side in sides for _, label in side}, key=str)
    if len(classes) < 2 or min(map(len, sides)) < 2:
        raise _wrong(
            f"{source} with {len(classes)} classes, {len(sides[0])} examples to train on and "
            f"{len(sides[1])} held out",
            "a classifier needs two classes, and examples on both sides",
            'give more lines like {"text": "...", "label": "..."}',
        )

    def rows(side: list[tuple[str, Any]]) -> Inputs:
        ids = torch.full((len(side), length), padding, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (text, _) in enumerate(side):
            found = encode(text)[:length]
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
            mask[row, : max(1, len(found))] = 1
        labels = torch.tensor([classes.index(label) for _, label in side])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    name = path.name if path.is_file() else source
    return Examples(rows(sides[0]), rows(sides[1]), len(classes), name)


def has_labels(source: str) -> bool:
    """Whether `--data` names JSON lines of which the first has a label."""
    path = Path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    _, first = next(_lines(path), ("", {}))
    return any(key in first for key in _LABEL_KEYS)


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    """Place and object of each line that is not empty."""
    for number, line in enumerate(contents(path, _OPTION).split("\n"), 1):
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


def _text_of(line: tuple[str, Row]) -> str:
    why = f"none of {', '.join(_TEXT_KEYS)} is there as text"
    return str(_value_of(line, _TEXT_KEYS, str, why, 'name the text "text"'))


def _label_of(line: tuple[str, Row]) -> Any:
    remedy = 'name the class "label", a number or a word'
    return _value_of(line, _LABEL_KEYS, int | str, "no label is there", remedy)


def _value_of(line: tuple[str, Row], keys: Iterable[str], kind: Any, why: str, remedy: str) -> Any:
    place, row = line
    for key in keys:
        if isinstance(row.get(key), kind):
            return row[key]
    found = f"{place} with {', '.join(map(repr, row)) or 'nothing'}"
    raise _wrong(found, why, remedy)


def _dataset(name: str) -> tuple[Places, Places]:
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
    train, heldout = ([(name, row) for row in splits[side]] for side in ("train", held_out))
    return train, heldout


def _wrong(found: str, why: str, remedy: str) -> ConfigError:
    problem = Problem(where=_OPTION, found=found, why=why, remedy=remedy)
    return ConfigError(problem, headline="the data cannot be used")
