"""Counters of collectives by purpose, of gathers by parameter, of offload and of partitioning."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ds_ckpt.telemetry.timings import Spans, timed


class Purpose(str, Enum):
    """Reason for a collective: three gathers of weights, changes of resident weights, ..."""

    GATHER_FORWARD = "gather_forward"
    GATHER_RECOMPUTE = "gather_recompute"
    GATHER_BACKWARD = "gather_backward"
    WEIGHTS = "weights"
    REDUCE = "reduce"
    PARTITION = "partition"
    OTHER = "other"


def collective_bytes(op: str, payload_bytes: int, world: int, backend: str) -> int:
    """Return the bytes that leave one rank for one collective, on average over the group.

    `payload_bytes` are of this rank's part for `all_gather`, else of the whole tensor.
    """
    if op == "all_gather":
        return payload_bytes * (world - 1)
    copies = {"all_reduce": 2, "reduce_scatter": 2 if backend == "gloo" else 1}.get(op, 1)
    # gloo's reduce-scatter runs an all-reduce (measured at the interface)
    return round(payload_bytes * (world - 1) / max(world, 1) * copies)


@dataclass(frozen=True)
class CounterValues:
    """The counters at one moment; the difference of two is what happened between them."""

    bytes_sent: Mapping[Purpose, int]
    gathers: Mapping[int, int]
    far_bytes: Mapping[Purpose, int]

    def __sub__(self, earlier: CounterValues) -> CounterValues:
        def since(name: str) -> dict[Any, int]:
            before = getattr(earlier, name)
            return {key: n - before.get(key, 0) for key, n in getattr(self, name).items()}

        return CounterValues(*map(since, ("bytes_sent", "gathers", "far_bytes")))


@dataclass
class Counters:
    """Bytes that this rank has sent, and its gathers. Each thread has its own current purpose.

    Attributes:
        gathers: all-gathers of a parameter, by DeepSpeed's `ds_id`.
        crosses_host: returns whether a rank is on another node; None counts no far bytes.
        far_bytes: part of `bytes_sent` that goes to other nodes.
    """

    bytes_sent: Counter[Purpose] = field(default_factory=Counter)
    collectives: Counter[Purpose] = field(default_factory=Counter)
    gathers: Counter[int] = field(default_factory=Counter)
    spans: Spans | None = None
    default: Purpose = Purpose.OTHER
    crosses_host: Callable[[int], bool] | None = None
    far_bytes: Counter[Purpose] = field(default_factory=Counter)
    _local: threading.local = field(default_factory=threading.local)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def purpose(self, purpose: Purpose) -> Iterator[None]:
        """Count collectives called inside under `purpose`; the innermost one wins."""
        purposes = self._local.__dict__.setdefault("purposes", [])
        purposes.append(purpose)
        try:
            with self.span(purpose.value):
                yield
        finally:
            purposes.pop()

    @property
    def current_purpose(self) -> Purpose:
        """Purpose of this thread's next collective."""
        purposes = getattr(self._local, "purposes", None)
        return purposes[-1] if purposes else self.default

    def span(self, kind: str) -> AbstractContextManager[Any]:
        """Return a range of profilers, recorded if `spans` is set."""
        return timed(kind, self.spans)

    def sent(self, number_of_bytes: int, far_bytes: int = 0) -> None:
        """Count one collective, of which `far_bytes` go to other nodes."""
        purpose = self.current_purpose
        with self._lock:  # += is a read and a write
            self.bytes_sent[purpose] += number_of_bytes
            self.far_bytes[purpose] += far_bytes
            self.collectives[purpose] += 1

    def snapshot(self) -> CounterValues:
        """Return a copy of the counters."""
        with self._lock:
            return CounterValues(
                {p: self.bytes_sent[p] for p in Purpose},
                dict(self.gathers),
                {p: self.far_bytes[p] for p in Purpose},
            )


@dataclass
class OffloadCounters:
    """Storages, not tensors, in host memory since attach, by the block that kept them first.

    `out` and `back` count copies to and from host memory, `late` those that began only when the
    tensor was needed. With `retain_graph`, `back` exceeds `out`.
    """

    out: Counter[str] = field(default_factory=Counter)
    out_bytes: Counter[str] = field(default_factory=Counter)
    back: Counter[str] = field(default_factory=Counter)
    late: int = 0


@dataclass
class PartitionCounters:
    """Storages of checkpointed inputs that are split over a group, since attach.

    `kept_bytes` are this rank's parts, by block; `late` gathers began when the tensor was needed.
    """

    kept_bytes: Counter[str] = field(default_factory=Counter)
    gathers: int = 0
    late: int = 0
