"""Install checkpointing on the units of a model, and remove it.

This file decides when a call is checkpointed, and replaces transformers' own checkpointing. It
handles key-value caches: a recomputation would append every key twice.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ds_ckpt.activation.blocks import is_hf_layer
from ds_ckpt.activation.checkpoint import Call, RecomputeContext, Scope, checkpoint
from ds_ckpt.activation.inputs import run_plainly
from ds_ckpt.activation.policies import Policy, Unit, make_units
from ds_ckpt.activation.selective import Choice, Tracker
from ds_ckpt.activation.snapshot import LEAVE_OUT, CheckpointedModule, refusal
from ds_ckpt.errors import log
from ds_ckpt.patch import Patches


class CheckpointedBlocks:
    """Checkpointing of one model's blocks, from construction until `remove()`.

    `patterns` is short for `Policy(modules=patterns)`; `units` replaces the policy's. `scopes` are
    entered around every recomputation, `trackers` hold random states beside torch's own. `around`
    is called instead of every unit's call. Saved-tensor hooks that it enters see what the call
    keeps for its recomputation, or all that an offloaded block saves. Earlier checkpointing of the
    model is removed. After an error the model has none.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str] | None = None,
        scopes: Sequence[Scope] = (),
        *,
        policy: Policy | None = None,
        units: Sequence[Unit] | None = None,
        around: Callable[..., Any] | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        policy = policy or Policy(modules=tuple(patterns) if patterns is not None else None)
        self._context = RecomputeContext(tuple(scopes), tuple(trackers))
        self._around, self._check_every = around, policy.check_determinism
        self._patches = Patches()
        self.units = list(units) if units is not None else make_units(model, policy)
        self.blocks = [block for unit in self.units for block in unit.blocks]
        for module in model.modules():
            earlier = getattr(vars(module).get("forward"), "owner", None)
            if isinstance(earlier, CheckpointedBlocks):
                earlier.remove()
        try:
            for unit in self.units:
                self._install(unit)
            self._replace_hf_checkpointing(model)
        except BaseException:
            self.remove()
            raise

    def _install(self, unit: Unit) -> None:
        # torch.compile can trace torch's own checkpoint; a trace would lose the rest
        is_plain = len(unit.blocks) == 1 and not (unit.save_ops or self._around)
        unit_run = _Run(self._context, unit, self._check_every, self._around)
        for index, block in enumerate(unit.blocks):
            given = (unit.save_ops, unit.where, block.name, block.module, self._patches)
            choice = Choice(*given) if unit.save_ops else None
            target = CheckpointedModule(block.name, block.module, choice, index)
            run: Callable[..., Any]
            run = functools.partial(unit_run, target, block.module.forward)
            if not is_plain or self._check_every:
                run = torch.compiler.disable(run)
            self._patches.set_method(block.module, "forward", run, owner=self)

    def _replace_hf_checkpointing(self, model: nn.Module) -> None:
        """Switch transformers' own recomputation off, also if it is enabled later."""
        for module in list(model.modules()):
            if hasattr(module, "gradient_checkpointing"):
                before: Any = module.gradient_checkpointing
                if before is True:
                    _ignore_request()
                has_layers = not is_hf_layer(module) and any(map(is_hf_layer, module.modules()))
                flag = _CheckpointingFlag(before) if has_layers else False
                self._patches.set(module, "gradient_checkpointing", flag)
                self._patches.set_method(
                    module, "_gradient_checkpointing_func", run_plainly, run_plainly
                )
            if hasattr(module, "_set_gradient_checkpointing"):
                # transformers' enable and disable end in it
                self._patches.set_method(module, "_set_gradient_checkpointing", _ignore_request)

    def describe(self) -> str:
        """Describe the blocks in a few words."""
        classes = ", ".join(sorted({type(b.module).__name__ for b in self.blocks}))
        words = f"{(n := len(self.blocks))} block{'s' * (n != 1)} ({classes})"
        if offloaded := sum(unit.offloads for unit in self.units):
            words += f", {offloaded} of them offloaded and not recomputed"
        if any(len(unit.blocks) > 1 for unit in self.units):
            words += f" in {len(self.units) - offloaded} recomputes"
        return words

    def remove(self) -> None:
        """Restore the model. A backward that is outstanding is refused."""
        self._context.is_removed = True
        self._patches.undo()


@dataclass(eq=False)
class _Run:
    """Checkpointed forwards of one unit's modules, whose inputs may be outputs of each other."""

    context: RecomputeContext
    unit: Unit
    check_every: int
    around: Callable[..., Any] | None
    forwards: int = 0
    next: int = 0
    check: bool = False
    before: weakref.ref[Call] | None = None

    def __call__(
        self, target: CheckpointedModule, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if target.replaying is not None:  # called with its hooks, for them
            again, target.replaying = target.replaying, None
            return again()
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self.unit.offloads:
            assert self.around is not None, "build_inputs makes the hooks of offloaded blocks"
            return self.around(target.name, None, function, args, kwargs)
        if torch.compiler.is_compiling():  # torch.compile can trace it
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        if not target.module.training and any(map(_is_cache, (*args, *kwargs.values()))):
            _warn_once(
                "a block gets a cache in evaluation mode while gradients are on: blocks are not "
                "checkpointed then (use_cache=False, or torch.no_grad)"
            )
            return function(*args, **kwargs)
        if not getattr(target.module, "_can_checkpoint_with_cache", False):  # transformers' flag
            args, kwargs = without_empty_caches(target.name, args, kwargs)
        run = functools.partial(self._checkpointed, target)
        if self.around is not None:
            return self.around(target.name, run, function, args, kwargs)
        return run(function, *args, **kwargs)

    def _checkpointed(
        self, target: CheckpointedModule, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        index = target.index
        before = self.before() if self.before is not None and index >= self.next else None
        if before is None:
            self.check = self.check_every > 0 and self.forwards % self.check_every == 0
            self.forwards += 1
        last = index == len(self.unit.blocks) - 1
        call = Call(target, self.context, check=self.check)
        result = call.run(function, args, kwargs, before=before, last=last)
        self.before = None if last else weakref.ref(call)
        self.next = index + 1
        return result


class _CheckpointingFlag:
    """`gradient_checkpointing` of a transformers model with layers: true while autograd records.

    In training mode such a model drops its key-value cache if the flag is true. `generate`, and a
    forward with `use_cache=True` under `no_grad`, need the cache. Copies of a model get the former
    flag.
    """

    def __init__(self, before: Any) -> None:
        self._before = before

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._before,)


@functools.cache
def _warn_once(words: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning("ds_ckpt: %s", words)


def _ignore_request(*_: Any, **__: Any) -> None:
    """Replace transformers' `_set_gradient_checkpointing`."""
    _warn_once(
        "the policy takes over transformers' checkpointing: requests to switch it on or off, and "
        "their arguments, change nothing"
    )


# key-value caches


def _is_cache(value: Any) -> bool:
    is_cache = any("Cache" in base.__name__ for base in type(value).__mro__)
    return is_cache and hasattr(value, "get_seq_length")


def without_empty_caches(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None for every empty cache; others are refused."""
    for value in filter(_is_cache, (*args, *kwargs.values())):
        if value.get_seq_length() > 0:
            found = f"{type(value).__name__} with {value.get_seq_length()} positions"
            why = "the recomputation would append this block's keys and values a second time"
            raise refusal(name, found, why, f"train without a prefix in the cache, {LEAVE_OUT}")
        _warn_once(
            f"{type(value).__name__} is left out in training: checkpointed blocks must not fill a "
            "cache (model.config.use_cache = False avoids this)"
        )
    given = tuple(None if _is_cache(value) else value for value in args)
    return given, {key: None if _is_cache(value) else value for key, value in kwargs.items()}
