"""The sections as frozen pydantic models: names, types, ranges, defaults, and what each key costs.

Strict: `true` is not 1 and `"1"` is not 1. `null` never reaches a model: it stands for the default
and is dropped before (`sections.py`). An option is here only when the code behind it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

import ds_ckpt.config.compression as _compression
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.weights import WeightsConfig
from ds_ckpt.fields import SWITCH, Expects, Section


class TelemetryConfig(Section):
    """Counters of bytes and collectives by purpose."""

    enabled: Annotated[bool, SWITCH] = Field(
        default=False, description="Write records of what was sent, gathered and reduced."
    )
    every_n_steps: Annotated[int, Expects("a whole number, 1 or more", "10")] = Field(
        default=10, ge=1, description="Optimizer steps from one record to the next."
    )
    path: Annotated[
        str | None,
        Field(min_length=1),
        Expects("a file path in quotes", '"runs/telemetry.jsonl"'),
    ] = Field(
        default=None,
        description="JSON Lines file; each process puts its index behind the stem (t.jsonl becomes "
        "t.0.jsonl). Default: the last record alone is kept, in memory.",
    )


class PluginConfig(Section):
    """The `ds_ckpt` section: activation checkpointing, gradients, weights, telemetry."""

    activation: Annotated[ActivationConfig, Expects("an object", '{"policy": "block"}')] = Field(
        default_factory=ActivationConfig, description="What is recomputed in backward."
    )
    compression: Annotated[CompressionConfig, Expects("an object", '{"method": "dense"}')] = Field(
        default_factory=CompressionConfig, description="How gradients travel."
    )
    weights: Annotated[WeightsConfig, Expects("an object", '{"resident": true}')] = Field(
        default_factory=WeightsConfig, description="What hosts keep of the weights."
    )
    telemetry: Annotated[TelemetryConfig, Expects("an object", '{"enabled": true}')] = Field(
        default_factory=TelemetryConfig, description="What is recorded."
    )

    @property
    def active(self) -> bool:
        """Whether training differs from plain DeepSpeed."""
        compresses = self.compression.method != "none"
        return self.activation.active or compresses or bool(self.weights.resident)

    def summary(self) -> str:
        """One line on what this configuration switches on."""
        parts = []
        if self.activation.active:
            parts.append(self.activation.summary())
        if self.compression.method != "none":
            parts.append(self.compression.summary())
        if self.weights.resident:
            parts.append(self.weights.summary())
        if self.telemetry.enabled:
            parts.append(f"telemetry every {self.telemetry.every_n_steps} steps")
        return "; ".join(parts) or "nothing switched on: plain DeepSpeed"


class DeepSpeedActivationSection(Section):
    """DeepSpeed's own section. Its presence, even empty, selects policy "block".

    DeepSpeed parses these keys and acts on none of them. Here those with a description act as the
    key of `ds_ckpt.activation` that it names.
    """

    removed: ClassVar = {
        theirs: replace(ActivationConfig.removed[ours], values=(True,))
        for theirs, ours in (
            ("contiguous_memory_optimization", "contiguous"),
            ("synchronize_checkpoint_boundary", "synchronize"),
            ("profile", "profile"),
        )
    }

    partition_activations: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Split inputs of blocks over the tensor-parallel group (ds_ckpt.activation."
        "partition).",
    )
    number_checkpoints: Annotated[
        int | None, Field(ge=1), Expects("a whole number, 1 or more", "32")
    ] = Field(
        default=None,
        description="Ignored: recomputations are counted.",
    )
    contiguous_memory_optimization: Annotated[bool, SWITCH] = Field(
        default=False, description="Removed; false only."
    )
    cpu_checkpointing: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Keep inputs of blocks in host memory (ds_ckpt.activation.offload).",
    )
    profile: Annotated[bool, SWITCH] = Field(default=False, description="Removed; false only.")
    synchronize_checkpoint_boundary: Annotated[bool, SWITCH] = Field(
        default=False, description="Removed; false only."
    )


def follow_registry() -> None:
    """Let the sections know of methods that were registered since."""
    if _compression.follow_registry():
        PluginConfig.model_rebuild(force=True)
