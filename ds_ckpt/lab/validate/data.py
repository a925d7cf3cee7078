"""Training data: the embedded corpus, or a user's text or labelled examples.

A micro-batch is a function of (seed, number, worker) alone. So runs of one seed read the same data
in the same order, with virtual workers and with ZeRO-3 ranks. User files are split into train and
held-out data by a hash of each piece or line.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab import workload
from ds_ckpt.lab.workload import Corpus

Inputs = dict[str, Tensor]
"""Keyword arguments of a model, `labels` included."""
Encode = Callable[[str], list[int]]
"""Text -> token ids."""

VOCABULARY = 2048
"""Number of word ids of the built-in classifier."""
_EVALUATION_EXAMPLES = 100
_EVALUATION_SEQUENCES = 8
EVALUATION_BATCHES = 24
_OPTION = "--data"


@dataclass(frozen=True)
class Text:
    """A text for language modelling: random windows of `length` to train on, fixed ones held out.

    `train` and `heldout` are vectors of token ids.
    """

    train: Tensor
    heldout: Tensor
    length: int
    source: str
    sha256: str

    @classmethod
    def of(cls, corpus: Corpus, length: int, encode: Encode | None = None) -> Text:
        """Build it with a tokenizer's ids, or with bytes. ConfigError if it is too short."""

        def ids(side: bytes) -> Tensor:
            if encode is None:
                found = torch.frombuffer(bytearray(side), dtype=torch.uint8)
            else:
                found = torch.tensor(encode(side.decode(errors="replace")))
            if len(found) <= length:
                why = f"a sequence takes {length}"
                remedy = "give a longer text or a shorter --length"
                raise _refused(f"{len(found)} tokens", why, remedy)
            return found

        train, heldout = ids(corpus.train), ids(corpus.heldout)
        return cls(train, heldout, length, corpus.source, corpus.sha256)

    def batch(self, seed: int, number: int, worker: int, rows: int) -> Inputs:
        """Return micro-batch `number` of a worker."""
        # numpy's seed sequence mixes the three numbers; its streams are fixed by its own policy
        random = np.random.default_rng([seed, number, worker])
        return self._windows(self.train, random.integers(0, len(self.train) - self.length, rows))

    def evaluation(self) -> Iterator[Inputs]:
        """Yield the held-out batches, always the same: windows spread evenly over the text."""
        count, last = EVALUATION_BATCHES * _EVALUATION_SEQUENCES, len(self.heldout) - self.length
        starts = np.linspace(0, last, num=count).astype(np.int64)
        for rows in starts.reshape(EVALUATION_BATCHES, -1):
            yield self._windows(self.heldout, rows)

    def _windows(self, ids: Tensor, starts: Iterable[int]) -> Inputs:
        rows = torch.stack([ids[start : start + self.length] for start in starts]).long()
        return {"input_ids": rows, "labels": rows}


@dataclass(frozen=True)
class Examples:
    """Labelled examples, drawn at random; `train` and `heldout` have `labels`."""

    train: Inputs
    heldout: Inputs
    classes: int
    source: str
    sha256: str = ""

    def batch(self, seed: int, number: int, worker: int, rows: int) -> Inputs:
        """Return micro-batch `number` of a worker."""
        random = np.random.default_rng([seed, number, worker])
        chosen = torch.from_numpy(random.integers(0, len(self.train["labels"]), rows))
        return {name: values[chosen] for name, values in self.train.items()}

    def evaluation(self) -> Iterator[Inputs]:
        """Yield the held-out batches, always the same."""
        for first in range(0, len(self.heldout["labels"]), _EVALUATION_EXAMPLES):
            rows = slice(first, first + _EVALUATION_EXAMPLES)
            yield {name: values[rows] for name, values in self.heldout.items()}


def word_ids(text: str) -> list[int]:
    """Return hashes of the words and marks of a text, from 1 up, in lower case."""
    found = re.findall(rb"[a-z_]+|[^\sa-z_]", text.encode().lower())
    return [1 + zlib.crc32(word) % (VOCABULARY - 1) for word in found]


def read_text(path: Path) -> Corpus:
    """Read a text file, or JSON lines with "text". Raises ConfigError if it is unusable."""
    if path.suffix == ".jsonl":
        return workload.pieces_corpus([text for text, _ in _rows(path)], path, _OPTION)
    return workload.file_corpus(path, _OPTION)


def read_labelled(path: Path, encode: Encode, length: int, padding: int = 0) -> Examples:
    """Read JSON lines with "text" and "label". Raises ConfigError if the file is unusable.

    Texts are cut or padded to `length` ids, with an attention mask.
    """
    split: tuple[list[tuple[str, Any]], ...] = ([], [])
    digest = hashlib.sha256()
    for text, label in _rows(path):
        if label is None:
            raise _refused(f"{path}: {text[:40]!r}", "it has no label", 'add "label" to each line')
        held_out = int(workload.content_hash(text), 16) % 10 == 0  # equal texts are on one side
        split[held_out].append((text, label))
        digest.update(json.dumps([text, label]).encode())
    classes = sorted({label for part in split for _, label in part}, key=str)
    if len(classes) < 2 or min(map(len, split)) < 2:
        raise _refused(
            f"{path} with {len(classes)} classes, {len(split[0])} examples to train on and "
            f"{len(split[1])} held out",
            "a classifier needs two classes, and examples on both sides",
            'give more lines like {"text": "...", "label": "..."}',
        )

    def tensors(side: list[tuple[str, Any]]) -> Inputs:
        ids = torch.full((len(side), length), padding, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (text, _) in enumerate(side):
            found = encode(text)[:length]
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
            mask[row, : max(1, len(found))] = 1
        labels = torch.tensor([classes.index(label) for _, label in side])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    train, heldout = map(tensors, split)
    return Examples(train, heldout, len(classes), path.name, digest.hexdigest())


def has_labels(path: Path) -> bool:
    """Return True if the file is JSON lines and the first line has a label."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    return next(_rows(path), ("", None))[1] is not None


def _rows(path: Path) -> Iterator[tuple[str, int | str | None]]:
    """Yield text and label of each line that is not empty."""
    for number, line in enumerate(workload.contents(path, _OPTION).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, label = row["text"], row.get("label")
            if not isinstance(text, str) or not isinstance(label, int | str | None):
                raise TypeError(f"text is {text!r}, label is {label!r}")
        except (ValueError, KeyError, TypeError) as error:
            why = f"the line is not an object with a text: {type(error).__name__}: {error}"
            remedy = 'write lines like {"text": "...", "label": "..."}'
            raise _refused(f"{path}:{number}", why, remedy) from None
        yield text, label


def _refused(found: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(_OPTION, found, why, remedy), headline="the data cannot be used")
