"""Guards: the two compared numbers, limits exceeded twice in a row, and the saved state."""

from __future__ import annotations

import logging
import math

import pytest

from ds_ckpt.engine.guard import Guard
from ds_ckpt.engine.step import StepState
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.lab.validate.virtual import VirtualWorld
from ds_ckpt.telemetry.timings import ResidualStats

LIMITS, WITHIN, BEYOND = ResidualStats(0.5, 2.0), ResidualStats(0.2, 1.0), ResidualStats(0.2, 3.0)


def state() -> StepState:
    exchange = AllToAllExchange(VirtualWorld(1).transports[0], lambda name, shape: None)
    return StepState(exchange, warmup_steps=0, current_step=lambda: 0)


def guard(*, acts: bool, logs: bool = True) -> tuple[Guard, StepState]:
    step = state()
    return Guard(step, LIMITS, acts=acts, logs=logs), step


def test_the_two_numbers() -> None:
    left = ResidualStats.of(16.0, 4.0, 0.5)
    assert left == ResidualStats(error=0.5, residual_norm=4.0)
    for nothing in ((0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (math.inf, 1.0, 1.0), (1.0, 1.0, math.nan)):
        assert ResidualStats.of(*nothing) is None


def test_one_odd_batch_is_no_reason_two_are() -> None:
    ours, step_state = guard(acts=True)
    for step, left in enumerate([BEYOND, WITHIN, BEYOND, WITHIN]):
        ours.check(step, left)
        assert not step_state.is_disabled
    ours.check(4, BEYOND)
    ours.check(5, ResidualStats(0.6, 0.0))  # the other limit counts as well
    assert step_state.is_disabled
    ours.check(6, WITHIN)
    assert step_state.is_disabled
    assert ours.last == WITHIN


def test_warnings_come_once_for_each_time_that_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    ours, step_state = guard(acts=False)
    with caplog.at_level(logging.WARNING, logger="ds_ckpt"):
        for step, left in enumerate([BEYOND] * 4 + [WITHIN] + [BEYOND] * 3):
            ours.check(step, left)
    assert [r.message.partition(":")[2][:14] for r in caplog.records] == [
        " guard: step 1",
        " guard: step 6",
    ]
    assert "residual norm 3, expected at most 2" in caplog.records[0].message
    assert not step_state.is_disabled
    quiet, _ = guard(acts=False, logs=False)
    with caplog.at_level(logging.WARNING, logger="ds_ckpt"):
        quiet.check(0, BEYOND)
        quiet.check(1, BEYOND)
    assert len(caplog.records) == 2


def test_a_checkpoint_that_disables_compression_warns(caplog: pytest.LogCaptureFixture) -> None:
    step = state()
    step.load_state_dict({"fallback": {"whole": False}})
    assert not caplog.records
    step.load_state_dict({"fallback": {"whole": True}})
    assert step.is_disabled
    assert "disabled compression" in caplog.text
