"""The tuner: steps of each candidate, one choice for all ranks; placement of weights by it."""

import logging
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.engine import resident_weights
from ds_ckpt.engine.tuner import COUNTED_STEPS, MAX_CYCLES, RECHECK_STEPS, Tuner
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.weights.changes import Lossless

BLOCK = 1 + COUNTED_STEPS
CYCLE = 2 * BLOCK
MAX_STEPS = MAX_CYCLES * CYCLE
ONE_CYCLE = ["ours"] * BLOCK + ["other"] * BLOCK


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(resident_weights, "refuse_too_large", lambda *_: None)
    reduced(monkeypatch, 1, lambda times: times)


def reduced(monkeypatch: pytest.MonkeyPatch, world: int, all_reduce: Callable) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)


def made(*candidates: str) -> Tuner:
    tuner = Tuner("things", candidates or ("ours", "other"), torch.device("cpu"))
    tuner._clock = Clock()
    return tuner


def drive(tuner: Tuner, steps: int, ours_s=1.0, other_s=1.0, skip=0) -> list[str]:
    """Run steps of these times; every `skip`-th is skipped and takes a day."""
    sent = []
    for step in range(1, steps + 1):
        is_skipped = bool(skip) and step % skip == 0
        sent.append(tuner.current)
        took_s = other_s if tuner.current == tuner.candidates[-1] else ours_s
        tuner._clock.now_s += 86400.0 if is_skipped else took_s  # type: ignore[attr-defined]
        tuner.step_ended(is_counted=not is_skipped)
    return sent


@pytest.mark.parametrize(
    ("ours_s", "other_s", "cycles"),
    [(1.0, 2.0, 1), (2.0, 1.0, 1), (1.25, 1.0, 1), (1.03, 1.0, 2), (1.0, 1.03, 2)],
)
def test_the_shorter_step_is_kept(ours_s: float, other_s: float, cycles: int) -> None:
    """One cycle suffices if the gap is decisive, else a second one has to agree."""
    tuner = made()
    sent = drive(tuner, cycles * CYCLE + 50, ours_s, other_s)
    assert sent[: cycles * CYCLE] == ONE_CYCLE * cycles
    assert tuner.choice == ("other" if other_s < ours_s else "ours")
    assert set(sent[cycles * CYCLE :]) == {tuner.choice}
    assert not tuner.is_comparing


def test_of_several_candidates_the_fastest_is_kept() -> None:
    tuner, times = made("a", "b", "c"), {"a": 3.0, "b": 1.0, "c": 2.0}
    for _ in range(3 * BLOCK):
        tuner._clock.now_s += times[tuner.current]  # type: ignore[attr-defined]
        tuner.step_ended()
    assert tuner.choice == "b"


@settings(deadline=None)
@given(st.integers(2, 7), st.sampled_from([(1.0, 2.0), (2.0, 1.0)]))
def test_skipped_steps_do_not_count(skip: int, times: tuple[float, float]) -> None:
    tuner = made()
    sent = drive(tuner, 3 * CYCLE, *times, skip=skip)
    assert tuner.choice == ("other" if times[1] < times[0] else "ours")
    counted = [name for step, name in enumerate(sent, 1) if step % skip]
    assert counted[:CYCLE] == ONE_CYCLE


def kept(ours_s: float, scatter: float, *, runs: int) -> int:
    """Runs in which scattering steps of this mean are kept over some of 1 s."""
    choices = []
    for seed in range(runs):
        tuner, rng = made(), random.Random(seed)
        while tuner.choice is None:
            took_s = ours_s if tuner.current == "ours" else 1.0
            took_s *= max(0.3, rng.gauss(1.0, scatter))
            drive(tuner, 1, took_s, took_s)
        choices.append(tuner.choice)
    return choices.count("ours")


def test_choices_are_about_as_certain_as_stated() -> None:
    """Single steps scatter by 14%."""
    assert kept(1.07, 0.14, runs=100) <= 2
    assert 1 <= kept(1.0, 0.14, runs=200) <= 8
    assert kept(0.9, 0.14, runs=50) >= 45


def test_without_a_significant_difference_the_baseline_wins(caplog) -> None:
    tuner = made()
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        sent = drive(tuner, MAX_STEPS)
    assert tuner.choice == "other"
    assert sent == ONE_CYCLE * MAX_CYCLES
    assert set(drive(tuner, RECHECK_STEPS)) == {"other"}
    assert drive(tuner, 1) == ["ours"]
    (line,) = [r.message for r in caplog.records]
    assert line == (
        "ds_ckpt: autotune: things: other (ms per step: ours 1000.0, other 1000.0; no significant "
        "difference)"
    )


def test_the_first_step_of_a_candidate_and_pauses_do_not_count() -> None:
    tuner = made()
    for step in range(CYCLE):
        drive(tuner, 1, 100.0 if step == 0 else 1.0, 0.001 if step == BLOCK else 2.0)
        if step % 4 == 0:
            tuner._clock.now_s += 100.0  # type: ignore[attr-defined]
            tuner.pause()
    assert tuner.choice == "ours"


def test_the_choice_is_that_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = torch.tensor([[1.0 + 5.0, 0.0], [2.0 + 2.0, 0.0]])
    reduced(monkeypatch, 2, lambda times: times.copy_(sums))
    for ours_s in (1.0, 5.0):
        tuner = made()
        drive(tuner, CYCLE, ours_s, 2.0)
        assert tuner.choice == "other"


@pytest.mark.parametrize(
    ("ours_variance", "other_variance", "cycles"),
    [(0.0, 0.2, 1), (0.2, 0.0, 1), (0.1, 0.1, 1), (0.12, 0.12, 2), (0.24, 0.0, 2), (0.0, 0.24, 2)],
)
def test_so_is_its_significance(monkeypatch, ours_variance, other_variance, cycles) -> None:
    """Means of two: 3 and 2, with an error of the root of half the variances; 1/3 is the most."""
    sums = torch.tensor([[6.0, ours_variance], [4.0, other_variance]])
    reduced(monkeypatch, 2, lambda times: times.copy_(sums))
    tuner = made()
    drive(tuner, CYCLE)
    sums.copy_(torch.tensor([[2.0, 0.0], [4.0, 0.0]]))
    drive(tuner, CYCLE)
    assert tuner.choice == ("other" if cycles == 1 else "ours")


def test_it_is_repeated_and_may_choose_otherwise() -> None:
    tuner = made()
    drive(tuner, CYCLE + RECHECK_STEPS, 2.0, 1.0)
    assert tuner.choice == "other"
    assert drive(tuner, CYCLE + 10, 1.0, 2.0) == [*ONE_CYCLE, *["ours"] * 10]
    tuner.restart()
    assert tuner.choice is None
    assert tuner.current == "ours"


def test_nan_of_one_rank_is_no_choice_against_the_first_candidate(monkeypatch) -> None:
    reduced(monkeypatch, 2, lambda times: times.fill_(math.nan))
    tuner = made()
    drive(tuner, CYCLE, 2.0, 1.0)
    assert tuner.choice == "ours"


class Hook:
    """A weights hook with the parts that are used; `made` counts its attachments."""

    is_attached, device, layout, made = True, torch.device("cpu"), None, 0
    codec: Any = None

    def attach(self) -> None:
        assert not self.is_attached
        self.is_attached, self.made = True, self.made + 1

    def detach(self) -> None:
        assert self.is_attached
        self.is_attached = False


class Run:
    """Steps of which a resident one takes `resident_s`, and another 1."""

    def __init__(self, resident_s: float) -> None:
        self.hook, self.busy, self.now_s = Hook(), False, 0.0
        self.resident_s = resident_s
        self.engine = SimpleNamespace(skipped_steps=0)
        hook: Any = self.hook
        self.resident = resident_weights.ResidentWeights(
            self.engine, hook, {"lossless": Lossless()}, (), may_detach=True
        )
        assert self.resident.tuner is not None
        self.tuner = self.resident.tuner
        self.tuner._clock = lambda: self.now_s

    def steps(self, count: int, pause_s: float = 0.0) -> list[bool]:
        """Return for each step whether the copy was in use."""
        places = []
        for _ in range(count):
            places.append(self.hook.is_attached)
            self.now_s += pause_s + (self.resident_s if self.hook.is_attached else 1.0)
            self.resident.step_ended(is_busy=self.busy)
        return places


@pytest.mark.parametrize("resident_s", [0.5, 2.0])
def test_weights_are_placed_where_the_step_is_shorter(resident_s, caplog) -> None:
    run = Run(resident_s)
    with caplog.at_level(logging.INFO):
        places = run.steps(CYCLE + 20)
    resident = resident_s < 1
    expected = [True] * BLOCK + [False] * (CYCLE - BLOCK) + [resident] * 20
    assert places == expected
    assert run.hook.made == resident
    where = "lossless" if resident else "deepspeed"
    (line,) = caplog.messages
    assert f"resident weights: {where} (ms per step: lossless {1e3 * resident_s:.1f}" in line


def test_skipped_steps_and_steps_of_another_comparison_do_not_count() -> None:
    """They take a day, and so does the first one after them, which has no beginning."""
    run = Run(0.5)
    run.steps(4)
    run.engine.skipped_steps += 1
    run.steps(1, 86400.0)
    run.busy = True
    assert run.steps(3, 86400.0) == [True] * 3
    run.busy = False
    assert run.steps(1, 86400.0) == [True]
    run.steps(CYCLE - 4)
    assert run.tuner.choice == "lossless"


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError(Problem("$", "true", "the copy does not fit", "free some")),
        OSError("the copy does not fit: no such device"),
    ],
)
def test_a_copy_without_room_is_not_made_again(caplog, monkeypatch, error) -> None:
    def refuse(*_: Any) -> None:
        raise error

    run = Run(0.5)
    run.steps(BLOCK + 1)
    monkeypatch.setattr(resident_weights, "refuse_too_large", refuse)
    assert run.steps(RECHECK_STEPS)[-1] is False
    assert run.hook.made == 0
    assert [m for m in caplog.messages if "the copy does not fit" in m]
