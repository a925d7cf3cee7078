"""What travels how and what it will cost, before anything has been sent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ds_ckpt.compression.base import Compressor
from ds_ckpt.exchange.rules import Choose

UNCOMPRESSED = "uncompressed"


@dataclass(frozen=True)
class PlannedTensor:
    """One parameter.

    Attributes:
        how: its compressor in words.
        dense_bytes: the gradient in its own type.
        sent_bytes: what stands for the whole gradient on the wire, in the same terms: payloads
            for all shards, or the factors as their sum moves them (`low_rank`). Norms and biases
            that ride along with factors are counted as if sent alone.
    """

    name: str
    shape: tuple[int, ...]
    how: str
    dense_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Plan:
    """All trainable parameters, in the model's order."""

    tensors: tuple[PlannedTensor, ...]

    @classmethod
    def of(
        cls,
        choose: Choose,
        shapes: Iterable[tuple[str, torch.Size, int]],
        world: int,
        local: int = 1,
    ) -> Plan:
        """From name, shape and bytes an element of each parameter.

        Args:
            world: processes that exchange: hosts, with two levels.
            local: processes of a host that divide each gradient among them; 1 with one level.
        """
        return cls(tuple(_planned(choose, world, local, *each) for each in shapes))

    @property
    def dense_bytes(self) -> int:
        return sum(t.dense_bytes for t in self.tensors)

    @property
    def sent_bytes(self) -> int:
        return sum(t.sent_bytes for t in self.tensors)

    @property
    def share(self) -> float:
        """Of the bytes that a dense exchange in the gradients' own types sends."""
        return self.sent_bytes / max(self.dense_bytes, 1)

    @property
    def compressed(self) -> int:
        """Number of tensors that travel compressed."""
        return sum(t.how != UNCOMPRESSED for t in self.tensors)

    def by_compressor(self) -> dict[str, tuple[int, int, int]]:
        """For each compressor: number of tensors, dense bytes, bytes to be sent."""
        sums: dict[str, tuple[int, int, int]] = {}
        for t in self.tensors:
            n, dense, sent = sums.get(t.how, (0, 0, 0))
            sums[t.how] = n + 1, dense + t.dense_bytes, sent + t.sent_bytes
        return sums

    def records(self) -> list[dict[str, Any]]:
        """One JSON-able record a tensor."""
        return [dict(vars(t)) for t in self.tensors]

    def table(self) -> str:
        """As `str`, tensors alike of numbered layers in one line."""
        alike: dict[tuple[str, tuple[int, ...], str], list[PlannedTensor]] = {}
        for t in self.tensors:
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", t.name)
            alike.setdefault((name, t.shape, t.how), []).append(t)
        return self._lines(
            (name if len(group) == 1 else f"{name} ({len(group)})", group)
            for (name, _, _), group in alike.items()
        )

    def __str__(self) -> str:
        return self._lines((t.name, [t]) for t in self.tensors)

    def _lines(self, rows: Iterable[tuple[str, list[PlannedTensor]]]) -> str:
        named = list(rows)
        width = max((len(name) for name, _ in named), default=0)
        lines = []
        for name, group in named:
            shape = "x".join(map(str, group[0].shape))
            sent, dense = sum(t.sent_bytes for t in group), sum(t.dense_bytes for t in group)
            lines.append(
                f"{name:<{width}}  {shape:>12}  {group[0].how:<28}  {sent:>12,} of {dense:>12,} B"
            )
        total = f"{self.sent_bytes:,} of {self.dense_bytes:,} B: {self.share:.2%}"
        return "\n".join([*lines, total])


def words(compressor: Compressor | None) -> str:
    """A compressor as people call it."""
    return UNCOMPRESSED if compressor is None else compressor.words()


def _planned(
    choose: Choose, world: int, local: int, name: str, shape: torch.Size, itemsize: int
) -> PlannedTensor:
    compressor = choose(name, shape)
    dense = shape.numel() * itemsize
    sent = dense if compressor is None else compressor.sent_bytes(shape, world, local)
    return PlannedTensor(name, tuple(shape), words(compressor), dense, sent)
