"""Gate and referee together, over thousands of steps, by a clock that the test turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.exchange import schedule
from ds_ckpt.exchange.gate import TRIALS, Gate
from ds_ckpt.exchange.referee import RECHECK, ROUND, STEPS, SWITCH, Referee
from ds_ckpt.exchange.schedule import ScheduledExchange

COMPUTE_S = 0.5
DECIDED = STEPS + ROUND
"""Steps of a comparison where the gap is not wide."""
BUCKETS = ("front", "back")


@dataclass
class Machine:
    """Takes its time, and nothing else.

    Attributes:
        compressed_s, whole_s, stock_s: of all buckets of a step.
        went: how each bucket last travelled, by the name of its one parameter.
    """

    compressed_s: float
    whole_s: float
    stock_s: float
    now_s: float = 0.0
    world: int = 2
    nonfinite_buckets: int = 0
    ways: list[str] = field(default_factory=list)
    went: dict[str, str] = field(default_factory=dict)

    def average(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        uncompressed: bool = False,
    ) -> list[Tensor]:
        self._take(
            "whole" if uncompressed else "compressed",
            self.whole_s if uncompressed else self.compressed_s,
        )
        self.went[names[0]] = self.ways[-1]
        return tensors

    def stock(self, tensors: list[Tensor]) -> list[Tensor]:
        self._take("stock", self.stock_s)
        return tensors

    def _take(self, way: str, seconds: float) -> None:
        self.now_s += seconds / len(BUCKETS)
        self.ways.append(way)

    def step_ended(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(compressed_s=0.4, whole_s=0.7, stock_s=0.5)
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: made.now_s)
    return made


def scheduled(machine: Machine, hosts: int = 2) -> ScheduledExchange:
    """Two processes on so many hosts."""
    exchange: Any = machine
    layout = (hosts, 2)
    gate = Gate(lambda t: t.mul_(2), world=hosts, layout=layout, rechecks=False)
    referee = Referee(lambda t: t.mul_(2), world=2, layout=layout, clock=lambda: machine.now_s)
    return ScheduledExchange(
        exchange, None, Factors(), start_step=0, current_step=lambda: 1, gate=gate, referee=referee
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
            machine.went[name] = "stock"
            inline = exchange.inline([name])
            exchange.reduce([name], [torch.zeros(1)], loss_scale=1.0, stock=machine.stock)
            assert inline == (machine.went[name] == "stock")
        ways.append(machine.ways[-1])
        exchange.step_ended(skipped=skipped)
        exchange.step_ended(skipped=True)  # DeepSpeed drops gradients after every step, too
    return ways


def test_what_is_faster_stays_through_every_recheck(machine: Machine) -> None:
    exchange = scheduled(machine)
    ways = train(machine, exchange, 3 * RECHECK)
    for start in range(0, len(ways), RECHECK):
        period = ways[start : start + RECHECK]
        assert period[:TRIALS] == ["whole"] * TRIALS
        assert set(period[TRIALS : 2 * TRIALS]) == {"compressed"}
        assert set(period[DECIDED:]) == {"compressed"}, f"the comparison after step {start}"


@pytest.mark.parametrize("turns_at", [100, RECHECK - 1])
def test_a_link_that_slows_down_is_noticed_at_the_next_recheck(
    machine: Machine, turns_at: int
) -> None:
    exchange = scheduled(machine)
    machine.whole_s, machine.stock_s = 0.3, 0.2
    assert set(train(machine, exchange, turns_at)[DECIDED:]) == {"stock"}
    machine.whole_s, machine.stock_s = 0.9, 0.8
    ways = train(machine, exchange, 2 * RECHECK - turns_at)
    assert set(ways[RECHECK - turns_at + DECIDED :]) == {"compressed"}


def test_a_resumed_run_compares_when_the_first_would_have(machine: Machine) -> None:
    first = scheduled(machine)
    train(machine, first, RECHECK - 3)
    second = scheduled(machine)
    for part in ("_gate", "_referee"):
        getattr(second, part).load_state_dict(getattr(first, part).state_dict())
    assert train(machine, second, DECIDED + 10) == train(machine, first, DECIDED + 10)


@pytest.mark.parametrize("saved_after", [3, SWITCH + 3, DECIDED + 20])
def test_as_many_processes_on_other_hosts_compare_anew(machine: Machine, saved_after: int) -> None:
    """Buckets and whole steps, one after the other, wherever the first run was."""
    first = scheduled(machine, hosts=1)
    machine.whole_s, machine.stock_s = 0.3, 0.2
    train(machine, first, saved_after)
    second = scheduled(machine, hosts=2)
    for part in ("_gate", "_referee"):
        getattr(second, part).load_state_dict(getattr(first, part).state_dict())
    machine.whole_s, machine.stock_s = 0.9, 0.8
    ways = train(machine, second, DECIDED + 50)
    assert ways[: 2 * TRIALS] == ["whole"] * TRIALS + ["compressed"] * TRIALS
    assert "stock" in ways
    assert set(ways[DECIDED:]) == {"compressed"}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("stock_s", "switch"), [(0.1, SWITCH), (0.32, SWITCH + ROUND)])
def test_a_parameter_absent_from_the_whole_step_goes_whole_before_deepspeed_has_it(
    machine: Machine, stock_s: float, switch: int, resumed: bool
) -> None:
    """Or its residual would stay undelivered until the next comparison, or for good; in a second
    round as in the first."""
    machine.stock_s = stock_s
    exchange = scheduled(machine)
    train(machine, exchange, switch)
    assert machine.went == dict.fromkeys(BUCKETS, "compressed")
    assert train(machine, exchange, 1, ["front"]) == ["whole"]
    train(machine, exchange, 2, ["front"])
    if resumed:
        first, exchange = exchange, scheduled(machine)
        for part in ("_gate", "_referee"):
            state = json.loads(json.dumps(getattr(first, part).state_dict()))
            getattr(exchange, part).load_state_dict(state)
    assert machine.went["back"] == "compressed"
    train(machine, exchange, 1, skipped=True)  # what it delivered is owed as before
    for way in ("whole", "stock", "stock"):
        train(machine, exchange, 1)
        assert machine.went == {"front": "stock", "back": way}
    train(machine, exchange, STEPS)
    assert machine.went == dict.fromkeys(BUCKETS, "stock")


def test_skipped_steps_count_for_neither(machine: Machine) -> None:
    """With fp16 the first steps seek the scale; an exchange that meets an overflow is short."""
    exchange = scheduled(machine)
    machine.whole_s = machine.stock_s = 0.2
    for _ in range(TRIALS):  # compressed exchanges seem to take no time, but in steps that count
        train(machine, exchange, TRIALS)
        machine.compressed_s = 0.0
        train(machine, exchange, TRIALS - 1, skipped=True)
        machine.compressed_s = 0.4
    train(machine, exchange, 2 * TRIALS)
    gate: Any = exchange
    assert [v.whole for v in gate._gate.verdicts.values()] == [True, True]
    assert [v.compressed_s for v in gate._gate.verdicts.values()] == pytest.approx([0.2, 0.2])


def test_after_a_fallback_whole_steps_are_not_compared(machine: Machine) -> None:
    """All go whole then, whatever a comparison would find."""
    exchange = scheduled(machine)
    train(machine, exchange, SWITCH + 5)
    exchange.fallback.whole = True
    assert set(train(machine, exchange, RECHECK)) == {"whole"}
    referee: Any = exchange
    assert referee._referee.state_dict()["steps"] == SWITCH + 5
