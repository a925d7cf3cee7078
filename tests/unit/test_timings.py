"""Times and errors of an exchange, compared with the residuals; the step log."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from virtual import World

from ds_ckpt.compression import Compressor, LowRank, Quantize, TopK
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.telemetry import Counters, CounterValues, Purpose, steps, timings
from ds_ckpt.telemetry.steps import Event, ExchangeSample, Interval, StepLog, line_of
from ds_ckpt.telemetry.timings import SECTIONS, EventSpans, Span, Spans, profiler_range, step_parts
from tests.pretended_gpu import DEVICE, Gpu


def test_errors_are_summed_by_method() -> None:
    errors = timings.Errors()
    errors.add("a", before=16.0, after=4.0)
    errors.add("a", before=9.0, after=0.0)
    errors.add("b", before=0.0, after=0.0)
    assert errors.take_sums() == {"a": (25.0, 4.0), "b": (0.0, 0.0)}
    assert errors.take_sums() == {}


@pytest.mark.parametrize("compressor", [TopK(density=0.1), Quantize(bits=2), LowRank(2)])
def test_the_sampled_error_is_that_of_the_residual(compressor: Compressor) -> None:
    world = World(2, lambda name, shape: compressor)
    world.exchanges[0].errors.sampling = True
    gradients = [[torch.randn(40, 30)], [torch.randn(40, 30)]]
    world.reduce(["w"], gradients)
    world.commit()
    before, after = world.exchanges[0].errors.take_sums()[compressor.describe()]
    error, norm = (after / before) ** 0.5, after**0.5
    theirs = ShardLayout(1200, 2).shard(1)
    left = world.feedbacks[0].state_dict()["w"][theirs].norm()
    given = gradients[0][0].flatten()[theirs].norm() / 2
    assert norm == pytest.approx(float(left), rel=1e-5)
    assert error == pytest.approx(float(left / given), rel=1e-5)
    assert 0 < error < 1
    assert world.exchanges[1].errors.take_sums() == {}


def test_an_exchange_reports_its_time_by_section() -> None:
    world = World(4, lambda name, shape: LowRank(2), local=2)
    spans = world.exchanges[0].spans = Spans()
    world.reduce(["w"], [[torch.randn(40, 30)] for _ in range(4)])
    assert {span.kind for span in spans.take()} == set(SECTIONS)


KINDS = ("forward", "recompute", "gather", "gather_recompute", "reduce", "weights", "wire")
SPANS = st.builds(
    lambda kind, start, length, depth: Span(kind, start, start + length, 1, depth),
    *(st.sampled_from((*KINDS, "collective")), st.integers(0, 40), st.integers(0, 20)),
    st.integers(0, 3),
)


@given(st.lists(SPANS, max_size=12))
def test_no_moment_is_in_two_parts(spans: list[Span]) -> None:
    """Also where spans of two threads overlap."""
    parts = step_parts(spans, Spans.waits)
    covered = {moment for s in spans for moment in range(int(s.start_s), int(s.end_s))}
    assert min(parts.values()) >= 0
    assert sum(parts[name] for name in (*timings.EXPOSED, "recompute")) <= len(covered)
    assert parts["exchange"] <= parts["reduction"] <= len(covered)


def test_parts_of_a_step_by_hand() -> None:
    def span(kind: str, start: float, end: float, depth: int) -> Span:
        return Span(kind, start, end, 1, depth)

    spans = [
        *(span("recompute", 0, 10, 0), span("gather", 1, 4, 1), span("collective", 2, 3, 2)),
        *(span("reduce", 12, 20, 0), span("pack", 12, 14, 1), span("wire", 14, 19, 1)),
        *(span("weights", 21, 23, 0), span("collective", 21, 22, 1), span("collective", 24, 25, 0)),
    ]
    waits = {"exchange": 5, "gather": 1, "weights": 1, "other": 1}
    waits |= dict.fromkeys(SECTIONS, 0) | {"pack": 2, "wire": 5, "reduction": 8}
    assert step_parts(spans, Spans.waits) == {**waits, "recompute": 9}
    # on a device all of a fetch holds the compute stream up
    waits["gather"] = 3
    assert step_parts(spans, EventSpans.waits) == {**waits, "recompute": 7}


def test_events_are_read_a_step_later_and_the_host_waits_for_none() -> None:
    with Gpu().watched() as gpu:
        spans = EventSpans(DEVICE)
        beside = gpu.Stream()
        for step in range(3):
            with spans.span("recompute"), spans.span("gather"), spans.span("collective"):
                gpu.tensor(torch.ones(4)).mul_(2)
            with gpu.stream(beside), spans.span("reduce"):
                gpu.tensor(torch.ones(4)).mul_(2)
            assert not gpu.waits
            kinds = [span.kind for span in spans.take()]
            assert kinds == (["gather", "recompute"] if step == 2 else [])
            if step:  # the wait that a step has for its verdict; the first step's is late
                gpu.synchronize()
                gpu.forget()


def test_ranges_are_there_while_a_profiler_runs_and_break_no_graph() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with profiler_range("reduce"), profiler_range("recompute"):
            return x * 2

    assert profiler_range("recompute") is profiler_range("forward")
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    compiled(torch.ones(2))
    with torch.profiler.profile() as seen:
        run(torch.ones(2))
        compiled(torch.ones(2))
    names = [event.name for event in seen.events()]
    assert {"ds_ckpt/exchange", "ds_ckpt/recompute"} <= {*names}


@pytest.mark.parametrize("name", ["exp.v1.jsonl", "exp.v1"])
def test_a_record_is_the_mean_over_its_steps(tmp_path: Path, name: str) -> None:
    counters = Counters()
    log = StepLog(counters, every_n_steps=2, path=str(tmp_path / "new" / name), rank=3)
    for step in range(1, 6):
        with counters.purpose(Purpose.REDUCE):
            counters.sent(100 * step)
        counters.gathers.update([7, 7, 8, 8])
        log.step_ended(step)
    lines = (tmp_path / "new" / "exp.v1.3.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], first["steps"]) == (2, 2)
    assert first["sent_bytes"]["reduce"] == 150
    assert second["sent_bytes"]["reduce"] == 350
    assert first["gathers_a_parameter"] == 2
    assert first["sent_bytes"]["other"] == 0
    assert first["step_time_s"] > 0
    assert log.last is not None
    assert log.last["step"] == 4


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    log = StepLog(Counters(), every_n_steps=1, path=str(tmp_path / "file" / "log"), rank=0)
    log.step_ended(1)
    log.step_ended(2)
    assert log.last is not None
    assert log.last["step"] == 2
    assert [r.levelname for r in caplog.records if r.levelname != "INFO"] == ["WARNING"]
    assert "telemetry is no longer written" in caplog.text


def test_an_exchange_adds_its_times_and_its_errors(tmp_path: Path) -> None:
    energies, logged, norms = {"PowerSGD rank 4": (4.0, 1.0)}, list[Event](), [None, 4.0]
    how = {"every_n_steps": 3, "path": str(tmp_path / "t.jsonl"), "monitor": logged.extend}
    sample = lambda: ExchangeSample(energies, norms.pop(), True)  # noqa: E731
    log = StepLog(Counters(), rank=0, sample=sample, **how)
    for step in range(1, 7):
        log.step_ended(step)
    first, second = map(json.loads, (tmp_path / "t.0.jsonl").read_text().splitlines())
    for record in (first, second):
        assert "exchange_s" not in record  # nothing was timed
        assert record["compression_error"] == {"PowerSGD rank 4": 0.5}
        assert record["compresses"] is True
    assert first["residual_norm"] == {"PowerSGD rank 4": 0.25}  # 1.0 of 4.0
    assert second["residual_norm"] == {}
    events = {name: (value, step) for name, value, step in logged}
    assert events["ds_ckpt/compression_error/PowerSGD rank 4"] == (0.5, 6)
    assert events["ds_ckpt/compresses"] == (1.0, 6)
    assert "ds_ckpt/sent_bytes/reduce" in events


def test_a_field_is_one_registered_function(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(steps, "FIELDS", dict(steps.FIELDS))
    guide = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    code = guide.split("**Add a field of telemetry**")[1].split("```python")[1].split("```")[0]
    exec(compile(code, "the guide", "exec", dont_inherit=True), {"__name__": "guide"})
    logged: list[Event] = []
    counters, path = Counters(), tmp_path / "t.jsonl"
    log = StepLog(counters, every_n_steps=2, path=str(path), rank=0, monitor=logged.extend)
    for step in (1, 2):
        counters.gathers[7] += 3
        log.step_ended(step)
    assert json.loads((tmp_path / "t.0.jsonl").read_text())["gathers_per_step"] == 3
    assert ("ds_ckpt/gathers_per_step", 3.0, 2) in logged


SECONDS = st.floats(1e-3, 10)


def _interval(recompute, exchange, work, *, compressed, before) -> Interval:
    waits = {"exchange": exchange, "gather": 3 * exchange, "weights": 0.0, "other": 0.0}
    parts = {**waits, "recompute": recompute, "reduction": exchange + work}
    counted = CounterValues({Purpose.REDUCE: 200, Purpose.GATHER_FORWARD: 600}, {}, {})
    sample = ExchangeSample(saved_bytes=1000.0)
    return Interval(2, 9.0, counted, 1, sample, [(compressed, parts)] * 2, before)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_share_is_measured_or_else_estimated(recompute, exchange, work, before) -> None:
    share = steps.recompute_paid_share
    measured = share(_interval(recompute, exchange, work, compressed=True, before=before))
    saved_s = before - exchange - work
    assert measured == {"measured": pytest.approx(saved_s / recompute)}
    estimated = share(_interval(recompute, exchange, work, compressed=True, before=None))
    saved_s = 1000 * 4 * exchange / 400 - work  # 400 bytes a step
    assert estimated == {"estimated": pytest.approx(saved_s / recompute)}


@pytest.mark.parametrize(
    ("recompute", "exchange", "compressed"), [(0, 1, True), (1, 0, True), (1, 1, False)]
)
def test_a_share_that_is_not_defined_is_absent(recompute, exchange, compressed) -> None:
    interval = _interval(recompute, exchange, 0.1, compressed=compressed, before=5.0)
    assert steps.recompute_paid_share(interval) is None


def test_uncompressed_steps_are_what_compressed_ones_are_compared_with(caplog) -> None:
    """Four of them; the mode is asked for before a step, its time known after it."""
    caplog.set_level("INFO", "ds_ckpt")
    spans, mode = Spans(), [False]
    log = StepLog(
        Counters(), every_n_steps=1, path=None, rank=0, spans=spans, is_compressing=lambda: mode[0]
    )
    for step in range(1, 7):
        took_s = 4 if step < 5 else 1
        spans._spans += [Span("reduce", 0, took_s, 1, 0), Span("wire", 0, took_s, 1, 1)]
        spans._spans.append(Span("recompute", 4, 6, 1, 0))
        mode[0] = step >= 4
        log.step_ended(step)
        assert log.last is not None
        assert log.last["exposed_s"]["exchange"] == took_s
        assert log.last.get("recompute_paid_share") == ({"measured": 1.5} if step > 4 else None)
    assert "recomputation 2.00 s, exposed exchange 1.00 s, 0 MB sent" in caplog.messages[-1]
    assert "pays for 150% of the recomputation (measured)" in caplog.messages[-1]
    worse = {**log.last, "recompute_paid_share": {"measured": -0.2}}
    assert "pays for 0% of the recomputation" in line_of(worse)
