"""Engines that the plugin does not serve, in words."""

from __future__ import annotations

from typing import Any

from ds_ckpt.errors import Problem, UnsupportedError


def has_optimizer(engine: Any) -> bool:
    """Whether there is an optimizer; transformers builds engines without one for evaluation."""
    optimizer = engine.optimizer
    return hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")


def refuse_pipeline(engine: Any) -> None:
    """A pipeline engine checkpoints by itself and trains past `engine.step`."""
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
    """The hooks need DeepSpeed's own."""
    optimizer = engine.optimizer
    if not has_optimizer(engine) or not hasattr(optimizer, "parameter_offload"):
        raise UnsupportedError(
            Problem(
                where="engine.optimizer",
                found=type(optimizer).__name__,
                why="the hooks lean on DeepSpeed's ZeRO-3 optimizer; without an optimizer "
                "nothing is trained",
                remedy="give ds_ckpt.initialize an optimizer, or name one in the JSON file",
            )
        )


def refuse_model_parallel(engine: Any, off: str = '$.ds_ckpt.compression.method to "none"') -> None:
    """What is kept of a parameter is kept by its name, which model-parallel processes share."""
    for attribute, word in (
        ("mp_world_size", "model-parallel"),
        ("sequence_parallel_size", "sequence-parallel"),
    ):
        size = getattr(engine, attribute, 1)
        if size > 1:
            raise UnsupportedError(
                Problem(
                    where=f"engine.{attribute}",
                    found=str(size),
                    why=f"{word} processes hold other slices under the same parameter name, by "
                    "which residuals and resident weights are kept",
                    remedy=f"set {off}",
                )
            )


def nothing_to_replace(stage: int) -> UnsupportedError:
    """There is no ZeRO-3 reduction to measure in the place of."""
    return UnsupportedError(
        Problem(
            where="$.zero_optimization.stage",
            found=str(stage),
            why="only ZeRO-3's reduction can be replaced, while the session is attached",
            remedy="measure with stage 3",
        )
    )
