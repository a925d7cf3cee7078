"""The thread that exchanges run on: order, errors, an end."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.zero3.overlap import Worker

PATIENCE_S = 5.0


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("exchange of")]


@given(st.lists(st.floats(0, 2e-3), max_size=12))
@settings(max_examples=20, deadline=None)
def test_calls_are_done_in_their_order_by_one_thread(naps_s: list[float]) -> None:
    worker = Worker("exchange of test")
    done: list[tuple[int, int]] = []

    def call(i: int, nap_s: float) -> int:
        time.sleep(nap_s)
        done.append((i, threading.get_ident()))
        return i

    futures = [worker.submit(lambda i=i, n=n: call(i, n)) for i, n in enumerate(naps_s)]
    assert [f.result(PATIENCE_S) for f in futures] == list(range(len(naps_s)))
    assert [i for i, _ in done] == list(range(len(naps_s)))
    assert len({ident for _, ident in done} - {threading.get_ident()}) == min(1, len(naps_s))
    assert worker.close(PATIENCE_S)
    assert _threads() == []


def _breaks_in_here() -> None:
    raise ValueError("no link")


def test_an_error_comes_with_its_traceback_and_stops_what_follows() -> None:
    worker = Worker("exchange of test")
    bad = worker.submit(_breaks_in_here)
    after = [worker.submit(lambda: pytest.fail("done after an error")) for _ in range(3)]
    with pytest.raises(ValueError, match="no link") as error:
        bad.result(PATIENCE_S)
    assert "_breaks_in_here" in "".join(traceback.format_tb(error.value.__traceback__))
    for future in after:
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)
    late = worker.submit(lambda: pytest.fail("nobody has said to go on"))
    worker.go_on()
    assert worker.submit(lambda: 7).result(PATIENCE_S) == 7
    assert late.cancelled()
    worker.close(PATIENCE_S)


def test_go_on_without_an_error_changes_nothing() -> None:
    worker = Worker("exchange of test")
    worker.go_on()
    assert worker.submit(lambda: 1).result(PATIENCE_S) == 1
    worker.go_on()
    assert worker.submit(lambda: 2).result(PATIENCE_S) == 2
    worker.close(PATIENCE_S)


def test_closing_cancels_what_waits_and_gives_up_on_what_hangs() -> None:
    worker = Worker("exchange of test")
    begun, gate = threading.Event(), threading.Event()
    running = worker.submit(lambda: begun.set() or gate.wait(PATIENCE_S))
    assert begun.wait(PATIENCE_S)
    waiting = worker.submit(lambda: pytest.fail("done after the end"))
    assert not worker.close(0.05)
    assert worker.submit(lambda: 3).result(PATIENCE_S) == 3  # another thread
    gate.set()
    assert running.result(PATIENCE_S)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)
    assert worker.close(PATIENCE_S)
    assert worker.close(PATIENCE_S)
    assert _threads() == []


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Gradient:
        pass

    worker = Worker("exchange of test")
    gradient = Gradient()
    seen = weakref.ref(gradient)
    worker.submit(lambda g=gradient: None).result(PATIENCE_S)
    del gradient
    worker.submit(lambda: None).result(PATIENCE_S)
    gc.collect()
    assert seen() is None
    worker.close(PATIENCE_S)


def test_a_worker_can_be_closed_by_its_own_thread() -> None:
    worker = Worker("exchange of test")
    assert worker.submit(lambda: worker.close(PATIENCE_S)).result(PATIENCE_S)
    limit = time.monotonic() + PATIENCE_S
    while _threads() and time.monotonic() < limit:
        time.sleep(0.01)
    assert _threads() == []
