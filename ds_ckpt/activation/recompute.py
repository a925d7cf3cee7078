"""Puts checkpointing on the units of a model, and takes it off again.

The recompute itself is in `frames.py`, and what belongs to one in `plan.py`. This file decides when
a call is checkpointed, and gets along with the checkpointing of transformers.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation.arguments import TakenApart, opened
from ds_ckpt.activation.blocks import is_hf_layer
from ds_ckpt.activation.caches import holds_cache, without_empty_caches
from ds_ckpt.activation.calls import Around, Scope, Site, recomputing
from ds_ckpt.activation.choice import Choice
from ds_ckpt.activation.frames import Frame
from ds_ckpt.activation.others import objection, refuse_other_checkpointing
from ds_ckpt.activation.plan import Unit, make_plan
from ds_ckpt.activation.policy import Policy
from ds_ckpt.activation.surroundings import Tracker
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.patch import Patches

log = logging.getLogger("ds_ckpt")
Surrounding = Callable[
    [Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]


class CheckpointedBlocks:
    """Checkpoints the blocks of one model from construction until `remove()`.

    Args:
        model: the engine's module.
        patterns: see `find_blocks`; stands for `Policy(modules=patterns)`.
        scopes: context managers entered around every recompute.
        policy: what is recomputed; every block when neither it nor `units` is given.
        units: the plan itself, for whoever makes plans otherwise.
        around: called in the place of every checkpointed call, as
            `around(checkpointed, function, args, kwargs)`; it returns what
            `checkpointed(function, *args, **kwargs)` returns. Saved-tensor hooks that it enters
            there see what the call keeps (`kept.py`) and nothing else.
        trackers: random states beside torch's own, put back for a recompute.

    Raises:
        ConfigError, UnsupportedError: from `make_plan`, or where the model already has
            checkpointing of another kind. Nothing has been changed then.
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
        self._around = Around(tuple(scopes), tuple(trackers))
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
        for unit in self.units:
            state = _UnitState(self._around, unit, self._check_every)
            for index, block in enumerate(unit.blocks):
                choice = None
                if unit.save_ops:
                    choice = Choice(
                        unit.save_ops, unit.where, block.name, block.module, self._patches
                    )
                site = Site(block.name, block.module, choice)
                run: Callable[..., Any] = functools.partial(
                    _run, state, index, site, self._surrounding
                )
                if not self._is_plain(unit):
                    # a compiler's trace would lose what torch's own checkpoint does not know
                    run = torch.compiler.disable(run)
                runs[block.module] = run
                wrap = _checkpointed if block.kind == "forward" else _in_evaluation
                self._patches.set_method(block.module, "forward", wrap(block.module, run))
        if any(is_hf_layer(m) for m in model.modules()):
            self._use_hf_hook(model, runs)

    def _is_plain(self, unit: Unit) -> bool:
        """Whether torch's own checkpoint, which torch.compile can trace, does the same."""
        alone = len(unit.blocks) == 1 and not unit.save_ops
        return alone and self._surrounding is None and self._check_every == 0

    def _use_hf_hook(self, model: nn.Module, runs: dict[nn.Module, Callable[..., Any]]) -> None:
        """Our recompute behind transformers' flag, on the found layers and no others."""
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
        """What was found, in a few words."""
        classes = ", ".join(sorted({type(b.module).__name__ for b in self.blocks}))
        words = f"{len(self.blocks)} blocks ({classes})"
        if any(len(unit.blocks) > 1 for unit in self.units):
            words += f" in {len(self.units)} recomputes"
        return words

    def remove(self) -> None:
        """Leave the model as it was found."""
        self._patches.undo()
        self._wanted.clear()


class _UnitState:
    """What the sites of one unit share while a forward runs."""

    def __init__(self, around: Around, unit: Unit, check_every: int) -> None:
        self.around = around
        self._size = len(unit.blocks)
        self._check_every = check_every
        self._forwards = 0
        self._open: weakref.ref[Frame] | None = None
        self._next = 0

    def frame(self, index: int, tensors: Sequence[torch.Tensor]) -> Frame:
        """The frame that a call of site `index` belongs to: the open one if it goes on from it."""
        frame = self._open() if self._open is not None else None
        if frame is None or index < self._next or not frame.continues(tensors):
            self._forwards += 1
            check = self._check_every > 0 and (self._forwards - 1) % self._check_every == 0
            frame = Frame(self.around, check=check)
        last = index == self._size - 1
        self._open = None if last else weakref.ref(frame)
        self._next = index + 1
        return frame

    def is_last(self, index: int) -> bool:
        return index == self._size - 1


def _run(
    state: _UnitState,
    index: int,
    site: Site,
    around: Surrounding | None,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a site's forward: checkpointed, or as part of a recompute that goes on already."""
    if site.replaying is not None:  # called with its hooks, for them
        again, own_args, own_kwargs = site.replaying
        site.replaying = None
        site.raw = again(*own_args, **own_kwargs)
        return site.raw
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if recomputing.newest is not None and state.around.number > recomputing.newest:
        return function(*args, **kwargs)  # of a forward before this plan
    if torch.compiler.is_compiling():  # what torch.compile knows how to trace
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if _is_transformed():
        return function(*args, **kwargs)
    function, args, kwargs = opened(function, args, kwargs)
    if not site.module.training and holds_cache(site.name, args, kwargs):
        return function(*args, **kwargs)
    if not getattr(site.module, "_can_checkpoint_with_cache", False):  # transformers' word for it
        args, kwargs = without_empty_caches(site.name, args, kwargs)

    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = TakenApart(function, args, kwargs)
        frame = state.frame(index, arguments.tensors)
        return frame.run(site, arguments, last=state.is_last(index))

    if around is not None:
        return around(checkpointed, function, args, kwargs)
    return checkpointed(function, *args, **kwargs)


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For layers that are no blocks, should somebody raise their flag."""
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
    """Transformers' layers call their hook in training mode alone; gradients are asked for in
    evaluation mode, too (a frozen backbone, dropout switched off)."""
    forward = layer.forward

    @functools.wraps(forward)
    def forward_in_evaluation(*args: Any, **kwargs: Any) -> Any:
        if not layer.training and layer.gradient_checkpointing and torch.is_grad_enabled():
            return run(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    return forward_in_evaluation


def _is_transformed() -> bool:
    """Inside torch.func's transforms or forward-mode differentiation, which know no saved-tensor
    hooks: what they compute needs every value, so blocks run as they are."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    if not inside and forward_ad._current_level < 0:
        return False
    _say_once(
        "blocks inside torch.func transforms or forward-mode differentiation are not checkpointed"
    )
    return True


@functools.cache
def _say_once(words: str) -> None:
    log.warning("ds_ckpt: %s", words)
