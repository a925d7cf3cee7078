"""Install checkpointing on the units of a model, and remove it.

The recomputation is in `checkpoint.py`, its modules are chosen in `policies.py`. This file decides
when a call is checkpointed, and handles what transformers brings: its own checkpointing, which is
taken over or refused, and key-value caches, to which a recomputation would append every key twice.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation.blocks import is_hf_layer
from ds_ckpt.activation.checkpoint import (
    Call,
    CheckpointedModule,
    RecomputeContext,
    Scope,
    opened,
)
from ds_ckpt.activation.policies import Policy, Unit, make_plan
from ds_ckpt.activation.selective import Choice, Tracker
from ds_ckpt.activation.snapshot import BlockMemory
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.patch import Patches

log = logging.getLogger("ds_ckpt")
_TRAINER_FLAG = "TrainingArguments(activation_checkpointing_kwargs=...)"
Surrounding = Callable[
    [str, Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]
"""Function that calls, for a block of this name, the first function with the others."""


class CheckpointedBlocks:
    """Checkpointing of one model's blocks, from construction until `remove()`.

    Args:
        model: the engine's module.
        patterns: see `find_blocks`; short for `Policy(modules=patterns)`.
        scopes: context managers entered around every recomputation.
        policy: policy of the blocks; default: all are recomputed.
        units: modules of each recomputation, instead of the policy's.
        around: called instead of every checkpointed call, as
            `around(label, checkpointed, function, args, kwargs)`; returns the result of
            `checkpointed(function, *args, **kwargs)`. Saved-tensor hooks that it enters see only
            what the call keeps for its recomputation.
        trackers: random states beside torch's own.

    Raises:
        ConfigError, UnsupportedError: from `make_plan`, or if the model has checkpointing of
            another kind. Nothing is changed then.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str] | None = None,
        scopes: Sequence[Scope] = (),
        *,
        policy: Policy | None = None,
        units: Sequence[Unit] | None = None,
        around: Surrounding | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        if policy is None:
            policy = Policy(modules=tuple(patterns) if patterns is not None else None)
        self._context = RecomputeContext(tuple(scopes), tuple(trackers))
        self._surrounding = around
        self._check_every = policy.check_determinism
        self._patches = Patches()
        self._wanted: dict[nn.Module, bool] = {}
        """Transformers' flag on each module that carries it, while checkpointing is enabled."""
        self.units = list(units) if units is not None else make_plan(model, policy)
        self.blocks = [block for unit in self.units for block in unit.blocks]
        refuse_other_checkpointing(model)
        try:
            self._install(model)
        except BaseException:
            self.remove()
            raise

    def _install(self, model: nn.Module) -> None:
        runs: dict[nn.Module, Callable[..., Any]] = {}
        choices = self._choices()
        for unit in self.units:
            unit_run = _Run(self._context, unit, self._check_every, self._surrounding)
            for index, block in enumerate(unit.blocks):
                memory = BlockMemory(block.name, block.module)
                choice = choices.get(block.name)
                target = CheckpointedModule(block.name, block.module, memory, choice)
                run: Callable[..., Any] = functools.partial(unit_run, index, target)
                if not self._is_plain(unit):
                    # a compiler's trace would lose what torch's own checkpoint does not know
                    run = torch.compiler.disable(run)
                runs[block.module] = run
                wrap = _checkpointed if block.kind == "forward" else _in_evaluation
                self._patches.set_method(block.module, "forward", wrap(block.module, run))
        if any(is_hf_layer(m) for m in model.modules()):
            self._use_hf_hook(model, runs)

    def _choices(self) -> dict[str, Choice]:
        """Return the saved operators of each block; all mistakes are in one error."""
        choices: dict[str, Choice] = {}
        problems: dict[tuple[str, str], Problem] = {}
        others: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for unit in self.units:
            for block in unit.blocks if unit.save_ops else ():
                try:
                    choices[block.name] = Choice(
                        unit.save_ops, unit.where, block.name, block.module, self._patches
                    )
                except ConfigError as error:
                    for problem in error.problems:
                        mistake = problem.where, problem.found
                        first = problems.setdefault(mistake, problem)
                        if problem != first:
                            others[mistake].append(block.name)
        if problems:
            raise ConfigError(
                [
                    replace(p, why=f"{p.why}; nor have {', '.join(others[m])}") if others[m] else p
                    for m, p in problems.items()
                ]
            )
        return choices

    def _is_plain(self, unit: Unit) -> bool:
        """Return whether torch's own checkpoint, which torch.compile can trace, does the same."""
        alone = len(unit.blocks) == 1 and not unit.save_ops
        return alone and self._surrounding is None and self._check_every == 0

    def _use_hf_hook(self, model: nn.Module, runs: dict[nn.Module, Callable[..., Any]]) -> None:
        """Put our recomputation behind transformers' flag, on the found layers and no others."""
        found = {id(block.module) for block in self.blocks if block.kind == "hf"}
        for module in list(model.modules()):
            if hasattr(module, "gradient_checkpointing"):
                # a model that owns layers carries the flag too, and then leaves its cache out
                self._wanted[module] = id(module) in found or not is_hf_layer(module)
                function = runs.get(module, _plainly)
                self._patches.set_method(module, "_gradient_checkpointing_func", function, _plainly)
                self._patches.set(module, "gradient_checkpointing", self._wanted[module])
            if hasattr(module, "_set_gradient_checkpointing"):
                # what transformers' enable and disable end in
                reconcile = self._reconcile(module)
                self._patches.set_method(module, "_set_gradient_checkpointing", reconcile)

    def _reconcile(self, module: nn.Module) -> Callable[..., None]:
        def _set_gradient_checkpointing(
            enable: bool = True,
            gradient_checkpointing_func: Callable[..., Any] = checkpoint,
            every_n_layers: int = 1,
        ) -> None:
            if enable:
                problem = objection(gradient_checkpointing_func, every_n_layers)
                if problem is not None:
                    raise UnsupportedError(problem)
            for part in module.modules():
                if part in self._wanted:
                    flag = enable and self._wanted[part]
                    setattr(part, "gradient_checkpointing", flag)  # noqa: B010 - not a Tensor

        return _set_gradient_checkpointing

    def describe(self) -> str:
        """Describe the blocks in a few words."""
        classes = ", ".join(sorted({type(b.module).__name__ for b in self.blocks}))
        words = f"{len(self.blocks)} blocks ({classes})"
        if any(len(unit.blocks) > 1 for unit in self.units):
            words += f" in {len(self.units)} recomputes"
        return words

    def remove(self) -> None:
        """Restore the model. A backward that is outstanding is refused."""
        self._context.removed = True
        self._patches.undo()
        self._wanted.clear()


class _Run:
    """Checkpointed forwards of one unit's modules, whose inputs may be outputs of each other."""

    def __init__(
        self, context: RecomputeContext, unit: Unit, check_every: int, around: Surrounding | None
    ) -> None:
        self._context, self._around = context, around
        self._size, self._check_every = len(unit.blocks), check_every
        self._forwards = self._next = 0
        self._check = False
        self._before: weakref.ref[Call] | None = None

    def __call__(
        self,
        index: int,
        target: CheckpointedModule,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call module `index`."""
        if target.replaying is not None:  # called with its hooks, for them
            again, target.replaying = target.replaying, None
            return again()
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():  # what torch.compile knows how to trace
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        if _is_transformed():
            return function(*args, **kwargs)
        function, args, kwargs = opened(function, args, kwargs)
        if not target.module.training and holds_cache(target.name, args, kwargs):
            return function(*args, **kwargs)
        if not getattr(target.module, "_can_checkpoint_with_cache", False):  # transformers' word
            args, kwargs = without_empty_caches(target.name, args, kwargs)
        run = functools.partial(self._checkpointed, index, target)
        if self._around is not None:
            return self._around(target.name, run, function, args, kwargs)
        return run(function, *args, **kwargs)

    def _checkpointed(
        self,
        index: int,
        target: CheckpointedModule,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = self._before() if self._before is not None and index >= self._next else None
        if before is None:
            self._forwards += 1
            self._check = self._check_every > 0 and (self._forwards - 1) % self._check_every == 0
        last = index == self._size - 1
        call = Call(target, self._context, check=self._check)
        result = call.run(function, args, kwargs, before=before, last=last)
        self._before = None if last else weakref.ref(call)
        self._next = index + 1
        return result


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer that is no block, if its flag is set."""
    return function(*args, **kwargs)


def _checkpointed(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return run(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    return checkpointed_forward


def _in_evaluation(layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint in evaluation mode with gradients, where transformers' layers call no hook."""
    forward = layer.forward

    @functools.wraps(forward)
    def forward_in_evaluation(*args: Any, **kwargs: Any) -> Any:
        if not layer.training and layer.gradient_checkpointing and torch.is_grad_enabled():
            return run(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    return forward_in_evaluation


def _is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation, which ignore hooks, is active."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    if not inside and forward_ad._current_level < 0:
        return False
    _warn_once(
        "blocks inside torch.func transforms or forward-mode differentiation are not checkpointed"
    )
    return True


@functools.cache
def _warn_once(words: str) -> None:
    log.warning("ds_ckpt: %s", words)


# checkpointing that somebody else has put on the model


def objection(function: Callable[..., Any], every_n_layers: int) -> Problem | None:
    """Return why checkpointing that was switched on elsewhere contradicts the policy, or None."""
    keywords = getattr(function, "keywords", {})
    target = getattr(function, "func", function)
    remedy = (
        'drop it, or set "ds_ckpt": {"activation": {"policy": "none"}} to leave checkpointing to '
        "transformers"
    )
    if keywords.get("use_reentrant", False):
        why = "ds_ckpt is non-reentrant; reentrant recompute gathers every weight 3 times"
        return Problem(_TRAINER_FLAG, '"use_reentrant": true', why, remedy)
    if every_n_layers != 1:
        why = "the policy decides which blocks are recomputed"
        return Problem(_TRAINER_FLAG, f'"every_n_layers": {every_n_layers}', why, remedy)
    extra = {k: v for k, v in keywords.items() if k != "use_reentrant"}
    if target is checkpoint and extra:
        why = "ds_ckpt checkpoints by itself and would drop it"
        return Problem(
            _TRAINER_FLAG, ", ".join(f"{k}={v!r}" for k, v in extra.items()), why, remedy
        )
    if target is not checkpoint:
        why = "it replaces the recompute that the policy has put on the model"
        found = f"checkpointing by {getattr(target, '__qualname__', target)} (offload?)"
        return Problem(_TRAINER_FLAG, found, why, remedy)
    return None


def refuse_other_checkpointing(model: nn.Module) -> None:
    """Take over checkpointing that is on already, or refuse another kind."""
    on = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    every_n = 1
    repeated = [m for m in layers if is_hf_layer(m)]
    if on and repeated:
        flags = [bool(m.gradient_checkpointing) for m in repeated]
        every_n = round(len(flags) / max(sum(flags), 1))
    functions: list[Any] = [m._gradient_checkpointing_func for m in on if m in layers]
    objections = {objection(function, every_n) for function in functions}
    problems = [o for o in objections if o is not None]
    if problems:
        raise UnsupportedError(problems, headline="the model already has other checkpointing on")
    if on:
        log.info("ds_ckpt takes over the checkpointing that transformers had switched on")


# key-value caches


def _is_cache(value: Any) -> bool:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return False
    if not hasattr(value, "get_seq_length"):
        return False
    names = {base.__name__ for base in type(value).__mro__}
    return "Cache" in names or hasattr(value, "update")


def without_empty_caches(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None for every empty cache.

    Raises:
        UnsupportedError: a cache is not empty.
    """
    return (
        tuple(_without(name, value) for value in args),
        {key: _without(name, value) for key, value in kwargs.items()},
    )


def holds_cache(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument is a cache, which has to be filled in evaluation mode."""
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return False
    _warn_once(
        "a block gets a cache in evaluation mode while gradients are on: blocks are not "
        "checkpointed then (use_cache=False, or torch.no_grad)"
    )
    return True


def _without(name: str, value: Any) -> Any:
    if not _is_cache(value):
        return value
    if value.get_seq_length() > 0:
        raise UnsupportedError(
            Problem(
                where=name,
                found=f"{type(value).__name__} with {value.get_seq_length()} positions",
                why="the recompute would append this block's keys and values a second time, and "
                "without the cache the forward would be another",
                remedy="train without a prefix in the cache, or leave the block out of "
                "checkpointing",
            )
        )
    _warn_once(
        f"{type(value).__name__} is left out in training: checkpointed blocks must not fill a "
        "cache (model.config.use_cache = False says so beforehand)"
    )
    return None
