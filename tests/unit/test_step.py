"""The state of a step: how buckets are sent, that no residual is stranded, and guards."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.engine.guard import Guard
from ds_ckpt.engine.step import StepState
from ds_ckpt.engine.tuner import COUNTED_STEPS, RECHECK_STEPS, Tuner
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.lab.validate.virtual import VirtualWorld
from ds_ckpt.telemetry.timings import ResidualStats

COMPUTE_S = 0.5
BUCKETS = ("front", "back")
BLOCK = 1 + COUNTED_STEPS
CYCLE = 2 * BLOCK


@dataclass
class Machine:
    """An exchange that takes its time, and nothing else.

    Attributes:
        compressed_s, uncompressed_s, deepspeed_s: of all buckets of a step.
        modes: of every bucket so far.
        last: mode of each bucket by the name of its one parameter.
    """

    compressed_s: float = 0.4
    uncompressed_s: float = 0.7
    deepspeed_s: float = 0.5
    now_s: float = 0.0
    nonfinite_buckets: int = 0
    modes: list[str] = field(default_factory=list)
    last: dict[str, str] = field(default_factory=dict)
    feedback: Feedback = field(default_factory=lambda: Feedback(enabled=False))
    factors: Factors = field(default_factory=Factors)
    metric: None = None

    def average(self, names, tensors, loss_scale=1.0, *, choose) -> list[Tensor]:
        seconds = self.compressed_s if choose is None else self.uncompressed_s
        self._take("compressed" if choose is None else "uncompressed", seconds)
        self.last[names[0]] = self.modes[-1]
        return tensors

    def deepspeed(self, tensors: list[Tensor]) -> list[Tensor]:
        self._take("deepspeed", self.deepspeed_s)
        return tensors

    def _take(self, mode: str, seconds: float) -> None:
        self.now_s += seconds / len(BUCKETS)
        self.modes.append(mode)

    def reset_step(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _two_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: t.mul_(2))


def made(machine, other="deepspeed", current_step=lambda: 1) -> StepState:
    tuner = Tuner("gradients", ("compressed", other), torch.device("cpu"))
    tuner._clock = lambda: machine.now_s
    exchange: Any = machine
    return StepState(exchange, warmup_steps=1, current_step=current_step, tuner=tuner)


def train(machine, state, steps, buckets=BUCKETS, *, skipped=False) -> list[str]:
    """Train, and return the mode of each step's last bucket."""
    modes = []
    for _ in range(steps):
        machine.now_s += COMPUTE_S
        for name in buckets:
            machine.last[name] = "deepspeed"
            (state.choose_reduction([name], 1.0) or machine.deepspeed)([torch.zeros(1)])
        modes.append(machine.modes[-1])
        (state.rollback if skipped else state.commit)()
        state.rollback()  # DeepSpeed drops gradients after every step, too
    return modes


@pytest.mark.parametrize("other", ["deepspeed", "uncompressed"])
@pytest.mark.parametrize("is_shorter", [False, True])
def test_residuals_are_sent_before_the_other_mode(other: str, is_shorter: bool) -> None:
    machine = Machine(**{f"{other}_s": 0.1 if is_shorter else 0.9})  # type: ignore[arg-type]
    state = made(machine, other)
    modes = train(machine, state, CYCLE + 5)
    assert modes[:CYCLE] == ["compressed"] * BLOCK + ["uncompressed"] + [other] * COUNTED_STEPS
    assert set(modes[CYCLE:]) == {other if is_shorter else "compressed"}
    assert state.is_compressing is not is_shorter


def test_the_warm_up_is_not_compared() -> None:
    machine, step = Machine(), 0
    state = made(machine, current_step=lambda: step)
    assert set(train(machine, state, RECHECK_STEPS)) == {"deepspeed"}
    assert not state.is_compressing
    step = 1
    assert train(machine, state, 2) == ["compressed", "compressed"]
    assert state.corrects_momentum


@pytest.mark.parametrize("resumed", [False, True])
def test_a_parameter_absent_from_the_uncompressed_step_is_sent_so_later(resumed: bool) -> None:
    """Else its residual would stay until the next comparison, or for good."""
    machine = Machine(deepspeed_s=0.1)
    state = made(machine)
    train(machine, state, BLOCK)
    assert machine.last == dict.fromkeys(BUCKETS, "compressed")
    assert train(machine, state, 1, ["front"]) == ["uncompressed"]
    train(machine, state, 2, ["front"])
    if resumed:
        state.load_state_dict(state.state_dict())
        assert train(machine, state, BLOCK + 1, ["front"])[-1] == "uncompressed"
    assert machine.last["back"] == "compressed"
    train(machine, state, 1, skipped=True)  # its residual is as before
    for mode in ("uncompressed", "deepspeed", "deepspeed"):
        train(machine, state, 1)
        assert machine.last == {"front": "deepspeed", "back": mode}


def test_disabled_compression_is_not_compared_and_saved() -> None:
    machine = Machine()
    state = made(machine)
    train(machine, state, BLOCK - 2)
    state.is_disabled = True
    assert set(train(machine, state, RECHECK_STEPS)) == {"uncompressed"}
    assert state.tuner is not None
    assert state.tuner.is_comparing
    assert not state.is_compressing
    other = made(machine)
    other.load_state_dict(state.state_dict())
    assert other.is_disabled
    other.load_state_dict({})
    assert not other.is_disabled


def test_measurements_of_an_earlier_release_are_ignored() -> None:
    state = made(Machine())
    old = {"momentum": {"kept": [[0, 0.5]]}, "autotune": {"choice": "deepspeed"}, "metric": {}}
    state.load_state_dict(old)
    assert state.mode(BUCKETS) == "compressed"
    assert state.state_dict() == {"factors": {}, "fallback": {"whole": False}}


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
