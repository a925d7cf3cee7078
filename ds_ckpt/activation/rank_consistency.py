"""Proves that the processes of a group hold the same tensors, or says which one differs.

Forward notes what is split: its place, its layout, and a checksum of its values where they are to
be compared. The first recompute of every backward compares the notes over the group, in a message
of a fixed size, before anything is gathered: processes that disagree on what there is to gather
find out here, and do not wait for each other. All of them see the same answers, so all raise.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.memory.copies import Ticket
from ds_ckpt.telemetry.memory import in_words

HEADLINE = "checkpointed inputs cannot be split over this group"
_MOST_NOTES = 8192
"""Older ones are forgotten by forwards whose backward never comes; counted they are."""


class Group(Protocol):
    """The processes over which inputs are split."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Their numbers in the world, in the group's order."""

    @property
    def index(self) -> int:
        """This process's place in `processes`."""

    def gather(self, part: Tensor, joined: Tensor) -> Ticket:
        """Start to fill `joined` (uint8 [size * n]) with every process's `part` (uint8 [n])."""

    def exchange(self, mine: Tensor) -> Tensor:
        """int64 [size, n] on the host, a row a process: everybody's `mine` (int64 [n])."""


@dataclass(frozen=True)
class Note:
    """One tensor that was split.

    Attributes:
        label: the block.
        what: the tensor's place among the call's, and its kind, in words.
        layout: a hash of all that must be equal for parts to fit together.
        checksum: of its values, int64 scalar on its device; None where they are not compared.
    """

    label: str
    what: str
    layout: int
    checksum: Tensor | None


def hash_of(*words: object) -> int:
    """A number for a message, the same in every process: -2**63 to 2**63 - 1."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class RankConsistency:
    """One group's notes since it compared them last.

    Args:
        group: who must agree.
        device: where the group's messages travel.
        every: values are compared in the first call of every block and each `every`-th after it.
    """

    def __init__(self, group: Group, device: torch.device, *, every: int = 100) -> None:
        self._group, self._device, self._every = group, device, every
        self._calls: Counter[str] = Counter()
        self._notes: deque[Note] = deque(maxlen=_MOST_NOTES)
        self._count = 0
        self._layout = 0
        self._failed: Problem | None = None
        self.compared = 0
        """Tensors whose values were compared."""

    @property
    def pending(self) -> bool:
        """Whether there is anything that was not compared yet."""
        return self._count > 0

    def begin(self, label: str) -> bool:
        """A call of block `label`: whether the values of its tensors are compared.

        Raises UnsupportedError: a comparison has failed before.
        """
        self._raise_again()
        compares = self._calls[label] % self._every == 0
        self._calls[label] += 1
        return compares

    def note(
        self, label: str, place: int, tensor: Tensor, layout: str, check: Tensor | None
    ) -> None:
        """The call of block `label` keeps `tensor`, its tensor number `place`, from 1.

        Args:
            layout: what must be equal for parts to fit together, besides shape and strides.
            check: its checksum; None where values are not compared.
        """
        kind = in_words(tensor.shape, tensor.dtype)
        strides = tensor.stride() if tensor.layout == torch.strided else None
        number = hash_of(label, place, kind, strides, layout, check is not None)
        self._layout = hash_of(self._layout, number)
        self._count += 1
        self._notes.append(Note(label, f"tensor {place} ({kind})", number, check))
        self.compared += check is not None

    def compare(self, alive: int) -> bool:
        """Everything that was noted; returns whether the group agrees on `alive` too.

        Collective: every process of the group must call it.

        Args:
            alive: a number for what may be gathered ahead. To differ there is no error.

        Raises:
            UnsupportedError: somebody's notes differ. In every process, and from then on always.
        """
        self._raise_again()
        checks = torch.stack(
            [n.checksum for n in self._notes if n.checksum is not None]
            or [torch.zeros((), dtype=torch.int64, device=self._device)]
        )
        places = torch.arange(1, len(checks) + 1, device=checks.device)
        values = ((checks ^ (checks >> 29)) * (2 * places + 1)).sum()
        known = torch.tensor([self._count, self._layout, alive], device=self._device)
        answers = self._group.exchange(torch.cat([known, values.reshape(1).to(self._device)]))
        rows = answers.tolist()
        if any(row[:2] + row[3:] != rows[0][:2] + rows[0][3:] for row in rows):
            self._failed = self._difference([row[0] for row in rows])
            self._raise_again()
        self._notes.clear()
        self._count = self._layout = 0
        return all(row[2] == alive for row in rows)

    def _raise_again(self) -> None:
        if self._failed is not None:
            raise UnsupportedError(self._failed, headline=HEADLINE)

    def _difference(self, counts: list[int]) -> Problem:
        """The first note that is not the same everywhere. Collective."""
        width = min(max(counts), _MOST_NOTES)
        mine = torch.full((width, 2), -1, dtype=torch.int64, device="cpu")
        for row, note in zip(mine, self._notes, strict=False):
            row[0] = note.layout
            row[1] = 0 if note.checksum is None else note.checksum
        answers = self._group.exchange(mine.flatten().to(self._device))
        everybody = answers.view(len(counts), width, 2)
        same = (everybody == everybody[0]).all(0)
        place = int((~same.all(1)).nonzero()[0]) if not bool(same.all()) else 0
        rows = everybody[:, place].tolist()
        other = next((i for i, row in enumerate(rows) if row != rows[0]), len(rows) - 1)
        processes = self._group.processes
        between = f"processes {processes[0]} and {processes[other]}"
        if place >= min(counts):
            where = self._notes[-1].label if self._notes else "a block"
            return Problem(
                where=where,
                found=f"{between} keep {counts[0]} and {counts[other]} tensors for this backward",
                why="parts of what the other process never had cannot be put together",
                remedy=_remedy(processes),
            )
        note = self._notes[place]
        if any(row[0] != rows[0][0] for row in rows):
            found = f"{note.what} here, and something else in other processes: {between} differ"
        else:
            found = f"{note.what} with other values in {between}"
        return Problem(
            where=note.label,
            found=found,
            why="each process would keep its own part alone, and recompute would begin with a "
            "mixture of different tensors: wrong gradients without a word",
            remedy=_remedy(processes),
        )


def _remedy(processes: tuple[int, ...]) -> str:
    return (
        f"processes {', '.join(map(str, processes))} must compute the same: tensor parallelism "
        "without sequence parallelism, equal batches, and equal seeds for dropout on what is not "
        "sharded; else set partition_activations ($.ds_ckpt.activation.partition) to false"
    )
