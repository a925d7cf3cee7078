"""Counters of collectives by purpose, of gathers by parameter, of offload and of partitioning.

The counters are updated where the collective is called (`ds_ckpt.zero3.collectives`), with the
sizes of its tensors. `sent_bytes` converts a payload into the bytes that leave this rank, with the
factor of the backend's algorithm; a contract test compares it with the interface's own counter.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TypeVar

from ds_ckpt.telemetry.timings import Spans
from ds_ckpt.telemetry.units import MIB

_Key = TypeVar("_Key")


class Purpose(str, Enum):
    """Why a collective runs.

    `gather_*` and `weights`, their changes once a step, move weights, `reduce` moves gradients,
    `partition` moves activations.
    """

    GATHER_FORWARD = "gather_forward"
    GATHER_RECOMPUTE = "gather_recompute"
    GATHER_BACKWARD = "gather_backward"
    WEIGHTS = "weights"
    REDUCE = "reduce"
    PARTITION = "partition"
    OTHER = "other"


def sent_bytes(op: str, payload_bytes: int, world: int, backend: str) -> int:
    """Bytes that leave one process for one collective, on average over the group.

    Args:
        op: the collective's name; not `all_to_all`, whose bytes are told by its arguments.
        payload_bytes: for `all_gather` this process's own part; else the whole tensor.
        world: size of the group.
        backend: `torch.distributed.get_backend`'s word.

    Gloo's reduce-scatter runs an all-reduce (measured at the interface: 1.00 of the tensor with
    2 processes, twice what a ring reduce-scatter sends).
    """
    if world <= 1:
        return 0
    ring = (world - 1) / world
    if op == "all_gather":
        return payload_bytes * (world - 1)
    if op == "reduce_scatter":
        return round(payload_bytes * ring * (2 if backend == "gloo" else 1))
    if op == "all_reduce":
        return round(payload_bytes * ring * 2)
    return round(payload_bytes * ring)  # broadcast, reduce: one copy to each of the others in all


@dataclass(frozen=True)
class Snapshot:
    """The counters at one moment; subtract two to get what happened between them."""

    bytes_sent: Mapping[Purpose, int]
    collectives: Mapping[Purpose, int]
    gathers: Mapping[int, int]
    reduce_s: float = 0.0
    far_bytes: Mapping[Purpose, int] = field(default_factory=dict)

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        def since(now: Mapping[_Key, int], before: Mapping[_Key, int]) -> dict[_Key, int]:
            return {key: n - before.get(key, 0) for key, n in now.items()}

        return Snapshot(
            since(self.bytes_sent, earlier.bytes_sent),
            since(self.collectives, earlier.collectives),
            since(self.gathers, earlier.gathers),
            self.reduce_s - earlier.reduce_s,
            since(self.far_bytes, earlier.far_bytes),
        )


@dataclass
class _Counts:
    def reset(self) -> None:
        """Start counting again."""
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Counter):
                value.clear()
            elif isinstance(value, int | float):
                setattr(self, part.name, 0)


@dataclass
class Counters(_Counts):
    """Payload bytes that this rank has sent, and its gathers.

    Every thread has purposes of its own, and any may count what it sends. `gathers` and the seconds
    are written by the thread that runs DeepSpeed.

    Attributes:
        gathers: all-gathers of a parameter, by DeepSpeed's `ds_id`.
        reduce_s: seconds that reductions of buckets took: packing, waiting for other ranks,
            summing. On an asynchronous accelerator, only the host's share.
        spans: where stretches of time are recorded; None: nowhere.
        default: what collectives are counted under that nobody has said a purpose of.
        is_far: whether a process is on another host; None: nobody asks, and nothing is far.
        far_bytes: those of `bytes_sent` that go to other hosts.
    """

    bytes_sent: Counter[Purpose] = field(default_factory=Counter)
    collectives: Counter[Purpose] = field(default_factory=Counter)
    gathers: Counter[int] = field(default_factory=Counter)
    reduce_s: float = 0.0
    spans: Spans | None = field(default=None, repr=False, compare=False)
    default: Purpose = Purpose.OTHER
    is_far: Callable[[int], bool] | None = field(default=None, repr=False, compare=False)
    far_bytes: Counter[Purpose] = field(default_factory=Counter)
    _local: threading.local = field(default_factory=threading.local, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @contextmanager
    def purpose(self, purpose: Purpose) -> Iterator[None]:
        """Collectives called inside are counted under `purpose`; the innermost one wins."""
        purposes = self._local.__dict__.setdefault("purposes", [])
        purposes.append(purpose)
        try:
            with self.span(purpose.value):
                yield
        finally:
            purposes.pop()

    @property
    def current_purpose(self) -> Purpose:
        """Return the purpose of this thread's next collective."""
        purposes = getattr(self._local, "purposes", None)
        return purposes[-1] if purposes else self.default

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Record what happens inside, if somebody wants to know."""
        return nullcontext() if self.spans is None else self.spans.span(kind)

    def sent(self, number_of_bytes: int, far_bytes: int = 0) -> None:
        """Count one collective; `far_bytes` of its bytes go to other hosts."""
        purpose = self.current_purpose
        with self._lock:  # += is a read and a write
            self.bytes_sent[purpose] += number_of_bytes
            self.far_bytes[purpose] += far_bytes
            self.collectives[purpose] += 1

    def snapshot(self) -> Snapshot:
        """Return a copy of the counters."""
        with self._lock:
            return Snapshot(
                {p: self.bytes_sent[p] for p in Purpose},
                {p: self.collectives[p] for p in Purpose},
                dict(self.gathers),
                self.reduce_s,
                {p: self.far_bytes[p] for p in Purpose},
            )


@dataclass
class OffloadCounters(_Counts):
    """Counters of storages by the block that kept them first; they grow until `reset()`."""

    out: Counter[str] = field(default_factory=Counter)
    """Storages that left for host memory, by block."""
    out_bytes: Counter[str] = field(default_factory=Counter)
    back: Counter[str] = field(default_factory=Counter)
    """Storages that were brought back, by block; with `retain_graph` more than have left."""
    left: Counter[str] = field(default_factory=Counter)
    """Tensors that stayed where they were, by reason."""
    late: int = 0
    """Storages brought back without prefetch: recomputation waited for the whole copy."""


@dataclass
class PartitionCounters(_Counts):
    """Counts storages by the block that kept them first; grows until `reset()`."""

    whole_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of what was split."""
    kept_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of this process's parts of it."""
    left: Counter[str] = field(default_factory=Counter)
    """Tensors that were not split, by reason."""
    gathers: int = 0
    received_bytes: int = 0
    """Bytes of other ranks' parts, in gathers."""
    late: int = 0
    """Gathers that began when the part was needed."""

    def line(self) -> str:
        """Describe what this rank keeps and receives."""
        kept, whole = sum(self.kept_bytes.values()), sum(self.whole_bytes.values())
        words = (
            f"{kept / MIB:.2f} of {whole / MIB:.2f} MiB of checkpointed inputs kept by this "
            f"process, {self.received_bytes / MIB:.2f} MiB received in {self.gathers} all-gathers"
        )
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left.items()))
        return words + (f"; tensors kept whole: {left}" if left else "")
