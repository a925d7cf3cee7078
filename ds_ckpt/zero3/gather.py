"""The gather hook: weights that a recomputation gathers are kept until backward has used them.

ZeRO-3's coordinator releases a module's weights after every forward, also after the second forward
of checkpointing. Backward gathers them again: 3 gathers per parameter and step instead of 2. During
a recomputation this hook skips the release and leaves it to backward. Backward does not use all
weights (a frozen layer, a block whose input needs no gradient). Unused ones are released when the
next recomputation begins, at the latest when backward ends.

It also removes entries that early-stopped recomputations leave on DeepSpeed's module stack. It
counts gathers by purpose, and orders gathers after a step behind the step's writes.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose

_PREFIX = "_PartitionedParameterCoordinator__"


class GatherHook:
    """Wraps one engine's parameter coordinator. `detach()` restores it.

    With `share` it keeps what a recomputation gathered for backward; else it only counts.

    Attributes:
        around_post_step: Called in place of the optimizer's `_post_step`, with it as argument.
    """

    def __init__(self, optimizer: Any, counters: Counters, *, share: bool) -> None:
        self._optimizer = optimizer
        self._counters = counters
        self._share = share
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._patches = Patches()
        self._release = self._coordinator.release_sub_module
        self._kept: dict[int, nn.Module] = {}
        self._begun: dict[int, nn.Module] | None = None
        """Modules whose backward has begun. DeepSpeed until 0.19.2 does not record them."""
        self._local = threading.local()
        self.around_post_step: Callable[[Callable[[], None]], None] = lambda post_step: post_step()
        self._install()

    def _install(self) -> None:
        coordinator, optimizer = self._coordinator, self._optimizer
        gather = getattr(coordinator, f"{_PREFIX}all_gather_params_")
        fetch, post_step = coordinator.fetch_sub_module, optimizer._post_step

        def timed_fetch(current_submodule: Any, forward: bool) -> None:
            if self._begun is not None and not forward:
                self._begun[current_submodule.ds_id] = current_submodule
            with self._counters.span("gather"):  # with the waits
                fetch(current_submodule, forward)

        def counted_gather(params: Any, forward: bool, quantize: bool = False) -> None:
            # the coordinator skips what is available or in flight: count what it fetches
            params = list(params)
            for param in params:
                if param.ds_status.name == "NOT_AVAILABLE":
                    self._counters.gathers[param.ds_id] += 1
            if not forward:
                purpose = Purpose.GATHER_BACKWARD
            elif self._is_recomputing:
                purpose = Purpose.GATHER_RECOMPUTE
            else:
                purpose = Purpose.GATHER_FORWARD
            with self._counters.purpose(purpose):
                gather(params, forward, quantize)

        def counted_post_step(*args: Any, **kwargs: Any) -> None:
            # small weights stay gathered; after a step DeepSpeed gathers them anew
            self._counters.gathers.update(p.ds_id for p in optimizer.persistent_parameters)
            with self._counters.purpose(Purpose.GATHER_FORWARD):
                self.around_post_step(functools.partial(post_step, *args, **kwargs))
            # DeepSpeed's stream for gathers does not wait for the optimizer
            stream = getattr(coordinator, f"{_PREFIX}allgather_stream", None)  # None on CPUs
            if stream is not None:
                stream.wait_stream(torch.get_device_module(stream.device).current_stream())

        self._patches.set(optimizer, "_post_step", counted_post_step)
        self._patches.set(coordinator, f"{_PREFIX}all_gather_params_", counted_gather)
        self._patches.set(coordinator, "fetch_sub_module", timed_fetch)
        if self._share:
            self._share_gathers()

    def _share_gathers(self) -> None:
        coordinator, optimizer = self._coordinator, self._optimizer
        backward_epilogue = optimizer.backward_epilogue
        records = f"{_PREFIX}active_backward_submodules"
        if not hasattr(coordinator, records):
            self._begun = {}
            self._patches.set(coordinator, records, self._begun)

        def release_sub_module(submodule: Any, forward: bool = False) -> None:
            if forward and self._is_recomputing:
                self._kept[id(submodule)] = submodule
                return
            if not forward:
                self._kept.pop(id(submodule), None)
                if self._begun is not None:
                    self._begun.pop(submodule.ds_id, None)
            self._release(submodule, forward=forward)

        def epilogue(*args: Any, **kwargs: Any) -> Any:
            result = backward_epilogue(*args, **kwargs)  # ends every backward that has begun
            while self._begun:  # DeepSpeed until 0.19.2 does not
                self._release(self._begun.popitem()[1], forward=False)
            self.release_kept()
            return result

        self._patches.set(coordinator, "release_sub_module", release_sub_module)
        self._patches.set(optimizer, "backward_epilogue", epilogue)

    @property
    def _is_recomputing(self) -> bool:
        return getattr(self._local, "depth", 0) > 0

    def release_kept(self) -> None:
        """Release what backward did not use, as the coordinator does after a forward.

        Modules whose backward has begun are left. With checkpointing inside a checkpointed block,
        the inner recomputation starts during the outer block's backward.
        """
        if not self._kept:
            return
        begun = getattr(self._coordinator, f"{_PREFIX}active_backward_submodules")
        for key, module in list(self._kept.items()):
            if module.ds_id not in begun:
                del self._kept[key]
                self._release(module, forward=True)

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Surround the second forward of one checkpointed block."""
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        if not self._is_recomputing and self._share:
            # backward has reached another block
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
        """Release what is kept and restore the coordinator's methods."""
        self.release_kept()
        self._patches.undo()
