"""The sections as frozen pydantic models: names, types, ranges, defaults, and what each key costs.

Strict: `true` is not 1 and `"1"` is not 1. `null` never reaches a model: it stands for the default
and is dropped before (`sections.py`). An option is here only when the code behind it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


@dataclass(frozen=True)
class Expects:
    """What a key takes, in words, and a value to copy (as JSON)."""

    words: str
    example: str


def _list_as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _whole(value: Any) -> Any:
    """`4.0` and `true` equal members of a Literal of integers; they are not whole numbers here."""
    if isinstance(value, bool | float):
        raise ValueError("not a whole number")
    return value


_SWITCH = Expects("true or false", "true")
_OFF = Expects("false", "false")
_ModuleName = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ActivationConfig(Section):
    """Activation checkpointing: keep a block's input only, compute the block again in backward."""

    policy: Annotated[Literal["none", "block"], Expects('"none" or "block"', '"block"')] = Field(
        default="none",
        description='What is recomputed. "none": nothing. "block": every block keeps its input '
        "alone and runs its forward a second time in backward, about a third more compute in "
        "exchange for the block's inner activations; gradients stay the same to the bit. The "
        'default is "block" where the section activation_checkpointing stands, else "none".',
    )
    modules: Annotated[
        tuple[_ModuleName, ...] | None,
        Field(min_length=1),
        BeforeValidator(_list_as_tuple),
        Expects("a list of class names or patterns over module names", '["Block", "layers.*"]'),
    ] = Field(
        default=None,
        description="Which modules are blocks: class names, or shell patterns (fnmatch) over "
        "module names. Default: the layers that a Hugging Face model declares. Needed for plain "
        "modules.",
    )
    share_gather: Annotated[bool, _SWITCH] = Field(
        default=True,
        description="Keep the weights that recompute gathered until the backward of the same "
        "block has used them: 2 gathers of each parameter a step instead of 3, one block's "
        "weights held a little longer. ZeRO stage 3 only.",
    )


class TopKConfig(Section):
    """Top-K: of each remote shard only the largest entries are sent, by all-to-all."""

    density: Annotated[float, Expects("a number above 0 and at most 1", "0.01")] = Field(
        default=0.01,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the entries that is sent (0.01 is 1%). Lower is fewer bytes and a "
        "higher loss; ds_configs/README.md has what was measured.",
    )
    values: Annotated[
        Literal["fp32", "bf16", "int8"], Expects('"fp32", "bf16" or "int8"', '"int8"')
    ] = Field(
        default="int8",
        description="Type of a sent value on the wire: 4, 2 or 1 bytes each. The rounding error "
        "goes into the residual where error feedback is on.",
    )
    selection: Annotated[Literal["exact", "blocks"], Expects('"exact" or "blocks"', '"blocks"')] = (
        Field(
            default="blocks",
            description='"exact": the largest entries of the whole shard, slow (about 20 ns an '
            'element on one CPU core). "blocks": the largest of each fixed-size block, about a '
            "twelfth of the time and smaller indices, somewhat less of the gradient's energy.",
        )
    )


class QuantizeConfig(Section):
    """Few-bit values: every entry of each remote shard is sent, in blocks that share a scale."""

    bits: Annotated[Literal[8, 4, 2], BeforeValidator(_whole), Expects("8, 4 or 2", "4")] = Field(
        default=4,
        description="Bits of a value, beside 16 bits of scale a block. 8 and 4: even steps up to "
        "the block's largest magnitude. 2: the four levels that suit a Gaussian best. Fewer are "
        "fewer bytes and a larger rounding error: on Gaussian entries in blocks of 64 its RMS is "
        "0.6%, 9.5% and 34% of theirs. 2 bits take about 1.7 times as long to pack as 4.",
    )
    block: Annotated[
        Literal[32, 64, 128, 256],
        BeforeValidator(_whole),
        Expects("32, 64, 128 or 256", "64"),
    ] = Field(
        default=64,
        description="Neighbouring entries that share a scale: 16 / block bits an element. Shorter "
        "blocks round finer and send more: at 4 bits 64 is 4.25 bits, 3.76 times less than bf16.",
    )


class ErrorFeedbackConfig(Section):
    """Error feedback: what was not sent is kept and added to the next gradient."""

    enabled: Annotated[bool, _SWITCH] = Field(
        default=True,
        description="Keep a residual per parameter (8 bytes an entry of a compressed tensor, in "
        "each process). Without it, what is not sent is lost and training ends worse.",
    )


class ExchangeConfig(Section):
    """When compressed gradients are exchanged."""

    when: Annotated[
        Literal["micro_step", "accumulation_boundary"],
        Expects('"micro_step" or "accumulation_boundary"', '"accumulation_boundary"'),
    ] = Field(
        default="accumulation_boundary",
        description='With gradient accumulation: "accumulation_boundary" exchanges once a step and '
        "keeps earlier micro-steps in the residuals, so bytes and time are divided by the number "
        'of micro-steps. "micro_step" exchanges every time, as DeepSpeed does, and is used in any '
        "case where error feedback or managed_gradient_accumulation is off.",
    )


class CompressionConfig(Section):
    """How gradients travel in ZeRO-3's reduction."""

    method: Annotated[
        Literal["none", "dense", "topk", "quantize"],
        Expects('"none", "dense", "topk" or "quantize"', '"topk"'),
    ] = Field(
        default="none",
        description='"none": DeepSpeed\'s own reduce-scatter. "dense": every entry sent once by '
        "all-to-all and summed at its owner: lossless, half the bytes of gloo's reduce-scatter. "
        '"topk": the largest entries only; fewer bytes, and it costs loss. "quantize": every '
        "entry in 8, 4 or 2 bits; more bytes than Top-K and a smaller error.",
    )
    topk: Annotated[TopKConfig, Expects("an object", '{"density": 0.01}')] = Field(
        default_factory=TopKConfig, description='Settings of method "topk".'
    )
    quantize: Annotated[QuantizeConfig, Expects("an object", '{"bits": 4}')] = Field(
        default_factory=QuantizeConfig, description='Settings of method "quantize".'
    )
    error_feedback: Annotated[ErrorFeedbackConfig, Expects("an object", '{"enabled": true}')] = (
        Field(
            default_factory=ErrorFeedbackConfig,
            description='Residuals of methods "topk" and "quantize".',
        )
    )
    exchange: Annotated[
        ExchangeConfig, Expects("an object", '{"when": "accumulation_boundary"}')
    ] = Field(
        default_factory=ExchangeConfig,
        description='When methods "topk" and "quantize" exchange gradients.',
    )
    start_step: Annotated[int, Expects("a whole number, 0 or more", "100")] = Field(
        default=100,
        ge=0,
        description="Optimizer steps that are sent dense before compression begins. A longer dense "
        "warm-up costs bytes and lowers the price in loss.",
    )
    min_numel: Annotated[int, Expects("a whole number, 0 or more", "4096")] = Field(
        default=4096,
        ge=0,
        description="Tensors with fewer entries are sent dense; so are all with less than two "
        "dimensions (biases, norms), whatever their size.",
    )


class TelemetryConfig(Section):
    """Counters of bytes and collectives by purpose."""

    enabled: Annotated[bool, _SWITCH] = Field(
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
    """The `ds_ckpt` section: activation checkpointing, gradient compression, telemetry."""

    activation: Annotated[ActivationConfig, Expects("an object", '{"policy": "block"}')] = Field(
        default_factory=ActivationConfig, description="What is recomputed in backward."
    )
    compression: Annotated[CompressionConfig, Expects("an object", '{"method": "dense"}')] = Field(
        default_factory=CompressionConfig, description="How gradients travel."
    )
    telemetry: Annotated[TelemetryConfig, Expects("an object", '{"enabled": true}')] = Field(
        default_factory=TelemetryConfig, description="What is recorded."
    )

    @property
    def active(self) -> bool:
        """Whether training differs from plain DeepSpeed."""
        return self.activation.policy != "none" or self.compression.method != "none"

    def summary(self) -> str:
        """One line on what this configuration switches on."""
        parts = []
        if self.activation.policy != "none":
            modules = self.activation.modules
            where = f" of {', '.join(modules)}" if modules else ""
            share = "" if self.activation.share_gather else ", gathers not shared"
            parts.append(f"checkpointing {self.activation.policy}{where}{share}")
        comp = self.compression
        lossy = {
            "topk": f"top-k {comp.topk.density:.3%} as {comp.topk.values} ({comp.topk.selection})",
            "quantize": f"in {comp.quantize.bits} bits (blocks of {comp.quantize.block})",
        }
        if comp.method in lossy:
            feedback = "with" if comp.error_feedback.enabled else "without"
            parts.append(
                f"gradients {lossy[comp.method]}, {feedback} error feedback, "
                f"dense for {comp.start_step} steps"
            )
        elif comp.method == "dense":
            parts.append("gradients dense by all-to-all (lossless)")
        if self.telemetry.enabled:
            parts.append(f"telemetry every {self.telemetry.every_n_steps} steps")
        return "; ".join(parts) or "nothing switched on: plain DeepSpeed"


def _off_only(text: str) -> Any:
    return WithJsonSchema({"enum": [False, None], "default": False, "description": text})


class DeepSpeedActivationSection(Section):
    """DeepSpeed's own section. Standing there, even empty, it asks for policy "block".

    DeepSpeed parses these keys and acts on none of them. This release serves none of them either:
    each may stand as false (null for number_checkpoints) and is refused otherwise.
    """

    partition_activations: Annotated[
        bool, _OFF, _off_only("Split kept activations over tensor-parallel processes.")
    ] = False
    number_checkpoints: Annotated[
        int | None,
        Expects("null (left out)", "null"),
        WithJsonSchema(
            {"type": "null", "default": None, "description": "Size of contiguous buffers."}
        ),
    ] = None
    contiguous_memory_optimization: Annotated[
        bool, _OFF, _off_only("Copy kept activations into one buffer.")
    ] = False
    cpu_checkpointing: Annotated[bool, _OFF, _off_only("Move kept activations to host memory.")] = (
        False
    )
    profile: Annotated[bool, _OFF, _off_only("Time each checkpointed forward.")] = False
    synchronize_checkpoint_boundary: Annotated[
        bool, _OFF, _off_only("Synchronize the device at every boundary.")
    ] = False
