"""Buckets on their way: exchanged by a thread of its own while backward goes on.

DeepSpeed reduces a bucket and takes its partitions in one go, and on the CPU accelerator it blocks
in between. Here a bucket is handed over instead: its gradients leave their parameters, DeepSpeed's
contiguous buffer changes places with a spare one (a copy would cost about 0.3 ns an element), and
its partitions are taken later by DeepSpeed's own `partition_grads`, in the buckets' order and in
DeepSpeed's thread: when another bucket is handed over, at the latest when backward ends.

At most `LIMIT` buckets are on their way, so at most as many spare buffers exist.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch

from ds_ckpt.telemetry import Counters

LIMIT = 2
"""One bucket in work and one that waits for it; a third makes backward wait."""


class Handed:
    """A parameter of a bucket that was handed over, with the gradient that it had then."""

    def __init__(self, param: Any) -> None:
        self._param = param
        self.grad = param.grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)


class Later(list[torch.Tensor]):
    """What DeepSpeed gets for partitions that have not arrived: it has nothing to take."""


@dataclass
class _Flight:
    params: list[Any]
    future: Future[_Arrived]
    buffer: torch.Tensor | None
    """Where the gradients lie, to be used again."""


@dataclass
class _Arrived:
    partitions: list[torch.Tensor]
    seconds: float
    event: Any
    """On an accelerator with streams: when the partitions are there."""


@dataclass
class _Streams:
    """The exchange's own stream, where the accelerator has streams."""

    accelerator: Any
    stream: Any = field(init=False)

    def __post_init__(self) -> None:
        synchronized = self.accelerator.is_synchronized_device()
        self.stream = None if synchronized else self.accelerator.Stream()

    def produced(self) -> Any:
        """Marks what the current stream has been given so far."""
        return self._mark(None)

    def run(
        self,
        reduce: Callable[[Sequence[Handed]], list[torch.Tensor]],
        handed: Sequence[Handed],
        produced: Any,
    ) -> _Arrived:
        """In the worker: reduce the bucket once its gradients are there."""
        start_s = time.perf_counter()
        context = nullcontext() if self.stream is None else self.accelerator.stream(self.stream)
        with torch.no_grad(), context:
            if self.stream is not None:
                produced.wait(self.stream)
                for param in handed:
                    param.grad.record_stream(self.stream)
            partitions = reduce(handed)
            return _Arrived(partitions, time.perf_counter() - start_s, self._mark(self.stream))

    def take(self, arrived: _Arrived) -> list[torch.Tensor]:
        """Let the current stream wait for the partitions."""
        if arrived.event is not None:
            arrived.event.wait()
            for partition in arrived.partitions:
                partition.record_stream(self.accelerator.current_stream())
        return arrived.partitions

    def _mark(self, stream: Any) -> Any:
        if self.stream is None:
            return None
        event = self.accelerator.Event()
        event.record(stream if stream is not None else self.accelerator.current_stream())
        return event


class Overlap:
    """The buckets of one optimizer that are on their way.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer, with its own `partition_grads`.
        counters: where reductions' seconds are counted.
        worker: does the exchanges; whoever gives it closes it.
    """

    def __init__(self, optimizer: Any, counters: Counters, worker: Worker) -> None:
        from deepspeed.accelerator import get_accelerator

        self._optimizer = optimizer
        self._partition_grads = optimizer.partition_grads
        self._counters = counters
        self._worker = worker
        self._accelerator = get_accelerator()
        self._streams = _Streams(self._accelerator)
        self._flights: deque[_Flight] = deque()
        self._spares: list[torch.Tensor] = []
        self._dropped: list[Future[_Arrived]] = []

    def hand_over(
        self,
        params: Sequence[Any],
        dtype: torch.dtype,
        reduce: Callable[[Sequence[Handed]], list[torch.Tensor]],
        *,
        more_to_come: bool,
    ) -> Later:
        """Have a bucket reduced by the worker; first take what has arrived.

        Args:
            params: DeepSpeed's parameters; their gradients are taken off them.
            dtype: which of DeepSpeed's buckets this is.
            reduce: called in the worker's thread.
            more_to_come: gradients may be written to the bucket's buffer before this one is done.

        Raises:
            Exception: what an earlier bucket's reduction raised; this one is not begun.
        """
        # An error waits until every process must look at it: raised as soon as it is there, it
        # would end backward at another place in each, between other gathers.
        while self._flights and _arrived_well(self._flights[0].future):
            self._take_next()
        while len(self._flights) >= LIMIT:
            self._take_next()
        handed = [Handed(p) for p in params]
        buffer = self._exchange_buffer(dtype, handed) if more_to_come else None
        produced = self._streams.produced()
        future = self._worker.submit(partial(self._streams.run, reduce, handed, produced))
        self._flights.append(_Flight(list(params), future, buffer))
        for param in params:
            param.grad = None
        return Later()

    def take_all(self) -> None:
        """Wait for every bucket on its way and let DeepSpeed take its partitions.

        Raises:
            Exception: what a reduction raised; its bucket and later ones are not taken.
        """
        if not self._flights:
            return
        while self._flights:
            self._take_next()
        if not self._accelerator.resolves_data_dependency():
            self._optimizer.reduce_and_partition_stream.synchronize()

    def drop(self) -> None:
        """Forget the buckets on their way; those that have not begun are not exchanged."""
        for flight in self._flights:  # their buffers may be in use and are not used again
            if not flight.future.cancel() and not flight.future.done():
                self._dropped.append(flight.future)
        self._flights.clear()
        self._worker.go_on()

    def wait_for_dropped(self) -> None:
        """Until the worker has done what `drop` could not stop any more."""
        wait(self._dropped)
        self._dropped.clear()

    def free_spares(self) -> None:
        """Give up the spare buffers."""
        self._spares.clear()

    def _take_next(self) -> None:
        flight = self._flights[0]
        start_s = time.perf_counter()
        try:
            with self._counters.span("exchange_wait"):
                arrived = flight.future.result()
        except BaseException:
            self.drop()
            raise
        finally:
            self._counters.exposed_reduce_s += time.perf_counter() - start_s
        self._counters.reduce_s += arrived.seconds
        self._flights.popleft()
        # a parameter may have the next gradient already, which is not DeepSpeed's to drop yet
        gradients = [p.grad for p in flight.params]
        with self._accelerator.stream(self._optimizer.reduce_and_partition_stream):
            self._partition_grads(flight.params, self._streams.take(arrived))
        for param, gradient in zip(flight.params, gradients, strict=True):
            param.grad = gradient
        if flight.buffer is not None:
            self._spares.append(flight.buffer)

    def _exchange_buffer(self, dtype: torch.dtype, handed: Sequence[Handed]) -> torch.Tensor | None:
        """Put a spare in the place of DeepSpeed's buffer if the bucket lies in it; that one."""
        bucket = self._optimizer.ipg_buckets[dtype]
        buffer: torch.Tensor | None = bucket.buffer
        if buffer is None or not any(_shares_memory(p.grad, buffer) for p in handed):
            return None
        for i, spare in enumerate(self._spares):
            if (spare.shape, spare.dtype, spare.device) == (
                buffer.shape,
                buffer.dtype,
                buffer.device,
            ):
                bucket.buffer = self._spares.pop(i)
                return buffer
        bucket.buffer = torch.empty_like(buffer)
        return buffer


def _shares_memory(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def describe_overlap(optimizer: Any, elements: int) -> str:
    """One clause on what overlap can hide with this many trainable entries."""
    bucket = int(optimizer.reduce_bucket_size)
    if elements <= bucket:
        return (
            f"exchanged when backward ends: its {elements} gradients are one bucket "
            f"(zero_optimization.reduce_bucket_size {bucket})"
        )
    return f"exchanged while backward goes on, in about {-(-elements // bucket)} buckets"


def _arrived_well(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


class _Word(Enum):
    GO_ON = "do again what comes from here on"
    END = "end the thread"


_Item = tuple["Future[Any]", Callable[[], Any]] | _Word


@dataclass
class _Inbox:
    """What the thread and its owner share, so that the thread keeps nothing else alive."""

    items: queue.SimpleQueue[_Item] = field(default_factory=queue.SimpleQueue)
    failed: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)


class Worker:
    """A daemon thread, started with the first call.

    After a call that raised, later ones are cancelled until `go_on`: collectives of one group must
    not run on past one that is missing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have `call` done after all earlier ones. Its exception comes with `Future.result`."""
        if self._thread is None:
            self._inbox = _Inbox()
            self._thread = threading.Thread(
                target=_serve, args=(self._inbox,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[Any] = Future()
        self._inbox.items.put((future, call))
        return future

    def go_on(self) -> None:
        """After a call that raised: what is submitted from now on is done again."""
        if self._inbox.failed.is_set():
            self._inbox.items.put(_Word.GO_ON)

    def close(self, patience_s: float) -> bool:
        """Cancel what waits and end the thread; a later `submit` starts another.

        Returns:
            False where the call under way was not done within `patience_s`. Nobody waits for it any
            more; the thread ends with it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._inbox.closed.set()
        self._inbox.items.put(_Word.END)
        if thread is threading.current_thread():  # a finalizer that the collector ran here
            return True
        thread.join(patience_s)
        return not thread.is_alive()


def _serve(inbox: _Inbox) -> None:
    while (item := inbox.items.get()) is not _Word.END:
        if item is _Word.GO_ON:
            inbox.failed.clear()
            continue
        assert isinstance(item, tuple)
        future, call = item
        if inbox.failed.is_set() or inbox.closed.is_set():
            future.cancel()
        elif future.set_running_or_notify_cancel():
            _do(future, call, inbox)
        del item, future, call  # an idle thread keeps no gradient alive


def _do(future: Future[Any], call: Callable[[], Any], inbox: _Inbox) -> None:
    try:
        result = call()
    except BaseException as error:
        inbox.failed.set()  # before anybody can know of the error
        future.set_exception(error)
    else:
        future.set_result(result)
