"""Whole steps, compressed against the other way: one choice for all, counted alike, kept when
saved, and nothing owed when the other way takes over."""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.exchange.autotune import (
    COUNTED,
    RECHECK,
    ROUND,
    ROUNDS,
    SWITCH,
    Autotuner,
    Way,
    middle,
)
from ds_ckpt.exchange.rules import Choose
from ds_ckpt.exchange.schedule import ScheduledExchange

CPU = torch.device("cpu")
MOST_STEPS = ROUNDS * ROUND
ONE_ROUND: list[Way] = [
    *["compressed"] * SWITCH,  # type: ignore[list-item]
    "uncompressed",
    *["deepspeed"] * (1 + COUNTED),  # type: ignore[list-item]
]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(
    add_up: Callable[[Tensor], object] = lambda t: None,
    world: int = 1,
    layout: tuple[int, ...] = (1, 1),
    other: Literal["uncompressed", "deepspeed"] = "deepspeed",
) -> Autotuner:
    return Autotuner(
        add_up,  # type: ignore[arg-type]
        world=world,
        layout=layout,
        other=other,
        speaks=True,
        clock=Clock(),
    )


def drive(
    tuner: Autotuner, steps: int, ours_s: float = 1.0, other_s: float = 1.0, skip: int = 0
) -> list[Way]:
    """Steps that take so long each way; every `skip`-th is skipped and takes a day."""
    ways = []
    for step in range(1, steps + 1):
        way, skipped = tuner.way, bool(skip) and step % skip == 0
        ways.append(way)
        tuner.exchanged(["a"], CPU)
        tuner.exchanged(["a"], CPU)
        took_s = ours_s if way == "compressed" else other_s
        tuner._clock.now_s += 86400.0 if skipped else took_s  # type: ignore[attr-defined]
        tuner.step_ended(skipped=skipped)
        tuner.step_ended(skipped=True)  # DeepSpeed drops gradients after every step, too
    return ways


def saved(tuner: Autotuner) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(tuner.state_dict()))
    return state


@pytest.mark.parametrize(
    ("ours_s", "other_s", "rounds"),
    [(1.0, 2.0, 1), (2.0, 1.0, 1), (1.25, 1.0, 1), (1.03, 1.0, 2), (1.0, 1.03, 2)],
)
def test_the_shorter_step_is_kept(ours_s: float, other_s: float, rounds: int) -> None:
    """After one round where the gap is wide, else another has to agree."""
    tuner = made()
    ways = drive(tuner, rounds * ROUND + 50, ours_s, other_s)
    assert ways[: rounds * ROUND] == ONE_ROUND * rounds
    assert tuner.choice == ("deepspeed" if other_s < ours_s else "compressed")
    assert set(ways[rounds * ROUND :]) == {tuner.choice}


def test_nothing_is_owed_when_deepspeeds_reduction_begins() -> None:
    ways = drive(made(), MOST_STEPS)
    assert {(a, b) for a, b in pairwise(ways) if b == "deepspeed" != a} == {
        ("uncompressed", "deepspeed")
    }


def test_steps_exchanged_once_are_held_against_uncompressed_ones() -> None:
    for times, choice in (((1.0, 2.0), "compressed"), ((2.0, 1.0), "uncompressed")):
        tuner = made(other="uncompressed")
        ways = drive(tuner, ROUND + 9, *times)
        assert ways[:ROUND] == ["uncompressed" if w == "deepspeed" else w for w in ONE_ROUND]
        assert tuner.choice == choice
        assert set(ways[ROUND:]) == {choice}


@settings(deadline=None)
@given(st.integers(2, 7), st.sampled_from([(1.0, 2.0), (2.0, 1.0)]))
def test_skipped_steps_count_for_nothing(skip: int, times: tuple[float, float]) -> None:
    """One that was to go uncompressed has sent nothing for good: the next one goes so."""
    tuner = made()
    ways = drive(tuner, 3 * ROUND, *times, skip=skip)
    assert tuner.choice == ("deepspeed" if times[1] < times[0] else "compressed")
    kept = [way for step, way in enumerate(ways, 1) if step % skip]
    assert kept[:ROUND] == drive(made(), ROUND, *times)


def judged(ours_s: float, other_s: float, scatter: float, seed: int) -> tuple[Autotuner, int]:
    """Steps that scatter, until there is a choice; how many."""
    tuner, rng, steps = made(), random.Random(seed), 0
    while tuner.choice is None:
        took_s = ours_s if tuner.way == "compressed" else other_s
        took_s *= max(0.3, rng.gauss(1.0, scatter))
        drive(tuner, 1, took_s, took_s)
        steps += 1
    return tuner, steps


def kept(ours_s: float, scatter: float, *, runs: int) -> int:
    """Of so many runs, in how many compression stays; DeepSpeed's step takes 1."""
    choices = [judged(ours_s, 1.0, scatter, seed)[0].choice for seed in range(runs)]
    return choices.count("compressed")


def test_choices_are_about_as_sure_as_they_say() -> None:
    """Eight steps each way alone mistake 7% for nothing where single steps scatter by 14%; three
    standard errors of all rounds keep few that are no shorter, and most that are 10% shorter."""
    assert kept(1.07, 0.14, runs=200) <= 2
    assert 1 <= kept(1.0, 0.14, runs=200) <= 8
    assert kept(0.9, 0.14, runs=100) >= 90


@pytest.mark.parametrize(("scatter", "ours_s"), [(0.02, 0.95), (0.14, 0.7), (0.4, 0.3)])
def test_a_step_that_is_clearly_shorter_is_kept(scatter: float, ours_s: float) -> None:
    assert kept(ours_s, scatter, runs=50) == 50


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_gap_takes_one_round(seed: int) -> None:
    assert judged(1.0, 3.0, 0.1, seed)[1] == ROUND


def test_what_cannot_be_told_apart_is_left_to_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    tuner = made()
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        ways = drive(tuner, MOST_STEPS)
    assert tuner.choice == "deepspeed"
    assert ways == ONE_ROUND * ROUNDS
    assert set(drive(tuner, RECHECK - MOST_STEPS)) == {"deepspeed"}
    assert drive(tuner, 1) == ["compressed"]
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


def test_a_pause_and_the_first_step_each_way_do_not_count() -> None:
    tuner = made()
    for step in range(ROUND):
        drive(tuner, 1, 100.0 if step == 0 else 1.0, 0.001 if step == SWITCH + 1 else 2.0)
        if step % 4 == 0:  # an evaluation
            tuner._clock.now_s += 100.0  # type: ignore[attr-defined]
    assert tuner.choice == "compressed"


def test_the_choice_is_that_of_the_sums() -> None:
    sums = torch.tensor([[1.0 + 5.0, 0.0], [2.0 + 2.0, 0.0]])
    for ours_s in (1.0, 5.0):
        tuner = made(lambda t: t.copy_(sums), world=2)
        drive(tuner, ROUND, ours_s, 2.0)
        assert tuner.choice == "deepspeed"


@pytest.mark.parametrize(
    ("ours_variance", "other_variance", "rounds"),
    [(0.0, 0.2, 1), (0.2, 0.0, 1), (0.1, 0.1, 1), (0.12, 0.12, 2), (0.24, 0.0, 2), (0.0, 0.24, 2)],
)
def test_so_is_how_far_it_can_be_trusted(
    ours_variance: float, other_variance: float, rounds: int
) -> None:
    """Means of two: 3 and 2, with an error of the root of half the variances; 1/3 is the most."""
    sums = torch.tensor([[6.0, ours_variance], [4.0, other_variance]])
    tuner = made(lambda t: t.copy_(sums), world=2)
    drive(tuner, ROUND)
    sums.copy_(torch.tensor([[2.0, 0.0], [4.0, 0.0]]))
    drive(tuner, ROUND)
    assert tuner.choice == ("deepspeed" if rounds == 1 else "compressed")


def test_it_is_asked_anew_and_may_change_its_mind() -> None:
    tuner = made()
    drive(tuner, RECHECK, 2.0, 1.0)
    assert tuner.choice == "deepspeed"
    ways = drive(tuner, ROUND + 10, 1.0, 2.0)
    assert ways == [*ONE_ROUND, *["compressed"] * 10]


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (1.0, 1.03)])
def test_a_resumed_run_goes_on_where_it_was(times: tuple[float, float]) -> None:
    borders = (SWITCH, ROUND, 2 * ROUND)
    around = {b + by for b in borders for by in (-1, 0, 1, 2)}
    for steps in sorted({0, 1, 40, RECHECK - 3, *around}):
        first, second = made(), made()
        drive(first, steps, *times)
        state = saved(first)
        second.load_state_dict(state)
        assert saved(second) == state
        assert drive(second, MOST_STEPS + 9, *times) == drive(first, MOST_STEPS + 9, *times)
        assert second.choice == ("compressed" if times[0] < times[1] else "deepspeed")
    second.load_state_dict({})
    assert second.way == "compressed"
    assert second.choice is None


@pytest.mark.parametrize("before", [(1, 1), (1, 2), (2, 4), (4, 4)])
def test_times_of_another_number_of_processes_or_hosts_do_not_count(
    before: tuple[int, int],
) -> None:
    """Resumed on two processes, each on a host of its own."""
    for steps, choice in ((ROUND - 5, None), (ROUND + 5, "compressed")):
        first = made(lambda t: t.mul_(before[1]), before[1], before)
        second = made(lambda t: t.mul_(2), 2, (2, 2))
        drive(first, steps, 1.0, 9.0)
        second.load_state_dict(saved(first))
        assert second.choice == choice
        assert drive(second, ROUND, 2.0, 1.0) == ONE_ROUND
        assert second.choice == "deepspeed"


def test_nor_do_those_of_a_run_that_was_held_against_another_way() -> None:
    first, second = made(other="uncompressed"), made()
    drive(first, ROUND + 5, 2.0, 1.0)
    second.load_state_dict(saved(first))
    assert drive(second, ROUND, 1.0, 2.0) == ONE_ROUND
    assert second.choice == "compressed"


def test_no_times_are_no_choice_against_compression() -> None:
    """Saved and resumed at every step: no step was seen from end to end."""
    tuner = made()
    for _ in range(ROUND):
        drive(tuner, 1, 2.0, 1.0)
        tuner.load_state_dict(saved(tuner))
    assert tuner.choice == "compressed"


def test_nan_of_one_process_is_no_choice_against_compression() -> None:
    tuner = made(lambda t: t.fill_(math.nan), world=2)
    drive(tuner, ROUND, 2.0, 1.0)
    assert tuner.choice == "compressed"


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tuner = made()
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        drive(tuner, RECHECK + ROUND, 0.002, 0.001)
    (line,) = [r.message for r in caplog.records]
    assert "autotune: gradients go by DeepSpeed's own reduction: " in line
    assert "2.0 ms compressed, 1.0 ms by DeepSpeed's own reduction (compression.exchange." in line


COMPUTE_S = 0.5
BUCKETS = ("front", "back")


@dataclass
class Machine:
    """An exchange that takes its time, and nothing else.

    Attributes:
        compressed_s, uncompressed_s, deepspeed_s: of all buckets of a step.
        went: how each bucket last travelled, by the name of its one parameter.
    """

    compressed_s: float = 0.4
    uncompressed_s: float = 0.7
    deepspeed_s: float = 0.5
    now_s: float = 0.0
    nonfinite_buckets: int = 0
    ways: list[str] = field(default_factory=list)
    went: dict[str, str] = field(default_factory=dict)
    feedback: Feedback = field(default_factory=lambda: Feedback(enabled=False))
    factors: Factors = field(default_factory=Factors)
    metric: None = None

    def average(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        choose: Choose | None,
    ) -> list[Tensor]:
        seconds = self.compressed_s if choose is None else self.uncompressed_s
        self._take("compressed" if choose is None else "uncompressed", seconds)
        self.went[names[0]] = self.ways[-1]
        return tensors

    def deepspeed(self, tensors: list[Tensor]) -> list[Tensor]:
        self._take("deepspeed", self.deepspeed_s)
        return tensors

    def _take(self, way: str, seconds: float) -> None:
        self.now_s += seconds / len(BUCKETS)
        self.ways.append(way)

    def step_ended(self) -> None:
        pass


def scheduled(
    machine: Machine, current_step: Callable[[], int] = lambda: 1
) -> tuple[ScheduledExchange, Autotuner]:
    exchange: Any = machine
    tuner = Autotuner(lambda t: t.mul_(2), world=2, clock=lambda: machine.now_s)
    return (
        ScheduledExchange(exchange, warmup_steps=1, current_step=current_step, autotuner=tuner),
        tuner,
    )


def train(
    machine: Machine,
    exchange: ScheduledExchange,
    steps: int,
    buckets: Sequence[str] = BUCKETS,
    *,
    skipped: bool = False,
) -> list[str]:
    """How each step's last bucket went."""
    ways = []
    for _ in range(steps):
        machine.now_s += COMPUTE_S
        for name in buckets:
            machine.went[name] = "deepspeed"
            inline = exchange.inline([name])
            exchange.reduce(
                [name], [torch.zeros(1)], loss_scale=1.0, deepspeed_reduce=machine.deepspeed
            )
            assert inline == (machine.went[name] == "deepspeed")
        ways.append(machine.ways[-1])
        exchange.step_ended(skipped=skipped)
        exchange.step_ended(skipped=True)  # DeepSpeed drops gradients after every step, too
    return ways


def test_the_warm_up_is_deepspeeds_and_counts_for_nothing() -> None:
    machine, step = Machine(), 0
    exchange, tuner = scheduled(machine, lambda: step)
    assert set(train(machine, exchange, 30)) == {"deepspeed"}
    assert not exchange.compresses
    step = 1
    assert train(machine, exchange, ROUND) == ONE_ROUND
    assert saved(tuner)["steps"] == ROUND


def test_what_a_warm_up_in_few_bits_owes_is_known() -> None:
    """A parameter that is absent until the choice has fallen would wait with its residual."""
    machine, step = Machine(deepspeed_s=0.1), 0
    exchange, tuner = scheduled(machine, lambda: step)
    exchange._warm_up = lambda name, shape: None
    train(machine, exchange, 3, [*BUCKETS, "seldom"])
    assert saved(tuner)["steps"] == 0
    step = 1
    assert train(machine, exchange, 2 * ROUND)[-1] == "deepspeed"
    assert tuner.way_of(["seldom"]) == "uncompressed"
    train(machine, exchange, 1, ["seldom"])
    assert tuner.way_of(["seldom"]) == "deepspeed"


def test_what_is_faster_stays_through_every_recheck() -> None:
    machine = Machine()
    exchange, _ = scheduled(machine)
    ways = train(machine, exchange, 3 * RECHECK)
    for start in range(0, len(ways), RECHECK):
        assert set(ways[start + 2 * ROUND : start + RECHECK]) == {"compressed"}, start
    assert exchange.compresses


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("deepspeed_s", "switch"), [(0.1, SWITCH), (0.32, SWITCH + ROUND)])
def test_a_parameter_absent_from_the_uncompressed_step_goes_so_before_deepspeed_has_it(
    deepspeed_s: float, switch: int, resumed: bool
) -> None:
    """Or its residual would stay undelivered until the next comparison, or for good; in a second
    round as in the first."""
    machine = Machine(deepspeed_s=deepspeed_s)
    exchange, tuner = scheduled(machine)
    train(machine, exchange, switch)
    assert machine.went == dict.fromkeys(BUCKETS, "compressed")
    assert train(machine, exchange, 1, ["front"]) == ["uncompressed"]
    train(machine, exchange, 2, ["front"])
    if resumed:
        state = saved(tuner)
        exchange, tuner = scheduled(machine)
        tuner.load_state_dict(state)
    assert machine.went["back"] == "compressed"
    train(machine, exchange, 1, skipped=True)  # what it delivered is owed as before
    for way in ("uncompressed", "deepspeed", "deepspeed"):
        train(machine, exchange, 1)
        assert machine.went == {"front": "deepspeed", "back": way}
    train(machine, exchange, ROUND)
    assert machine.went == dict.fromkeys(BUCKETS, "deepspeed")


def test_after_a_fallback_nothing_is_compared() -> None:
    """All go uncompressed then, whatever a comparison would find."""
    machine = Machine()
    exchange, tuner = scheduled(machine)
    train(machine, exchange, SWITCH - 2)
    exchange.fallback.uncompressed = True
    assert set(train(machine, exchange, RECHECK)) == {"uncompressed"}
    assert saved(tuner)["steps"] == SWITCH - 2
    assert not exchange.compresses
