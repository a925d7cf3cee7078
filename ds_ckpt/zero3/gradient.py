"""The gradient hook: another exchange in the place of ZeRO-3's reduce-scatter of a bucket.

DeepSpeed reduces a bucket in `__avg_scatter_grads(params, dtype)`, which scales and casts around
one call of the module-global `reduce_scatter_coalesced(tensors, group)`. The hook notes which
parameters the bucket holds, then answers that one call: *the mean over the group, my chunk of each
tensor, unpadded*. Everything around it stays DeepSpeed's. With `overlap` the first call is made
later, by a thread of its own (`overlap.py`), and answered with nothing for now.

`_loss_scale_update_and_overflow_cleanup` tells whether a step is skipped, by every process, or the
weights will change. After a backward that does not end nothing does: the next forward finds that
buckets were reduced and no epilogue came, or that a step began and no verdict came, and drops the
step.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.zero3.compatibility import Reduce, check_identity, fill_in_verdict
from ds_ckpt.zero3.overlap import Later, Overlap, Worker
from ds_ckpt.zero3.skips import Skips

log = logging.getLogger("ds_ckpt")
_PREFIX = "_DeepSpeedZeroOptimizer_Stage3__"
_PATIENCE_S = 10.0
"""How long closing waits for an exchange under way; it hangs where another process has gone."""
_current = threading.local()
"""In each thread, the hook whose bucket is about to be reduced, and the bucket's parameters."""
_global = Patches()
_leases: set[Lease] = set()


class Lease:
    """What one hook holds of the program: DeepSpeed's module-global, which stays replaced while
    there is a lease, and the exchange's thread.

    Apart from the hook, so that it can be given up when an engine is dropped without a word.
    `close()` may be called more than once.
    """

    def __init__(self) -> None:
        self.worker = Worker("exchange of ds_ckpt")
        if not _leases:
            _replace_reduction()
        _leases.add(self)

    def close(self) -> None:
        _leases.discard(self)
        if not _leases:
            _global.undo()
        if not self.worker.close(_PATIENCE_S):
            log.warning(
                "ds_ckpt: an exchange is still under way after %g s; its thread ends with it",
                _PATIENCE_S,
            )


def _replace_reduction() -> None:
    """Calls go to the hook that has announced a bucket in this thread, all others to DeepSpeed."""
    from deepspeed.runtime.zero import stage3

    deepspeeds = stage3.reduce_scatter_coalesced

    def reduce_scatter_coalesced(
        tensors: list[torch.Tensor], group: Any = None
    ) -> list[torch.Tensor]:
        def in_group(bucket: list[torch.Tensor]) -> list[torch.Tensor]:
            result: list[torch.Tensor] = deepspeeds(bucket, group)
            return result

        hook: GradientHook | None = getattr(_current, "hook", None)
        if hook is None:  # another engine in this program, which has no session
            return in_group(tensors)
        return hook.reduce_bucket(_current.params, tensors, group, in_group)

    reduce_scatter_coalesced.__wrapped__ = deepspeeds  # type: ignore[attr-defined]
    _global.set(stage3, "reduce_scatter_coalesced", reduce_scatter_coalesced)


class BucketExchange(Protocol):
    """What stands in for the reduction of one bucket.

    `reduce` may be called by another thread than the rest: never by two at once, never while a step
    ends, but while `inline` runs.
    """

    def inline(self, names: Sequence[str]) -> bool:
        """Whether `reduce` would hand this bucket over to DeepSpeed, the same on every process.

        It is then called by the thread that runs DeepSpeed, whose group nobody else may use.
        """

    def reduce(
        self,
        names: Sequence[str],
        tensors: list[torch.Tensor],
        *,
        loss_scale: float,
        deepspeed_reduce: Reduce,
    ) -> list[torch.Tensor]:
        """Mean over the group, this process's chunk (`ceil(numel / world)`) of each tensor.

        Args:
            names: parameter names, in the bucket's order.
            tensors: full gradients of this process; may be overwritten.
            loss_scale: what the gradients are multiplied by.
            deepspeed_reduce: DeepSpeed's own, for an exchange that hands over.
        """

    def step_ended(self, *, skipped: bool) -> None:
        """Skipped or not is the same on every process; skipped, too, where `reduce` raised or the
        program drops its gradients. Nothing is pending after it, also where it raises, which keeps
        the weights as they are."""


class GradientHook:
    """Routes one ZeRO-3 optimizer's buckets to a `BucketExchange`. `detach()` restores it.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        names: parameter name by `ds_id`.
        exchange: None counts only, DeepSpeed's own reduction runs.
        overlap: have the exchange's thread reduce buckets while backward goes on.
        verify: an exchange that sends everything, where DeepSpeed's source has changed: the first
            finite bucket is held against DeepSpeed's own reduction.
    """

    def __init__(
        self,
        optimizer: Any,
        names: dict[int, str],
        exchange: BucketExchange | None,
        counters: Counters,
        *,
        overlap: bool = False,
        verify: BucketExchange | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._exchange = exchange
        self._counters = counters
        self._verify = verify
        self._patches = Patches()
        self.lease = Lease()
        self._overlap: Overlap | None = None
        self._backward_ends = False
        self._unfinished = False
        """Buckets were reduced and backward has not ended, or a step began and has no verdict."""
        if overlap and exchange is not None:
            self._overlap = Overlap(optimizer, counters, self.lease.worker)
        self._install()
        if self._overlap is not None:
            self._install_overlap(self._overlap)

    def _install(self) -> None:
        optimizer = self._optimizer
        fill_in_verdict(optimizer, self._patches, always_check=self._exchange is not None)
        avg_scatter = getattr(optimizer, f"{_PREFIX}avg_scatter_grads")
        overflow_decision = optimizer._loss_scale_update_and_overflow_cleanup

        def reduced(params: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            _current.hook, _current.params = self, params
            try:
                with self._counters.purpose(Purpose.REDUCE):
                    result: list[torch.Tensor] = avg_scatter(params, dtype)
                    return result
            finally:
                _current.hook = _current.params = None

        def reduced_here(params: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            start_s = time.perf_counter()
            try:
                return reduced(params, dtype)
            finally:
                seconds = time.perf_counter() - start_s
                self._counters.reduce_s += seconds
                self._counters.exposed_reduce_s += seconds

        def avg_scatter_grads(params: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            self._unfinished = self._exchange is not None
            with self._void_on_error():
                if self._overlap is None:
                    return reduced_here(params, dtype)
                if self._inline(params):
                    self._take_all()  # in the buckets' order
                    return reduced_here(params, dtype)
                reduce = functools.partial(reduced, dtype=dtype)
                more = not self._backward_ends
                return self._overlap.hand_over(params, dtype, reduce, more_to_come=more)

        skips = Skips(speaks=torch_dist.get_rank() == 0)

        def loss_scale_update_and_overflow_cleanup() -> Any:
            self._unfinished = False
            scale = self._scale()
            try:
                skipped = overflow_decision()
                skips.step_ended(skipped=bool(skipped), before=scale, after=self._scale())
                if self._exchange is not None:
                    with self._counters.purpose(Purpose.REDUCE):  # sums that all processes know
                        self._exchange.step_ended(skipped=bool(skipped))
            except BaseException:  # as DeepSpeed does where the loss scale can fall no further
                self.drop_step()
                raise
            return skipped

        def step_begins() -> None:
            self._unfinished = self._exchange is not None

        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def give_up(*args: Any, **kwargs: Any) -> Any:
            """Between backward and step the gradients are dropped, and what was held of them."""
            if self._broke_off():
                self.drop_step()
            elif self._exchange is not None:
                self._exchange.step_ended(skipped=True)
            return zero_grad(*args, **kwargs)

        epilogue = optimizer.independent_gradient_partition_epilogue

        def gradient_partition_epilogue() -> None:
            self._backward_ends = True
            try:
                epilogue()  # reduces or hands over the last bucket
                self._take_all()
            finally:
                self._backward_ends = False
            self._unfinished = False

        self._patches.set(optimizer, "zero_grad", give_up)
        name = "independent_gradient_partition_epilogue"
        self._patches.set(optimizer, name, gradient_partition_epilogue)
        name = "clear_backward_seen_flag"  # a forward begins
        forward_begins = _after(self._drop_unfinished, getattr(optimizer, name))
        self._patches.set(optimizer, name, forward_begins)
        self._patches.set(optimizer, "_pre_step", _after(step_begins, optimizer._pre_step))
        self._patches.set(optimizer, f"{_PREFIX}avg_scatter_grads", avg_scatter_grads)
        name = "_loss_scale_update_and_overflow_cleanup"
        self._patches.set(optimizer, name, loss_scale_update_and_overflow_cleanup)

    def _install_overlap(self, overlap: Overlap) -> None:
        """Take partitions where DeepSpeed counts on them, and before it begins anything new."""
        optimizer = self._optimizer
        partition_grads = optimizer.partition_grads

        def partition_grads_that_are_there(params: list[Any], partitions: Any) -> Any:
            return [] if isinstance(partitions, Later) else partition_grads(params, partitions)

        self._patches.set(optimizer, "partition_grads", partition_grads_that_are_there)
        # what a backward that was interrupted has left, DeepSpeed would have taken long ago
        for name in ("backward_prologue", "_pre_step"):
            self._patches.set(optimizer, name, _after(self._take_all, getattr(optimizer, name)))
        name = "offload_states"
        self._patches.set(optimizer, name, _after(overlap.free_spares, getattr(optimizer, name)))

    def _take_all(self) -> None:
        """Wait for the buckets on their way."""
        if self._overlap is not None:
            with self._void_on_error():
                self._overlap.take_all()

    @contextmanager
    def _void_on_error(self) -> Iterator[None]:
        """Leave nothing of the step's gradients where an exchange has raised.

        Whoever catches the error may train on; residuals were rolled back where an exchange raised,
        and are with the next forward where something else did.
        """
        try:
            yield
        except BaseException:
            if self._exchange is not None:  # else DeepSpeed's error, DeepSpeed's state
                self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        from deepspeed.accelerator import get_accelerator

        optimizer = self._optimizer
        optimizer.micro_step_id = 0
        optimizer._epilogue_ran_this_backward = False
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear_params()
        # a step takes these of all parameters, also of those that the next backward leaves out
        get_accelerator().synchronize()
        optimizer.grad_partitions_flat_buffer.zero_()
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
            for master in optimizer.fp32_partitioned_groups_flat:
                if master.grad is not None:
                    master.grad.zero_()
        for group in optimizer.fp16_groups:
            for param in group:
                param.grad = None

    def drop_step(self) -> None:
        """Drop the gradients of the step under way and what its exchanges have left pending.

        Of an accumulated step all micro-steps so far: what they left cannot be told apart. Waits
        for the buckets on their way. Nothing happens without an exchange.

        Raises:
            Exception: what the exchange of one of them raised. They are dropped all the same.
        """
        if self._exchange is None:
            return
        self._take_all()
        if self._overlap is not None:
            self._overlap.wait_for_dropped()
        self._exchange.step_ended(skipped=True)
        self._drop_gradients()
        self._unfinished = False

    def _broke_off(self) -> bool:
        """Whether a backward has reduced buckets or left gradients in one, and has not ended, or a
        step has not come to its verdict."""
        if self._exchange is None:
            return False
        return self._unfinished or any(b.params for b in self._optimizer.ipg_buckets.values())

    def _drop_unfinished(self) -> None:
        if self._broke_off():
            self.drop_step()
            log.warning(
                "ds_ckpt: a backward or a step did not end; its gradients so far are dropped"
            )

    def _inline(self, params: Sequence[Any]) -> bool:
        """Whether the thread that runs DeepSpeed reduces this bucket itself."""
        import deepspeed.comm.comm as ds_comm

        assert self._exchange is not None
        if self._verify is not None or ds_comm.comms_logger.enabled:  # its timers know one thread
            return True
        return self._exchange.inline([self._names[p.ds_id] for p in params])

    def replace_exchange(self, exchange: BucketExchange) -> None:
        """Have another exchange reduce every bucket from now on; between steps only."""
        self._take_all()
        self._exchange = exchange

    def reduce_bucket(
        self,
        params: Sequence[Any],
        tensors: list[torch.Tensor],
        group: Any,
        deepspeed_reduce: Reduce,
    ) -> list[torch.Tensor]:
        """Answer one call of `reduce_scatter_coalesced` for the bucket's parameters."""
        if self._exchange is None:
            return deepspeed_reduce(tensors)
        assert len(params) == len(tensors), "DeepSpeed handed over another bucket than announced"
        self._refuse_foreign_group(params[0], group)
        names = [self._names[p.ds_id] for p in params]
        scale = self._scale()
        if self._verify is not None:
            ours = functools.partial(
                self._verify.reduce, names, loss_scale=scale, deepspeed_reduce=deepspeed_reduce
            )
            if check_identity(names, tensors, ours, deepspeed_reduce, group):
                self._verify = None
        try:
            return self._exchange.reduce(
                names, tensors, loss_scale=scale, deepspeed_reduce=deepspeed_reduce
            )
        except BaseException:
            self._exchange.step_ended(skipped=True)
            raise

    def _scale(self) -> float:
        """What the gradients are multiplied by: the loss scale, or torch autocast's scaler."""
        scaler = getattr(self._optimizer, "torch_autocast_gradscaler", None)
        scale = float(self._optimizer.loss_scale)
        return scale * float(scaler.get_scale()) if scaler is not None else scale

    def _refuse_foreign_group(self, param: Any, group: Any) -> None:
        ours = self._optimizer.dp_process_group
        if torch_dist.get_world_size(group) != torch_dist.get_world_size(ours):
            raise UnsupportedError(
                Problem(
                    where=self._names[param.ds_id],
                    found=f"a reduction over {torch_dist.get_world_size(group)} processes, "
                    f"others go over {torch_dist.get_world_size(ours)}",
                    why="residuals belong to one data-parallel group; expert-parallel gradients "
                    "are averaged over another",
                    remedy='set "ds_ckpt": {"compression": {"method": "none"}} for this model',
                )
            )

    def detach(self) -> None:
        """Give the optimizer its own methods back. Buckets on their way are dropped."""
        self._patches.undo()
        try:
            if self._overlap is not None:
                self._overlap.drop()
        finally:
            self.lease.close()


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both
