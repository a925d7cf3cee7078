"""Medians, intervals and derived figures, from samples of which everything is known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ckpt.lab.hosts.interfaces import Sent
from ds_ckpt.lab.measure.figures import (
    DERIVED,
    MEASURED,
    Measured,
    Take,
    number,
    put_together,
    taken,
)
from ds_ckpt.lab.measure.findings import SETTLED_REPETITIONS, Comparison, crossing, find
from ds_ckpt.lab.measure.resampling import Estimate, Repetitions
from ds_ckpt.lab.measure.samples import Key, StepTime, Store, Trial
from tests.unit import measure_samples as known

WITH_WEIGHTS = replace(known.SPEC, weights=("whole", "lossless"), baselines=("zero2",), bf16=True)


def _compared(baseline: str, rate: float) -> Comparison:
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
    unkept_s = known.step(f"none/{baseline}", rate).step_s
    expected = {
        "recompute_dense_s": known.RECOMPUTE_S,
        "recompute_compressed_s": known.RECOMPUTE_S,
        "recompute_dense_by_difference_s": known.RECOMPUTE_S,
        "bytes_freed": 1e6 * (mb - 1.25),
        "link_seconds_freed_s": known.seconds(mb - 1.25, rate),
        "time_freed_s": freed_s,
        "time_freed_by_difference_s": freed_s,
        "share_paid": freed_s / known.RECOMPUTE_S,
        "ceiling_s": known.seconds(mb, rate),
        "share_of_ceiling": freed_s / known.seconds(mb, rate),
        "faster": dense_s / compressed_s,
        "faster_than_no_checkpointing": unkept_s / compressed_s,
    }
    found = _compared(baseline, rate).values
    assert {name: e.value for name, e in found.items()} == pytest.approx(expected)
    for estimate in found.values():  # all repetitions are alike
        assert estimate.low == pytest.approx(estimate.value) == estimate.high


@pytest.mark.parametrize("name", ["whole", "lossless"])
@pytest.mark.parametrize("rate", known.SPEC.rates)
def test_resident_weights_are_compared_by_the_same_definitions(name: str, rate: float) -> None:
    """Against the dense baseline with ZeRO-3's weights; the ceiling is of the same weights."""
    mb = known.WEIGHTS_MB + known.GRADIENTS_MB["dense"]
    kept = known.CHANGED_MB[name] + known.GRADIENTS_MB["4bit"]
    freed_s = known.seconds(mb - kept, rate) - known.PACKING_S
    samples = known.samples(WITH_WEIGHTS)
    (found,) = [
        one
        for one in find(WITH_WEIGHTS, samples).comparisons
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


def test_a_baseline_is_compared_and_has_no_ceiling() -> None:
    found = find(WITH_WEIGHTS, known.samples(WITH_WEIGHTS))
    (one,) = [c for c in found.comparisons if c.method == "stock/zero2" and c.rate_mbit == 100.0]
    assert one.values["bytes_freed"].value == pytest.approx(1e6 * (20 + 10 - 8 - 20))
    assert "ceiling_s" not in one.values
    row = {r.configuration: r for r in found.rows}["none/stock/zero2"]
    assert row.number("link_weight_bytes") == 8e6
    assert row.number("weight_bytes") == 8e6
    assert row.number("tokens_per_s") == pytest.approx(4 * 128 * 2 / row.number("step_s"))


def test_older_runs_have_no_share_of_the_memory() -> None:
    samples = [
        s.model_copy(update={"figures": {}}) if isinstance(s, Trial) else s
        for s in known.samples(WITH_WEIGHTS)
    ]
    found = find(WITH_WEIGHTS, samples)
    assert found.comparisons
    assert not any("memory_taken" in one.values for one in found.comparisons)
    assert found.rows[0].text("link_gather_bytes") == "-"


def test_every_figure_has_a_definition_and_words() -> None:
    of_gradients = [one.name for one in DERIVED if one.name != "memory_taken"]
    assert list(_compared("stock", 100.0).values) == of_gradients
    assert all(one.definition and one.words for one in DERIVED)
    assert any(one.headline for one in DERIVED)
    for entries in (MEASURED, DERIVED):
        assert len({one.name for one in entries}) == len(entries)


def test_the_break_even_is_where_the_time_freed_is_that_of_recomputing() -> None:
    found = {b.baseline: b for b in find(known.SPEC, known.samples()).break_even}
    # 8 * (20 - 1.25) / r = 0.1 + 0.02 at 1250 Mbit/s, 8 * (10 - 1.25) / r at 583; the line between
    # measured rates is not the true curve
    pays = found["stock"].pays_for_recompute_mbit, found["dense"].pays_for_recompute_mbit
    assert pays[0] is not None
    assert pays[1] is not None
    assert 800 < pays[0] < 1600
    assert 450 < pays[1] < 900
    assert found["stock"].frees_nothing_mbit is None


def test_a_crossing_lies_on_the_line_over_the_logarithm() -> None:
    assert crossing([100, 400], [1, -1]) == pytest.approx(200)
    assert crossing([100, 400, 1600], [3, 1, -1]) == pytest.approx(800)
    assert crossing([100, 400], [1, 0.5]) is None
    assert crossing([100, 400], [-1, -2]) is None


def _step(seconds: float) -> StepTime:
    parts = dict.fromkeys(known.step("none/stock", 100.0).parts_s, 0.0)
    parts["compute_forward"] = seconds
    return StepTime(step_s=seconds, parts_s=parts, in_collectives_s=0.0)


def _repetitions(values: list[float]) -> Repetitions:
    base = known.trial(known.SPEC, "none/stock", 100.0, 0, 0.0)
    return Repetitions(
        base.model_copy(update={"repetition": n, "steps": (_step(v),)})
        for n, v in enumerate(values)
    )


@pytest.fixture
def loss() -> Iterator[Measured]:
    """A figure that somebody has registered."""
    one = Measured("loss", "loss", "nat", take=lambda take: max(take.losses), over=min)
    MEASURED.append(one)
    yield one
    MEASURED.remove(one)


def test_a_new_figure_is_one_entry(loss: Measured, tmp_path: Path) -> None:
    """Taken in the processes, put together, kept on disk, shown with its unit."""
    everyone = [
        taken(Take([_step(1.0), _step(2.0)], losses, Sent(3, 40), leads, 2, far, weights))
        for losses, leads, far, weights in (
            ([5.0, 7.0], True, {"gather_forward": 2.0, "gather_backward": 1.0}, 7),
            ([6.0, 6.5], False, {"gather_forward": 1.0, "reduce": 8.0, "weights": 6.0}, 9),
        )
    ]
    assert put_together(everyone) == {
        "interface_bytes": 20.0,
        "link_gather_bytes": 2.0,  # the mean over two hosts
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
    plain = find(known.SPEC, known.samples()).rows[0]  # of a run that has not taken it
    assert plain.text("loss") == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0612, "0.0612"), (4.876, "4.88"), (39.21, "39.2"), (135.4, "135")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text
    bytes_ = Measured("a", "a", "MB", of=lambda _: None)
    assert bytes_.text(1e6 * value) == text
    assert bytes_.with_unit(Estimate(1e6 * value, 0.0, 9e6)) == f"{text} MB"


def test_a_row_has_what_its_samples_say() -> None:
    rows = {r.configuration: r for r in find(known.SPEC, known.samples()).rows[::-1]}
    row = rows["block/4bit"]
    mb = known.WEIGHTS_MB + 1.25
    assert row.number("link_bytes") == 1e6 * mb
    assert row.number("gradient_bytes") == 1.25e6
    assert row.number("weight_bytes") == 2e7
    assert row.number("held_bytes") == 4
    assert row.number("interface_over_purposes") == pytest.approx(1.01)
    assert row.number("parts_over_step") == pytest.approx(1.0)
    assert row.text("heldout_loss") == "3.6000"
    assert rows["block/silent"].text("heldout_loss") == "-"
    assert row.number("link_busy_s") == pytest.approx(known.seconds(mb, 100.0))


KEY = Key("none/stock", 4)


def test_one_slow_repetition_moves_neither_median_nor_parts() -> None:
    point = _repetitions([1.0, 1.1, 0.9, 1.0, 50.0]).lookup()(KEY)
    assert point.step_s == 1.0
    assert point.parts_s["compute_forward"] == pytest.approx(1.0, rel=0.1)


def test_an_interval_holds_the_median_of_resampled_repetitions() -> None:
    rounds = _repetitions([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    found = rounds.estimate(lambda at: {"step": at(KEY).step_s})["step"]
    assert found.value == 4.0
    assert 1.0 < found.low < 4.0 < found.high < 7.0
    again = rounds.estimate(lambda at: {"step": at(KEY).step_s})["step"]
    assert again == found


@pytest.mark.parametrize("count", [4, 8])
def test_an_interval_of_few_repetitions_holds_the_truth_as_often_as_it_says(count: int) -> None:
    """In 95% of trials, or about that; the draws' own percentiles would hold it in 85 to 88%."""
    draw = random.Random(count)
    held = 0
    for _ in range(100):
        rounds = _repetitions([draw.gauss(10.0, 1.0) for _ in range(count)])
        found = rounds.estimate(
            lambda at: {"step": at(KEY).parts_s["compute_forward"]}, seed=draw.randrange(1 << 30)
        )["step"]
        held += found.low <= 10.0 <= found.high
    assert held >= 91


def test_a_slow_repetition_is_slow_for_both_sides_of_a_difference() -> None:
    """Repetitions are drawn for all configurations at once: what they share cancels."""
    spec = known.SPEC
    found = find(spec, known.samples(spec, drift=0.5))
    figures = [f for f in found.comparisons if f.rate_mbit == 100.0]
    for one in figures:
        step = next(
            r for r in found.rows if r.configuration == "block/stock" and r.rate_mbit == 100.0
        )
        assert step.step_s.half_width > 0.1
        assert one.values["time_freed_by_difference_s"].half_width < 1e-6


def test_a_repetition_that_not_every_configuration_took_part_in_is_left_out() -> None:
    samples = known.samples()
    last = max(
        i for i, s in enumerate(samples) if s.kind == "trial" and s.configuration == "none/4bit"
    )
    del samples[last]
    rows = find(known.SPEC, samples).rows
    assert len(rows) == len(find(known.SPEC, known.samples()).rows)


def test_a_headline_needs_a_narrow_interval_and_repetitions() -> None:
    wide, narrow = Estimate(1.0, 0.9, 1.1), Estimate(1.0, 0.96, 1.04)
    figures = Comparison(
        100.0, "block", "dense", "4bit", 4, SETTLED_REPETITIONS, {"a": wide, "b": narrow}
    )
    assert not figures.settled("a")
    assert figures.settled("b")
    assert not figures.settled("c")
    few = Comparison(100.0, "block", "dense", "4bit", 4, SETTLED_REPETITIONS - 1, {"b": narrow})
    assert not few.settled("b")


def test_of_an_interval_that_lies_askew_the_longer_side_counts() -> None:
    assert Estimate(1.0, 0.92, 1.0).half_width == pytest.approx(0.08)


def test_draws_in_which_recomputing_costs_nothing_leave_no_interval() -> None:
    trials = [known.trial(known.SPEC, "none/stock", 100.0, n, 0.0) for n in range(5)]
    shares = iter([0.5, *[0.5, math.nan] * 200])
    share = Repetitions(trials).estimate(lambda _: {"share_paid": next(shares)})["share_paid"]
    assert share.value == 0.5
    assert math.isnan(share.low)
    assert not Comparison(100.0, "block", "stock", "4bit", 4, 5, {"share_paid": share}).settled(
        "share_paid"
    )


@pytest.mark.parametrize("kept", [1, 5, 8])
def test_a_rate_without_a_whole_repetition_is_left_out(kept: int) -> None:
    """Stopped in the first repetition at the last rate, after some had their trial."""
    names = [one.name for one in known.SPEC.configurations][:kept]
    found = [
        s
        for s in known.samples()
        if not isinstance(s, Trial)
        or s.rate_mbit != 1600.0
        or (s.configuration in names and s.repetition == 0)
    ]
    findings = find(known.SPEC, found)
    whole = {100.0, 400.0} | ({1600.0} if kept == 8 else set())
    assert (
        {f.rate_mbit for f in findings.comparisons} == {r.rate_mbit for r in findings.rows} == whole
    )
