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


@pytest.mark.slow
def test_an_error_is_reported_while_the_others_wait(pool: Pool) -> None:
    victim = 1
    pool.run(cases_pool.rank)
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
    pool.run(cases_pool.rank)
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
