"""What a run shows: the table of cells, and the figures derived from it. Pure.

`DEFINITIONS` is the one place that says what each derived figure is; docs/measuring.md and the
report print it. P is a checkpointing policy, D a dense baseline (`stock` or `dense`), C a method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_ckpt.measure.break_even import BreakEven, break_even
from ds_ckpt.measure.records import Loss, Memory, Sample, Turn
from ds_ckpt.measure.rows import Row, row_of
from ds_ckpt.measure.spec import BASELINES, DENSE, SILENT, STOCK, Spec, link
from ds_ckpt.measure.statistics import Estimate, Key, Lookup, Rounds

SETTLED, SETTLED_ROUNDS = 0.05, 4
"""A headline is a figure whose interval is no wider than this either way, from so many rounds."""
DEFINITIONS = {
    "recompute_dense_s": "recompute(P, D) + network(P, D) - network(none, D): what recomputing "
    "adds to a step with dense gradients, its own gathers included and those that backward is "
    "spared taken off",
    "recompute_compressed_s": "the same with C in the place of D",
    "recompute_dense_by_difference_s": "step(P, D) - step(none, D): the same from whole steps, "
    "which carry the noise of all their parts",
    "bytes_freed": "link bytes(P, D) - link bytes(P, C): what a host's interface need not "
    "send in a step",
    "link_seconds_freed_s": "8 * bytes freed / rate of the link",
    "time_freed_s": "exchange(P, D) - exchange(P, C), exchange = exposed network + compression: "
    "what compression takes off a step after its own work is paid",
    "time_freed_by_difference_s": "step(P, D) - step(P, C): the same from whole steps",
    "share_paid": "time freed / what recomputing adds with dense gradients: 1 means that "
    "compression pays for all of it",
    "ceiling_s": "exchange(P, D) - exchange(P, silent): the time freed if no gradient were sent",
    "share_of_ceiling": "time freed / ceiling",
    "faster": "step(P, D) / step(P, C)",
    "faster_than_no_checkpointing": "step(none, D) / step(P, C): above 1, memory is saved for "
    "nothing",
    "tokens_per_s_none": "tokens a second without checkpointing, D, at the usual batch",
    "tokens_per_s_equal_memory": "tokens a second of (P, C) with the batch whose activations peak "
    "no higher than those of no checkpointing at the usual batch",
    "equal_memory_gain": "the second over the first",
}
HEADLINES = (
    "recompute_dense_s",
    "bytes_freed",
    "link_seconds_freed_s",
    "time_freed_s",
    "share_paid",
    "ceiling_s",
    "faster",
    "equal_memory_gain",
)


@dataclass(frozen=True)
class Figures:
    """Derived figures of a policy, a dense baseline and a method at a rate."""

    rate_mbit: float | None
    policy: str
    baseline: str
    method: str
    sequences: int
    rounds: int
    values: dict[str, Estimate]

    def settled(self, name: str) -> bool:
        """Whether a figure is certain enough to be a headline."""
        enough = self.rounds >= SETTLED_ROUNDS and name in self.values
        return enough and self.values[name].half_width <= SETTLED


@dataclass(frozen=True)
class Findings:
    """All of it."""

    rows: list[Row]
    figures: list[Figures]
    break_even: list[BreakEven] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the plan has and the samples have not, in words."""


def derive(spec: Spec, samples: Sequence[Sample]) -> Findings:
    """Everything that the samples show; cells and rates without a whole round are left out."""
    memories = {(m.cell, m.sequences): m for m in samples if isinstance(m, Memory)}
    losses = {s.cell: s for s in samples if isinstance(s, Loss)}
    rows: list[Row] = []
    figures: list[Figures] = []
    missing: list[str] = []
    for rate in spec.rates:
        turns = [t for t in samples if isinstance(t, Turn) and t.rate_mbit == rate]
        rounds = Rounds(turns)
        usual = {Key(cell.name, batch) for cell in spec.cells for batch in spec.batches}
        whole = len(rounds.rounds) if usual.issubset(rounds.keys) else 0
        if whole < spec.rounds:
            missing.append(f"{link(rate)}: {whole or 'none'} of {spec.rounds} rounds")
        if not whole:
            continue
        order = {cell.name: place for place, cell in enumerate(spec.cells)}
        keys = sorted(rounds.keys, key=lambda k: (k.equal_memory, k.sequences, order[k.cell]))
        rows += [row_of(rate, key, turns, rounds, memories, losses) for key in keys]
        here = {Key(r.cell, r.sequences, r.equal_memory): r for r in rows if r.rate_mbit == rate}
        figures += _all_figures(spec, rate, rounds, here)
    trained = [cell for cell in spec.cells if cell.method != SILENT and spec.loss_steps]
    if without := [cell.name for cell in trained if cell.name not in losses]:
        missing.append(f"no held-out loss of {', '.join(without)}")
    return Findings(rows, figures, break_even(figures), missing)


def _all_figures(
    spec: Spec, rate: float | None, rounds: Rounds, rows: Mapping[Key, Row]
) -> list[Figures]:
    found = []
    for policy in spec.policies:
        for baseline in (STOCK, DENSE):
            for method in spec.methods:
                for batch in spec.batches:
                    if policy == "none" or method in BASELINES:
                        continue
                    names = policy, baseline, method
                    values = _figures(spec, rate, rounds, rows, names, batch)
                    found.append(Figures(rate, *names, batch, len(rounds.rounds), values))
    return found


def _figures(
    spec: Spec,
    rate: float | None,
    rounds: Rounds,
    rows: Mapping[Key, Row],
    names: tuple[str, str, str],
    batch: int,
) -> dict[str, Estimate]:
    policy, base, method = names

    def key(p: str, m: str) -> Key:
        return Key(f"{p}/{m}", batch)

    large = [k for k in rounds.keys if k.equal_memory and k.cell == f"{policy}/{method}"]
    freed_bytes = rows[key(policy, base)].link_bytes - rows[key(policy, method)].link_bytes
    tokens = spec.tokens * spec.processes

    def times(at: Lookup) -> dict[str, float]:
        def recomputing(m: str) -> float:
            point = at(key(policy, m))
            return point.parts_s["recompute"] + point.network_s - at(key("none", m)).network_s

        dense, compressed = at(key(policy, base)), at(key(policy, method))
        unkept = at(key("none", base))
        added, freed = recomputing(base), dense.exchange_s - compressed.exchange_s
        ceiling = dense.exchange_s - at(key(policy, SILENT)).exchange_s
        found = {
            "recompute_dense_s": added,
            "recompute_compressed_s": recomputing(method),
            "recompute_dense_by_difference_s": dense.step_s - unkept.step_s,
            "time_freed_s": freed,
            "time_freed_by_difference_s": dense.step_s - compressed.step_s,
            "share_paid": _over(freed, added),
            "ceiling_s": ceiling,
            "share_of_ceiling": _over(freed, ceiling),
            "faster": dense.step_s / compressed.step_s,
            "faster_than_no_checkpointing": unkept.step_s / compressed.step_s,
        }
        if large and batch == min(spec.batches):
            usual = batch * tokens / unkept.step_s
            more = large[0].sequences * tokens / at(large[0]).step_s
            found["tokens_per_s_none"] = usual
            found["tokens_per_s_equal_memory"] = more
            found["equal_memory_gain"] = more / usual
        return found

    values = rounds.estimate(times)
    values["bytes_freed"] = Estimate(freed_bytes, freed_bytes, freed_bytes)
    if rate is not None:
        seconds = 8e-6 * freed_bytes / rate
        values["link_seconds_freed_s"] = Estimate(seconds, seconds, seconds)
    return values


def _over(value: float, by: float) -> float:
    return value / by if by > 0 else math.nan
