"""The worker pool itself: order, errors, hangs, and nothing left behind."""

import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool, PoolError, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of its own, for tests that break it: the next one starts it anew."""
    own = Pool(2)
    yield own
    own.stop()


@ranks(2)
def _wrong_on(victim: int) -> None:
    rank = dist.get_rank()
    assert rank != victim
    dist.barrier()


def _hang_in_a_loop() -> None:
    """Each process hangs, with a child beside it that is in another process group."""
    print("about to hang", flush=True)
    with subprocess.Popen(["sleep", "600"], start_new_session=True):
        while True:
            time.sleep(0.01)


@pytest.mark.slow
def test_an_error_is_reported_while_the_others_wait(pool: Pool) -> None:
    victim = 1
    assert pool.run(dist.get_rank) == [0, 1]
    pids = pool.pids
    started = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool.run(_wrong_on, [2], {"victim": victim}, timeout=60)
    assert time.monotonic() - started < 20
    assert f"process {victim} raised" in str(caught.value)
    assert "assert rank != victim" in str(caught.value)
    assert f"victim = {victim}" in str(caught.value)
    assert "test_pool.py" in str(caught.value)
    assert not any(_alive(pid) for pid in pids)


def test_a_hang_is_killed_in_time_with_its_children(pool: Pool) -> None:
    assert pool.run(dist.get_rank) == [0, 1]
    family = pool.pids
    started = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool.run(_hang_in_a_loop, timeout=2)
    assert time.monotonic() - started < 8
    message = str(caught.value)
    assert "no answer within 2 s" in message
    assert message.count("about to hang") == 2  # each log
    assert message.count("in _hang_in_a_loop") >= 2  # each stack
    family += [p.pid for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]
    assert not any(_alive(pid) for pid in family)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
