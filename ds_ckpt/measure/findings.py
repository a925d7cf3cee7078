"""What a run's samples show: the rows of configurations, the comparisons, the break-even. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_ckpt.measure.figures import DERIVED, MEASURED, Seen, Sides, measured
from ds_ckpt.measure.parts import PARTS
from ds_ckpt.measure.records import Key, Loss, Memory, Sample, Trial
from ds_ckpt.measure.spec import BASELINES, DENSE, SILENT, STOCK, Configuration, Spec, link
from ds_ckpt.measure.statistics import Estimate, Lookup, Repetitions

SETTLED, SETTLED_REPETITIONS = 0.05, 4
"""A headline is a figure whose interval is no wider than this either way, from so many trials."""


@dataclass(frozen=True)
class Row:
    """A configuration at a rate with a batch: the values of `MEASURED`, and parts for charts."""

    configuration: str
    rate_mbit: float | None
    sequences: int
    equal_memory: bool
    parts_s: dict[str, Estimate]
    purpose_bytes: dict[str, float]
    values: dict[str, Estimate | float | None]

    @property
    def step_s(self) -> Estimate:
        step = self.values["step_s"]
        assert isinstance(step, Estimate)
        return step

    def number(self, name: str) -> float:
        """The value alone of a figure that every configuration has."""
        value = self.values[name]
        assert value is not None, name
        return value.value if isinstance(value, Estimate) else value

    def text(self, name: str, *, interval: bool = False) -> str:
        """A figure's value in its unit."""
        return measured(name).text(self.values[name], interval=interval)


@dataclass(frozen=True)
class Comparison:
    """Derived figures of a policy, a dense baseline and a method at a rate."""

    rate_mbit: float | None
    policy: str
    baseline: str
    method: str
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

    rows: list[Row]
    comparisons: list[Comparison]
    break_even: list[BreakEven] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the plan has and the samples have not, in words."""

    def content(self) -> dict[str, Any]:
        """As it stands in report.json."""
        return {
            "rows": [
                {
                    "cell": row.configuration,
                    **{
                        name: v
                        for name, v in vars(row).items()
                        if name not in ("configuration", "values")
                    },
                    **row.values,
                }
                for row in self.rows
            ],
            "figures": [
                {"rounds" if k == "repetitions" else k: v for k, v in vars(one).items()}
                for one in self.comparisons
            ],
            "break_even": self.break_even,
            "missing": self.missing,
            "settled": [[n for n in one.values if one.settled(n)] for one in self.comparisons],
        }


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
        trials = [t for t in samples if isinstance(t, Trial) and t.rate_mbit == rate]
        repetitions = Repetitions(trials)
        whole = len(repetitions.numbers) if usual.issubset(repetitions.keys) else 0
        if whole < spec.repetitions:
            missing.append(f"{link(rate)}: {whole or 'none'} of {spec.repetitions} repetitions")
        if not whole:
            continue
        here: dict[Key, Row] = {}
        keys = repetitions.keys
        for key in sorted(
            keys, key=lambda k: (k.equal_memory, k.sequences, names.index(k.configuration))
        ):
            policy, _, method = key.configuration.partition("/")
            mine = [t for t in trials if t.whose == key]
            memory = memories.get((f"{policy}/{STOCK}", key.sequences))
            loss = losses.get(key.configuration) if method != SILENT else None
            here[key] = _row(key, mine, repetitions, spec, rate, memory, loss)
        rows += here.values()
        link_bytes = {key: row.number("link_bytes") for key, row in here.items()}
        comparisons += _compared(spec, rate, repetitions, link_bytes)
    trained = [c for c in spec.configurations if c.method != SILENT and spec.loss_steps]
    if without := [c.name for c in trained if c.name not in losses]:
        missing.append(f"no held-out loss of {', '.join(without)}")
    return Findings(rows, comparisons, break_even(comparisons), missing)


def _row(
    key: Key,
    trials: Sequence[Trial],
    repetitions: Repetitions,
    spec: Spec,
    rate: float | None,
    memory: Memory | None,
    loss: Loss | None,
) -> Row:
    def seen(at: Lookup) -> Seen:
        return Seen(at(key), trials, spec, rate, memory, loss)

    def timed(at: Lookup) -> dict[str, float]:
        here = seen(at)
        found = {one.name: one.value(here) for one in MEASURED if one.timed}
        return {n: v for n, v in found.items() if v is not None} | dict(here.point.parts_s)

    estimates = repetitions.estimate(timed)
    all_of_it = seen(repetitions.lookup())
    return Row(
        configuration=key.configuration,
        rate_mbit=rate,
        sequences=key.sequences,
        equal_memory=key.equal_memory,
        parts_s={name: estimates[name] for name in PARTS},
        purpose_bytes=all_of_it.purposes(),
        values={
            one.name: estimates.get(one.name) if one.timed else one.value(all_of_it)
            for one in MEASURED
        },
    )


def _compared(
    spec: Spec, rate: float | None, repetitions: Repetitions, link_bytes: Mapping[Key, float]
) -> list[Comparison]:
    found = []
    for one in spec.configurations:
        if one.policy == "none" or one.method in BASELINES:
            continue
        for baseline in (STOCK, DENSE):
            for batch in spec.batches:
                values = _derived(spec, rate, repetitions, link_bytes, one, baseline, batch)
                names = one.policy, baseline, one.method
                count = len(repetitions.numbers)
                found.append(Comparison(rate, *names, batch, count, values))
    return found


def _derived(
    spec: Spec,
    rate: float | None,
    repetitions: Repetitions,
    link_bytes: Mapping[Key, float],
    one: Configuration,
    baseline: str,
    batch: int,
) -> dict[str, Estimate]:
    def values(at: Lookup, *, timed: bool) -> dict[str, float]:
        sides = Sides(at, spec, link_bytes, rate, one.policy, baseline, one.method, batch)
        found = {f.name: f.of(sides) for f in DERIVED if f.timed == timed}
        return {name: value for name, value in found.items() if value is not None}

    found = repetitions.estimate(lambda at: values(at, timed=True))
    exact = values(repetitions.lookup(), timed=False)
    found |= {name: Estimate.exact(value) for name, value in exact.items()}
    return {f.name: found[f.name] for f in DERIVED if f.name in found}


def break_even(comparisons: Sequence[Comparison]) -> list[BreakEven]:
    """One for each policy, baseline, method and batch that has rates."""
    lines: dict[tuple[str, str, str, int], list[Comparison]] = {}
    for one in comparisons:
        if one.rate_mbit is not None:
            lines.setdefault(one.line, []).append(one)
    found = []
    for line, mine in lines.items():
        ordered = sorted(mine, key=lambda c: c.rate_mbit or 0.0)
        rates = [c.rate_mbit or 0.0 for c in ordered]
        paid = [c.values["share_paid"].value - 1 for c in ordered]
        freed = [c.values["time_freed_s"].value for c in ordered]
        found.append(BreakEven(*line, crossing(rates, paid), crossing(rates, freed)))
    return found


def crossing(rates: Sequence[float], values: Sequence[float]) -> float | None:
    """The rate at which values fall through 0, on a line over the logarithm of the rate."""
    points = zip(rates, values, strict=True)
    for (r0, v0), (r1, v1) in itertools.pairwise(points):
        if v0 >= 0 > v1:
            return float(r0 * (r1 / r0) ** (v0 / (v0 - v1)))
    return None
