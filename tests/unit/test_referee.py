"""Whole steps, ours against DeepSpeed's: one verdict for all, counted alike, kept when saved."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.exchange.gate import TRIALS
from ds_ckpt.exchange.referee import COUNTED, RECHECK, STEPS, Referee, Way

CPU = torch.device("cpu")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(add_up: Callable[[Tensor], object] = lambda t: None, world: int = 1) -> Referee:
    return Referee(add_up, world=world, speaks=True, clock=Clock())  # type: ignore[arg-type]


def drive(
    referee: Referee, steps: int, gated_s: float = 1.0, stock_s: float = 1.0, skip: int = 0
) -> list[Way]:
    """Steps that take so long each way; every `skip`-th is skipped and takes a day."""
    ways = []
    for step in range(1, steps + 1):
        way, skipped = referee.way, bool(skip) and step % skip == 0
        ways.append(way)
        referee.exchanged(["a"], CPU)
        referee.exchanged(["a"], CPU)
        took_s = stock_s if way == "stock" else gated_s
        referee._clock.now_s += 86400.0 if skipped else took_s  # type: ignore[attr-defined]
        referee.step_ended(skipped=skipped)
        referee.step_ended(skipped=True)  # DeepSpeed drops gradients after every step, too
    return ways


@pytest.mark.parametrize(("gated_s", "stock_s"), [(1.0, 2.0), (2.0, 1.0), (1.03, 1.0)])
def test_the_shorter_step_is_kept(gated_s: float, stock_s: float) -> None:
    referee = made()
    ways = drive(referee, STEPS + 50, gated_s, stock_s)
    assert ways[:STEPS].count("stock") == COUNTED + 1
    assert referee.stock is (stock_s < gated_s)
    assert set(ways[STEPS:]) == {"stock" if stock_s < gated_s else "gated"}


def test_the_gate_compares_first_and_nothing_is_owed_when_stock_begins() -> None:
    ways = drive(made(), STEPS)
    assert ways[: 2 * TRIALS + 1 + COUNTED] == ["gated"] * (2 * TRIALS + 1 + COUNTED)
    assert [(a, b) for a, b in pairwise(ways) if b == "stock" != a] == [("whole", "stock")]


@settings(deadline=None)
@given(st.integers(2, 7), st.sampled_from([(1.0, 2.0), (2.0, 1.0)]))
def test_skipped_steps_count_for_nothing(skip: int, times: tuple[float, float]) -> None:
    """A skipped step that was to go whole has sent nothing for good: the next one goes whole."""
    referee = made()
    ways = drive(referee, 3 * STEPS, *times, skip=skip)
    assert referee.stock is (times[1] < times[0])
    kept = [way for step, way in enumerate(ways, 1) if step % skip]
    assert kept[:STEPS] == drive(made(), STEPS, *times)


def test_a_pause_does_not_count() -> None:
    referee = made()
    for step in range(STEPS):
        drive(referee, 1, 1.0, 2.0)
        if step % 4 == 0:  # an evaluation
            referee._clock.now_s += 100.0  # type: ignore[attr-defined]
    assert referee.stock is False


def test_the_verdict_is_that_of_the_sums() -> None:
    sums = torch.tensor([1.0 + 5.0, 2.0 + 2.0])
    for gated_s in (1.0, 5.0):
        referee = made(lambda t: t.copy_(sums), world=2)
        drive(referee, STEPS, gated_s, 2.0)
        assert referee.stock is True


def test_it_is_asked_anew_and_may_change_its_mind() -> None:
    referee = made()
    drive(referee, RECHECK, 2.0, 1.0)
    assert referee.stock is True
    ways = drive(referee, STEPS + 10, 1.0, 2.0)
    assert ways[0] == "gated"
    assert set(ways[STEPS:]) == {"gated"}
    assert referee.stock is False


def test_a_resumed_run_goes_on_where_it_was() -> None:
    for steps in (0, 1, 9, 17, 18, 20, STEPS, STEPS + 40):
        first, second = made(), made()
        drive(first, steps, 2.0, 1.0)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drive(second, 60, 2.0, 1.0) == drive(first, 60, 2.0, 1.0)
    second.load_state_dict({})
    assert second.way == "gated"
    assert second.stock is None


def test_no_times_are_no_verdict_against_the_exchange() -> None:
    """Saved and resumed at every step: no step was seen from end to end."""
    referee = made()
    for _ in range(STEPS):
        drive(referee, 1, 2.0, 1.0)
        referee.load_state_dict(json.loads(json.dumps(referee.state_dict())))
    assert referee.stock is False


def test_nan_of_one_process_is_no_verdict_against_the_exchange() -> None:
    referee = made(lambda t: t.fill_(math.nan), world=2)
    drive(referee, STEPS, 2.0, 1.0)
    assert referee.stock is False


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    referee = made()
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        drive(referee, RECHECK + STEPS, 0.002, 0.001)
    (line,) = [r.message for r in caplog.records]
    assert "DeepSpeed's own reduction" in line
    assert "2.0 ms with the exchange, 1.0 ms with DeepSpeed's own" in line
