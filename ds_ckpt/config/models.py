"""The `ds_ckpt` section as frozen pydantic models, and its JSON Schema for editors.

The models are strict: `true` is not 1 and `"1"` is not 1. `null` stands for the default and is
removed before validation. Constraints between keys are markers on the fields (`fields.py`).
"""

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.json_schema import models_json_schema

from ds_ckpt.activation.policies import POLICIES, policy_names, setting_fields
from ds_ckpt.compression import Method, methods
from ds_ckpt.config.activation import ActivationConfig, ActivationRuleConfig, policy_field
from ds_ckpt.config.compression import CompressionConfig, with_methods
from ds_ckpt.fields import Expects, Name, Removed, Requires, Section, derive, field_of

_ENABLED = Requires("enabled", (True,))


class TelemetryConfig(Section):
    """Records of bytes and times, by purpose."""

    enabled: bool = Field(
        False, description="Records of bytes and of a step's times; rank 0 logs a line of each."
    )
    every_n_steps: Annotated[int, _ENABLED] = Field(
        10, ge=1, description="Interval of records, in optimizer steps."
    )
    path: Annotated[
        Name | None, Expects("a file path in quotes", '"runs/telemetry.jsonl"'), _ENABLED
    ] = Field(None, description="JSON Lines file; each rank appends its index to the stem.")


class WeightsConfig(Section):
    """Copies of the weights on every node, so that all-gathers stay inside the node."""

    removed = {
        "deltas": Removed(
            "weight changes in few bits were removed", 'write "auto"', ("4bit", "3bit")
        )
    }

    resident: Annotated[bool | Literal["auto"], Expects('true, false or "auto"', "true")] = Field(
        False,
        description="Keep one copy of the weights per node, sharded over its ranks. Weights "
        "are sent between nodes once per step, for 2 bytes per parameter (4 in fp32). Bit-equal to "
        'DeepSpeed. "auto": only if that shortens the step.',
    )
    deltas: Annotated[
        Literal["auto", "none", "lossless"], Requires("resident", not_in=(False,), suggest=True)
    ] = Field(
        "auto",
        description='Encoding of weights between nodes. "none": uncompressed. "lossless": changes '
        'in 0.8 to 4 bits a weight, bit-equal. "auto": the faster one for bf16 and fp16, none for '
        "fp32.",
    )

    def summary(self) -> str:
        """Describe the active settings in a few words."""
        condition = ", if that shortens the step" if self.resident == "auto" else ""
        return f"weights resident on every node{condition}"


class PluginConfig(Section):
    """The `ds_ckpt` section: activation checkpointing, gradients, weights, telemetry.

    `"ds_ckpt": "auto"` means block checkpointing, and 3-bit gradients and resident weights if they
    shorten the step. A part that conflicts with DeepSpeed's settings is left out.
    """

    activation: ActivationConfig = field_of(ActivationConfig, "Recomputation in backward.")
    compression: CompressionConfig = field_of(CompressionConfig, "Compression of gradients.")
    weights: WeightsConfig = field_of(WeightsConfig, "Copies of the weights on every node.")
    telemetry: TelemetryConfig = field_of(TelemetryConfig, "Records of bytes and times.")

    @property
    def active(self) -> bool:
        """Return whether training differs from plain DeepSpeed."""
        compresses = self.compression.method != "none"
        return self.activation.active or compresses or bool(self.weights.resident)

    def summary(self, blocks: str = "", weights: str = "") -> str:
        """Describe the active settings in one line.

        `blocks` follows the policy; `weights` replaces the description of resident weights.
        """
        parts = []
        if self.activation.active:
            parts.append(self.activation.summary(blocks))
        if self.compression.method != "none":
            parts.append(self.compression.summary())
        if self.weights.resident:
            parts.append(weights or self.weights.summary())
        if self.telemetry.enabled:
            parts.append(f"telemetry every {self.telemetry.every_n_steps} steps")
        return "; ".join(parts) or "nothing switched on: plain DeepSpeed"


class CompatSection(Section):
    """DeepSpeed's own section. Its presence, even empty, selects policy "block".

    A key acts as the key of `ds_ckpt.activation` that its description names, or has no effect.
    Like DeepSpeed it accepts other keys and values, too; a warning names what is ignored.
    """

    model_config = ConfigDict(extra="ignore")
    ours: ClassVar = {"partition_activations": "partition", "cpu_checkpointing": "offload"}

    partition_activations: bool = Field(
        False, description="Same as ds_ckpt.activation.partition; ignored without a group."
    )
    cpu_checkpointing: bool = Field(False, description="Same as ds_ckpt.activation.offload.")
    number_checkpoints: int | None = Field(None, description="No effect: no buffer is allocated.")
    contiguous_memory_optimization: bool = Field(
        False, description="No effect: use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )
    synchronize_checkpoint_boundary: bool = Field(
        False, description="No effect: use CUDA_LAUNCH_BLOCKING=1."
    )
    profile: bool = Field(False, description="No effect: use torch.profiler or ds-ckpt profile.")


def plugin_model() -> type[PluginConfig]:
    """Return the section's model with the policies and methods that are registered now."""
    return _build(tuple(POLICIES.items()), tuple(methods().items()))


@cache
def _build(
    _: tuple[tuple[str, type[Section]], ...], known: tuple[tuple[str, type[Method]], ...]
) -> type[PluginConfig]:
    settings = setting_fields()
    of_rules = policy_names(planned=False)
    rule = derive(ActivationRuleConfig, policy=Literal[of_rules], **settings)
    names = policy_names()
    activation = derive(
        ActivationConfig,
        policy=(Literal[names], policy_field()),
        rules=tuple[rule, ...],  # type: ignore[valid-type]
        **settings,
    )
    return derive(PluginConfig, activation=activation, compression=with_methods(dict(known)))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a whole file; DeepSpeed's keys pass."""
    models: tuple[type[Section], ...] = plugin_model(), CompatSection
    _, generated = models_json_schema([(model, "validation") for model in models])
    ours, theirs = ({"$ref": f"#/$defs/{model.__name__}"} for model in models)
    keys = {"ds_ckpt": {"anyOf": [ours, {"const": "auto"}]}, "activation_checkpointing": theirs}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed configuration with ds_ckpt",
        "type": "object",
        "properties": keys,
        **generated,
    }
