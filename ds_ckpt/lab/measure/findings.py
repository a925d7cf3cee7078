"""Rows, comparisons and intervals from a run's samples. Pure.

Steps of one trial follow each other and share their disturbances; repetitions are apart in time.
Intervals are therefore a bootstrap over repetitions, drawn for all configurations at once: what a
slow repetition does to both sides of a comparison cancels. The middle 95% of the draws is widened
about the value, because draws from n repetitions understate the spread by sqrt((n - 1) / n) and
normal percentiles are used where Student's t applies (Hesterberg, The American Statistician 69,
2015).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Comparison, Estimate, Row
from ds_ckpt.lab.measure.parts import PARTS
from ds_ckpt.lab.measure.samples import Loss, Memory, Sample, StepTime, Trial
from ds_ckpt.lab.measure.spec import BASELINES, DENSE, NO_COMM, STOCK, Configuration, Spec, link
from ds_ckpt.lab.report.charts import missing
from ds_ckpt.telemetry.units import number

DRAWS = 400
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class ComparisonRow:
    """Derived figures of a policy, a reference and another exchange at one rate."""

    rate_mbit: float | None
    policy: str
    baseline: str
    method: str
    values: dict[str, Estimate]

    @property
    def title(self) -> str:
        """Name that is unique at one rate."""
        return f"{self.policy}, {self.method} against {self.baseline}"


@dataclass(frozen=True)
class Findings:
    """Results of a run. `missing` lists what was planned and not measured."""

    spec: Spec
    rows: list[Row]
    comparisons: list[ComparisonRow]
    losses: dict[str, Loss]
    missing: list[str]

    @property
    def rates(self) -> list[float | None]:
        """Rates with a complete repetition."""
        return list(dict.fromkeys(row.rate_mbit for row in self.rows))

    def at(self, rate: float | None) -> list[Row]:
        """Return the rows of one rate."""
        return [row for row in self.rows if row.rate_mbit == rate]

    def content(self) -> dict[str, Any]:
        """Return the content of report.json."""
        stored = ("rate_mbit", "parts_s", "purpose_bytes")
        rows = [
            {
                "configuration": row.configuration,
                **asdict(Configuration.of(row.configuration)),
                **{name: getattr(row, name) for name in stored},
                **{one.name: one.value(row) for one in MEASURED},
            }
            for row in self.rows
        ]
        return {"rows": rows, "comparisons": self.comparisons, "missing": self.missing}


def find(spec: Spec, samples: Sequence[Sample]) -> Findings:
    """Evaluate the samples; rates without a complete repetition are left out."""
    memories = {m.policy: m for m in samples if isinstance(m, Memory)}
    losses = {s.configuration: s for s in samples if isinstance(s, Loss)}
    rows: list[Row] = []
    comparisons: list[ComparisonRow] = []
    missing: list[str] = []
    for rate in spec.rates:
        trials: dict[str, dict[int, Trial]] = {one.name: {} for one in spec.configurations}
        for one in samples:
            if isinstance(one, Trial) and one.rate_mbit == rate:
                trials[one.configuration][one.repetition] = one
        numbers = sorted(set.intersection(*(set(numbered) for numbered in trials.values())))
        if len(numbers) < spec.repetitions:
            missing.append(f"{link(rate)}: {len(numbers)} of {spec.repetitions} repetitions")
        if not numbers:
            continue
        here = {}
        for name, mine in trials.items():
            found = estimate(numbers, functools.partial(_times, mine))
            memory = memories.get(Configuration.of(name).policy)
            chosen = [mine[n] for n in numbers]
            here[name] = _row(spec, chosen, found, memory, losses.get(name))
        rows += here.values()
        comparisons += _compared(spec, rate, numbers, trials, here)
    trained = [c.name for c in spec.configurations if c.method != NO_COMM and spec.loss_steps]
    if without := [name for name in trained if name not in losses]:
        missing.append(f"no held-out loss of {', '.join(without)}")
    return Findings(spec, rows, comparisons, losses, missing)


def _times(trials: Mapping[int, Trial], numbers: Sequence[int]) -> dict[str, float]:
    """Return median step and mean parts of the steps in the middle half, so that parts add up."""
    steps: list[StepTime] = [step for n in numbers for step in trials[n].steps]
    ordered = sorted(steps, key=lambda step: step.step_s)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    means = {name: statistics.fmean([s.parts_s[name] for s in middle]) for name in PARTS}
    return {"step_s": statistics.median(step.step_s for step in steps), **means}


def _row(
    spec: Spec,
    trials: Sequence[Trial],
    times: dict[str, Estimate],
    memory: Memory | None,
    loss: Loss | None,
) -> Row:
    def medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = [n for n in values[0] if all(n in one for one in values)]
        return {name: statistics.median(one[name] for one in values) for name in names}

    return Row(
        configuration=trials[0].configuration,
        rate_mbit=trials[0].rate_mbit,
        processes=spec.processes,
        tokens=spec.step_tokens,
        step_s=times["step_s"],
        parts_s={name: times[name] for name in PARTS},
        purpose_bytes=medians([t.purpose_bytes for t in trials]),
        link_bytes=max(map(statistics.median, zip(*(t.link_bytes for t in trials), strict=True))),
        interface_bytes=statistics.median(t.interface_bytes for t in trials),
        taken=medians([t.figures for t in trials]),
        memory=memory,
        loss=loss,
    )


def _compared(
    spec: Spec,
    rate: float | None,
    numbers: Sequence[int],
    trials: Mapping[str, Mapping[int, Trial]],
    rows: Mapping[str, Row],
) -> list[ComparisonRow]:
    @functools.cache
    def drawn(chosen: tuple[int, ...]) -> dict[str, Row]:
        found = {}
        for name, row in rows.items():
            times = {k: Estimate(v, v, v) for k, v in _times(trials[name], chosen).items()}
            found[name] = replace(row, step_s=times.pop("step_s"), parts_s=times)
        return found

    def derived(one: Comparison, chosen: tuple[int, ...]) -> dict[str, float]:
        here = replace(one, rows=drawn(chosen))
        values = ((figure.name, figure.of(here)) for figure in DERIVED)
        return {name: value for name, value in values if value is not None}

    found = []
    for one, baseline in itertools.product(spec.configurations, (STOCK, DENSE)):
        if one.policy == "none" or one.exchange in (STOCK, DENSE) or one.method == NO_COMM:
            continue
        if one.weights != STOCK and baseline == STOCK:
            continue  # other placements are compared with the better reference only
        names = one.policy, baseline, one.exchange
        figures = functools.partial(derived, Comparison(rows, rate, *names))
        found.append(ComparisonRow(rate, *names, estimate(numbers, figures)))
    return found


def estimate(
    numbers: Sequence[int],
    figures: Callable[[tuple[int, ...]], Mapping[str, float]],
    *,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Estimate figures with intervals, by drawing from the repetitions `numbers`.

    With a single repetition the interval is the value.
    """
    values = figures(tuple(numbers))
    count, generator = len(numbers), random.Random(seed)
    if count < 2:
        return {name: Estimate(value, value, value) for name, value in values.items()}
    draws = [tuple(sorted(generator.choices(numbers, k=count))) for _ in range(DRAWS)]
    found = {chosen: figures(chosen) for chosen in set(draws)}  # most draws are alike
    wider = _widening(count)
    return {
        name: _interval(value, [found[chosen][name] for chosen in draws], wider)
        for name, value in values.items()
    }


def _interval(value: float, drawn: Sequence[float], wider: float) -> Estimate:
    if any(map(math.isnan, drawn)):
        return Estimate(value, math.nan, math.nan)
    ordered = sorted(drawn)
    cut = round((1 - _CONFIDENCE) / 2 * (len(ordered) - 1))
    low, high = ordered[cut], ordered[-1 - cut]
    return Estimate(value, value - wider * (value - low), value + wider * (high - value))


@functools.cache
def _widening(repetitions: int) -> float:
    """Return the factor by which the percentiles of the draws move away from the value."""
    try:
        from scipy.stats import norm, t
    except ImportError as error:
        raise missing("scipy") from error
    quantile, free = (1 + _CONFIDENCE) / 2, repetitions - 1
    return float(t.ppf(quantile, free) / norm.ppf(quantile) * math.sqrt(repetitions / free))


def headline(findings: Findings) -> str:
    """Summarize the run in one sentence: the first method against `dense`, at the first rate."""
    of_dense = [c for c in findings.comparisons if c.baseline == DENSE]
    if not of_dense:
        return "No comparison: it needs a policy beside none and a method beside the references."
    one = of_dense[0]
    values = one.values
    faster = values["faster"]
    ratio = f"{number(faster.value)}x ({number(faster.low)} to {number(faster.high)})"
    if faster.low > 1:
        result = f"steps are {ratio} as fast as with {DENSE} gradients"
    elif faster.high < 1:
        result = f"steps are SLOWER, {ratio} as fast as with {DENSE} gradients"
    else:
        result = f"the speedup over {DENSE} gradients, {ratio}, is not significant"
    cost = values.get("recompute_dense_s")
    added = f", recomputation adds {number(cost.value)} s" if cost else ""
    return (
        f"{link(one.rate_mbit)}, {one.policy} checkpointing, {one.method}: {result}. Compression "
        f"saves {number(values['time_freed_s'].value)} s per step{added}."
    )


def exactness(losses: Mapping[str, Loss]) -> str:
    """Compare losses and final weights with those of no checkpointing and ZeRO-3's weights.

    DeepSpeed baselines may sum in another order and are left out.
    """
    different, compared = [], 0
    for name, loss in losses.items():
        one = Configuration.of(name)
        plain = losses.get(f"none/{one.method}")
        if one.weights in BASELINES or plain is None or plain is loss:
            continue
        compared += 1
        if (loss.train_losses, loss.weights_sha256) != (plain.train_losses, plain.weights_sha256):
            different.append(name)
    if different:
        return (
            "Exactness: NOT met. Losses or final weights differ from those without checkpointing "
            f"and with ZeRO-3's weights in {', '.join(different)}. On CPU they must be equal: "
            "please report it."
        )
    if not compared:
        return "Exactness: no losses were compared."
    return (
        "Exactness: checkpointing and resident weights changed no training loss and no final "
        f"weight by a single bit ({compared} configurations compared)."
    )


def break_even(comparisons: Sequence[ComparisonRow]) -> dict[str, float]:
    """Return the rates at which compression pays for recomputation, by comparison's title."""
    found = {}
    for title in dict.fromkeys(one.title for one in comparisons):
        mine = [c for c in comparisons if c.title == title]
        rated = sorted((c.rate_mbit, c.values["share_paid"].value - 1) for c in mine if c.rate_mbit)
        rate = crossing([r for r, _ in rated], [v for _, v in rated])
        if rate is not None:
            found[title] = rate
    return found


def crossing(rates: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the rate at which values fall through 0, linear in the logarithm of the rate."""
    for (r0, v0), (r1, v1) in itertools.pairwise(zip(rates, values, strict=True)):
        if v0 >= 0 > v1:
            return float(r0 * (r1 / r0) ** (v0 / (v0 - v1)))
    return None
