"""Time spans of a step, ranges of profilers, and statistics of residuals.

Telemetry, or `ds-ckpt measure`, sets a `Spans` on a session's counters and exchange. Kinds of spans
are `forward`, `backward`, `update`, `recompute` and `gather` (DeepSpeed's fetch of a module's
weights). Others are the purposes of collectives, `collective` (a call, or the wait for one) and the
`SECTIONS` of an exchange. Each kind is a range of torch's profiler, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

_MAX_SPANS = 1 << 18  # between steps: a long evaluation has more
_NO_RANGE = nullcontext()
_REASONS = {
    **dict.fromkeys(("gather", "gather_forward", "gather_recompute", "gather_backward"), "gather"),
    "reduce": "exchange",
    "weights": "weights",
}
EXPOSED = ("exchange", "gather", "weights", "other")
"""Reasons for which a step waits for the network."""
SECTIONS = ("in_host", "residual", "pack", "wire", "unpack")
"""Sections of an exchange: `in_host` sums inside the node, `wire` waits for other ranks' bytes."""


def profiler_range(kind: str) -> AbstractContextManager[Any]:
    """Return a range `ds_ckpt/<kind>` of torch's profiler or `emit_nvtx`, if one is running."""
    if not profiler._is_profiler_enabled:
        return _NO_RANGE
    return profiler.record_function(f"ds_ckpt/{'exchange' if kind == 'reduce' else kind}")


def timed(kind: str, spans: Spans | None) -> AbstractContextManager[Any]:
    """Return a profiler range, which is also a span if `spans` is given."""
    return profiler_range(kind) if spans is None else spans.span(kind)


@dataclass(frozen=True)
class Span:
    """A stretch of time in one thread, by `time.perf_counter`, inside `depth` others."""

    kind: str
    start_s: float
    end_s: float
    thread: int
    depth: int


class Spans:
    """Records spans of any thread. Inside kinds in `waits` a step waits for the network."""

    waits = frozenset({"collective", "wire"})
    delay = 0
    """Number of steps after which `take` returns a step's spans."""

    def __init__(self, clock: Callable[[], Any] = time.perf_counter) -> None:
        self._clock = clock
        self._local = threading.local()
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the block as a span, also if it ends with an exception."""
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        start_s = self._clock()
        stack.append(kind)
        try:
            with profiler_range(kind):
                yield
        finally:
            stack.pop()
            end_s = self._clock()
            self._spans.append(Span(kind, start_s, end_s, threading.get_ident(), len(stack)))

    @property
    def open(self) -> tuple[str, ...]:
        """Kinds of the spans that this thread is in, outermost first."""
        return tuple(getattr(self._local, "stack", ()))

    def take(self) -> list[Span]:
        """Return the spans that have ended since the last call."""
        taken, self._spans = self._spans, deque(maxlen=_MAX_SPANS)
        return list(taken)


class EventSpans(Spans):
    """Spans of an accelerator's compute stream, by events, for which the host never waits.

    The compute stream is the current one when a step ends; work on other streams is not recorded.
    A gather has no inner spans.
    """

    waits = Spans.waits | {"gather"}
    delay = 1

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._current = partial(module.current_stream, device)
        super().__init__(lambda: self._current().record_event(module.Event(enable_timing=True)))
        self._stream, self._start = self._current(), self._clock()
        self._ended: tuple[Any, list[Span]] = (self._start, [])

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the block's work on the compute stream."""
        is_beside = "gather" in self.open or self._current() != self._stream
        with profiler_range(kind) if is_beside else super().span(kind):
            yield

    def take(self) -> list[Span]:
        """End a step; return the spans of the one before it, or none if the device is behind."""
        (begin, spans), self._ended = self._ended, (self._start, super().take())
        if not self._start.query():
            spans = []
        self._stream, self._start = self._current(), self._clock()

        def at_s(event: Any) -> float:
            return float(begin.elapsed_time(event)) / 1e3

        return [replace(s, start_s=at_s(s.start_s), end_s=at_s(s.end_s)) for s in spans]


def innermost(spans: Sequence[Span]) -> Iterator[tuple[float, float, list[str]]]:
    """Yield disjoint stretches with the kinds of the spans around them, outermost first."""
    stack: list[Span] = []
    at_s = 0.0
    last = Span("", math.inf, math.inf, 0, 0)  # all others end before it
    for span in [*sorted(spans, key=lambda s: (s.start_s, s.depth)), last]:
        while stack and stack[-1].end_s <= span.start_s:
            if stack[-1].end_s > at_s:
                yield at_s, stack[-1].end_s, [s.kind for s in stack]
            at_s = max(at_s, stack.pop().end_s)
        if stack and span.start_s > at_s:
            yield at_s, span.start_s, [s.kind for s in stack]
        stack.append(span)
        at_s = span.start_s


def step_parts(spans: Sequence[Span], waits: frozenset[str]) -> dict[str, float]:
    """Return a step's seconds of waiting by reason (`EXPOSED`), and of `recompute` without waits.

    `reduction` is all of the reduction, waits and work: what compression changes. `SECTIONS` divide
    an exchange, each without those inside it.
    """
    seconds = dict.fromkeys((*EXPOSED, *SECTIONS, "recompute", "reduction"), 0.0)
    for start_s, end_s, kinds in innermost(spans):
        reason = next((_REASONS[kind] for kind in reversed(kinds) if kind in _REASONS), "other")
        if reason == "exchange":
            seconds["reduction"] += end_s - start_s
            if section := next((kind for kind in reversed(kinds) if kind in SECTIONS), None):
                seconds[section] += end_s - start_s
        if not waits.isdisjoint(kinds):
            seconds[reason] += end_s - start_s
        elif "recompute" in kinds:
            seconds["recompute"] += end_s - start_s
    return seconds


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
class Errors:
    """Squared norms before and after compression, by method; `sampling` costs two passes."""

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
