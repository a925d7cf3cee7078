"""Puts non-reentrant checkpointing on the blocks of a model, and takes it off again.

The recompute itself is torch's (`torch.utils.checkpoint`, Chen et al., arXiv 1604.06174); this file
decides where it goes and surrounds each recompute with the scopes that others ask for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation.blocks import Block, find_blocks, is_hf_layer
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.patch import Patches

log = logging.getLogger("ds_ckpt")
Scope = Callable[[], AbstractContextManager[Any]]
_TRAINER_FLAG = "TrainingArguments(activation_checkpointing_kwargs=...)"


class CheckpointedBlocks:
    """Checkpoints the blocks of one model from construction until `remove()`.

    Args:
        model: the engine's module.
        patterns: see `find_blocks`.
        scopes: context managers entered around every recompute.

    Raises:
        ConfigError, UnsupportedError: from `find_blocks`, or where the model already has
            checkpointing of another kind. Nothing has been changed then.
    """

    def __init__(
        self, model: nn.Module, patterns: Sequence[str] | None, scopes: Sequence[Scope] = ()
    ) -> None:
        self._scopes = tuple(scopes)
        self._patches = Patches()
        self._wanted: dict[nn.Module, bool] = {}
        """Transformers' flag on each module that carries it, while checkpointing is enabled."""
        self.blocks = find_blocks(model, patterns)
        _refuse_other_checkpointing(model)
        for block in self.blocks:
            if block.kind == "forward":
                self._patches.set(block.module, "forward", self._checkpointed(block.module))
        if any(is_hf_layer(m) for m in model.modules()):
            self._use_hf_hook(model, self.blocks)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        stack = ExitStack()
        return nullcontext(), _entering(stack, self._scopes)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _checkpointed(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
            if module.training and torch.is_grad_enabled():
                return self._run(forward, *args, **kwargs)
            return forward(*args, **kwargs)

        return checkpointed_forward

    def _use_hf_hook(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        """Our recompute behind transformers' flag, on the found layers and no others."""
        found = {id(block.module) for block in blocks if block.kind == "hf"}
        for module in list(model.modules()):
            if hasattr(module, "gradient_checkpointing"):
                # a model that owns layers carries the flag too, and then leaves its cache out
                self._wanted[module] = id(module) in found or not is_hf_layer(module)
                self._patches.set(module, "_gradient_checkpointing_func", self._run)
                self._patches.set(module, "gradient_checkpointing", self._wanted[module])
            if hasattr(module, "_set_gradient_checkpointing"):
                # what transformers' enable and disable end in
                self._patches.set(module, "_set_gradient_checkpointing", self._reconcile(module))

    def _reconcile(self, module: nn.Module) -> Callable[..., None]:
        def _set_gradient_checkpointing(
            enable: bool = True,
            gradient_checkpointing_func: Callable[..., Any] = checkpoint,
            every_n_layers: int = 1,
        ) -> None:
            if enable:
                problem = _objection(gradient_checkpointing_func, every_n_layers)
                if problem is not None:
                    raise UnsupportedError(problem)
            for part in module.modules():
                if part in self._wanted:
                    flag = enable and self._wanted[part]
                    setattr(part, "gradient_checkpointing", flag)  # noqa: B010 - not a Tensor

        return _set_gradient_checkpointing

    def remove(self) -> None:
        """Leave the model as it was found."""
        self._patches.undo()
        self._wanted.clear()


class _entering:  # noqa: N801 - a context manager, used as a verb
    """Enters the scopes when entered itself, so that one object can be handed out early."""

    def __init__(self, stack: ExitStack, scopes: Sequence[Scope]) -> None:
        self._stack = stack
        self._scopes = scopes

    def __enter__(self) -> None:
        for scope in self._scopes:
            self._stack.enter_context(scope())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _objection(function: Callable[..., Any], every_n_layers: int) -> Problem | None:
    """Why checkpointing that someone else asked for is not what policy `block` does."""
    keywords = getattr(function, "keywords", {})
    target = getattr(function, "func", function)
    remedy = (
        'drop it, or set "ds_ckpt": {"activation": {"policy": "none"}} to leave checkpointing to '
        "transformers"
    )
    if keywords.get("use_reentrant", False):
        why = "policy block is non-reentrant; reentrant recompute gathers every weight 3 times"
        return Problem(_TRAINER_FLAG, '"use_reentrant": true', why, remedy)
    if every_n_layers != 1:
        why = "policy block recomputes every block"
        return Problem(_TRAINER_FLAG, f'"every_n_layers": {every_n_layers}', why, remedy)
    extra = {k: v for k, v in keywords.items() if k != "use_reentrant"}
    if target is checkpoint and extra:
        why = "policy block checkpoints with torch's defaults and would drop it"
        return Problem(
            _TRAINER_FLAG, ", ".join(f"{k}={v!r}" for k, v in extra.items()), why, remedy
        )
    if target is not checkpoint:
        why = "it replaces the recompute that policy block has put on the model"
        found = f"checkpointing by {getattr(target, '__qualname__', target)} (offload?)"
        return Problem(_TRAINER_FLAG, found, why, remedy)
    return None


def _refuse_other_checkpointing(model: nn.Module) -> None:
    """Checkpointing that is on already must be the same thing, which is then taken over."""
    on = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    every_n = 1
    repeated = [m for m in layers if is_hf_layer(m)]
    if on and repeated:
        flags = [bool(m.gradient_checkpointing) for m in repeated]
        every_n = round(len(flags) / max(sum(flags), 1))
    functions: list[Any] = [m._gradient_checkpointing_func for m in on if m in layers]
    objections = {_objection(function, every_n) for function in functions}
    problems = [o for o in objections if o is not None]
    if problems:
        raise UnsupportedError(problems, headline="the model already has other checkpointing on")
    if on:
        log.info("ds_ckpt takes over the checkpointing that transformers had switched on")
