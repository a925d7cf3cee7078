"""What the time of one step went into, from its spans. Pure: no clock, no process.

DeepSpeed's thread decides how long a step takes, so its time is divided, every moment to one part:

    network     inside a collective, waiting for one, or in an exchange's `wire` section; by where
                it happens: forward, recompute, backward, update
    compression the exchange's own work: residuals, packing, unpacking, summing; of stock DeepSpeed
                what its reduction does beside the collective
    recompute   inside a recompute, none of the above
    compute     forward, backward, update: the rest of each

Where DeepSpeed's thread stands still for an exchange in another thread (`exchange_wait`), the wait
is divided by what that thread does meanwhile; what it does while nobody waits costs nothing here.

The phases are recorded by the loop that also reads the step's own clock, once before and once
after. What lies between the phases is in none of the parts, so their sum can be held against the
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_ckpt.telemetry.timings import Span

PHASES = ("forward", "backward", "update")
NETWORK = ("network_forward", "network_recompute", "network_backward", "network_update")
COMPUTE = ("compute_forward", "compute_backward", "compute_update")
PARTS = (*COMPUTE, "recompute", *NETWORK, "compression")
"""Every moment of a phase belongs to one of these."""
_WIRE = ("collective", "wire")


@dataclass(frozen=True)
class Stretch:
    """A time in which one thread does one thing. On disk in seconds from the step's begin.

    Attributes:
        part: one of `PARTS`; in another thread than DeepSpeed's `network` or `compression`.
        purpose: of a piece on the network, what for: a purpose of the counters, or empty.
    """

    start_s: float
    end_s: float
    part: str
    purpose: str = ""


def parts(spans: Sequence[Span], main: int) -> dict[str, float]:
    """Seconds by part, all of `PARTS`.

    Args:
        spans: of one step, of all threads.
        main: the thread that runs DeepSpeed.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for piece in main_pieces(spans, main):
        seconds[piece.part] += piece.end_s - piece.start_s
    return seconds


def main_pieces(spans: Sequence[Span], main: int) -> list[Stretch]:
    """What DeepSpeed's thread did, in order, without gaps inside a phase."""
    beside = beside_pieces(spans, main)
    pieces: list[Stretch] = []
    for start_s, end_s, stack in _innermost([s for s in spans if s.thread == main]):
        where = _where(stack)
        if where is None:
            continue
        if stack[-1].kind == "exchange_wait":
            pieces += _waited(start_s, end_s, where, beside)
        else:
            pieces.append(Stretch(start_s, end_s, _part(stack, where), _purpose(stack)))
    return pieces


def beside_pieces(spans: Sequence[Span], main: int) -> list[Stretch]:
    """What the exchange's thread did, in order; nothing where it had nothing to do."""
    pieces = []
    for start_s, end_s, stack in _innermost([s for s in spans if s.thread != main]):
        kinds = {span.kind for span in stack}
        part = "network" if kinds & set(_WIRE) else "compression"
        pieces.append(Stretch(start_s, end_s, part, "reduce"))
    return pieces


def in_collectives_s(spans: Sequence[Span]) -> float:
    """Seconds in which some thread was inside a collective or waited for one."""
    total, until = 0.0, -math.inf
    for span in sorted((s for s in spans if s.kind in _WIRE), key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return total


def _where(stack: Sequence[Span]) -> str | None:
    kinds = [span.kind for span in stack]
    if "recompute" in kinds:
        return "recompute"
    return next((kind for kind in kinds if kind in PHASES), None)


def _part(stack: Sequence[Span], where: str) -> str:
    kinds = {span.kind for span in stack}
    if kinds & set(_WIRE):
        return f"network_{where}"
    if kinds & {"reduce", "in_host", "residual", "pack", "unpack"}:
        return "compression"
    return "recompute" if where == "recompute" else f"compute_{where}"


def _purpose(stack: Sequence[Span]) -> str:
    for span in reversed(stack):
        if span.kind == "collective":
            return span.detail
        if span.kind == "wire":
            return "reduce"
    return ""


def _waited(start_s: float, end_s: float, where: str, beside: Sequence[Stretch]) -> list[Stretch]:
    """A wait for the exchange's thread, divided by what that does; the rest is the network's."""
    network = f"network_{where}"
    pieces, at_s = [], start_s
    for other in beside:
        first, last = max(other.start_s, at_s), min(other.end_s, end_s)
        if first >= last:
            continue
        if first > at_s:
            pieces.append(Stretch(at_s, first, network, "reduce"))
        part = network if other.part == "network" else "compression"
        pieces.append(Stretch(first, last, part, "reduce"))
        at_s = last
    if at_s < end_s:
        pieces.append(Stretch(at_s, end_s, network, "reduce"))
    return pieces


def _innermost(spans: Sequence[Span]) -> Iterator[tuple[float, float, tuple[Span, ...]]]:
    """Stretches of one thread or of threads that take turns, with the spans they lie in.

    Spans of a thread nest; stretches outside of all spans are left out.
    """
    stack: list[Span] = []
    at_s = 0.0
    for span in sorted(spans, key=lambda s: (s.start_s, s.depth)):
        while stack and stack[-1].end_s <= span.start_s:
            if stack[-1].end_s > at_s:
                yield at_s, stack[-1].end_s, tuple(stack)
            at_s = stack.pop().end_s
        if stack and span.start_s > at_s:
            yield at_s, span.start_s, tuple(stack)
        stack.append(span)
        at_s = span.start_s
    while stack:
        if stack[-1].end_s > at_s:
            yield at_s, stack[-1].end_s, tuple(stack)
        at_s = stack.pop().end_s
