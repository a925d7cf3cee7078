"""Refuses engines that the plugin does not support."""

from __future__ import annotations

from typing import Any

from ds_ckpt.errors import Problem, UnsupportedError


def has_optimizer(engine: Any) -> bool:
    """Return whether the engine trains; transformers builds engines without one for evaluation."""
    optimizer = engine.optimizer
    return hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")


def refuse_unsupported(engine: Any) -> None:
    """Refuse pipeline engines, and stage-3 engines without DeepSpeed's ZeRO-3 optimizer."""
    kind = type(engine)
    if any(base.__name__ == "PipelineEngine" for base in kind.__mro__):
        why = "a pipeline checkpoints its own layers (activation_checkpoint_interval)"
        remedy = "use a model that is not a PipelineModule"
        raise UnsupportedError(Problem("engine", kind.__name__, why, remedy))
    is_stage3 = engine.zero_optimization_stage() == 3
    if is_stage3 and not (has_optimizer(engine) and hasattr(engine.optimizer, "parameter_offload")):
        why = "the hooks patch DeepSpeed's ZeRO-3 optimizer"
        remedy = "pass an optimizer to ds_ckpt.initialize, or name one in the JSON file"
        found = type(engine.optimizer).__name__
        raise UnsupportedError(Problem("engine.optimizer", found, why, remedy))
