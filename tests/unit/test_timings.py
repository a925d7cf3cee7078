"""Times and errors of an exchange; errors are compared with the residuals."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from virtual import World

from ds_ckpt.compression import Compressor, LowRank, Quantize, TopK
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.telemetry.timings import (
    EXPOSED,
    Errors,
    EventSpans,
    Span,
    Spans,
    Timings,
    profiler_range,
    step_parts,
)
from tests.pretended_gpu import DEVICE, Gpu


def test_time_inside_a_section_is_its_own() -> None:
    timings = Timings()
    with timings.section("pack"):
        for _ in range(2):
            with timings.section("wire"):
                time.sleep(0.02)
        with pytest.raises(KeyError), timings.section("wire"):
            raise KeyError
    assert timings.seconds["wire"] >= 0.04
    assert 0 <= timings.seconds["pack"] < 0.04


def test_errors_are_summed_by_method() -> None:
    errors = Errors()
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
    world.reduce(["w"], [[torch.randn(40, 30)] for _ in range(4)])
    seconds = world.exchanges[0].timings.seconds
    assert set(seconds) == {"in_host", "residual", "pack", "wire", "unpack"}
    assert all(s > 0 for s in seconds.values())


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
    assert sum(parts[name] for name in (*EXPOSED, "recompute")) <= len(covered)
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
    assert step_parts(spans, Spans.waits) == {**waits, "recompute": 9, "reduction": 8}
    # on a device all of a fetch holds the compute stream up
    waits["gather"] = 3
    assert step_parts(spans, EventSpans.waits) == {**waits, "recompute": 7, "reduction": 8}


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
