"""Where weights are, by timed steps: one hook taken off and put on, for all processes alike."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.engine.residence import ResidencyTuner
from ds_ckpt.engine.tuner import COUNTED_STEPS, MAX_CYCLES, RECHECK_STEPS
from ds_ckpt.errors import Problem, UnsupportedError

BLOCK = 1 + COUNTED_STEPS
CYCLE = 2 * BLOCK


class Hook:
    """What of the weights hook is used, and how often it was put on."""

    attached, settled, device, made = True, True, torch.device("cpu"), 0

    def attach(self) -> None:
        assert not self.attached
        self.attached, self.made = True, self.made + 1

    def detach(self) -> None:
        assert self.attached
        self.attached = False


class Run:
    """Steps of which a resident one takes `resident_s`, and another 1."""

    def __init__(self, resident_s: float, room: bool = True) -> None:
        self.hook, self.busy, self.room, self.now_s = Hook(), False, room, 0.0
        self.resident_s = resident_s
        self.error: Exception | None = None
        self.engine = SimpleNamespace(
            optimizer=SimpleNamespace(dp_process_group=None),
            skipped_steps=0,
        )
        hook: Any = self.hook
        self.residence = ResidencyTuner(self.engine, hook, self._make_room, lambda: self.busy)
        self.residence.tuner._clock = lambda: self.now_s

    def _make_room(self) -> None:
        if not self.room:
            assert self.error is not None
            raise self.error

    def steps(self, count: int, pause_s: float = 0.0) -> list[bool]:
        """Where the weights were in each."""
        places = []
        for _ in range(count):
            places.append(self.hook.attached)
            self.now_s += pause_s + (self.resident_s if self.hook.attached else 1.0)
            self.residence.step_ended(0)
        return places


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda times, group: None)


@pytest.mark.parametrize("resident_s", [0.5, 2.0])
def test_the_shorter_step_is_kept(resident_s: float, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(resident_s)
    with caplog.at_level(logging.INFO):
        places = run.steps(CYCLE + 20)
    resident = resident_s < 1
    expected = [True] * BLOCK + [False] * (CYCLE - BLOCK) + [resident] * 20
    assert places == expected
    assert run.hook.made == resident
    where = "resident on every node" if resident else "gathered by DeepSpeed"
    (line,) = caplog.messages
    assert f"weights are {where}: a step takes {1e3 * resident_s:.1f} ms resident" in line


def test_a_tie_goes_to_deepspeed_which_needs_no_copy() -> None:
    run = Run(1.0)
    run.steps(MAX_CYCLES * CYCLE)
    assert run.residence.tuner.choice == "gathered"
    assert not run.hook.attached
    assert run.steps(RECHECK_STEPS + 1)[-1], "and is compared anew"


def test_steps_in_which_something_else_is_compared_do_not_count() -> None:
    """They take a day, and so does the first one after them, which has no beginning."""
    run = Run(0.5)
    run.steps(4)
    run.busy = True
    assert run.steps(3, 86400.0) == [True] * 3
    run.busy, run.hook.settled = False, False
    assert run.steps(3, 86400.0) == [True] * 3
    run.hook.settled = True
    run.steps(CYCLE - 4)
    assert run.residence.tuner.choice == "resident"


def test_skipped_steps_do_not_count() -> None:
    run = Run(0.5)
    run.steps(4)
    run.engine.skipped_steps += 1
    run.steps(1, 86400.0)
    assert run.steps(CYCLE - 4) == [True] * (BLOCK - 4) + [False] * (CYCLE - BLOCK)
    assert run.residence.tuner.choice == "resident"


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError(Problem("$", "true", "the copy does not fit", "free some")),
        OSError("the copy does not fit: no such device"),
    ],
)
def test_a_copy_without_room_is_not_made_again(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    run = Run(0.5)
    run.error = error
    run.steps(BLOCK + 1)
    run.room = False
    assert run.steps(RECHECK_STEPS)[-1] is False
    assert run.hook.made == 0
    assert [m for m in caplog.messages if "the copy does not fit" in m]
