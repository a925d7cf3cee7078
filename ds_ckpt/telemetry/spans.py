"""Where the time of a step goes: spans with a kind, nested, per thread. For measuring only.

Nothing is recorded unless somebody gives a `Spans` to the counters and timings of a session. What
the spans mean for a step is worked out in `ds_ckpt.measure.parts`.

Kinds are the phases that the measuring loop names (`forward`, `backward`, `update`), `recompute`,
the purposes of collectives, `collective` (a call of a collective, or the wait for one),
`exchange_wait` (DeepSpeed's thread stands still for an exchange in another one), and the sections
of `timings.SECTIONS`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """One stretch of time in one thread; `time.perf_counter`'s seconds.

    Attributes:
        detail: of a `collective` its purpose, else empty.
        depth: spans of this thread that it lies in.
    """

    kind: str
    start_s: float
    end_s: float
    thread: int
    depth: int
    detail: str = ""


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
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        """What happens inside is recorded as one span when it ends, also by an exception."""
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
            self._spans.append(Span(kind, start_s, end_s, thread, len(stack), detail))

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

    def __init__(self, handle: Any, spans: Spans, purpose: str) -> None:
        self._handle = handle
        self._spans = spans
        self._purpose = purpose

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._spans.span("collective", self._purpose):
            return self._handle.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
