"""What guards go by: the two numbers, limits passed twice in a row, and what is kept of it."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from ds_ckpt.engine.guard import Guard
from ds_ckpt.exchange.schedule import Fallback
from ds_ckpt.telemetry.timings import ResidualStats

LIMITS, WITHIN, BEYOND = ResidualStats(0.5, 2.0), ResidualStats(0.2, 1.0), ResidualStats(0.2, 3.0)


def guard(
    action: Literal["warn", "dense"], *, speaks: bool = True, limits: ResidualStats = LIMITS
) -> tuple[Guard, Fallback]:
    built: Any = SimpleNamespace(exchange=SimpleNamespace(fallback=Fallback()))
    return Guard(built, limits, action, speaks=speaks), built.exchange.fallback


def test_the_two_numbers() -> None:
    left = ResidualStats.of(16.0, 4.0, 0.5)
    assert left == ResidualStats(error=0.5, residual_norm=4.0)
    for nothing in ((0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (math.inf, 1.0, 1.0), (1.0, 1.0, math.nan)):
        assert ResidualStats.of(*nothing) is None


def test_one_odd_batch_is_no_reason_two_are() -> None:
    ours, fallback = guard("dense")
    for step, left in enumerate([BEYOND, WITHIN, BEYOND, WITHIN]):
        ours.look(step, left)
        assert not ours.fallen_back
    ours.look(4, BEYOND)
    ours.look(5, ResidualStats(0.6, 0.0))  # the other limit counts as well
    assert ours.fallen_back
    assert fallback.uncompressed
    ours.look(6, WITHIN)
    assert ours.fallen_back
    assert ours.last == WITHIN


def test_warnings_come_once_for_each_time_that_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, fallback = guard("warn")
    with caplog.at_level(logging.WARNING, logger="ds_ckpt"):
        for step, left in enumerate([BEYOND] * 4 + [WITHIN] + [BEYOND] * 3):
            ours.look(step, left)
    assert [r.message.partition(":")[2][:14] for r in caplog.records] == [
        " guard: step 1",
        " guard: step 6",
    ]
    assert "residual norm 3 where validation saw 2 at most" in caplog.records[0].message
    assert "error" not in caplog.records[0].message.replace("guard", "")
    assert not fallback.uncompressed
    quiet, _ = guard("warn", speaks=False)
    with caplog.at_level(logging.WARNING, logger="ds_ckpt"):
        quiet.look(0, BEYOND)
        quiet.look(1, BEYOND)
    assert len(caplog.records) == 2


def test_a_number_without_a_limit_is_not_held_to_one() -> None:
    ours, _ = guard("dense", limits=ResidualStats(0.5, math.inf))
    for step in range(3):
        ours.look(step, ResidualStats(0.4, 1e9))
    assert not ours.fallen_back
    assert ours.describe() == "guard: everything whole beyond error 0.5"


def test_what_a_checkpoint_keeps() -> None:
    fallback = Fallback(uncompressed=True)
    again = Fallback()
    again.load_state_dict(fallback.state_dict())
    assert again.uncompressed
    again.load_state_dict({})  # of a release before guards
    assert not again.uncompressed


def test_a_checkpoint_that_brings_the_fallback_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ds_ckpt"):
        for fallback in (Fallback(speaks=True), Fallback()):
            fallback.load_state_dict({"whole": False})
        assert not caplog.records
        for fallback in (Fallback(speaks=True), Fallback()):
            fallback.load_state_dict({"whole": True})
    (record,) = caplog.records
    assert "gradients go uncompressed" in record.message
