"""Times and errors of an exchange; errors are compared with the residuals."""

from __future__ import annotations

import time

import pytest
import torch
from virtual import World

from ds_ckpt.compression import Compressor, LowRank, Quantize, TopK
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.telemetry.timings import Errors, Timings


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
