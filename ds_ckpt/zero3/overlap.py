"""Buckets on their way: exchanged by a thread of its own while backward goes on.

DeepSpeed reduces a bucket and takes its partitions in one go, and on the CPU accelerator it blocks
in between. Here a bucket is handed over instead: its gradients leave their parameters, DeepSpeed's
contiguous buffer changes places with a spare one (a copy would cost about 0.3 ns an element), and
its partitions are taken later by DeepSpeed's own `partition_grads`, in the buckets' order and in
DeepSpeed's thread: when another bucket is handed over, at the latest when backward ends.

At most `LIMIT` buckets are on their way, so at most as many spare buffers exist. For accelerators
without streams: elsewhere exchanges stay in DeepSpeed's own stream.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
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
    future: Future[tuple[list[torch.Tensor], float]]
    """The partitions, and the seconds that they took."""
    buffer: torch.Tensor | None
    """Where the gradients lie, to be used again."""


class Overlap:
    """The buckets of one optimizer that are on their way.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer, with its own `partition_grads`.
        counters: where reductions' seconds are counted.
        worker: does the exchanges; whoever gives it closes it.
    """

    def __init__(self, optimizer: Any, counters: Counters, worker: Worker) -> None:
        self._optimizer = optimizer
        self._partition_grads = optimizer.partition_grads
        self._counters = counters
        self._worker = worker
        self._flights: deque[_Flight] = deque()
        self._spares: list[torch.Tensor] = []
        self._dropped: list[Future[Any]] = []

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
        while self._flights and (
            len(self._flights) >= LIMIT or _arrived_well(self._flights[0].future)
        ):
            self._take_next()
        handed = [Handed(p) for p in params]
        buffer = self._exchange_buffer(dtype, handed) if more_to_come else None
        future = self._worker.submit(partial(_timed, reduce, handed))
        self._flights.append(_Flight(list(params), future, buffer))
        for param in params:
            param.grad = None
        return Later()

    def take_all(self) -> None:
        """Wait for every bucket on its way and let DeepSpeed take its partitions.

        Raises:
            Exception: what a reduction raised; its bucket and later ones are not taken.
        """
        while self._flights:
            self._take_next()

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
                partitions, seconds = flight.future.result()
        except BaseException:
            self.drop()
            raise
        finally:
            self._counters.exposed_reduce_s += time.perf_counter() - start_s
        self._counters.reduce_s += seconds
        self._flights.popleft()
        # a parameter may have the next gradient already, which is not DeepSpeed's to drop yet
        gradients = [p.grad for p in flight.params]
        self._partition_grads(flight.params, partitions)
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
        fits = [s.shape == buffer.shape and s.dtype == buffer.dtype for s in self._spares]
        bucket.buffer = (
            self._spares.pop(fits.index(True)) if any(fits) else torch.empty_like(buffer)
        )
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


class Worker:
    """A daemon thread, started with the first call.

    After a call that raised, later ones are cancelled until `go_on`: collectives of one group must
    not run on past one that is missing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have `call` done after all earlier ones. Its exception comes with `Future.result`."""
        if self._thread is None:
            self._calls, self._failed = queue.SimpleQueue(), threading.Event()
            self._thread = threading.Thread(  # which keeps nothing of this object alive
                target=_serve, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, call, self._failed))
        return future

    def go_on(self) -> None:
        """After a call that raised: what is submitted from now on is done again."""
        if self._failed.is_set():
            self._failed = threading.Event()

    def close(self, patience_s: float) -> bool:
        """Cancel what waits and end the thread; a later `submit` starts another.

        Returns:
            False where the call under way was not done within `patience_s`. Nobody waits for it any
            more; the thread ends with it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._failed.set()
        self._calls.put(None)
        if thread is threading.current_thread():  # a finalizer that the collector ran here
            return True
        thread.join(patience_s)
        return not thread.is_alive()


_Call = tuple["Future[Any]", Callable[[], Any], threading.Event]
"""What `submit` was given, and the event that cancels it and is set where it fails."""


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (item := calls.get()) is not None:
        future, call, failed = item
        if failed.is_set():
            future.cancel()
        elif future.set_running_or_notify_cancel():
            _do(future, call, failed)
        del item, future, call  # an idle thread keeps no gradient alive


def _do(future: Future[Any], call: Callable[[], Any], failed: threading.Event) -> None:
    try:
        result = call()
    except BaseException as error:
        failed.set()  # before anybody can know of the error
        future.set_exception(error)
    else:
        future.set_result(result)


def _timed(
    reduce: Callable[[Sequence[Handed]], list[torch.Tensor]], handed: Sequence[Handed]
) -> tuple[list[torch.Tensor], float]:
    start_s = time.perf_counter()
    with torch.no_grad():
        return reduce(handed), time.perf_counter() - start_s
