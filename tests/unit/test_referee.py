"""Whole steps, ours against DeepSpeed's: one verdict for all, counted alike, kept when saved."""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.exchange.gate import TRIALS
from ds_ckpt.exchange.referee import (
    COUNTED,
    RECHECK,
    ROUND,
    ROUNDS,
    STEPS,
    Referee,
    Way,
    middle,
)

CPU = torch.device("cpu")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(
    add_up: Callable[[Tensor], object] = lambda t: None,
    world: int = 1,
    layout: tuple[int, ...] = (1, 1),
) -> Referee:
    return Referee(  # type: ignore[arg-type]
        add_up, world=world, layout=layout, speaks=True, clock=Clock()
    )


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


@pytest.mark.parametrize(
    ("gated_s", "stock_s", "rounds"),
    [(1.0, 2.0, 1), (2.0, 1.0, 1), (1.25, 1.0, 1), (1.03, 1.0, 2), (1.0, 1.03, 2)],
)
def test_the_shorter_step_is_kept(gated_s: float, stock_s: float, rounds: int) -> None:
    """After one round where the gap is wide, else another has to agree."""
    referee = made()
    steps = 2 * TRIALS + rounds * ROUND
    ways = drive(referee, steps + 50, gated_s, stock_s)
    assert ways[:steps].count("stock") == rounds * (COUNTED + 1)
    assert referee.stock is (stock_s < gated_s)
    assert set(ways[steps:]) == {"stock" if stock_s < gated_s else "gated"}


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


def judged(
    gated_s: float, stock_s: float, scatter: float, seed: int, referee: Referee | None = None
) -> tuple[Referee, list[Way]]:
    """Steps that scatter, until there is a verdict."""
    referee, rng, ways = referee or made(), random.Random(seed), []
    while referee.stock is None:
        took_s = stock_s if referee.way == "stock" else gated_s
        took_s *= max(0.3, rng.gauss(1.0, scatter))
        ways += drive(referee, 1, took_s, took_s)
    return referee, ways


MOST_STEPS = 2 * TRIALS + ROUNDS * ROUND


def kept(gated_s: float, scatter: float, *, runs: int) -> int:
    """Of so many runs, in how many the exchange stays; DeepSpeed's step takes 1."""
    verdicts = [judged(gated_s, 1.0, scatter, seed)[0].stock for seed in range(runs)]
    return verdicts.count(False)


def test_verdicts_are_about_as_sure_as_they_say() -> None:
    """Eight steps each way alone mistake 7% for nothing where single steps scatter by 14%; three
    standard errors of all rounds keep few that are no shorter, and most that are 10% shorter."""
    assert kept(1.07, 0.14, runs=200) <= 2
    assert 1 <= kept(1.0, 0.14, runs=200) <= 8
    assert kept(0.9, 0.14, runs=100) >= 90


@pytest.mark.parametrize(("scatter", "gated_s"), [(0.02, 0.95), (0.14, 0.7), (0.4, 0.3)])
def test_a_step_that_is_clearly_shorter_is_kept(scatter: float, gated_s: float) -> None:
    assert kept(gated_s, scatter, runs=50) == 50


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_gap_takes_one_round(seed: int) -> None:
    assert len(judged(1.0, 3.0, 0.1, seed)[1]) == STEPS


def test_what_cannot_be_told_apart_is_left_to_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    """Each round begins as the gate has it, and nothing is owed when DeepSpeed's begins."""
    referee = made()
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        ways = drive(referee, MOST_STEPS)
    assert referee.stock is True
    round_ = ["gated"] * (1 + COUNTED) + ["whole"] + ["stock"] * (1 + COUNTED)
    assert ways == ["gated"] * 2 * TRIALS + round_ * ROUNDS
    assert set(drive(referee, RECHECK - MOST_STEPS)) == {"stock"}
    assert drive(referee, 1) == ["gated"]
    (line,) = [r.message for r in caplog.records]
    assert "own reduction, which cannot be told apart (" in line


def test_a_comparison_ends_before_the_next_begins() -> None:
    assert MOST_STEPS < RECHECK


@pytest.mark.parametrize("count", [4, 8, 32, 128])
def test_the_error_of_a_median_is_what_normal_values_give(count: int) -> None:
    """In the mean over draws; a pause among eight or more changes it little."""
    rng = random.Random(count)
    draws = [[rng.gauss(1.0, 0.1) for _ in range(count)] for _ in range(2000)]
    medians, variances = zip(*map(middle, draws), strict=True)
    assert statistics.mean(variances) == pytest.approx(statistics.variance(medians), rel=0.2)
    if count >= 8:
        paused = [middle([values[0] + 1000.0, *values[1:]])[1] for values in draws]
        assert statistics.mean(paused) < 2 * statistics.mean(variances)


def test_a_pause_does_not_count() -> None:
    referee = made()
    for step in range(STEPS):
        drive(referee, 1, 1.0, 2.0)
        if step % 4 == 0:  # an evaluation
            referee._clock.now_s += 100.0  # type: ignore[attr-defined]
    assert referee.stock is False


def test_the_verdict_is_that_of_the_sums() -> None:
    sums = torch.tensor([[1.0 + 5.0, 0.0], [2.0 + 2.0, 0.0]])
    for gated_s in (1.0, 5.0):
        referee = made(lambda t: t.copy_(sums), world=2)
        drive(referee, STEPS, gated_s, 2.0)
        assert referee.stock is True


@pytest.mark.parametrize(
    ("gated_variance", "stock_variance", "rounds"),
    [(0.0, 0.2, 1), (0.2, 0.0, 1), (0.1, 0.1, 1), (0.12, 0.12, 2), (0.24, 0.0, 2), (0.0, 0.24, 2)],
)
def test_so_is_how_far_it_can_be_trusted(
    gated_variance: float, stock_variance: float, rounds: int
) -> None:
    """Means of two: 3 and 2, with an error of the root of half the variances; 1/3 is the most."""
    sums = torch.tensor([[6.0, gated_variance], [4.0, stock_variance]])
    referee = made(lambda t: t.copy_(sums), world=2)
    drive(referee, STEPS)
    sums.copy_(torch.tensor([[2.0, 0.0], [4.0, 0.0]]))
    drive(referee, ROUND)
    assert referee.stock is (rounds == 1)


def test_it_is_asked_anew_and_may_change_its_mind() -> None:
    referee = made()
    drive(referee, RECHECK, 2.0, 1.0)
    assert referee.stock is True
    ways = drive(referee, STEPS + 10, 1.0, 2.0)
    assert ways[0] == "gated"
    assert set(ways[STEPS:]) == {"gated"}
    assert referee.stock is False


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (1.0, 1.03)])
def test_a_resumed_run_goes_on_where_it_was(times: tuple[float, float]) -> None:
    borders = (2 * TRIALS, 2 * TRIALS + COUNTED + 1, STEPS, STEPS + ROUND)
    for steps in sorted({0, 1, 40, *(b + by for b in borders for by in (-1, 0, 1, 2))}):
        first, second = made(), made()
        drive(first, steps, *times)
        state = json.loads(json.dumps(first.state_dict()))
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert drive(second, MOST_STEPS + 9, *times) == drive(first, MOST_STEPS + 9, *times)
        assert second.stock is first.stock is (times[0] >= times[1])
    second.load_state_dict({})
    assert second.way == "gated"
    assert second.stock is None


@pytest.mark.parametrize("before", [(1, 1), (1, 2), (2, 4), (4, 4)])
def test_times_of_another_number_of_processes_or_hosts_do_not_count(
    before: tuple[int, int],
) -> None:
    """Resumed on two processes, each on a host of its own."""
    for steps, stock in ((STEPS - 5, None), (STEPS + 5, False)):
        first = made(lambda t: t.mul_(before[1]), before[1], before)
        second = made(lambda t: t.mul_(2), 2, (2, 2))
        drive(first, steps, 1.0, 9.0)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.stock is stock
        ways = drive(second, STEPS + 9, 2.0, 1.0)
        assert ways[: STEPS - COUNTED - 1] == drive(made(), STEPS - COUNTED - 1)
        assert second.stock is True


def test_a_checkpoint_with_the_world_in_the_place_of_the_layout_compares_anew() -> None:
    first, second = made(), made()
    drive(first, STEPS + 5, 1.0, 9.0)
    state = first.state_dict()
    second.load_state_dict({"world": 1} | {k: v for k, v in state.items() if k != "layout"})
    assert second.stock is False
    assert drive(second, STEPS, 2.0, 1.0) == drive(made(), STEPS)
    assert second.stock is True


@pytest.mark.parametrize(("times", "verdict"), [((2.0, 1.0), True), ((1.0, 2.0), False)])
def test_a_checkpoint_from_before_there_were_rounds_is_of_the_first_or_past_it(
    times: tuple[float, float], verdict: bool
) -> None:
    for steps, stock in ((STEPS - 4, None), (STEPS + 4, verdict)):
        saved = made()
        drive(saved, steps, *times)
        assert saved.stock is stock
        state = saved.state_dict()
        del state["rounds"], state["layout"]
        resumed = made()
        resumed.load_state_dict(state)
        assert drive(resumed, 30, *times) == drive(saved, 30, *times)
        assert resumed.stock is verdict


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
    assert "2.0 ms with the exchange, 1.0 ms with DeepSpeed's own reduction (" in line
