"""The gate: timed both ways, one verdict for all processes, kept in the checkpoint, said aloud."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from ds_ckpt.exchange.gate import MOST_BUCKETS, RECHECK, TRIALS, Gate

NAMES = ["a", "b"]
CPU = torch.device("cpu")


def drive(gate: Gate, visits: int, compressed_s: float, whole_s: float) -> list[bool]:
    ways = []
    for _ in range(visits):
        whole = gate.sends_whole(NAMES)
        gate.took(NAMES, whole, whole_s if whole else compressed_s, CPU)
        ways.append(whole)
    return ways


@pytest.mark.parametrize(("compressed_s", "whole_s"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_way_is_kept(compressed_s: float, whole_s: float) -> None:
    gate = Gate(lambda t: None, world=1)
    ways = drive(gate, 2 * TRIALS + 20, compressed_s, whole_s)
    assert ways[: 2 * TRIALS] == [True] * TRIALS + [False] * TRIALS
    assert set(ways[2 * TRIALS :]) == {compressed_s > whole_s}
    assert gate.dense_buckets == (compressed_s > whole_s)


def test_the_first_exchange_each_way_and_an_outlier_do_not_count() -> None:
    gate = Gate(lambda t: None, world=1)
    times = {True: iter([0.1, 2.0, 2.0, 2.0]), False: iter([50.0, 1.0, 90.0, 1.0])}
    for _ in range(2 * TRIALS):
        whole = gate.sends_whole(NAMES)
        gate.took(NAMES, whole, next(times[whole]), CPU)
    assert gate.dense_buckets == 0


def test_the_verdict_is_that_of_the_sums() -> None:
    """One process finds compression faster, the other much slower: both come to one verdict."""
    sums = torch.tensor([1.0 + 5.0, 2.0 + 2.0])
    verdicts = []
    for compressed_s in (1.0, 5.0):
        gate = Gate(lambda t: t.copy_(sums), world=2)
        drive(gate, 2 * TRIALS, compressed_s, 2.0)
        verdicts.append(gate.dense_buckets)
        (verdict,) = gate.verdicts.values()
        assert (verdict.compressed_s, verdict.whole_s) == (3.0, 2.0)
    assert verdicts == [1, 1]


def test_buckets_are_timed_anew_and_may_change_their_way() -> None:
    gate = Gate(lambda t: None, world=1)
    drive(gate, RECHECK, 1.0, 2.0)
    assert gate.dense_buckets == 0
    drive(gate, 2 * TRIALS, 2.0, 1.0)
    assert gate.dense_buckets == 1
    assert all(drive(gate, 10, 2.0, 1.0))


def test_told_when_to_time_anew_it_does_so_then_and_only_then() -> None:
    gate = Gate(lambda t: None, world=1, rechecks=False)
    drive(gate, 2 * TRIALS, 1.0, 2.0)
    assert not any(drive(gate, 2 * RECHECK, 1.0, 2.0))
    gate.sends_whole(["others"])
    gate.recheck()
    ways = drive(gate, 2 * TRIALS + 5, 2.0, 1.0)
    assert ways == [True] * TRIALS + [False] * TRIALS + [True] * 5


def test_a_resumed_gate_goes_on_where_it_was() -> None:
    for visits in (0, 1, 3, 2 * TRIALS, 50):
        first = Gate(lambda t: None, world=1)
        drive(first, visits, 2.0, 1.0)
        second = Gate(lambda t: None, world=1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drive(second, 30, 2.0, 1.0) == drive(first, 30, 2.0, 1.0)


@pytest.mark.parametrize("visits", [2, TRIALS + 2, 2 * TRIALS + 20])
@pytest.mark.parametrize("before", [(1, 1), (2, 2), (4, 4), (1, 4)])
def test_times_of_another_number_of_processes_do_not_count(
    visits: int, before: tuple[int, int]
) -> None:
    """Resumed on two hosts of two processes, where the other way is the faster one."""
    first = Gate(lambda t: None, world=before[0], layout=before)
    drive(first, visits, 1.0, 2.0)
    second = Gate(lambda t: t.mul_(2), world=2, layout=(2, 4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    ways = drive(second, 2 * TRIALS + 5, 60.0, 50.0)
    assert ways == [True] * TRIALS + [False] * TRIALS + [True] * 5
    (verdict,) = second.verdicts.values()
    assert (verdict.compressed_s, verdict.whole_s) == (60.0, 50.0)


def test_a_checkpoint_from_before_the_layout_was_saved_goes_on() -> None:
    first, second = Gate(lambda t: None, world=1), Gate(lambda t: None, world=1)
    drive(first, 50, 2.0, 1.0)
    state = first.state_dict()
    del state["layout"]
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("visits", [2, 2 * TRIALS + 20])
def test_a_checkpoint_with_the_world_in_the_place_of_the_layout_compares_anew(visits: int) -> None:
    first, second = (Gate(lambda t: None, world=1, layout=(1, 1)) for _ in range(2))
    drive(first, visits, 2.0, 1.0)
    state = first.state_dict()
    second.load_state_dict({"world": 1} | {k: v for k, v in state.items() if k != "layout"})
    assert drive(second, 2 * TRIALS, 60.0, 50.0) == [True] * TRIALS + [False] * TRIALS
    (verdict,) = second.verdicts.values()
    assert (verdict.compressed_s, verdict.whole_s) == (60.0, 50.0)


@pytest.mark.parametrize("visits", [RECHECK + 1, RECHECK + TRIALS, RECHECK + 2 * TRIALS - 1])
@pytest.mark.parametrize("rechecks", [True, False])
def test_a_gate_that_compares_at_other_times_resumes(visits: int, rechecks: bool) -> None:
    """`when` was changed in between: the other gate may be amid a comparison, with no times."""
    first = Gate(lambda t: None, world=1, rechecks=rechecks)
    drive(first, visits, 2.0, 1.0)
    second = Gate(lambda t: None, world=1, rechecks=not rechecks)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    drive(second, RECHECK, 2.0, 1.0)
    assert second.dense_buckets == 1


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(lambda t: None, world=1, speaks=True)
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        drive(gate, 50, 0.002, 0.001)
    (line,) = [r.message for r in caplog.records]
    assert "1 of 1 buckets go whole" in line
    assert "2.0 ms" in line
    assert "1.0 ms" in line


def test_buckets_that_are_never_the_same_do_not_pile_up() -> None:
    gate = Gate(lambda t: None, world=1)
    for i in range(2 * MOST_BUCKETS):
        names = [f"p{i}"]
        gate.took(names, gate.sends_whole(names), 1.0, CPU)
    assert len(gate.verdicts) == MOST_BUCKETS
    assert not gate.sends_whole(["another"])
