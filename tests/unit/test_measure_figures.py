"""Medians, intervals and derived figures, from samples with known parts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ckpt.lab.hosts.backends import Sent
from ds_ckpt.lab.measure.figures import (
    DERIVED,
    MEASURED,
    Estimate,
    Measured,
    TrialObservation,
    combined,
    observed,
)
from ds_ckpt.lab.measure.findings import (
    ComparisonRow,
    break_even,
    crossing,
    estimate,
    exactness,
    find,
    headline,
)
from ds_ckpt.lab.measure.samples import Loss, StepTime, Store, Trial
from tests.unit import measure_samples as known

WITH_WEIGHTS = replace(known.SPEC, weights=("whole", "lossless"), baselines=("zero2",), bf16=True)


def _compared(baseline: str, rate: float) -> ComparisonRow:
    (found,) = [
        f
        for f in find(known.SPEC, known.samples()).comparisons
        if (f.baseline, f.rate_mbit) == (baseline, rate)
    ]
    return found


@pytest.mark.parametrize("baseline", ["stock", "dense"])
@pytest.mark.parametrize("rate", known.SPEC.rates)
def test_every_figure_is_its_definition(baseline: str, rate: float) -> None:
    mb = known.GRADIENTS_MB[baseline]
    freed_s = known.seconds(mb - 1.25, rate) - known.PACKING_S
    dense_s = known.step(f"block/{baseline}", rate).step_s
    compressed_s = known.step("block/4bit", rate).step_s
    plain_s = known.step(f"none/{baseline}", rate).step_s
    expected = {
        "recompute_dense_s": known.RECOMPUTE_S,
        "recompute_compressed_s": known.RECOMPUTE_S,
        "bytes_freed": 1e6 * (mb - 1.25),
        "link_seconds_freed_s": known.seconds(mb - 1.25, rate),
        "time_freed_s": freed_s,
        "share_paid": freed_s / known.RECOMPUTE_S,
        "ceiling_s": known.seconds(mb, rate),
        "faster": dense_s / compressed_s,
        "faster_than_no_checkpointing": plain_s / compressed_s,
    }
    found = _compared(baseline, rate).values
    assert {name: e.value for name, e in found.items()} == pytest.approx(expected)
    for value in found.values():  # all repetitions are alike
        assert value.low == pytest.approx(value.value) == value.high
    assert [*found, "memory_taken"] == [one.name for one in DERIVED]


@pytest.mark.parametrize("name", ["whole", "lossless"])
@pytest.mark.parametrize("rate", known.SPEC.rates)
def test_resident_weights_are_compared_by_the_same_definitions(name: str, rate: float) -> None:
    """With the reference of ZeRO-3's weights; the upper bound has the same weights."""
    mb = known.WEIGHTS_MB + known.GRADIENTS_MB["dense"]
    kept = known.CHANGED_MB[name] + known.GRADIENTS_MB["4bit"]
    freed_s = known.seconds(mb - kept, rate) - known.PACKING_S
    (found,) = [
        one
        for one in find(WITH_WEIGHTS, known.samples(WITH_WEIGHTS)).comparisons
        if (one.method, one.rate_mbit) == (f"4bit/{name}", rate)
    ]
    assert found.baseline == "dense"
    values = {name: one.value for name, one in found.values.items()}
    expected = {
        "recompute_dense_s": known.RECOMPUTE_S,
        "recompute_compressed_s": known.RECOMPUTE_S,
        "bytes_freed": 1e6 * (mb - kept),
        "time_freed_s": freed_s,
        "share_paid": freed_s / known.RECOMPUTE_S,
        "ceiling_s": known.seconds(mb - known.CHANGED_MB[name], rate),
        "memory_taken": 0.5,  # 1 MB of the 2 that block frees
    }
    assert {n: values[n] for n in expected} == pytest.approx(expected)


def test_a_baseline_is_compared_and_has_no_upper_bound() -> None:
    found = find(WITH_WEIGHTS, known.samples(WITH_WEIGHTS))
    (one,) = [c for c in found.comparisons if c.method == "stock/zero2" and c.rate_mbit == 100.0]
    assert one.values["bytes_freed"].value == pytest.approx(1e6 * (20 + 10 - 8 - 20))
    assert "ceiling_s" not in one.values
    row = {r.configuration: r for r in found.rows}["none/stock/zero2"]
    assert row.number("link_weight_bytes") == 8e6
    assert row.number("weight_bytes") == 8e6
    assert row.number("tokens_per_s") == pytest.approx(4 * 128 * 2 / row.number("step_s"))


def test_a_row_has_the_values_of_its_samples() -> None:
    rows = {r.configuration: r for r in find(known.SPEC, known.samples()).at(100.0)}
    row = rows["block/4bit"]
    mb = known.WEIGHTS_MB + 1.25
    assert row.number("link_bytes") == 1e6 * mb
    assert row.number("gradient_bytes") == 1.25e6
    assert row.number("weight_bytes") == 2e7
    assert row.number("held_bytes") == 1e6
    assert row.number("interface_over_purposes") == pytest.approx(1.01)
    assert row.number("parts_over_step") == pytest.approx(1.0)
    assert row.text("heldout_loss") == "3.6000"
    assert rows["block/no_comm"].text("heldout_loss") == "-"


@pytest.fixture
def loss() -> Iterator[Measured]:
    """A newly registered figure."""
    one = Measured("loss", "loss", "nat", observe=lambda trial: max(trial.losses), over=min)
    MEASURED.append(one)
    yield one
    MEASURED.remove(one)


def test_a_new_figure_is_one_entry(loss: Measured, tmp_path: Path) -> None:
    """Observed in the processes, combined, stored, and shown with its unit."""
    parts = dict.fromkeys(known.step("none/stock", 100.0).parts_s, 0.0)
    times = [StepTime(step_s=1.0, parts_s=parts)] * 2
    everyone = [
        observed(TrialObservation(times, losses, Sent(3, 40), leads, 2, far, weights))
        for losses, leads, far, weights in (
            ([5.0, 7.0], True, {"gather_forward": 2.0, "gather_backward": 1.0}, 7),
            ([6.0, 6.5], False, {"gather_forward": 1.0, "reduce": 8.0, "weights": 6.0}, 9),
        )
    ]
    assert combined(everyone) == {
        "interface_bytes": 20.0,
        "link_gather_bytes": 2.0,  # the mean over two nodes
        "link_weight_bytes": 3.0,
        "link_gradient_bytes": 4.0,
        "kept_weight_bytes": 9.0,
        "loss": 6.5,
    }
    store = Store(tmp_path)
    store.append(
        [
            s.model_copy(update={"figures": {"loss": 6.5}}) if isinstance(s, Trial) else s
            for s in known.samples()
        ]
    )
    findings = find(known.SPEC, store.read())
    assert findings.rows[0].text("loss") == "6.50"
    assert findings.content()["rows"][0]["loss"] == 6.5
    assert loss.heading == "loss, nat"
    plain = find(known.SPEC, known.samples()).rows[0]  # of a run without it
    assert plain.text("loss") == "-"


def test_the_break_even_is_where_the_time_saved_is_that_of_recomputation() -> None:
    """8 * (20 - 1.25) / r = 0.12 at 1250 Mbit/s, 8 * (10 - 1.25) / r at 583, interpolated."""
    found = break_even(find(known.SPEC, known.samples()).comparisons)
    assert 800 < found["block, 4bit against stock"] < 1600
    assert 450 < found["block, 4bit against dense"] < 900
    assert crossing([100, 400], [1, -1]) == pytest.approx(200)
    assert crossing([100, 400, 1600], [3, 1, -1]) == pytest.approx(800)
    assert crossing([100, 400], [1, 0.5]) is None
    assert crossing([100, 400], [-1, -2]) is None


def test_one_slow_repetition_moves_neither_median_nor_parts() -> None:
    spec = replace(known.SPEC, rates=(100.0,))
    samples = known.samples(spec)
    plain = find(spec, samples).rows[0]
    slow = [
        s.model_copy(update={"steps": known.trial(spec, s.configuration, 1.0, 0, 0.0).steps})
        for s in samples
        if isinstance(s, Trial) and s.repetition == 1 and s.configuration == "none/stock"
    ]
    row = find(spec, [*samples, *slow]).rows[0]
    assert row.step_s.value == plain.step_s.value
    assert row.part_s() == pytest.approx(plain.part_s(), rel=0.1)


@pytest.mark.parametrize("count", [4, 8])
def test_an_interval_of_few_repetitions_holds_the_truth_as_often_as_it_should(count: int) -> None:
    """In about 95% of trials; percentiles of the draws alone would hold it in 85 to 88%."""
    draw = random.Random(count)
    held = 0
    for _ in range(100):
        values = [draw.gauss(10.0, 1.0) for _ in range(count)]
        found = estimate(
            range(count),
            lambda chosen, values=values: {"mean": sum(values[n] for n in chosen) / count},
            seed=draw.randrange(1 << 30),
        )["mean"]
        held += found.low <= 10.0 <= found.high
    assert held >= 91


def test_a_slow_repetition_is_slow_for_both_sides_of_a_comparison() -> None:
    """Repetitions are drawn for all configurations at once: shared disturbances cancel."""
    found = find(known.SPEC, known.samples(drift=0.5))
    (one,) = [c for c in found.comparisons if (c.baseline, c.rate_mbit) == ("stock", 100.0)]
    step = next(r for r in found.at(100.0) if r.configuration == "block/stock").step_s
    assert step.high - step.low > 0.2 * step.value
    freed = one.values["time_freed_s"]
    assert freed.high - freed.low < 1e-6


def test_draws_without_a_share_leave_no_interval() -> None:
    shares = iter([0.5, *[0.5, math.nan] * 200])
    share = estimate(range(5), lambda _: {"share_paid": next(shares)})["share_paid"]
    assert share.value == 0.5
    assert math.isnan(share.low)
    assert estimate([0], lambda _: {"x": 2.0}) == {"x": Estimate(2.0, 2.0, 2.0)}


@pytest.mark.parametrize("kept", [1, 5, 8])
def test_an_incomplete_repetition_is_left_out(kept: int) -> None:
    """A run stopped in the first repetition at the last rate, after some configurations."""
    names = [one.name for one in known.SPEC.configurations][:kept]
    found = [
        s
        for s in known.samples()
        if not isinstance(s, Trial)
        or s.rate_mbit != 1600.0
        or (s.configuration in names and s.repetition == 0)
    ]
    findings = find(known.SPEC, found)
    complete = {100.0, 400.0} | ({1600.0} if kept == 8 else set())
    assert {f.rate_mbit for f in findings.comparisons} == {*findings.rates} == complete
    (missing,) = findings.missing
    assert missing == f"1600 Mbit/s: {int(kept == 8)} of 5 repetitions"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(100.0, "steps are 1.31x"), (1600.0, "fast as"), (1e6, "steps are SLOWER, 0.962x")],
)
def test_the_headline_compares_the_first_method_with_dense(rate: float, text: str) -> None:
    spec = replace(known.SPEC, rates=(rate,))
    found = headline(find(spec, known.samples(spec)))
    assert text in found
    assert found.startswith(f"{rate:g} Mbit/s, block checkpointing, 4bit: ")
    assert "recomputation adds 0.100 s" in found


def test_a_difference_within_the_interval_is_not_significant() -> None:
    spec = replace(known.SPEC, rates=(2800.0,))
    samples = [
        s.model_copy(update={"steps": known.trial(spec, "block/4bit", 2800.0, 0, -0.1).steps})
        if isinstance(s, Trial) and s.configuration == "block/4bit" and s.repetition == 2
        else s
        for s in known.samples(spec, drift=0.01)
    ]
    assert "is not significant" in headline(find(spec, samples))
    none = replace(spec, policies=("none",))
    assert "No comparison" in headline(find(none, known.samples(none)))


def test_a_loss_or_weight_that_differs_is_reported() -> None:
    """A DeepSpeed baseline may differ: it sums in another order."""
    losses = {s.configuration: s for s in known.samples(WITH_WEIGHTS) if isinstance(s, Loss)}
    assert "changed no training loss and no final weight" in exactness(losses)
    assert "no losses were compared" in exactness({})
    for name, update, met in (
        ("block/dense", {"train_losses": (5.0, 4.0, 3.4)}, False),
        ("none/4bit/lossless", {"weights_sha256": "other"}, False),
        ("none/stock/zero2", {"train_losses": (5.0, 4.0, 3.4)}, True),
    ):
        text = exactness({**losses, name: losses[name].model_copy(update=update)})
        assert ("NOT met" not in text) == met, name
        assert met or name in text
