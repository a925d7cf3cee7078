"""Means, intervals and derived figures, from samples with known parts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Estimate, Figure, Row
from ds_ckpt.lab.measure.findings import Findings, estimate, find, headline
from ds_ckpt.lab.measure.samples import Trial
from tests.unit import measure_samples as known

WITH_WEIGHTS = replace(known.SPEC, weights=("whole", "lossless"), baselines=("zero2",), bf16=True)


@pytest.fixture(scope="module")
def found() -> Findings:
    return find(WITH_WEIGHTS, known.samples(WITH_WEIGHTS))


def _text(row: Row, name: str) -> str:
    (figure,) = (one for one in MEASURED if one.name == name)
    return figure.text(figure.of(row))


@pytest.mark.parametrize("rate", known.SPEC.rates)
@pytest.mark.parametrize("weights", ["stock", "whole", "lossless"])
def test_every_figure_is_its_definition(found: Findings, weights: str, rate: float) -> None:
    """Resident weights by the same definitions; the upper bound has the same weights."""
    method = "4bit" if weights == "stock" else f"4bit/{weights}"
    mb = known.WEIGHTS_MB + known.GRADIENTS_MB["dense"]
    weights_mb = known.CHANGED_MB.get(weights, known.WEIGHTS_MB)
    freed_mb = mb - weights_mb - known.GRADIENTS_MB["4bit"]
    freed_s = known.seconds(freed_mb, rate) - known.PACKING_S
    compressed_s = known.step(f"block/{method}", rate).step_s
    expected = {
        "recompute_s": known.RECOMPUTE_S,
        "bytes_freed": 1e6 * freed_mb,
        "time_freed_s": freed_s,
        "share_paid": freed_s / known.RECOMPUTE_S,
        "ceiling_s": known.seconds(mb - weights_mb, rate),
        "faster": known.step("block/dense", rate).step_s / compressed_s,
        "faster_than_no_checkpointing": known.step("none/dense", rate).step_s / compressed_s,
    }
    if weights != "stock":
        expected["memory_taken"] = 0.5  # 1 MB of the 2 that block frees
    (one,) = [c for c in found.comparisons if (c.method, c.rate_mbit) == (method, rate)]
    assert {name: e.value for name, e in one.values.items()} == pytest.approx(expected)
    for value in one.values.values():  # all repetitions are alike
        assert value.low == pytest.approx(value.value) == value.high
    assert expected.keys() <= {figure.name for figure in DERIVED}


def test_rows_have_the_values_of_their_samples(found: Findings) -> None:
    rows = {row.configuration: row for row in found.at(100.0)}
    row = rows["block/4bit"]
    assert row.step_s.value == pytest.approx(sum(row.parts_s.values()))
    assert row.tokens == 4 * 128 * 2
    for name, text in (
        ("link_bytes", "21.2"),
        ("link_gather_bytes", "20.0"),
        ("link_gradient_bytes", "1.25"),
        ("stored_weight_bytes", "1.00"),
        ("peak_bytes", "2.00"),
    ):
        assert _text(row, name) == text, name
    assert _text(rows["none/stock/zero2"], "link_weight_bytes") == "8.00"
    (baseline,) = (c for c in found.comparisons if (c.method, c.rate_mbit) == ("stock/zero2", 100))
    assert "ceiling_s" not in baseline.values  # zero2 has no run without communication


def test_a_new_figure_is_one_entry(monkeypatch: pytest.MonkeyPatch, found: Findings) -> None:
    new = Figure[Row]("all_bytes", "all", "MB", lambda r: sum(r.purpose_bytes.values()))
    monkeypatch.setattr("ds_ckpt.lab.measure.findings.MEASURED", [*MEASURED, new])
    row = found.content()["rows"][0]
    assert row["all_bytes"] == pytest.approx(4 * 20e6 + 1000)
    assert new.heading == "all, MB"
    assert new.text(Estimate(2e6, 1e6, 3e6)) == "2.00 (1.00 to 3.00)"


def test_one_slow_repetition_does_not_move_a_step(found: Findings) -> None:
    slow = [
        s.model_copy(update={"steps": known.trial(known.SPEC, s.configuration, 1.0, 0, 0).steps})
        for s in known.samples()
        if isinstance(s, Trial) and s.repetition == 1 and s.configuration == "none/stock"
    ]
    row = find(known.SPEC, [*known.samples(), *slow]).rows[0]
    assert row.step_s.value == pytest.approx(found.rows[0].step_s.value)


@pytest.mark.parametrize("count", [3, 6])
def test_an_interval_of_few_repetitions_holds_the_truth_as_often_as_it_should(count: int) -> None:
    """In about 95% of trials."""
    draw = random.Random(count)
    held = 0
    for _ in range(200):
        values = [draw.gauss(10.0, 1.0) for _ in range(count)]
        mean = estimate(
            range(count),
            lambda chosen, values=values: {"mean": sum(values[n] for n in chosen) / len(chosen)},
        )["mean"]
        held += mean.low <= 10.0 <= mean.high
    assert 180 <= held <= 199
    assert estimate([0], lambda _: {"x": 2.0}) == {"x": Estimate(2.0, 2.0, 2.0)}


def test_a_slow_repetition_is_slow_for_both_sides_of_a_comparison() -> None:
    """Repetitions are left out for all configurations at once: shared disturbances cancel."""
    drifting = find(known.SPEC, known.samples(drift=0.5))
    step = drifting.at(100.0)[0].step_s
    assert step.high - step.low > 0.2 * step.value
    freed = drifting.comparisons[0].values["time_freed_s"]
    assert freed.high - freed.low < 1e-6


@pytest.mark.parametrize("kept", [1, 5, 8])
def test_an_incomplete_repetition_is_left_out(kept: int) -> None:
    """A run stopped in the first repetition at the last rate, after some configurations."""
    names = [one.name for one in known.SPEC.configurations][:kept]
    findings = find(
        known.SPEC,
        [
            s
            for s in known.samples()
            if not isinstance(s, Trial)
            or s.rate_mbit != 1600.0
            or (s.configuration in names and s.repetition == 0)
        ],
    )
    complete = {100.0, 400.0} | ({1600.0} if kept == 8 else set())
    assert {f.rate_mbit for f in findings.comparisons} == {*findings.rates} == complete
    assert findings.missing == [f"1600 Mbit/s: {int(kept == 8)} of 5 repetitions"]


@pytest.mark.parametrize(
    ("rate", "drift", "text"),
    [
        (100.0, 0.0, "steps are 1.31x"),
        (1e6, 0.0, "steps are SLOWER, 0.962x"),
        (3500.0, 0.1, "is not significant"),
    ],
)
def test_the_headline_compares_the_first_method_with_dense(
    rate: float, drift: float, text: str
) -> None:
    spec = replace(known.SPEC, rates=(rate,))
    samples = [
        s.model_copy(update={"steps": known.trial(spec, "block/4bit", rate, 0, 0).steps})
        if isinstance(s, Trial) and s.configuration == "block/4bit" and s.repetition == 2
        else s
        for s in known.samples(spec, drift)
    ]
    sentence = headline(find(spec, samples))
    assert text in sentence
    assert sentence.startswith(f"{rate:g} Mbit/s, block checkpointing, 4bit: ")
    assert "recomputation adds 0.100 s" in sentence
    none = replace(spec, policies=("none",))
    assert "No comparison" in headline(find(none, known.samples(none)))
