"""Means, intervals and derived figures, from samples with known parts."""

import gc
import io
import math
import random
import re
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Estimate, Figure, Ratio, Row
from ds_ckpt.lab.measure.findings import Findings, byte_notes, find, headline, jackknife
from ds_ckpt.lab.measure.measure_report import Report
from ds_ckpt.lab.measure.samples import PARTS, Sample, StepTime, Trial, parts
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.telemetry.memory import activations_tracker
from ds_ckpt.telemetry.timings import Span, Spans
from ds_ckpt.zero3 import collectives
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
    new = Figure[Row]("all_bytes", "all", "MB", lambda r: sum(r.far_bytes.values()))
    monkeypatch.setattr("ds_ckpt.lab.measure.findings.MEASURED", [*MEASURED, new])
    row = found.content()["rows"][0]
    assert row["all_bytes"] == pytest.approx(2 * 20e6)
    assert new.heading == "all, MB"
    texts = [new.text(Estimate(2e6, 1e6, high)) for high in (3e6, 4e6)]
    assert texts == ["2.00 ± 1.00", "2.00 (1.00 to 4.00)"]


def test_one_slow_repetition_does_not_move_a_step(found: Findings) -> None:
    slow = [
        s.model_copy(update={"steps": known.trial(known.SPEC, s.configuration, 1.0, 0, 0).steps})
        for s in known.samples()
        if isinstance(s, Trial) and s.repetition == 1 and s.configuration == "none/stock"
    ]
    row = find(known.SPEC, [*known.samples(), *slow]).rows[0]
    assert row.step_s.value == pytest.approx(found.rows[0].step_s.value)


@pytest.mark.parametrize("count", [4, 6])
def test_an_interval_of_few_repetitions_holds_the_truth_as_often_as_it_should(count: int) -> None:
    """It does in about 95% of trials; a quotient's interval, too, if it exists."""
    draw = random.Random(count)
    held, shares = 0, []
    for _ in range(300):
        pairs = [(draw.gauss(1.0, 0.3), draw.gauss(2.0, 0.5)) for _ in range(count)]

        def figures(chosen: Sequence[int], pairs: Any = pairs) -> dict[str, float | Ratio]:
            over, under = (statistics.fmean(pairs[n][i] for n in chosen) for i in (0, 1))
            return {"over": over, "share": Ratio(over, under)}

        found = jackknife(range(count), figures)
        held += found["over"].low <= 1.0 <= found["over"].high
        if not math.isnan(found["share"].low):
            shares.append(found["share"].low <= 0.5 <= found["share"].high)
    assert 270 <= held <= 298
    assert len(shares) > 200
    assert 0.9 <= statistics.fmean(shares) <= 0.995


@pytest.mark.parametrize("count", [1, 3])
def test_few_repetitions_have_no_interval(count: int) -> None:
    values = {"x": 2.0, "share": Ratio(1.0, 2.0), "none": Ratio(1.0, 0.0)}
    found = jackknife(range(count), lambda _: values)
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


def _timed(steps_s: Mapping[str, Sequence[list[float]]], rate=200.0, work_s=0.1) -> Findings:
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


OUTCOMES = {
    "share": r"it pays for [\d.]+% of the recomputation",
    "all": "it pays for all of the recomputation",
    "none": "it is not shown to pay for any of the recomputation",
    "free": "recomputation does not lengthen the step measurably",
    "busy": "the machine is too busy to time recomputation",
    "few": "there are too few repetitions for an interval",
}
"""Words that only the headline of this outcome has."""
NEGATIVE_S = re.compile(r"-[\d.]+( to [-\d.]+)? s\b")


def test_headlines_are_the_golden_ones(is_golden: Callable[[str, str], bool]) -> None:
    runs = {
        "share": _run(1.0, 1.4, 1.2),
        "all": _run(1.0, 1.4, 0.9),
        "none": _run(1.0, 1.4, 1.4),
        "none, longer": _run(1.0, 1.4, 1.6),
        "free": _run(1.0, 1.0, 0.8),
        "busy": _run(1.0, 1.1, 0.8, noise=0.4),
        "few": {name: steps[:3] for name, steps in _run(1.0, 1.1, 1.2, noise=0.4).items()},
    }
    lines = []
    for name, steps_s in runs.items():
        findings = _timed(steps_s)
        assert findings.comparisons[0].outcome == name.partition(",")[0]
        lines += [headline(findings), headline(_timed(steps_s, rate=None))]
        Report([], findings).print(Console(file=(said := io.StringIO())))
        assert ("For your DeepSpeed file" in (report := said.getvalue())) == (
            name not in ("busy", "few")
        )
        assert not NEGATIVE_S.search(report), report
        assert (" ± " in report or " to " in report) == (name != "few"), report
    none = replace(known.SPEC, policies=("none",))
    lines += [headline(find(none, known.samples(none))), ""]
    assert is_golden("measure_headlines.txt", "\n".join(lines))


NAMES, SECONDS = ("none/dense", "block/dense", "block/4bit"), st.floats(1e-3, 1e3)
STEPS = st.sampled_from([1, 3, 4, 5]).flatmap(
    lambda n: st.tuples(*[st.tuples(*[st.lists(SECONDS, min_size=2, max_size=2)] * n)] * 3)
)


@given(STEPS, st.sampled_from([None, 0.5, 200.0]), st.sampled_from([0.0, 0.1, 50.0]))
def test_any_steps_give_exactly_one_sentence(steps_s, rate, work_s) -> None:
    """Never NaN or infinite; a share only where the interval of the cost excludes zero."""
    findings = _timed(dict(zip(NAMES, steps_s, strict=True)), rate, work_s)
    sentence, (one,) = headline(findings), findings.comparisons
    found = [name for name, words in OUTCOMES.items() if re.search(words, sentence)]
    assert found == [one.outcome], sentence
    assert not re.search(r"\b(nan|inf)\b", sentence)
    assert not NEGATIVE_S.search(sentence)
    assert not any(row.step_s.low < 0 for row in findings.rows)
    values = one.values
    if one.outcome == "share":
        assert values["cost_s"].low > 0
        assert -1e-9 < values["share_paid"].low <= values["share_paid"].value
    if one.outcome in ("free", "busy"):
        assert values["cost_s"].low <= 0


@pytest.mark.parametrize(("hosts", "slots"), [(2, 1), (1, 2)])
def test_bytes_are_the_collectives_and_the_interface_checks_them(hosts: int, slots: int) -> None:
    """Other programs send from the third repetition on; two of them hardly at all."""
    spec = replace(known.SPEC, hosts=hosts, slots=slots)
    quiet = find(spec, known.samples(spec))
    for more, checked in ((6e5, False), (3e5, True)):
        samples = [
            s.model_copy(update={"interface_bytes": tuple(n + more for n in s.interface_bytes)})
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
    uncounted = {"interface_bytes": (0.0, 0.0)}
    found = [s.model_copy(update=uncounted) if isinstance(s, Trial) else s for s in samples]
    assert "not checked" in byte_notes(find(spec, found))[0]
    assert "of the link" in headline(find(spec, found))


MAIN = 1


def at(kind: str, start: float, end: float, depth: int, thread: int = MAIN) -> Span:
    return Span(kind, start, end, thread, depth)


STEP = [
    at("forward", 0, 10, 0),
    at("gather_forward", 1, 2, 1),
    at("collective", 1, 1.5, 2),
    at("collective", 3, 6, 1),
    at("backward", 10, 30, 0),
    at("recompute", 11, 16, 1),
    at("collective", 12, 13, 2),
    at("collective", 17, 18, 1),
    at("reduce", 20, 24, 1),
    at("residual", 20, 21, 2),
    at("pack", 21, 21.5, 2),
    at("wire", 21.5, 23, 2),
    at("collective", 21.6, 22.9, 3),
    at("unpack", 23, 24, 2),
    at("update", 30, 33, 0),
    at("collective", 30.5, 31, 1),
]


def test_every_moment_belongs_to_one_part() -> None:
    found = parts(STEP, MAIN)
    assert found == pytest.approx(
        {
            "compute_forward": 10 - 0.5 - 3,
            "compute_backward": 20 - 5 - 1 - 4,
            "compute_update": 2.5,
            "recompute": 4,
            "network_forward": 3.5,
            "network_recompute": 1,
            "network_backward": 1 + 1.5,
            "network_update": 0.5,
            "compression": 1 + 0.5 + 1,
        }
    )
    assert sum(found.values()) == pytest.approx(33)
    assert set(found) == set(PARTS)
    # time between phases is in none: thus the sum can be compared with the step's own clock
    gap = [at("forward", 0, 1, 0), at("collective", 1, 5, 0), at("backward", 5, 6, 0)]
    assert sum(parts(gap, MAIN).values()) == pytest.approx(2)


def test_spans_nest_by_thread_and_end_with_exceptions() -> None:
    spans = Spans()

    def fail() -> None:
        with spans.span("outer"), spans.span("inner"):
            assert spans.open == ("outer", "inner")
            raise KeyError

    def other() -> None:
        with pytest.raises(KeyError):
            fail()

    with spans.span("main"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert spans.open == ("main",)
    inner, outer, main = spans.take()
    assert (inner.kind, inner.depth) == ("inner", 1)
    assert (outer.kind, outer.depth, outer.thread) == ("outer", 0, inner.thread)
    assert main.start_s <= outer.start_s <= inner.start_s <= inner.end_s <= main.end_s
    assert main.thread != outer.thread
    assert spans.take() == []


def test_purposes_and_sections_are_spans_only_where_somebody_measures() -> None:
    counters, spans = Counters(), Spans()
    with counters.purpose(Purpose.REDUCE), counters.span("recompute"):
        pass
    assert spans.take() == []
    counters.spans = spans
    with counters.purpose(Purpose.REDUCE), counters.span("recompute"):
        assert counters.current_purpose is Purpose.REDUCE
    assert [s.kind for s in spans.take()] == ["recompute", "reduce"]
    assert counters.current_purpose is Purpose.OTHER


class _Handle:
    waited = 0

    def wait(self, timeout: float) -> str:
        self.waited += 1
        return f"in {timeout}"


def test_a_wait_is_a_span_only_where_somebody_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, counters = _Handle(), Counters()
    monkeypatch.setattr(collectives, "_listeners", [Counters(), counters])
    assert collectives._timed(lambda: handle, (), {}) is handle
    counters.spans = Spans()
    with counters.purpose(Purpose.GATHER_BACKWARD):
        timed = collectives._timed(lambda: handle, (), {})
    assert (timed.wait(1.0), timed.waited) == ("in 1.0", 1)
    kinds = [span.kind for span in counters.spans.take()]
    assert kinds == ["collective", "gather_backward", "collective"]


class _Gathered(nn.Module):
    """A block that allocates its weight as a gather does."""

    def __init__(self, spans: Spans) -> None:
        super().__init__()
        self.spans = spans

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.spans.span("gather_forward"):
            weight = torch.ones(1000, 1000)
        return (x * 2).sin().cos() + weight[0, 0]


def _peak(run: Callable[[Spans, torch.Tensor], torch.Tensor]) -> int:
    spans = Spans()
    x = torch.zeros(1000, requires_grad=True)
    with activations_tracker(nn.Identity(), spans) as peak:
        with spans.span("forward"):
            y = run(spans, x)
        with spans.span("backward"):
            y.sum().backward()
    del y
    gc.collect()
    assert peak.live_bytes == 0
    return peak.peak_bytes


def test_the_peak_is_what_autograd_holds_and_no_weights() -> None:
    # x * 2 and its sine are held for backward; the cosine goes when the sum is there, the sum stays
    assert _peak(lambda spans, x: _Gathered(spans)(x)) == 4 * 4000


def test_with_checkpointing_the_peak_is_in_one_recompute() -> None:
    def chain(spans: Spans, x: torch.Tensor, *, kept: bool) -> torch.Tensor:
        def block(y: torch.Tensor) -> torch.Tensor:
            again = spans.span("recompute") if "backward" in spans.open else nullcontext()
            with again:
                return y.sin().cos().sin().cos()

        for _ in range(6):
            x = checkpoint(block, x, use_reentrant=False) if kept else block(x)
        return x

    assert _peak(partial(chain, kept=False)) == 24 * 4000
    # six outputs, and what a recompute brings back before it is stopped
    assert 6 * 4000 < _peak(partial(chain, kept=True)) <= 11 * 4000
