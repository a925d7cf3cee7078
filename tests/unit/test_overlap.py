"""Buckets on their way, on an optimizer that has only what they need of DeepSpeed's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.zero3 import overlap as overlap_module
from ds_ckpt.zero3.overlap import LIMIT, Overlap, Worker, describe_overlap

PATIENCE_S = 5.0
SIZE = 8


@dataclass
class Optimizer:
    """Writes gradients into one buffer as DeepSpeed does, and takes partitions."""

    taken: list[list[float]] = field(default_factory=list)
    reduce_and_partition_stream: Any = None

    def __post_init__(self) -> None:
        self.bucket = SimpleNamespace(buffer=torch.empty(SIZE))
        self.ipg_buckets = {torch.float32: self.bucket}

    def gradient(self, value: float) -> Any:
        """A parameter whose gradient lies in the buffer, over that of the bucket before."""
        return SimpleNamespace(grad=self.bucket.buffer.narrow(0, 0, 4).fill_(value), ds_id=value)

    def partition_grads(self, params: list[Any], partitions: list[torch.Tensor]) -> None:
        self.taken.append([float(p.sum()) for p in partitions])
        for param in params:
            param.grad = None


@pytest.fixture
def overlap() -> Any:
    worker = Worker("exchange of test")
    optimizer = Optimizer()
    yield SimpleNamespace(
        it=Overlap(optimizer, Counters(), worker), optimizer=optimizer, worker=worker
    )
    assert worker.close(PATIENCE_S)


def _hand_over(overlap: Any, param: Any, reduce: Any) -> Any:
    return overlap.it.hand_over([param], torch.float32, reduce, more_to_come=True)


def test_a_buffer_is_not_written_while_it_is_read_and_is_used_again(overlap: Any) -> None:
    gate, buffers = threading.Event(), set()

    def late(handed: Any) -> list[torch.Tensor]:
        assert gate.wait(PATIENCE_S)
        return [param.grad * 2 for param in handed]

    for value in range(10):
        param = overlap.optimizer.gradient(float(value))
        buffers.add(param.grad.data_ptr())
        if value == LIMIT:
            gate.set()  # a third would wait for ever
        assert _hand_over(overlap, param, late) == []
        assert param.grad is None
    overlap.it.take_all()
    assert overlap.optimizer.taken == [[8.0 * value] for value in range(10)]
    assert len(buffers) <= LIMIT + 1
    overlap.it.free_spares()


def test_a_second_gradient_stays_where_the_first_is_taken(overlap: Any) -> None:
    param = overlap.optimizer.gradient(1.0)
    _hand_over(overlap, param, lambda handed: [handed[0].grad])
    second = param.grad = torch.ones(3)
    overlap.it.take_all()
    assert overlap.optimizer.taken == [[4.0]]
    assert param.grad is second


def test_gradients_outside_of_the_buffer_leave_it_alone(overlap: Any) -> None:
    buffer = overlap.optimizer.bucket.buffer
    param = SimpleNamespace(grad=torch.ones(100))
    _hand_over(overlap, param, lambda handed: [handed[0].grad])
    assert overlap.optimizer.bucket.buffer is buffer
    last = overlap.optimizer.gradient(2.0)
    overlap.it.hand_over([last], torch.float32, lambda h: [h[0].grad], more_to_come=False)
    assert overlap.optimizer.bucket.buffer is buffer
    overlap.it.take_all()
    assert overlap.optimizer.taken == [[100.0], [8.0]]


@given(buckets=st.integers(1, 6), bad=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_after_an_error_nothing_later_is_taken_and_the_next_step_works(
    buckets: int, bad: int
) -> None:
    worker, optimizer, counters = Worker("exchange of test"), Optimizer(), Counters()
    it = Overlap(optimizer, counters, worker)
    done: list[int] = []

    def reduce(i: int, handed: Any) -> list[torch.Tensor]:
        if i == bad:
            raise ValueError("no link")
        done.append(i)
        return [handed[0].grad.clone()]

    def backward() -> None:
        for i in range(buckets):
            param = optimizer.gradient(1.0)
            it.hand_over([param], torch.float32, lambda h, i=i: reduce(i, h), more_to_come=True)
        it.take_all()

    if bad < buckets:
        with pytest.raises(ValueError, match="no link"):
            backward()
        assert done == list(range(bad))
        assert len(optimizer.taken) == bad
    bad = -1
    done.clear()
    optimizer.taken.clear()
    backward()
    assert done == list(range(buckets))
    assert len(optimizer.taken) == buckets
    assert counters.exposed_reduce_s > 0
    assert worker.close(PATIENCE_S)


def test_only_seconds_in_which_backward_stands_still_are_exposed(
    overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    gone_on, stands_still, ended = threading.Event(), threading.Event(), threading.Event()
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr(overlap_module, "time", clock)

    @contextlib.contextmanager
    def span(kind: str) -> Iterator[None]:
        assert kind == "exchange_wait"
        stands_still.set()
        yield

    def takes(seconds: float, begins: threading.Event) -> Any:
        def reduce(handed: Any) -> list[torch.Tensor]:
            assert begins.wait(PATIENCE_S)
            now_s[0] += seconds
            ended.set()
            return [handed[0].grad]

        return reduce

    counters = overlap.it._counters
    counters.spans = SimpleNamespace(span=span)
    _hand_over(overlap, overlap.optimizer.gradient(1.0), takes(2.0, gone_on))
    gone_on.set()
    assert ended.wait(PATIENCE_S)
    overlap.it.take_all()
    assert (counters.reduce_s, counters.exposed_reduce_s) == (2.0, 0.0)
    stands_still.clear()
    _hand_over(overlap, overlap.optimizer.gradient(2.0), takes(3.0, stands_still))
    overlap.it.take_all()
    assert (counters.reduce_s, counters.exposed_reduce_s) == (5.0, 3.0)


def test_each_thread_counts_under_its_own_purpose() -> None:
    counters = Counters()
    inside, go = threading.Event(), threading.Event()

    def reduce() -> None:
        with counters.purpose(Purpose.REDUCE):
            inside.set()
            assert go.wait(PATIENCE_S)
            for _ in range(20_000):
                counters.sent(1)

    thread = threading.Thread(target=reduce)
    thread.start()
    assert inside.wait(PATIENCE_S)
    with counters.purpose(Purpose.GATHER_BACKWARD):
        go.set()
        for _ in range(20_000):
            counters.sent(1)
    counters.sent(5)
    thread.join(PATIENCE_S)
    sent = counters.snapshot().bytes_sent
    assert sent[Purpose.REDUCE] == sent[Purpose.GATHER_BACKWARD] == 20_000
    assert sent[Purpose.OTHER] == 5


def test_seconds_are_counted_between_two_moments() -> None:
    counters = Counters(reduce_s=1.0, exposed_reduce_s=0.5)
    before = counters.snapshot()
    counters.reduce_s += 2.0
    counters.exposed_reduce_s += 0.25
    delta = counters.snapshot() - before
    assert (delta.reduce_s, delta.exposed_reduce_s) == (2.0, 0.25)
    counters.reset()
    assert counters.snapshot().reduce_s == 0


def test_one_bucket_is_said_to_hide_nothing() -> None:
    optimizer = SimpleNamespace(reduce_bucket_size=100)
    assert "when backward ends" in describe_overlap(optimizer, 100)
    assert "reduce_bucket_size 100" in describe_overlap(optimizer, 100)
    assert "about 2 buckets" in describe_overlap(optimizer, 101)
