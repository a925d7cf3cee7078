"""The gradient seam: another exchange in the place of ZeRO-3's reduce-scatter of a bucket.

DeepSpeed reduces a bucket in `__avg_scatter_grads(params, dtype)`, which scales and casts around
one call of the module-global `reduce_scatter_coalesced(tensors, group)`. The seam notes which
parameters the bucket holds, then answers that one call: *the mean over the group, my chunk of each
tensor, unpadded*. Everything around it stays DeepSpeed's.

The step's verdict comes from `_loss_scale_update_and_overflow_cleanup`: True means that every
process skips the step (`rolled_back`), False that the weights will change (`committed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import ContractError, Problem, UnsupportedError
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose

Reduce = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A bucket's full gradients to this process's parts."""


class BucketExchange(Protocol):
    """What stands in for the reduction of one bucket."""

    def reduce(
        self, names: Sequence[str], tensors: list[torch.Tensor], *, loss_scale: float, stock: Reduce
    ) -> list[torch.Tensor]:
        """Mean over the group, this process's chunk (`ceil(numel / world)`) of each tensor.

        Args:
            names: parameter names, in the bucket's order.
            tensors: full gradients of this process; may be overwritten.
            loss_scale: what the gradients are multiplied by.
            stock: DeepSpeed's own reduction of such tensors, for an exchange that hands over.
        """

    def step_ended(self, *, skipped: bool) -> None:
        """The step's verdict, the same on every process."""


class _Dispatcher:
    """Replaces `stage3.reduce_scatter_coalesced` while at least one seam is attached."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._users = 0
        self._patches = Patches()

    def acquire(self) -> None:
        from deepspeed.runtime.zero import stage3

        self._users += 1
        if self._users > 1:
            return
        stock = stage3.reduce_scatter_coalesced

        def reduce_scatter_coalesced(
            tensors: list[torch.Tensor], group: Any = None
        ) -> list[torch.Tensor]:
            def in_group(bucket: list[torch.Tensor]) -> list[torch.Tensor]:
                result: list[torch.Tensor] = stock(bucket, group)
                return result

            seam, params = getattr(self._local, "bucket", (None, ()))
            if seam is None:  # another engine in this program, which has no session
                return in_group(tensors)
            parts: list[torch.Tensor] = seam.reduce_bucket(params, tensors, group, in_group)
            return parts

        reduce_scatter_coalesced.__wrapped__ = stock  # type: ignore[attr-defined]
        self._patches.set(stage3, "reduce_scatter_coalesced", reduce_scatter_coalesced)

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._patches.undo()

    def bucket(self, seam: GradientSeam | None, params: Sequence[Any]) -> None:
        self._local.bucket = (seam, params)


_dispatcher = _Dispatcher()


class Lease:
    """One user's hold on the replaced module-global. `close()` may be called more than once.

    Apart from the seam, so that it can be given up when an engine is dropped without a word.
    """

    def __init__(self) -> None:
        self._open = True
        _dispatcher.acquire()

    def close(self) -> None:
        if self._open:
            self._open = False
            _dispatcher.release()


class GradientSeam:
    """Routes one ZeRO-3 optimizer's buckets to a `BucketExchange`. `detach()` restores it.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        names: parameter name by `ds_id`.
        exchange: None counts only, DeepSpeed's own reduction runs.
        verify: hold the first bucket against DeepSpeed's own reduction (used when DeepSpeed's
            source has changed); `dense` must then be an exchange that sends everything.
    """

    def __init__(
        self,
        optimizer: Any,
        names: dict[int, str],
        exchange: BucketExchange | None,
        counters: Counters,
        *,
        verify: BucketExchange | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._exchange = exchange
        self._counters = counters
        self._verify = verify
        self._patches = Patches()
        self._install()

    def _install(self) -> None:
        optimizer = self._optimizer
        avg_scatter = optimizer._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
        verdict = optimizer._loss_scale_update_and_overflow_cleanup

        def avg_scatter_grads(params: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            _dispatcher.bucket(self, params)
            try:
                with self._counters.purpose(Purpose.REDUCE):
                    result: list[torch.Tensor] = avg_scatter(params, dtype)
                    return result
            finally:
                _dispatcher.bucket(None, ())

        def loss_scale_update_and_overflow_cleanup() -> Any:
            skipped = verdict()
            if self._exchange is not None:
                self._exchange.step_ended(skipped=bool(skipped))
            return skipped

        self.lease = Lease()
        prefix = "_DeepSpeedZeroOptimizer_Stage3__"
        self._patches.set(optimizer, f"{prefix}avg_scatter_grads", avg_scatter_grads)
        name = "_loss_scale_update_and_overflow_cleanup"
        self._patches.set(optimizer, name, loss_scale_update_and_overflow_cleanup)

    def reduce_bucket(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any, stock: Reduce
    ) -> list[torch.Tensor]:
        """Answer one call of `reduce_scatter_coalesced` for the bucket's parameters."""
        if self._exchange is None:
            return stock(tensors)
        assert len(params) == len(tensors), "DeepSpeed handed over another bucket than announced"
        self._refuse_foreign_group(params[0], group)
        names = [self._names[p.ds_id] for p in params]
        scale = self._scale()
        if self._verify is not None:
            self._check_identity(self._verify, names, tensors, scale, group, stock)
            self._verify = None
        return self._exchange.reduce(names, tensors, loss_scale=scale, stock=stock)

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

    def _check_identity(
        self,
        dense: BucketExchange,
        names: Sequence[str],
        tensors: list[torch.Tensor],
        scale: float,
        group: Any,
        stock: Reduce,
    ) -> None:
        expected = stock([t.clone() for t in tensors])
        copies = [t.clone() for t in tensors]
        got = dense.reduce(names, copies, loss_scale=scale, stock=stock)
        pairs = zip(names, expected, got, strict=True)
        differing = [name for name, a, b in pairs if not _same(a, b)]
        # the verdict is the group's: nobody may go on into a collective where another has stopped
        flag = torch.tensor([len(differing)], device=tensors[0].device)
        torch_dist.all_reduce(flag, group=group)
        if not flag.item():
            return
        where = ", ".join(differing) if differing else "(in other processes)"
        raise ContractError(
            Problem(
                where=f"reduce_scatter_coalesced, parameter {where}",
                found="another result than an exchange that sends everything",
                why="its reduction no longer means what the seam stands in for",
                remedy="install a DeepSpeed that ds-ckpt doctor reports as tested",
            )
        )

    def detach(self) -> None:
        """Give the optimizer its own methods back."""
        self._patches.undo()
        self.lease.close()


def _same(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Equal but for the rounding of another order of summation."""
    if expected.shape != got.shape:
        return False
    tolerance = 8 * torch.finfo(expected.dtype).eps
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, got, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
