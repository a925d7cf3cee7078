"""The policies "budget" and "auto" on an engine: one plan, made at the first training batch.

Every rank measures its own batch and plans for it. The plan of the rank whose batch would hold the
most is installed on all ranks, and stays until checkpointing is taken off.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.blocks import find_blocks
from ds_ckpt.activation.planning.budget import AUTO_SHARE, ActivationPlan, Allowance, plan_within
from ds_ckpt.activation.planning.costs import measured_rates
from ds_ckpt.activation.policies import Unit
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.telemetry.device import capacity_of, free_on
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import OPTIONAL, resident_bytes
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise

log = logging.getLogger("ds_ckpt")


class Planning:
    """Plans for one engine at its first training batch.

    Args:
        engine: DeepSpeed's.
        config: with policy "budget" or "auto".
        install: puts the units of a plan on the model.
        report: called with the plan once it is installed.
        beside: bytes that the plugin itself keeps on the accelerator, by what they are.

    Attributes:
        plan: None before the first training batch.

    Raises:
        ConfigError: the budget is larger than the device's memory, or "auto" has no limit.
    """

    def __init__(
        self,
        engine: Any,
        config: ActivationConfig,
        *,
        install: Callable[[Sequence[Unit]], None],
        report: Callable[[ActivationPlan], None],
        beside: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._engine, self._config = engine, config
        self._install, self._report, self._beside = install, report, beside
        self._device = torch.device(engine.device)
        self._blocks = [b.module for b in find_blocks(engine.module, config.modules)]
        self._capacity = capacity_of(self._device)
        self._check(config.budget_gib)
        self.plan: ActivationPlan | None = None
        self._largest = 0
        """Tokens of the largest batch that a warning or the plan was about."""
        hook = torch.compiler.disable(self._before_forward)
        self._handle = engine.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def _check(self, asked: float | None) -> None:
        cpu = self._device.type == "cpu"
        if cpu and self._config.policy == "auto":
            if asked is None:
                why = "the CPU accelerator has no memory of its own: a limit must be given"
                raise _wrong("gib", "nothing", why, "write the GiB that may be held")
            if self._config.budget_is_of == "accelerator":
                why = "on the CPU accelerator nobody counts what is allocated"
                raise _wrong("of", '"accelerator"', why, 'write "activations" or "saved"')
        if asked is not None and asked * GIB > self._capacity:
            what = "this host" if cpu else "the device"
            why = f"{what} has {self._capacity / GIB:.1f} GiB"
            raise _wrong("gib", f"{asked:g}", why, f"write at most {self._capacity / GIB:.1f}")

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        tokens = tokens_of(args, kwargs)
        if self.plan is None:
            plan = self._agree(args, kwargs)
            self._install(plan.units(module))
            self.plan, self._largest = plan, max(tokens, plan.tokens)
            self._report(plan)
        elif tokens > self._largest:
            log.warning(
                "ds_ckpt: a batch of %d tokens is larger than the %d of the plan, and "
                "may need more than the budget. Begin training with the largest batch",
                tokens,
                self.plan.tokens,
            )
            self._largest = tokens

    def _agree(self, args: Any, kwargs: dict[str, Any]) -> ActivationPlan:
        """Plan on every rank, and take the plan of the rank that would hold the most.

        Collective.

        Raises:
            UnsupportedError: the model cannot be measured, or nothing fits.
            StateError: planning failed on another rank.
        """
        limit = torch.tensor(self._limit_bytes(), device=self._device)
        torch.distributed.all_reduce(limit, op=torch.distributed.ReduceOp.MIN)
        make = functools.partial(self._make, args, kwargs, int(limit))
        own = run_on_all_or_raise(make, None, what="plan within the memory budget")
        plans: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(plans, own)
        largest: ActivationPlan = max(plans, key=lambda plan: plan.none_bytes)
        return largest

    def _make(self, args: Any, kwargs: dict[str, Any], limit_bytes: int) -> ActivationPlan:
        start_s = time.perf_counter()
        model, device = self._engine.module, self._device
        dtype = max(model.parameters(), key=_numel).dtype
        plan = plan_within(
            self._allowance(limit_bytes),
            model,
            args,
            kwargs,
            rates=measured_rates(device, dtype),
            tokens=tokens_of(args, kwargs),
            modules=self._config.modules,
            device=device,
        )
        return replace(plan, planning_s=time.perf_counter() - start_s)

    def _limit_bytes(self) -> int:
        """The budget, or where that is less, the memory that this process can have."""
        asked = self._config.budget_gib
        available = self._capacity
        if self._device.type == "cuda" and self._config.budget_is_of == "accelerator":
            available = free_on(self._device) + torch.cuda.memory_allocated(self._device)
        return available if asked is None else min(available, int(asked * GIB))

    def _allowance(self, limit_bytes: int) -> Allowance:
        config = self._config
        resident: dict[str, int] = {}
        if config.budget_is_of == "accelerator":
            resident = {**resident_bytes(self._engine, self._blocks), **self._beside()}
        return Allowance(
            limit_bytes,
            config.budget_is_of,
            resident,
            config.offload,
            config.offload_prefetch,
            config.offload_min_bytes,
            int(self._engine.train_micro_batch_size_per_gpu()),
            self._capacity,
            OPTIONAL,
            aim=AUTO_SHARE if config.policy == "auto" else 1.0,
        )

    def stop(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()


def tokens_of(args: Any, kwargs: Any) -> int:
    """Elements of the largest integer tensor (masks left out), else of the largest tensor."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    whole = [t for t in tensors if not t.is_floating_point() and t.dim()]
    named = [t for t in whole if t.dtype != torch.bool] or whole or tensors
    return max((t.numel() for t in named), default=0)


def _numel(parameter: nn.Parameter) -> int:
    """Elements of the full parameter: one that ZeRO-3 has partitioned is empty by itself."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _wrong(key: str, found: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"$.ds_ckpt.activation.budget_{key}", found, why, remedy))
