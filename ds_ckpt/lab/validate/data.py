"""Training data: the embedded corpus, or a user's text or labelled examples.

A micro-batch is a function of (seed, number, worker) alone: runs of one seed read the same data in
the same order, whether virtual workers or ZeRO-3 ranks train. User files are split into train and
held-out data by a hash of each piece or line; labelled lines are {"text": ..., "label": ...}.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.workload import (
    Corpus,
    content_hash,
    contents,
    evaluation_batches,
    file_corpus,
    pieces_corpus,
    training_batch,
)

Inputs = dict[str, Tensor]
"""Keyword arguments of a model, `labels` included."""

VOCABULARY = 2048
"""Number of word ids of the built-in classifier."""
_EVALUATION_EXAMPLES = 100
_EVALUATION_SEQUENCES = 8
_OPTION = "--data"
_TEXT_KEYS, _LABEL_KEYS = ("text", "sentence", "content"), ("label", "labels")


@dataclass(frozen=True)
class Text:
    """A text for language modelling: random windows to train on, fixed ones held out.

    Attributes:
        train: vector of token ids.
        heldout: vector of token ids.
        length: of a sequence, in tokens.
        source: name of the data.
        sha256: digest of both vectors.
        evaluation_batches: number of batches of 8 sequences, spread evenly over the held-out text.

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
            raise _refused(
                f"{len(self.heldout)} held-out tokens, a tenth of the text",
                f"a sequence takes {self.length} of them",
                "give more text or a shorter --length",
            )

    @classmethod
    def of_bytes(cls, corpus: Corpus, length: int, evaluation_batches: int = 24) -> Text:
        """Build it with bytes as tokens."""
        train, heldout = (
            torch.frombuffer(bytearray(side), dtype=torch.uint8)
            for side in (corpus.train, corpus.heldout)
        )
        return cls(train, heldout, length, corpus.source, corpus.sha256, evaluation_batches)

    @classmethod
    def of_tokens(cls, corpus: Corpus, length: int, encode: Callable[[str], list[int]]) -> Text:
        """Build it with a tokenizer's ids."""
        train, heldout = (
            torch.tensor(encode(side.decode(errors="replace")), dtype=torch.int64)
            for side in (corpus.train, corpus.heldout)
        )
        ids = Corpus("tokens", train.numpy().tobytes(), heldout.numpy().tobytes())
        return cls(train, heldout, length, corpus.source, ids.sha256)

    def batch(self, seed: int, number: int, worker: int, workers: int, rows: int) -> Inputs:
        """Return micro-batch `number` of a worker."""
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
        """Yield the held-out batches, always the same."""
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
    """Labelled examples, dealt out to the workers in one permutation per (seed, epoch).

    Attributes:
        train: all rows, `labels` included.
        heldout: all rows, `labels` included.
        classes: number of classes.
        source: name of the data.
    """

    train: Inputs
    heldout: Inputs
    classes: int
    source: str

    @property
    def evaluated(self) -> int:
        """Return the number of held-out examples that fill batches of 100."""
        count = len(self.heldout["labels"])
        return count - count % min(_EVALUATION_EXAMPLES, count)

    @property
    def sha256(self) -> str:
        """Return a digest of all examples."""
        digest = hashlib.sha256()
        for side in (self.train, self.heldout):
            for name, values in sorted(side.items()):
                digest.update(name.encode())
                digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def batch(self, seed: int, number: int, worker: int, workers: int, rows: int) -> Inputs:
        """Return micro-batch `number` of a worker."""
        first = (number * workers + worker) * rows
        count = len(self.train["labels"])
        places = (divmod(place, count) for place in range(first, first + rows))
        chosen = torch.tensor([int(_permutation(seed, epoch, count)[at]) for epoch, at in places])
        return {name: values[chosen] for name, values in self.train.items()}

    def evaluation(self) -> Iterator[Inputs]:
        """Yield the held-out batches, always the same."""
        size = min(_EVALUATION_EXAMPLES, len(self.heldout["labels"]))
        for first in range(0, self.evaluated, size):
            yield {name: values[first : first + size] for name, values in self.heldout.items()}


@functools.lru_cache(maxsize=16)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def word_ids(text: str) -> list[int]:
    """Return hashes of the words and marks of a text, from 1 up, in lower case."""
    found = re.findall(rb"[a-z_]+|[^\sa-z_]", text.encode().lower())
    return [1 + zlib.crc32(word) % (VOCABULARY - 1) for word in found]


def read_text(path: Path) -> Corpus:
    """Read a text file, or JSON lines with "text". Raises ConfigError if it is unusable."""
    if path.suffix == ".jsonl":
        return pieces_corpus([text for text, _ in _lines(path, labelled=False)], path, _OPTION)
    return file_corpus(path, _OPTION)


def read_labelled(
    path: Path, encode: Callable[[str], list[int]], length: int, padding: int = 0
) -> Examples:
    """Read JSON lines with "text" and "label". Raises ConfigError if the file is unusable.

    Args:
        path: of the file.
        encode: returns the token ids of a text.
        length: number of ids of an example; texts are cut or padded, with an attention mask.
        padding: id that fills up an example.
    """
    sides: tuple[list[tuple[str, Any]], ...] = ([], [])
    for text, label in _lines(path, labelled=True):
        held_out = int(content_hash(text), 16) % 10 == 0  # equal texts are on one side
        sides[held_out].append((text, label))
    classes = sorted({label for side in sides for _, label in side}, key=str)
    if len(classes) < 2 or min(map(len, sides)) < 2:
        raise _refused(
            f"{path} with {len(classes)} classes, {len(sides[0])} examples to train on and "
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

    return Examples(rows(sides[0]), rows(sides[1]), len(classes), path.name)


def has_labels(path: Path) -> bool:
    """Return True if the file is JSON lines and the first line has a label."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    _, first = next(_objects(path), ("", {}))
    return any(key in first for key in _LABEL_KEYS)


def _lines(path: Path, *, labelled: bool) -> Iterator[tuple[str, Any]]:
    """Yield text and label (None without labels) of each line."""
    for place, row in _objects(path):
        text = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
        label = next((row[k] for k in _LABEL_KEYS if isinstance(row.get(k), int | str)), None)
        found = f"{place} with {', '.join(map(repr, row)) or 'nothing'}"
        if text is None:
            why = f"none of {', '.join(_TEXT_KEYS)} has a text"
            raise _refused(found, why, 'name the text "text"')
        if labelled and label is None:
            raise _refused(found, "there is no label", 'add "label", a number or a word')
        yield text, label


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and object of each line that is not empty."""
    for number, line in enumerate(contents(path, _OPTION).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise _refused(place, f"the line is not JSON: {error.msg}", "correct it") from None
        if not isinstance(found, dict):
            raise _refused(place, "the line is not a JSON object", 'write {"text": "..."}')
        yield place, found


def _refused(found: str, why: str, remedy: str) -> ConfigError:
    problem = Problem(where=_OPTION, found=found, why=why, remedy=remedy)
    return ConfigError(problem, headline="the data cannot be used")
