"""Checkpointing that someone else has put on a model, or asks for: taken over, or refused.

Transformers' own, switched on by a flag of the Trainer or by `activation_checkpointing_enable`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation.blocks import is_hf_layer
from ds_ckpt.errors import Problem, UnsupportedError

log = logging.getLogger("ds_ckpt")
_TRAINER_FLAG = "TrainingArguments(activation_checkpointing_kwargs=...)"


def objection(function: Callable[..., Any], every_n_layers: int) -> Problem | None:
    """Why checkpointing that someone else asked for is not what the policy does."""
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
        why = "the policy says which blocks are recomputed"
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
    """Checkpointing that is on already must be the same thing, which is then taken over."""
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
