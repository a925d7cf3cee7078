"""The gradient hook: another exchange in place of ZeRO-3's reduce-scatter of a bucket.

DeepSpeed reduces a bucket in `__avg_scatter_grads(params, dtype)`, which scales and casts around
one call of the module-global `reduce_scatter_coalesced(tensors, group)`. The hook replaces that
global for the duration of the call. Its replacement returns the mean over the group: this rank's
chunk of each tensor, unpadded. Everything around it stays DeepSpeed's.

`_loss_scale_update_and_overflow_cleanup` decides on every rank whether a step is skipped. A
backward or a step that raised has no such decision: the next forward finds it and drops the step.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import log
from ds_ckpt.patch import Patches, patched
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.zero3.compatibility import Reduce, SkipDecision, check_identity, wrap_skip_decision

SKIPPED_IN_A_ROW = 10
"""Skipped steps in a row, at an unchanged loss scale, before a warning."""
_PREFIX = "_DeepSpeedZeroOptimizer_Stage3__"
_reduction = threading.RLock()
"""Held while DeepSpeed's module-global is replaced: a program may have several engines."""


class BucketExchange(Protocol):
    """Reduces buckets in place of DeepSpeed."""

    def choose_reduction(self, names: Sequence[str], loss_scale: float) -> Reduce | None:
        """Return how the bucket of these parameters is reduced now; None: by DeepSpeed.

        The function takes this rank's full gradients, times `loss_scale` (DeepSpeed's, times
        autocast's), which it may overwrite. It returns the mean over the group: this rank's chunk
        (`ceil(numel / world)`) of each tensor.
        """

    def commit(self) -> None:
        """End a step that was taken, on all ranks. Nothing is pending afterwards."""

    def rollback(self) -> None:
        """End a step that was skipped, or whose gradients are dropped: a bucket may have raised."""


@dataclass(eq=False)
class GradientHook:
    """Routes one ZeRO-3 optimizer's buckets to a `BucketExchange` until `detach()`.

    Without an exchange it only counts, and DeepSpeed's own reduction runs.

    Attributes:
        names: Names by `ds_id` of the parameters to exchange; DeepSpeed reduces other buckets.
        exchange: May be replaced between steps.
        verify: An exchange that sends everything, if DeepSpeed's source has changed. The first
            finite bucket is compared with DeepSpeed's own reduction.
        before_forward: Called as each forward begins.
    """

    optimizer: Any
    names: dict[int, str]
    exchange: BucketExchange | None
    counters: Counters
    verify: BucketExchange | None = None

    def __post_init__(self) -> None:
        self._patches = Patches()
        self._is_unfinished = False
        """Buckets were reduced and backward has not ended, or a step began without a decision."""
        self._skipped_in_a_row = 0
        self._autocast_scale: float | None = None
        """Autocast's scale in the step under way; reading it waits for the device."""
        self.before_forward: list[Callable[[], None]] = [self._drop_unfinished]
        self._install()

    def _install(self) -> None:
        optimizer, patches = self.optimizer, self._patches
        avg_scatter = getattr(optimizer, f"{_PREFIX}avg_scatter_grads")
        zero_grad = optimizer.zero_grad
        epilogue = optimizer.independent_gradient_partition_epilogue
        stream = getattr(optimizer, "reduce_and_partition_stream", None)  # None on CPUs
        current = stream and torch.get_device_module(stream.device).current_stream(stream.device)
        waits = ("reduce", "collective") if stream != current else ()

        def avg_scatter_grads(params: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            self._is_unfinished = self.exchange is not None
            try:
                with self.counters.purpose(Purpose.REDUCE):
                    return self._reduced(params, functools.partial(avg_scatter, params, dtype))
            except BaseException:  # the caller may catch it and train on
                self.drop_step()
                raise

        def end_step(decide: SkipDecision) -> Any:
            self._is_unfinished = False
            before = self._scale()
            try:
                skipped = decide()
                self._autocast_scale = None
                self._count_skipped(skipped=bool(skipped) and self._scale() >= before)
                if self.exchange is not None:
                    with self.counters.purpose(Purpose.REDUCE):  # small sums over all ranks
                        (self.exchange.rollback if skipped else self.exchange.commit)()
            except BaseException:  # DeepSpeed raises if the loss scale can fall no further
                self.drop_step()
                raise
            finally:
                self._autocast_scale = None  # the step may update it from here on
            return skipped

        def step_begins() -> None:
            self._is_unfinished = self.exchange is not None

        @functools.wraps(zero_grad)
        def drop_and_zero_grad(*args: Any, **kwargs: Any) -> Any:
            """Between backward and step this drops the gradients, and their pending residuals."""
            if self._broke_off():
                self.drop_step()
            elif self.exchange is not None:
                self.exchange.rollback()
            return zero_grad(*args, **kwargs)

        def gradient_partition_epilogue() -> None:
            with ExitStack() as stack:
                for kind in waits:  # backward's end waits for the side stream
                    stack.enter_context(self.counters.span(kind))
                epilogue()  # reduces the last bucket
            self._is_unfinished = False

        def forward_begins() -> None:
            for act in self.before_forward:
                act()

        clear_flag = _after(forward_begins, optimizer.clear_backward_seen_flag)
        patches.set(optimizer, "zero_grad", drop_and_zero_grad)
        name = "independent_gradient_partition_epilogue"
        patches.set(optimizer, name, gradient_partition_epilogue)
        patches.set(optimizer, "clear_backward_seen_flag", clear_flag)
        patches.set(optimizer, "_pre_step", _after(step_begins, optimizer._pre_step))
        patches.set(optimizer, f"{_PREFIX}avg_scatter_grads", avg_scatter_grads)
        wrap_skip_decision(optimizer, patches, end_step, always_check=self.exchange is not None)

    def _reduced(
        self, params: Sequence[Any], avg_scatter: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Call DeepSpeed's method with its reduction replaced."""
        from deepspeed.runtime.zero import stage3

        if self.exchange is None:
            return avg_scatter()
        deepspeeds = stage3.reduce_scatter_coalesced

        def reduce_scatter_coalesced(
            tensors: list[torch.Tensor], group: Any = None
        ) -> list[torch.Tensor]:
            return self.reduce_bucket(params, tensors, group, lambda ts: deepspeeds(ts, group))

        with _reduction, patched(stage3, "reduce_scatter_coalesced", reduce_scatter_coalesced):
            return avg_scatter()

    def reduce_bucket(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any, theirs: Reduce
    ) -> list[torch.Tensor]:
        """Answer one call of `reduce_scatter_coalesced` for the bucket's parameters."""
        assert self.exchange is not None
        assert len(params) == len(tensors), "DeepSpeed reduces another bucket than announced"
        if params[0].ds_id not in self.names:  # a bucket has one group
            return theirs(tensors)
        names = [self.names[p.ds_id] for p in params]
        if self.verify is not None:
            ours = self.verify.choose_reduction(names, self._scale())
            if ours is None or check_identity(names, tensors, ours, theirs, group):
                self.verify = None
        reduce = self.exchange.choose_reduction(names, self._scale())
        return (reduce or theirs)(tensors)

    def drop_step(self) -> None:
        """Drop the step under way: gradients of all its micro-steps, and their residuals."""
        if self.exchange is None:
            return
        self.exchange.rollback()
        self._autocast_scale = None
        self._drop_gradients()
        self._is_unfinished = False

    def _drop_gradients(self) -> None:
        from deepspeed.accelerator import get_accelerator

        optimizer = self.optimizer
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

    def _broke_off(self) -> bool:
        """Return whether a backward or a step began and did not end."""
        if self.exchange is None:
            return False
        return self._is_unfinished or any(b.params for b in self.optimizer.ipg_buckets.values())

    def _drop_unfinished(self) -> None:
        amid_backward = torch._C._current_graph_task_id() != -1  # GradCache calls the model
        if self._broke_off() and not amid_backward:
            self.drop_step()
            log.warning(
                "ds_ckpt: a backward or a step did not end; its gradients so far are dropped"
            )

    def _count_skipped(self, *, skipped: bool) -> None:
        """Warn once if every step is skipped. A skip that lowers fp16's loss scale is normal."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == SKIPPED_IN_A_ROW and torch_dist.get_rank() == 0:
            log.warning(
                "ds_ckpt: %d steps in a row were skipped because gradients were NaN or infinite. "
                "The loss scale stays at %g, and the weights do not change. If the loss is not "
                "finite, load an earlier checkpoint with a lower learning rate, or check the "
                "batches. If it is, the loss scale is too high ($.fp16.loss_scale)",
                SKIPPED_IN_A_ROW,
                self._scale(),
            )

    def _scale(self) -> float:
        """Return the gradients' factor: the loss scale, or torch autocast's scaler."""
        scaler = getattr(self.optimizer, "torch_autocast_gradscaler", None)
        scale = float(self.optimizer.loss_scale)
        if scaler is None:
            return scale
        if self._autocast_scale is None:
            self._autocast_scale = float(scaler.get_scale())
        return scale * self._autocast_scale

    def detach(self) -> None:
        """Give the optimizer its own methods back."""
        self._patches.undo()


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both
