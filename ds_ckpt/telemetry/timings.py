"""Time spans and sections of a step, and statistics of residuals.

`ds-ckpt measure` sets a `Spans` on a session's counters and timings. Kinds of spans are the loop's
phases (`forward`, `backward`, `update`), `recompute`, the purposes of collectives, `collective` (a
call, or the wait for one) and the sections of `Timings`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """A stretch of time in one thread, in `time.perf_counter` seconds.

    Attributes:
        depth: number of the thread's spans around it.
    """

    kind: str
    start_s: float
    end_s: float
    thread: int
    depth: int


class Spans:
    """Records spans of any thread; `synchronize` waits for an accelerator before each reading."""

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        self._synchronize = synchronize
        self._local = threading.local()
        self._spans: list[Span] = []

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the block as a span, also if it ends with an exception."""
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        self._synchronize()
        start_s = time.perf_counter()
        stack.append(kind)
        try:
            yield
        finally:
            stack.pop()
            self._synchronize()
            end_s = time.perf_counter()
            self._spans.append(Span(kind, start_s, end_s, threading.get_ident(), len(stack)))

    @property
    def open(self) -> tuple[str, ...]:
        """Kinds of the spans that this thread is in, outermost first."""
        return tuple(getattr(self._local, "stack", ()))

    def take(self) -> list[Span]:
        """Return the spans that have ended since the last call."""
        taken, self._spans = self._spans, []
        return taken


class TimedHandle:
    """A collective's handle that records its `wait`."""

    def __init__(self, handle: Any, spans: Spans) -> None:
        self._handle = handle
        self._spans = spans

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait inside a span."""
        with self._spans.span("collective"):
            return self._handle.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@dataclass
class Timings:
    """Host seconds by section, without those of inner sections, for one thread at a time.

    Sections are `in_host` (sum inside the node), `residual`, `pack`, `wire` (waiting for other
    ranks and their bytes) and `unpack`. An accelerator's (`is_asynchronous`) are not timed.
    """

    spans: Spans | None = None
    is_asynchronous: bool = False
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=list)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the block as a section."""
        self._open.append(name)
        start_s = time.perf_counter()
        try:
            with nullcontext() if self.spans is None else self.spans.span(name):
                yield
        finally:
            self._open.pop()
            took_s = 0.0 if self.is_asynchronous else time.perf_counter() - start_s
            self.seconds[name] += took_s
            if self._open:
                self.seconds[self._open[-1]] -= took_s


@dataclass
class Errors:
    """Squared norms before and after compression, by method.

    Attributes:
        sampling: whether buckets are measured; it costs two passes over each.
    """

    sampling: bool = False
    _sums: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, method: str, before: Any, after: Any) -> None:
        """Add squared norms of entries for other ranks: to send, and left out."""
        sums = self._sums.setdefault(method, [0.0, 0.0])
        sums[0] += before
        sums[1] += after

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return and reset both sums by method."""
        taken, self._sums = self._sums, {}
        return {key: (float(before), float(after)) for key, (before, after) in taken.items()}


@dataclass(frozen=True)
class ResidualStats:
    """Compression error of one step, over all ranks: the residual's norm over that of all to send.

    `residual_norm` is in norms of the averaged gradient.
    """

    error: float
    residual_norm: float

    @classmethod
    def of(cls, before: float, after: float, gradient_norm: float) -> ResidualStats | None:
        """Compute them from sums over all ranks; None if one is 0 or not finite."""
        numbers = (before, after, gradient_norm)
        if not all(map(math.isfinite, numbers)) or before <= 0 or gradient_norm <= 0:
            return None
        return cls(math.sqrt(after / before), math.sqrt(after) / gradient_norm)
