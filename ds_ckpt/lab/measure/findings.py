"""What a run's samples show: the rows of configurations, the comparisons, the break-even. Pure."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Row, Sides
from ds_ckpt.lab.measure.parts import PARTS
from ds_ckpt.lab.measure.resampling import Estimate, Lookup, Repetitions
from ds_ckpt.lab.measure.samples import Key, Loss, Memory, Sample, Trial
from ds_ckpt.lab.measure.spec import DENSE, SILENT, STOCK, Configuration, Spec, link

SETTLED, SETTLED_REPETITIONS = 0.05, 4
"""A headline is a figure whose interval is no wider than this either way, from so many trials."""


@dataclass(frozen=True)
class Comparison:
    """Derived figures of a policy, a dense baseline and another exchange at a rate."""

    rate_mbit: float | None
    policy: str
    baseline: str
    method: str
    """`Configuration.exchange`: of gradients, and of weights that are not where ZeRO-3 has them."""
    sequences: int
    repetitions: int
    values: dict[str, Estimate]

    @property
    def line(self) -> tuple[str, str, str, int]:
        """What is compared, at whatever rate."""
        return self.policy, self.baseline, self.method, self.sequences

    def settled(self, name: str) -> bool:
        """Whether a figure is certain enough to be a headline."""
        enough = self.repetitions >= SETTLED_REPETITIONS and name in self.values
        return enough and self.values[name].half_width <= SETTLED


@dataclass(frozen=True)
class BreakEven:
    """The rate at which compression pays for all recomputation; None: none between two measured."""

    policy: str
    baseline: str
    method: str
    sequences: int
    pays_for_recompute_mbit: float | None
    frees_nothing_mbit: float | None
    """Above it compression costs more time than it saves."""


@dataclass(frozen=True)
class Findings:
    """All that a run shows."""

    spec: Spec
    rows: list[Row]
    comparisons: list[Comparison]
    break_even: list[BreakEven]
    missing: list[str]
    """What the plan has and the samples have not, in words."""

    @property
    def rates(self) -> list[float | None]:
        return list(dict.fromkeys(row.rate_mbit for row in self.rows))

    def usual(self, rate: float | None) -> dict[str, Row]:
        """Of one rate, with the usual batch, by configuration."""
        return {r.configuration: r for r in self.rows if r.usual and r.rate_mbit == rate}

    def content(self) -> dict[str, Any]:
        """Rows and comparisons as they are in report.json."""
        kept = ("rate_mbit", "sequences", "parts_s", "purpose_bytes")
        rows = [
            {
                "configuration": row.configuration,
                **asdict(Configuration.of(row.configuration)),
                **{name: getattr(row, name) for name in kept},
                **{one.name: one.value(row) for one in MEASURED},
            }
            for row in self.rows
        ]
        figures = [vars(one) for one in self.comparisons]
        settled = [[n for n in one.values if one.settled(n)] for one in self.comparisons]
        rest = {"break_even": self.break_even, "missing": self.missing, "settled": settled}
        return {"rows": rows, "figures": figures, **rest}


def title(one: Comparison | BreakEven, findings: Findings) -> str:
    """Name of a comparison among those of the same rate."""
    batch = f", {one.sequences} sequences" if len(findings.spec.batches) > 1 else ""
    return f"{one.policy}, {one.method} against {one.baseline}{batch}"


def find(spec: Spec, samples: Sequence[Sample]) -> Findings:
    """Everything that the samples show; rates without a whole repetition are left out."""
    memories = {(m.configuration, m.sequences): m for m in samples if isinstance(m, Memory)}
    losses = {s.configuration: s for s in samples if isinstance(s, Loss)}
    rows: list[Row] = []
    comparisons: list[Comparison] = []
    missing: list[str] = []
    names = [one.name for one in spec.configurations]
    usual = {Key(name, batch) for name in names for batch in spec.batches}
    for rate in spec.rates:
        repetitions = Repetitions(
            t for t in samples if isinstance(t, Trial) and t.rate_mbit == rate
        )
        whole = len(repetitions.numbers) if usual <= repetitions.trials.keys() else 0
        if whole < spec.repetitions:
            missing.append(f"{link(rate)}: {whole or 'none'} of {spec.repetitions} repetitions")
        if not whole:
            continue
        here: dict[Key, Row] = {}
        for key in sorted(
            repetitions.trials,
            key=lambda k: (k.sequences, names.index(k.configuration)),
        ):
            one = Configuration.of(key.configuration)
            memory = memories.get((f"{one.policy}/{STOCK}", key.sequences))
            loss = losses.get(one.name) if one.method != SILENT else None
            here[key] = _row(key, repetitions, spec, memory, loss)
        rows += here.values()
        comparisons += _compared(spec, rate, repetitions, here)
    trained = [c.name for c in spec.configurations if c.method != SILENT and spec.loss_steps]
    if without := [name for name in trained if name not in losses]:
        missing.append(f"no held-out loss of {', '.join(without)}")
    return Findings(spec, rows, comparisons, break_even(comparisons), missing)


def _row(
    key: Key, repetitions: Repetitions, spec: Spec, memory: Memory | None, loss: Loss | None
) -> Row:
    trials = list(repetitions.trials[key].values())
    estimates = repetitions.estimate(lambda at: {"step_s": at(key).step_s, **at(key).parts_s})

    def medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        common = [n for n in values[0] if all(n in one for one in values)]
        return {name: statistics.median(one[name] for one in values) for name in common}

    return Row(
        configuration=key.configuration,
        rate_mbit=trials[0].rate_mbit,
        sequences=key.sequences,
        usual=key.sequences == min(spec.batches),
        processes=spec.processes,
        tokens=spec.tokens_of(key.sequences),
        step_s=estimates["step_s"],
        parts_s={name: estimates[name] for name in PARTS},
        in_collectives_s=repetitions.lookup()(key).in_collectives_s,
        purpose_bytes=medians([t.purpose_bytes for t in trials]),
        link_bytes=max(map(statistics.median, zip(*(t.link_bytes for t in trials), strict=True))),
        interface_bytes=statistics.median(t.interface_bytes for t in trials),
        taken=medians([t.figures for t in trials]),
        memory=memory,
        loss=loss,
    )


def _compared(
    spec: Spec, rate: float | None, repetitions: Repetitions, rows: Mapping[Key, Row]
) -> list[Comparison]:
    found = []
    for one, baseline, batch in itertools.product(
        spec.configurations, (STOCK, DENSE), spec.batches
    ):
        if one.policy == "none" or one.exchange in (STOCK, DENSE) or one.method == SILENT:
            continue
        if one.weights != STOCK and baseline == STOCK:
            continue  # held against the better one alone: there are many of them
        names = one.policy, baseline, one.exchange
        sides = Sides(repetitions.lookup(), spec, rows, rate, *names, batch)
        values = repetitions.estimate(functools.partial(_derived, sides))
        found.append(Comparison(rate, *names, batch, len(repetitions.numbers), values))
    return found


def _derived(sides: Sides, at: Lookup) -> dict[str, float]:
    here = replace(sides, at=at)
    found = ((figure.name, figure.of(here)) for figure in DERIVED)
    return {name: value for name, value in found if value is not None}


def break_even(comparisons: Sequence[Comparison]) -> list[BreakEven]:
    """One for each policy, baseline, method and batch that has rates."""
    rated = sorted(
        ((one.rate_mbit, one) for one in comparisons if one.rate_mbit), key=lambda pair: pair[0]
    )
    found = []
    for line in dict.fromkeys(one.line for one in comparisons if one.rate_mbit):
        mine = [(rate, one.values) for rate, one in rated if one.line == line]
        rates = [rate for rate, _ in mine]
        paid = crossing(rates, [values["share_paid"].value - 1 for _, values in mine])
        freed = crossing(rates, [values["time_freed_s"].value for _, values in mine])
        found.append(BreakEven(*line, paid, freed))
    return found


def crossing(rates: Sequence[float], values: Sequence[float]) -> float | None:
    """The rate at which values fall through 0, on a line over the logarithm of the rate."""
    points = zip(rates, values, strict=True)
    for (r0, v0), (r1, v1) in itertools.pairwise(points):
        if v0 >= 0 > v1:
            return float(r0 * (r1 / r0) ** (v0 / (v0 - v1)))
    return None
