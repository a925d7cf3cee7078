"""The policies "budget" and "auto" on an engine: one plan, made at the first training batch.

Every rank measures its own batch and plans for it. The plan of the rank whose batch would hold the
most is installed on all ranks.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.blocks import find_blocks
from ds_ckpt.activation.planning.budget import AUTO_SHARE, ActivationPlan, Allowance, plan_within
from ds_ckpt.activation.planning.costs import measured_rates
from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.errors import log
from ds_ckpt.exchange.transport import gather_objects
from ds_ckpt.telemetry.memory import free_on
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import resident_bytes
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise

NCCL_BUFFERS = "NCCL's buffers"
"""Purpose, among those of the exchange's memory, that torch's allocator does not count."""


@dataclass(eq=False)
class FirstBatchPlanning:
    """Plans for one engine at its first training batch; until then `plan` is None.

    `install` installs a plan on the model. `exchange_memory` returns what the exchange of
    gradients and weights keeps on the accelerator, by purpose.
    """

    engine: Any
    config: ActivationConfig
    install: Callable[[ActivationPlan], None]
    exchange_memory: Callable[[], Mapping[str, int]]

    def __post_init__(self) -> None:
        self._device = torch.device(self.engine.device)
        self.plan: ActivationPlan | None = None
        self._largest = 0
        """Tokens of the largest batch that the plan or a warning was about."""
        hook = torch.compiler.disable(self._before_forward)
        handle = self.engine.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        self.stop: Callable[[], None] = handle.remove

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        tokens = batch_tokens(args, kwargs)
        if self.plan is None:
            plan = self._agree(args, kwargs)
            self.install(plan)
            self.plan, self._largest = plan, max(tokens, plan.tokens)
        elif tokens > self._largest:
            log.warning(
                "ds_ckpt: a batch of %d tokens is larger than the %d of the plan, and may need "
                "more than the budget. Begin training with the largest batch",
                tokens,
                self.plan.tokens,
            )
            self._largest = tokens

    def _agree(self, args: Any, kwargs: dict[str, Any]) -> ActivationPlan:
        """Plan on every rank; return the plan of the rank that would hold the most. Collective."""
        limits = torch.tensor([self._limit_bytes(), self._host_bytes()], device=self._device)
        dist.all_reduce(limits, op=dist.ReduceOp.MIN)
        make = functools.partial(self._make, args, kwargs, *map(int, limits.tolist()))
        own = run_on_all_or_raise(make, what="plan within the memory budget")
        largest: ActivationPlan = max(gather_objects(own), key=lambda plan: plan.none_bytes)
        return largest

    def _limit_bytes(self) -> int:
        """Return the budget, or the memory that this rank can have if that is less."""
        asked, available = self.config.budget_gib, float(free_on(self._device))
        if self._device.type == "cuda":
            # neither torch's tensors nor NCCL's buffers are free, but `resident` counts them
            available += torch.cuda.memory_allocated(self._device)
            available += self.exchange_memory()[NCCL_BUFFERS]
        if self.config.policy == "auto":
            available *= AUTO_SHARE
        return int(available if asked is None else min(available, asked * GIB))

    def _host_bytes(self) -> int:
        """Return the host memory that blocks which are not recomputed may take; 0: none may.

        Half of what is free, as torch rounds pinned blocks up to powers of two. None for the CPU,
        whose memory is the host's.
        """
        config, kind = self.config, self._device.type
        if kind == "cpu" or ("offload" in config.model_fields_set and not config.offload):
            return 0
        local = max(1, int(torch.get_device_module(kind).device_count()))
        return free_on(torch.device("cpu")) // 2 // local

    def _make(
        self, args: Any, kwargs: dict[str, Any], limit_bytes: int, host_bytes: int
    ) -> ActivationPlan:
        start_s = time.perf_counter()
        engine, config, device = self.engine, self.config, self._device
        resident: dict[str, int] = {}
        if config.budget_is_of == "accelerator":
            blocks = [b.module for b in find_blocks(engine.module, config.modules)]
            resident = {**resident_bytes(engine, blocks), **self.exchange_memory()}
        allowance = Allowance(
            limit_bytes,
            config.budget_is_of,
            resident,
            config.offload,
            config.offload_prefetch,
            config.offload_min_bytes,
            int(engine.train_micro_batch_size_per_gpu()),
            host_bytes,
        )
        forward = Forward(engine.module, args, kwargs, device)
        rates = measured_rates(device, next(engine.module.parameters()).dtype)
        plan = plan_within(allowance, forward, rates, batch_tokens(args, kwargs), config.modules)
        return replace(plan, planning_s=time.perf_counter() - start_s)


def batch_tokens(args: Any, kwargs: Any) -> int:
    """Return the elements of the largest integer tensor, else of the largest tensor."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    integers = [t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool]
    return max((t.numel() for t in integers or tensors), default=0)
