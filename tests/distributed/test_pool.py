"""The worker pool itself: order, errors, hangs, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.distributed import cases_pool
from tests.distributed.pool import Pool, PoolError


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of its own, for tests that break it: the next one starts it anew."""
    own = Pool(2)
    yield own
    own.stop()


def test_results_come_in_order(world2: Pool) -> None:
    results = world2.run(cases_pool.identity, "ab", factor=2)
    assert [r["dp_rank"] for r in results] == [0, 1]
    assert [r["environment"]["LOCAL_RANK"] for r in results] == ["0", "1"]
    assert {r["environment"]["LOCAL_SIZE"] for r in results} == {"2"}
    assert {r["value"] for r in results} == {"abab"}
    assert {r["threads"] for r in results} == {1}


def test_workers_stay_up_and_start_every_case_alike(world2: Pool) -> None:
    first = world2.run(cases_pool.identity, 1)
    again = world2.run(cases_pool.identity, 1)
    assert [r["pid"] for r in first] == [r["pid"] for r in again] == world2.pids
    assert {r["drawn"] for r in first} == {r["drawn"] for r in again}


def test_what_a_case_leaves_is_cleared(world2: Pool) -> None:
    assert world2.run(cases_pool.leave_an_engine) == [2, 2]
    assert world2.run(cases_pool.what_is_left) == [0, 0]


def test_an_error_is_reported_while_the_others_wait(pool: Pool) -> None:
    victim = 1
    pool.run(cases_pool.identity, 1)
    pids = pool.pids
    started = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool.run(cases_pool.raise_in, victim, timeout=60)
    assert time.monotonic() - started < 20
    assert f"process {victim} raised" in str(caught.value)
    assert f"ValueError: wrong in process {victim}" in str(caught.value)
    assert "cases_pool.py" in str(caught.value)
    assert not any(_alive(pid) for pid in pids)


def test_a_hang_is_killed_in_time_with_its_children(pool: Pool) -> None:
    pool.run(cases_pool.identity, 1)
    family = pool.pids
    started = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool.run(cases_pool.hang_in_a_loop, timeout=2)
    assert time.monotonic() - started < 8
    message = str(caught.value)
    assert "no answer within 2 s" in message
    assert message.count("about to hang") == 2  # each log
    assert message.count("in hang_in_a_loop") >= 2  # each stack
    family += [p.pid for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]
    assert not any(_alive(pid) for pid in family)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
