"""From what each process saw of a cell to the cell's result. Pure: no process, no clock."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_ckpt.harness.cells import Cell, topk_start_step
from ds_ckpt.harness.results import CellResult, Traffic
from ds_ckpt.telemetry import Purpose


@dataclass(frozen=True)
class StepRecord:
    """One step of one cell, on this process."""

    loss: float
    time_s: float
    sent_bytes: dict[str, int]
    interface_bytes: int | None
    """What the interface has sent: of this process's host, or, on loopback, of all processes."""


@dataclass(frozen=True)
class Share:
    """What one process saw of a cell."""

    held_bytes: int
    heldout_loss: float | None
    weights_sha256: str
    """Of this process's partitions."""
    steps: tuple[StepRecord, ...]


def summarise(
    cell: Cell, shares: Sequence[Share], steps: int, *, shaped_steps: int = 0
) -> CellResult:
    """Put the processes' shares of a cell together; `steps` is the run's, not the cell's.

    With `shaped_steps` the last ones, on a link with a rate, are those that are timed.
    """
    count = len(shares[0].steps)
    # loopback counts what all processes send, a host's interface its own
    divide_by = 1 if shaped_steps else len(shares)
    timed_from = _timed_from(cell, steps)
    if shaped_steps and not cell.reference:
        timed_from = max(timed_from, steps - shaped_steps)
    warmed = topk_start_step(steps)
    # A step takes as long as its slowest process.
    times = tuple(max(s.steps[i].time_s for s in shares) for i in range(count))
    interface = [
        step.interface_bytes / divide_by
        for step in shares[0].steps[timed_from:]
        if step.interface_bytes is not None
    ]
    return CellResult(
        name=cell.name,
        title=cell.title,
        method=cell.method,
        checkpointing=cell.checkpointing,
        reference=cell.reference,
        config_file=f"configs/{cell.file_name}",
        steps=count,
        timed_from_step=timed_from,
        step_time_median_s=statistics.median(times[timed_from:]),
        step_times_s=times,
        held_activation_bytes=shares[0].held_bytes,
        traffic=_traffic(shares, range(timed_from, count)),
        warmup_traffic=(
            _traffic(shares, range(1, warmed)) if cell.method == "topk" and warmed > 1 else None
        ),
        interface_bytes=statistics.median(interface) if interface else None,
        heldout_loss=shares[0].heldout_loss,
        train_losses=tuple(
            sum(s.steps[i].loss for s in shares) / len(shares) for i in range(count)
        ),
        weights_sha256=hashlib.sha256(
            "".join(s.weights_sha256 for s in shares).encode()
        ).hexdigest(),
    )


def _timed_from(cell: Cell, steps: int) -> int:
    """First step that counts. The same for the four cells; step 0 is never one of them.

    The last warm-up step of Top-K is followed by one that allocates its residuals, left out too.
    """
    if cell.reference:
        return 1
    return min(topk_start_step(steps) + 1, steps - 1)


def _traffic(shares: Sequence[Share], steps: range) -> Traffic:
    records = [share.steps[i] for share in shares for i in steps]
    means = {
        f"{purpose.value}_bytes": statistics.fmean(r.sent_bytes[purpose.value] for r in records)
        for purpose in Purpose
    }
    return Traffic(**means)
