"""Means, intervals and derived figures, from samples with known parts."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Estimate, Figure, Ratio, Row
from ds_ckpt.lab.measure.findings import Findings, byte_notes, estimate, find, headline
from ds_ckpt.lab.measure.samples import Sample, StepTime, Trial
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
    shorter_s = known.seconds(freed_mb, rate) - known.PACKING_S
    compressed_s = known.step(f"block/{method}", rate).step_s
    expected = {
        "cost_s": known.RECOMPUTE_S,
        "work_s": known.RECOMPUTE_S,
        "freed_bytes": 1e6 * freed_mb,
        "freed_s": known.seconds(freed_mb, rate),
        "shorter_s": shorter_s,
        "share_paid": shorter_s / known.RECOMPUTE_S,
        "change_s": known.RECOMPUTE_S - shorter_s,
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
    assert one.is_checked
    assert one.outcome == ("all" if shorter_s > known.RECOMPUTE_S else "share")
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
    """In about 95% of trials; a quotient's, too, wherever it exists."""
    draw = random.Random(count)
    held, shares = 0, []
    for _ in range(300):
        pairs = [(draw.gauss(1.0, 0.3), draw.gauss(2.0, 0.5)) for _ in range(count)]

        def figures(chosen: Sequence[int], pairs: Any = pairs) -> dict[str, float | Ratio]:
            over, under = (statistics.fmean(pairs[n][i] for n in chosen) for i in (0, 1))
            return {"over": over, "share": Ratio(over, under)}

        found = estimate(range(count), figures)
        held += found["over"].low <= 1.0 <= found["over"].high
        if not math.isnan(found["share"].low):
            shares.append(found["share"].low <= 0.5 <= found["share"].high)
    assert 270 <= held <= 298
    assert len(shares) > 200
    assert 0.9 <= statistics.fmean(shares) <= 0.995


def test_one_repetition_has_no_interval() -> None:
    found = estimate([0], lambda _: {"x": 2.0, "share": Ratio(1.0, 2.0), "none": Ratio(1.0, 0.0)})
    assert [one.value for one in found.values()] == pytest.approx([2.0, 0.5, math.nan], nan_ok=True)
    assert all(math.isnan(one.low) and math.isnan(one.high) for one in found.values())


def test_a_slow_repetition_is_slow_for_both_sides_of_a_comparison() -> None:
    """Steps are paired and repetitions left out together: shared disturbances cancel."""
    drifting = find(known.SPEC, known.samples(drift=0.5))
    step = drifting.at(100.0)[0].step_s
    assert step.high - step.low > 0.2 * step.value
    for name in ("cost_s", "shorter_s", "share_paid"):
        found = drifting.comparisons[0].values[name]
        assert found.high - found.low < 1e-6, name


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


def _timed(
    steps_s: dict[str, list[list[float]]], rate: float | None = 200.0, work_s: float = 0.1
) -> Findings:
    """Evaluate a run with these steps of repetitions, by configuration, and known bytes."""
    count = len(steps_s["none/dense"])
    spec = replace(known.SPEC, rates=(rate,), repetitions=count)
    found: list[Sample] = []
    for one in spec.configurations:
        for n in range(count):
            trial = known.trial(spec, one.name, rate, n, 0.0)
            parts_s = trial.steps[0].parts_s | {"recompute": work_s}
            times = steps_s.get(one.name, [[1.0, 1.0]] * count)[n]
            steps = tuple(StepTime(step_s=s, parts_s=parts_s) for s in times)
            found.append(trial.model_copy(update={"steps": steps}))
    return find(spec, found)


def _run(none: float, block: float, compressed: float, noise: float = 0.01) -> dict[str, Any]:
    """Return four repetitions of two steps with a disturbance of each repetition."""
    draw = random.Random(1)
    means = {"none/dense": none, "block/dense": block, "block/4bit": compressed}
    return {
        name: [[mean + n / 2 + draw.uniform(-noise, noise) for _ in range(2)] for n in range(4)]
        for name, mean in means.items()
    }


NUMBER = r"-?\d+(\.\d+)?"
ENDS = rf"\(95%: {NUMBER} to {NUMBER} s\)"
COST = rf"(At {NUMBER} Mbit/s|On a link that is not shaped) recomputation costs {NUMBER} s a step"
LESS = rf"4-bit quantization ((frees|takes) {NUMBER} (s of the link|MB a step and node) and )?"
MEASURED_CHANGE = rf"(shortens|lengthens) the step by {NUMBER} s"
CHANGE = rf"({MEASURED_CHANGE}|does not change the step measurably {ENDS})"
TOGETHER = rf"\. Both together change the step by {NUMBER} s {ENDS}\."
COST_UNKNOWN = {
    "free": rf"recomputation does not lengthen the step measurably {ENDS}\.",
    "busy": rf"the machine is too busy to time recomputation: it costs {NUMBER} to {NUMBER} s a "
    rf"step \(95%\), and its own work takes {NUMBER} s\.",
}
SENTENCES = {
    "share": rf"{COST}\. {LESS}shortens the step by {NUMBER} s: it pays for {NUMBER}% of the "
    rf"recomputation \(95%: {NUMBER} to {NUMBER}%\)\.",
    "all": rf"{COST}\. {LESS}shortens the step by {NUMBER} s: it pays for all of the "
    rf"recomputation{TOGETHER}",
    "none": rf"{COST}\. {LESS}{CHANGE}: it is not shown to pay for any of the "
    rf"recomputation \(95%: {NUMBER} to {NUMBER}%\){TOGETHER}",
    "single": rf"{COST} in the only repetition, which gives no interval\. {LESS}{MEASURED_CHANGE}"
    r"\. Use --repetitions 2 or more\.",
} | {
    verdict: rf"(At {NUMBER} Mbit/s|On a link that is not shaped) {words} {LESS}{CHANGE}{TOGETHER}"
    for verdict, words in COST_UNKNOWN.items()
}


@pytest.mark.parametrize(
    ("verdict", "steps_s", "words"),
    [
        ("share", _run(1.0, 1.4, 1.2), "it pays for 50% of the recomputation (95%: 4"),
        ("all", _run(1.0, 1.4, 0.9), "it pays for all of the recomputation. Both together"),
        ("none", _run(1.0, 1.4, 1.4), "does not change the step measurably"),
        ("none", _run(1.0, 1.4, 1.6), "lengthens the step by 0.2"),
        ("free", _run(1.0, 1.0, 0.8), "and shortens the step by"),
        ("busy", _run(1.0, 1.1, 0.8, noise=0.4), "its own work takes 0.100 s"),
        (
            "single",
            {name: steps[:1] for name, steps in _run(1.0, 1.4, 1.2).items()},
            "in the only repetition",
        ),
    ],
)
def test_the_headline_always_says_something(
    verdict: str, steps_s: dict[str, Any], words: str
) -> None:
    findings = _timed(steps_s)
    sentence = headline(findings)
    assert findings.comparisons[0].outcome == verdict
    assert sentence.startswith("At 200 Mbit/s ")
    assert re.fullmatch(SENTENCES[verdict], sentence), sentence
    assert words in sentence
    assert "4-bit quantization frees 0.350 s of the link and" in sentence  # 8.75 MB
    assert "frees 8.75 MB a step and node and" in headline(_timed(steps_s, rate=None))


SECONDS = st.floats(1e-3, 1e3)
STEPS = st.integers(1, 4).flatmap(
    lambda count: st.fixed_dictionaries(
        {
            name: st.lists(
                st.lists(SECONDS, min_size=2, max_size=2), min_size=count, max_size=count
            )
            for name in ("none/dense", "block/dense", "block/4bit")
        }
    )
)


@given(STEPS, st.sampled_from([None, 0.5, 200.0]), st.sampled_from([0.0, 0.1, 50.0]))
def test_any_steps_give_exactly_one_sentence(
    steps_s: dict[str, Any], rate: float | None, work_s: float
) -> None:
    """Never NaN or infinite; a share only where the interval of the cost excludes zero."""
    findings = _timed(steps_s, rate, work_s)
    sentence, (one,) = headline(findings), findings.comparisons
    found = [name for name, words in SENTENCES.items() if re.fullmatch(words, sentence)]
    assert found == [one.outcome], sentence
    values = one.values
    if one.outcome == "share":
        assert values["cost_s"].low > 0
        assert -1e-9 < values["share_paid"].low <= values["share_paid"].value
    if one.outcome in ("free", "busy"):
        assert values["cost_s"].low <= 0


def test_without_a_policy_there_is_no_comparison() -> None:
    none = replace(known.SPEC, policies=("none",))
    assert "No comparison" in headline(find(none, known.samples(none)))


@pytest.mark.parametrize(("hosts", "slots"), [(2, 1), (1, 2)])
def test_bytes_are_the_collectives_and_the_interface_checks_them(hosts: int, slots: int) -> None:
    """Other programs send from the third repetition on; two of them hardly at all."""
    spec = replace(known.SPEC, hosts=hosts, slots=slots)
    quiet = find(spec, known.samples(spec))
    for more, checked in ((1e9, False), (1e5, True)):
        samples = [
            s.model_copy(
                update={
                    "link_bytes": tuple(n + more for n in s.link_bytes),
                    "interface_bytes": s.interface_bytes + more,
                }
            )
            if isinstance(s, Trial) and s.configuration == "block/4bit" and s.repetition > 1
            else s
            for s in known.samples(spec)
        ]
        busy = find(spec, samples)
        one, expected = busy.comparisons[0], quiet.comparisons[0]
        assert one.values == expected.values
        assert one.is_checked == checked
        assert ("of the link" in headline(busy)) == checked
        notes = byte_notes(busy)
        assert len(notes) == (0 if checked else 3)
        assert all(note.startswith("BYTES NOT CONFIRMED") for note in notes)


def test_a_report_without_a_counter_says_so() -> None:
    none = {"link_bytes": (0.0, 0.0), "interface_bytes": 0.0}
    samples = [
        s.model_copy(update=none) if isinstance(s, Trial) else s for s in known.samples(known.SPEC)
    ]
    found = find(known.SPEC, samples)
    assert "not checked" in byte_notes(found)[0]
    assert "of the link" in headline(found)
