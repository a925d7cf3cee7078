"""Division of a step's time: spans, their parts, and the peak of activations."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.lab.measure.parts import PARTS, parts
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.telemetry.memory import activations_tracker
from ds_ckpt.telemetry.timings import Span, Spans, Timings
from ds_ckpt.zero3 import collectives

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


def test_time_between_the_phases_is_in_no_part() -> None:
    """Thus the sum can be compared with the step's own clock."""
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
    counters, timings, spans = Counters(), Timings(), Spans()
    with counters.purpose(Purpose.REDUCE), timings.section("pack"), counters.span("recompute"):
        pass
    assert spans.take() == []
    counters.spans = timings.spans = spans
    with counters.purpose(Purpose.REDUCE), timings.section("pack"), counters.span("recompute"):
        assert counters.current_purpose is Purpose.REDUCE
    assert [s.kind for s in spans.take()] == ["recompute", "pack", "reduce"]
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
    def plain(spans: Spans, x: torch.Tensor) -> torch.Tensor:
        return _Gathered(spans)(x)

    # x * 2 and its sine are held for backward; the cosine goes when the sum is there, the sum stays
    assert _peak(plain) == 4 * 4000


def test_with_checkpointing_the_peak_is_in_one_recompute() -> None:
    def chain(spans: Spans, x: torch.Tensor, kept: bool) -> torch.Tensor:
        def block(y: torch.Tensor) -> torch.Tensor:
            return y.sin().cos().sin().cos()

        def recomputed(y: torch.Tensor) -> torch.Tensor:
            if "backward" in spans.open:
                with spans.span("recompute"):
                    return block(y)
            return block(y)

        for _ in range(6):
            x = checkpoint(recomputed, x, use_reentrant=False) if kept else block(x)
        return x

    def plain(spans: Spans, x: torch.Tensor) -> Any:
        return chain(spans, x, False)

    def kept(spans: Spans, x: torch.Tensor) -> Any:
        return chain(spans, x, True)

    assert _peak(plain) == 24 * 4000
    # six outputs, and what a recompute brings back before it is stopped
    assert 6 * 4000 < _peak(kept) <= 11 * 4000
