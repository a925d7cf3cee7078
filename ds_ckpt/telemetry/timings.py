"""Time spans and sections of a step, and statistics of residuals.

Spans are stretches of time with a kind, nested, per thread; nothing is recorded unless somebody
gives a `Spans` to the counters and timings of a session. What they mean for a step is worked out in
the harness. Kinds are the phases that the measuring loop names (`forward`, `backward`, `update`),
`recompute`, the purposes of collectives, `collective` (a call of a collective, or the wait for
one), and the sections of `SECTIONS`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """One stretch of time in one thread; `time.perf_counter`'s seconds.

    Attributes:
        depth: spans of this thread that it lies in.
    """

    kind: str
    start_s: float
    end_s: float
    thread: int
    depth: int


class Spans:
    """Records spans of any thread.

    Args:
        synchronize: called before the clock is read. On an accelerator that runs behind, only that
            makes a span mean what it says, and it takes away what the accelerator does beside.
    """

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        self._synchronize = synchronize
        self._local = threading.local()
        self._spans: list[Span] = []

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the block as a span, also if it ends with an exception."""
        stack = self._stack()
        self._synchronize()
        start_s = time.perf_counter()
        stack.append(kind)
        try:
            yield
        finally:
            stack.pop()
            self._synchronize()
            end_s = time.perf_counter()
            thread = threading.get_ident()
            self._spans.append(Span(kind, start_s, end_s, thread, len(stack)))

    @property
    def open(self) -> tuple[str, ...]:
        """Kinds of the spans that this thread is in, the outermost first."""
        return tuple(self._stack())

    def take(self) -> list[Span]:
        """The spans that have ended since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def _stack(self) -> list[str]:
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        return stack


class TimedHandle:
    """A collective's handle whose `wait` is recorded; all else is the handle's own."""

    def __init__(self, handle: Any, spans: Spans) -> None:
        self._handle = handle
        self._spans = spans

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait inside a span."""
        with self._spans.span("collective"):
            return self._handle.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


SECTIONS = ("in_host", "residual", "pack", "wire", "unpack")
"""In-host sum; adding to the residual and checking it; choosing entries, factoring and encoding;
waiting for other processes and their bytes; decoding and summing."""


@dataclass
class Timings:
    """Seconds by section, without those of inner sections, for one thread at a time.

    They are the host's on a CPU, and the stream's on an accelerator.

    Attributes:
        spans: where sections are recorded as stretches of time, too; None: nowhere.
        module: `torch.get_device_module` of an accelerator with streams; None: the host's clock.
    """

    spans: Spans | None = None
    module: Any = None
    _seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=list)
    _marks: deque[tuple[str, str | None, Any, Any]] = field(default_factory=deque)
    """Sections whose events nobody has read: its name and that of the one around it."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the block as a section."""
        outer = self._open[-1] if self._open else None
        self._open.append(name)
        start = self._mark()
        try:
            with nullcontext() if self.spans is None else self.spans.span(name):
                yield
        finally:
            self._open.pop()
            self._marks.append((name, outer, start, self._mark()))
            while self._marks and (self.module is None or self._marks[0][3].query()):
                self._count(*self._marks.popleft())

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Return the seconds by section since the start; waits for an accelerator's sections."""
        while self._marks:
            self._marks[0][3].synchronize()
            self._count(*self._marks.popleft())
        return self._seconds

    def _mark(self) -> Any:
        if self.module is None:
            return time.perf_counter()
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def _count(self, name: str, outer: str | None, start: Any, end: Any) -> None:
        took_s = end - start if self.module is None else start.elapsed_time(end) / 1e3
        self._seconds[name] += took_s
        if outer is not None:
            self._seconds[outer] -= took_s


@dataclass
class Errors:
    """Squared norms of what compression was given and left out, by method.

    Attributes:
        sampling: whether buckets are measured; it costs two passes over each.
    """

    sampling: bool = False
    _energy: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, method: str, before: Any, after: Any) -> None:
        """Add squared norms of a tensor's entries for other ranks, before and after compression.

        Numbers, or tensors of one number, which are read by `take_sums`.
        """
        sums = self._energy.setdefault(method, [0.0, 0.0])
        sums[0] += before
        sums[1] += after

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return and reset both sums by method."""
        taken, self._energy = self._energy, {}
        return {key: (float(before), float(after)) for key, (before, after) in taken.items()}

    def take_energies(self) -> tuple[float, float]:
        """Return and reset both sums, of all methods together."""
        sums = self.take_sums().values()
        return sum(before for before, _ in sums), sum(after for _, after in sums)


@dataclass(frozen=True)
class ResidualStats:
    """One step, all processes together.

    Attributes:
        error: norm of what was left over norm of what there was to send, residual of earlier steps
            included: 0 is lossless, 1 sends nothing.
        residual_norm: norm of what was left, over all processes, in norms of the averaged gradient:
            how many steps' worth the weights are owed. Gradients of other models have other sizes;
            this ratio has none.
    """

    error: float
    residual_norm: float

    @classmethod
    def of(cls, before: float, after: float, gradient_norm: float) -> ResidualStats | None:
        """Compute them from squared norms summed over all ranks.

        None if nothing was compressed, or if a number is not finite.
        """
        numbers = (before, after, gradient_norm)
        if not all(map(math.isfinite, numbers)) or before <= 0 or gradient_norm <= 0:
            return None
        return cls(math.sqrt(after / before), math.sqrt(after) / gradient_norm)
