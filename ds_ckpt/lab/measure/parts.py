"""What the time of one step went into, from its spans. Pure: no clock, no process.

DeepSpeed's thread decides how long a step takes, so its time is divided, every moment to one part:

    network     inside a collective, waiting for one, or in an exchange's `wire` section; by where
                it happens: forward, recompute, backward, update
    compression the exchange's own work: residuals, packing, unpacking, summing, of gradients and of
                resident weights; of stock DeepSpeed what its reduction does beside the collective
    recompute   inside a recompute, none of the above
    compute     forward, backward, update: the rest of each

The phases are recorded by the loop that also reads the step's own clock, once before and once
after. What lies between the phases is in none of the parts, so their sum can be held against the
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ds_ckpt.telemetry.timings import Span

PHASES = ("forward", "backward", "update")
NETWORK = ("network_forward", "network_recompute", "network_backward", "network_update")
COMPUTE = ("compute_forward", "compute_backward", "compute_update")
PARTS = (*COMPUTE, "recompute", *NETWORK, "compression")
"""Every moment of a phase belongs to one of these."""
_WIRE = {"collective", "wire"}
_EXCHANGE = {"reduce", "weights", "in_host", "residual", "pack", "unpack"}


def parts(spans: Sequence[Span], main: int) -> dict[str, float]:
    """Seconds by part, all of `PARTS`.

    Args:
        spans: of one step, of all threads.
        main: the thread that runs DeepSpeed.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for start_s, end_s, stack in _innermost([s for s in spans if s.thread == main]):
        kinds = [span.kind for span in stack]
        phase = next((kind for kind in kinds if kind in PHASES), None)
        where = "recompute" if "recompute" in kinds else phase
        if where is None:
            continue
        if _WIRE & set(kinds):
            seconds[f"network_{where}"] += end_s - start_s
        elif _EXCHANGE & set(kinds):
            seconds["compression"] += end_s - start_s
        else:
            seconds["recompute" if where == "recompute" else f"compute_{where}"] += end_s - start_s
    return seconds


def in_collectives_s(spans: Sequence[Span]) -> float:
    """Seconds in which some thread was inside a collective or waited for one."""
    total, until = 0.0, -math.inf
    for span in sorted((s for s in spans if s.kind in _WIRE), key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return total


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
