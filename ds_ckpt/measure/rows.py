"""The table of cells: one row a cell, rate and batch. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_ckpt.measure.parts import PARTS
from ds_ckpt.measure.records import Loss, Memory, Turn
from ds_ckpt.measure.spec import SILENT, STOCK
from ds_ckpt.measure.statistics import Estimate, Key, Lookup, Rounds


@dataclass(frozen=True)
class Row:
    """A cell at a rate. Bytes are a step's; link bytes those of the host that sends most."""

    cell: str
    rate_mbit: float | None
    sequences: int
    equal_memory: bool
    step_s: Estimate
    parts_s: dict[str, Estimate]
    parts_over_step: float
    in_collectives_s: float
    purpose_bytes: dict[str, float]
    link_bytes: float
    interface_bytes: float
    interface_over_purposes: float
    link_busy_s: float | None
    """Link bytes at the link's rate; None where there is no rate."""
    held_bytes: int | None
    peak_bytes: int | None
    heldout_loss: float | None


def row_of(
    rate: float | None,
    key: Key,
    turns: Sequence[Turn],
    rounds: Rounds,
    memories: Mapping[tuple[str, int], Memory],
    losses: Mapping[str, Loss],
) -> Row:
    """What the turns of one cell at one rate show."""

    def times(at: Lookup) -> dict[str, float]:
        point = at(key)
        return {"step_s": point.step_s, **point.parts_s}

    estimates = rounds.estimate(times)
    step = estimates.pop("step_s")
    mine = [t for t in turns if Key(t.cell, t.sequences, t.equal_memory) == key]
    purposes = {
        name: statistics.median(t.purpose_bytes[name] for t in mine)
        for name in mine[0].purpose_bytes
    }
    link = max(statistics.median(h) for h in zip(*(t.link_bytes for t in mine), strict=True))
    interface = statistics.median(t.interface_bytes for t in mine)
    policy, _, method = key.cell.partition("/")
    memory = memories.get((f"{policy}/{STOCK}", key.sequences))
    loss = losses.get(key.cell)
    return Row(
        cell=key.cell,
        rate_mbit=rate,
        sequences=key.sequences,
        equal_memory=key.equal_memory,
        step_s=step,
        parts_s={name: estimates[name] for name in PARTS},
        parts_over_step=sum(estimates[name].value for name in PARTS) / step.value,
        in_collectives_s=rounds.lookup()(key).in_collectives_s,
        purpose_bytes=purposes,
        link_bytes=link,
        interface_bytes=interface,
        interface_over_purposes=interface / max(sum(purposes.values()), 1.0),
        link_busy_s=None if rate is None else 8e-6 * link / rate,
        held_bytes=memory.held_bytes if memory else None,
        peak_bytes=memory.peak_bytes if memory else None,
        heldout_loss=loss.heldout_loss if loss and method != SILENT else None,
    )
