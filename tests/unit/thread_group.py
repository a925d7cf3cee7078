"""A group of threads in the place of processes: each has its own model, store and graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.activation.offload import Wait

LIMIT_S = 20.0
"""Nobody waits longer for the others: a test of a hang fails."""


class _Exchange:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.slots: list[Any] = [None] * size

    def everybody(self, index: int, mine: Any) -> list[Any]:
        self.slots[index] = mine
        self.barrier.wait()
        seen = list(self.slots)
        self.barrier.wait()
        return seen


class _Gathered:
    """A gather whose result is written when somebody waits, and not before."""

    def __init__(self, parts: list[Tensor], joined: Tensor) -> None:
        self._parts: list[Tensor] | None = parts
        self._joined = joined
        joined.fill_(0xA5)

    def __call__(self) -> None:
        if self._parts is not None:
            self._joined.copy_(torch.cat(self._parts))
            self._parts = None


class ThreadGroup:
    """One thread's end. `sent` logs bytes by gather, to compare the order over threads."""

    def __init__(self, exchange: _Exchange, index: int, size: int) -> None:
        self._exchange, self.index = exchange, index
        self.processes = tuple(range(10, 10 + size))
        self.gathered: list[int] = []
        self.exchanges = 0

    def gather(self, part: Tensor, joined: Tensor) -> Wait:
        parts = self._exchange.everybody(self.index, part.clone())
        assert len({p.numel() for p in parts}) == 1, "a real backend would hang or mix them up"
        self.gathered.append(part.numel())
        return _Gathered(parts, joined)

    def exchange(self, mine: Tensor) -> Tensor:
        self.exchanges += 1
        seen = self._exchange.everybody(self.index, mine.clone())
        assert len({s.numel() for s in seen}) == 1
        return torch.stack(seen)


def in_threads(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Results, or errors, of `work` in every thread of a new group."""
    exchange = _Exchange(size)

    def run(index: int) -> Any:
        try:
            return work(ThreadGroup(exchange, index, size))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def results(answers: list[Any]) -> list[Any]:
    """The answers, none of which may be an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
