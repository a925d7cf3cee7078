"""Times and errors of an exchange, held against what really was left behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from virtual import World

from ds_ckpt.compression import Compressor, LowRank, Quantize, TopK, powersgd
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.telemetry.timings import Errors, Timings
from tests.pretended_gpu import Gpu


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


def test_an_accelerators_sections_are_timed_by_its_stream_and_read_later() -> None:
    gpu = Gpu()
    timings = Timings(module=gpu)
    with gpu.watched():
        x = gpu.tensor(torch.ones(4))
        with timings.section("pack"), timings.section("wire"):
            x.add_(1.0)
        with timings.section("pack"):
            x.add_(1.0)
        assert not gpu.waits
        # 1 ms between events, of which the wire takes one of the packing's two
        assert timings.seconds == pytest.approx({"wire": 0.001, "pack": 0.001})
        assert sum(gpu.waits.values()) == 3
        assert timings.seconds == pytest.approx({"wire": 0.001, "pack": 0.001})


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


def test_an_exchange_tells_where_its_time_goes() -> None:
    world = World(4, lambda name, shape: LowRank(2), local=2)
    world.reduce(["w"], [[torch.randn(40, 30)] for _ in range(4)])
    seconds = world.exchanges[0].timings.seconds
    assert set(seconds) == {"in_host", "residual", "pack", "wire", "unpack"}
    assert all(s > 0 for s in seconds.values())


def test_what_low_rank_computes_is_not_booked_as_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of each thread's own that runs in the named function alone."""
    clock = threading.local()
    for function in ("orthogonalize_all", "back_project", "subtract_product_"):
        real = getattr(powersgd, function)

        def slow(*args: Any, real: Any = real) -> Any:
            clock.now = getattr(clock, "now", 0.0) + 1.0
            return real(*args)

        monkeypatch.setattr(powersgd, function, slow)
    monkeypatch.setattr(
        "ds_ckpt.telemetry.timings.time.perf_counter", lambda: getattr(clock, "now", 0.0)
    )
    world = World(2, lambda name, shape: LowRank(2))
    world.reduce(["w"], [[torch.randn(40, 30)] for _ in range(2)])
    for exchange in world.exchanges:
        taken = {name: s for name, s in exchange.timings.seconds.items() if s}
        assert taken.keys() == {"pack"}  # all of it, and no second of it as the wire's
        assert taken["pack"] >= 4
