"""Refuses engines that the plugin does not support."""

from __future__ import annotations

from typing import Any

from ds_ckpt.errors import Problem, UnsupportedError


def has_optimizer(engine: Any) -> bool:
    """Return whether the engine trains; transformers builds engines without one for evaluation."""
    optimizer = engine.optimizer
    return hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")


def refuse_pipeline(engine: Any) -> None:
    """Refuse pipeline engines: they checkpoint by themselves and do not call `engine.step`."""
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        raise UnsupportedError(
            Problem(
                where="engine",
                found=type(engine).__name__,
                why="a pipeline checkpoints its own layers (activation_checkpoint_interval) and "
                "runs its steps inside train_batch",
                remedy="use a model that is not a PipelineModule, or remove the ds_ckpt and "
                "activation_checkpointing sections",
            )
        )


def refuse_no_zero3_optimizer(engine: Any) -> None:
    """Refuse engines without DeepSpeed's ZeRO-3 optimizer."""
    if not has_optimizer(engine) or not hasattr(engine.optimizer, "parameter_offload"):
        raise UnsupportedError(
            Problem(
                where="engine.optimizer",
                found=type(engine.optimizer).__name__,
                why="the hooks patch DeepSpeed's ZeRO-3 optimizer",
                remedy="pass an optimizer to ds_ckpt.initialize, or name one in the JSON file",
            )
        )


def refuse_model_parallel(engine: Any, off: str = '$.ds_ckpt.compression.method to "none"') -> None:
    """Refuse model parallelism: state is stored by parameter name, which its ranks share."""
    for attribute in ("mp_world_size", "sequence_parallel_size"):
        size = getattr(engine, attribute, 1)
        if size > 1:
            raise UnsupportedError(
                Problem(
                    where=f"engine.{attribute}",
                    found=str(size),
                    why="these ranks hold other slices under the same parameter name, and "
                    "residuals and resident weights are stored by name",
                    remedy=f"set {off}",
                )
            )


def nothing_to_replace(stage: int) -> UnsupportedError:
    """Return the error of `Session.measure_with` without a ZeRO-3 reduction."""
    return UnsupportedError(
        Problem(
            where="$.zero_optimization.stage",
            found=str(stage),
            why="only ZeRO-3's reduction can be replaced, while the session is attached",
            remedy="measure with stage 3",
        )
    )
