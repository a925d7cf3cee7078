"""The gather hook: what recompute gathers stays until backward has used it.

ZeRO-3's coordinator releases a module's weights after every forward, the second forward of
checkpointing included, and backward then gathers them again: 3 gathers of each parameter a step
instead of 2. Inside a recompute this hook lets the release pass and leaves it to backward. What
backward never comes back for (a frozen layer, a block whose input needs no gradient) is released
when the next recompute begins, at the latest when backward ends.

It also takes back the entries that early-stopped recomputes leave on DeepSpeed's module stack:
their post-forward hooks never run.

Here too, gathers are counted by purpose, where the coordinator starts them. Those after a step wait
for the weights that it has written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.zero3.compatibility import fill_in_backward


class GatherHook:
    """Wraps one engine's parameter coordinator. `detach()` restores it.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        counters: where gathers are counted.
        share: keep what recompute gathered for backward; False only counts.
    """

    def __init__(self, optimizer: Any, counters: Counters, *, share: bool) -> None:
        self._optimizer = optimizer
        self._counters = counters
        self._share = share
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._patches = Patches()
        if share:
            fill_in_backward(optimizer, self._patches)
        self._release = self._coordinator.release_sub_module
        self._kept: dict[int, nn.Module] = {}
        self._local = threading.local()
        self._install()

    def _install(self) -> None:
        coordinator = self._coordinator
        gather = coordinator._PartitionedParameterCoordinator__all_gather_params_
        backward_epilogue = self._optimizer.backward_epilogue

        def counted_gather(params: Any, forward: bool, quantize: bool = False) -> None:
            # the coordinator passes over what is there already or in flight: count what it fetches
            params = list(params)
            for param in params:
                if param.ds_status.name == "NOT_AVAILABLE":
                    self._counters.gathers[param.ds_id] += 1
            if not forward:
                purpose = Purpose.GATHER_BACKWARD
            elif self._recomputing:
                purpose = Purpose.GATHER_RECOMPUTE
            else:
                purpose = Purpose.GATHER_FORWARD
            with self._counters.purpose(purpose):
                gather(params, forward, quantize)

        def release_sub_module(submodule: nn.Module, forward: bool = False) -> None:
            if forward and self._recomputing and self._share:
                self._kept[id(submodule)] = submodule
                return
            if not forward:
                self._kept.pop(id(submodule), None)
            self._release(submodule, forward=forward)

        def epilogue(*args: Any, **kwargs: Any) -> Any:
            result = backward_epilogue(*args, **kwargs)  # ends every backward that has begun
            self.release_kept()
            return result

        post_step = self._optimizer._post_step

        def counted_post_step(*args: Any, **kwargs: Any) -> Any:
            # small weights stay gathered; after a step they are fetched anew, past the coordinator
            for param in self._optimizer.persistent_parameters:
                self._counters.gathers[param.ds_id] += 1
            with self._counters.purpose(Purpose.GATHER_FORWARD):
                result = post_step(*args, **kwargs)
            # DeepSpeed gathers on a stream of its own, which waits for none: not for the optimizer
            name = "_PartitionedParameterCoordinator__allgather_stream"
            stream = getattr(coordinator, name, None)  # None where the accelerator has no streams
            if stream is not None:
                stream.wait_stream(torch.get_device_module(stream.device).current_stream())
            return result

        self._patches.set(self._optimizer, "_post_step", counted_post_step)
        name = "_PartitionedParameterCoordinator__all_gather_params_"
        self._patches.set(coordinator, name, counted_gather)
        if self._share:
            self._patches.set(coordinator, "release_sub_module", release_sub_module)
            self._patches.set(self._optimizer, "backward_epilogue", epilogue)

    @property
    def _recomputing(self) -> bool:
        return getattr(self._local, "depth", 0) > 0

    def release_kept(self) -> None:
        """Release what no backward came back for, as the coordinator would after a forward.

        Modules whose backward has begun are left: with checkpointing inside a checkpointed block,
        the inner recompute starts in the middle of the outer block's backward.
        """
        if not self._kept:
            return
        begun = self._coordinator._PartitionedParameterCoordinator__active_backward_submodules
        for key, module in list(self._kept.items()):
            if module.ds_id not in begun:
                del self._kept[key]
                self._release(module, forward=True)

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Surrounds the second forward of one checkpointed block."""
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        outermost = not self._recomputing
        if outermost and self._share:
            # backward has moved on to another block: what it left of the last one is not needed
            self.release_kept()
        height = len(FWD_MODULE_STACK)
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            with self._counters.span("recompute"):
                yield
        finally:
            self._local.depth -= 1
            interrupted = FWD_MODULE_STACK[height:]
            del FWD_MODULE_STACK[height:]
            if self._share:
                self._kept.update((id(module), module) for module in interrupted)

    def detach(self) -> None:
        """Release what is kept and give the coordinator its own methods back."""
        self.release_kept()
        self._patches.undo()
