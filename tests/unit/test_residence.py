"""Choice of weight placement by timed steps: one hook attached and detached, alike on all ranks."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.engine import resident_weights
from ds_ckpt.engine.tuner import COUNTED_STEPS, RECHECK_STEPS
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.weights.changes import Lossless

BLOCK = 1 + COUNTED_STEPS
CYCLE = 2 * BLOCK


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


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda times: None)
    monkeypatch.setattr(resident_weights, "refuse_too_large", lambda *_: None)


@pytest.mark.parametrize("resident_s", [0.5, 2.0])
def test_the_shorter_step_is_kept(resident_s: float, caplog: pytest.LogCaptureFixture) -> None:
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
