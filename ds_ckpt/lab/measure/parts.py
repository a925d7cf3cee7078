"""Division of a step's time into parts, from its spans. Pure: no clock, no process.

DeepSpeed's thread decides how long a step takes, so each moment of it belongs to one part:

    network     inside a collective, waiting for one, or in an exchange's `wire` section, by phase:
                forward, recomputation, backward, update
    compression the exchange's own work: residuals, packing, unpacking, summing, of gradients and of
                resident weights; in default DeepSpeed the reduction's work beside the collective
    recompute   inside a recomputation, none of the above
    compute     forward, backward, update: the rest of each

The loop that records the phases also reads the step's own clock, before and after. Time between
phases is in no part, so a test can compare the sum with the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_ckpt.telemetry.timings import Span, innermost

PHASES = ("forward", "backward", "update")
NETWORK = ("network_forward", "network_recompute", "network_backward", "network_update")
COMPUTE = ("compute_forward", "compute_backward", "compute_update")
PARTS = (*COMPUTE, "recompute", *NETWORK, "compression")
_WIRE = {"collective", "wire"}
_EXCHANGE = {"reduce", "weights", "in_host", "residual", "pack", "unpack"}


def parts(spans: Sequence[Span], main: int) -> dict[str, float]:
    """Return seconds by part of one step, from the spans of the thread that runs DeepSpeed."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for start_s, end_s, kinds in innermost([s for s in spans if s.thread == main]):
        phase = next((kind for kind in kinds if kind in PHASES), None)
        where = "recompute" if "recompute" in kinds else phase
        if where is None:
            continue
        if _WIRE & set(kinds):
            part = f"network_{where}"
        elif _EXCHANGE & set(kinds):
            part = "compression"
        else:
            part = "recompute" if where == "recompute" else f"compute_{where}"
        seconds[part] += end_s - start_s
    return seconds
