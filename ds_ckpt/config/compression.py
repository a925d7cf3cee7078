"""The `compression` section: how gradients travel, and what each key costs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_ckpt.config.base import SWITCH, Expects, ModuleName, Section, list_as_tuple


def _whole(value: Any) -> Any:
    """`4.0` and `true` equal members of a Literal of integers; they are not whole numbers here."""
    if isinstance(value, bool | float):
        raise ValueError("not a whole number")
    return value


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
    selection: Annotated[
        Literal["exact", "sampled", "blocks"],
        Expects('"exact", "sampled" or "blocks"', '"blocks"'),
    ] = Field(
        default="blocks",
        description='"exact": the largest entries of the whole shard, slow (about 20 ns an element '
        'on one CPU core). "sampled": the same entries, found by a threshold from a sample, about '
        'a fifth of the time. "blocks": the largest of each fixed-size block, an eighth of the '
        "time, somewhat less of the gradient's energy.",
    )
    offsets: Annotated[Literal["bytes", "packed"], Expects('"bytes" or "packed"', '"bytes"')] = (
        Field(
            default="bytes",
            description='How the places of selection "blocks" travel: "bytes": 8 bits each. '
            '"packed": about 7.2 bits, 5% fewer bytes in all for a tenth more packing time, which '
            "pays on links below about 20 Mbit/s. The other selections always pack.",
        )
    )


class QuantizeConfig(Section):
    """Few-bit values: every entry of each remote shard is sent, in blocks that share a scale."""

    bits: Annotated[Literal[8, 4, 3, 2], BeforeValidator(_whole), Expects("8, 4, 3 or 2", "3")] = (
        Field(
            default=3,
            description="Bits of a value, beside 16 bits of scale a block. 8, 4 and 3: even steps "
            "up to the block's largest magnitude. 2: the four levels that suit a Gaussian best. "
            "Fewer are fewer bytes and a larger rounding error: on Gaussian entries in blocks of "
            "64 its RMS is 0.6%, 9.5%, 19% and 34% of theirs. 3 is the fewest that validation "
            "found equivalent to dense training with error feedback; 3 bits take 1.6 times, 2 bits "
            "twice as long to pack as 4.",
        )
    )
    block: Annotated[
        Literal[32, 64, 128, 256],
        BeforeValidator(_whole),
        Expects("32, 64, 128 or 256", "64"),
    ] = Field(
        default=64,
        description="Neighbouring entries that share a scale: 16 / block bits an element. Shorter "
        "blocks round finer and send more: at 3 bits 64 is 3.25 bits, 4.92 times less than bf16.",
    )
    rotated: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Rotate each block at random (signs, a Hadamard transform) before rounding, "
        "so that no entry dwarfs its block: on a Llama's matrices the error of 2 bits falls from "
        "0.59 to 0.31 of the gradient, of 4 bits from 0.10 to 0.07; on embeddings it rises. "
        "Packing takes 3 to 4 times as long, by the CPU.",
    )


class PowerSGDConfig(Section):
    """PowerSGD: two factors of each matrix travel in its place, its rank the size of both."""

    rank: Annotated[int, Expects("a whole number from 1 to 1024", "16")] = Field(
        default=16,
        ge=1,
        le=1024,
        description="Columns of each factor. A rows x columns matrix sends rank * (rows + columns) "
        "numbers. Higher is more bytes, more compute and a lower loss; what a model needs "
        "grows with its width.",
    )
    alternate: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Send only one of the two factors a step, in turns (ACP-SGD): half the bytes, "
        "one collective less, two thirds of the compute; it follows the gradient more slowly.",
    )


class HybridConfig(Section):
    """Hybrid: low rank first, then values of what it missed."""

    remainder: Annotated[
        Literal["topk", "quantize"], Expects('"topk" or "quantize"', '"quantize"')
    ] = Field(
        default="quantize",
        description="How the entries that the factors missed travel, by the section of that name: "
        "few-bit values of all, or the largest alone.",
    )


class ErrorFeedbackConfig(Section):
    """Error feedback: what was not sent is kept and added to the next gradient."""

    enabled: Annotated[bool, SWITCH] = Field(
        default=True,
        description="Keep a residual per parameter (8 bytes an entry of a compressed tensor, in "
        "each process; see dtype). Without it, what is not sent is lost, which low rank and Top-K "
        "pay for with a higher loss.",
    )
    dtype: Annotated[
        Literal["fp32", "bf16", "int8"], Expects('"fp32", "bf16" or "int8"', '"bf16"')
    ] = Field(
        default="fp32",
        description="What residuals are kept in from step to step: 8, 4 or 2.1 bytes an entry, "
        "the copy that a skipped step falls back on included. bf16 and int8 (scales for 64 "
        "entries) are rounded up or down at random so that nothing is lost on average; an entry is "
        "off by up to one unit of the type, and a step takes 2 to 4 ns an entry more on one CPU "
        "core.",
    )
    device: Annotated[Literal["accelerator", "cpu"], Expects('"accelerator" or "cpu"', '"cpu"')] = (
        Field(
            default="accelerator",
            description='Where residuals are kept. "cpu": in pinned host memory, no accelerator '
            "memory between steps; each step copies every residual there and back, in its dtype.",
        )
    )

    def words(self) -> str:
        """A few words on what is switched on."""
        if not self.enabled:
            return "without error feedback"
        kept = "" if self.dtype == "fp32" else f" in {self.dtype}"
        return f"with error feedback{kept}{' on the host' if self.device == 'cpu' else ''}"


class ExchangeConfig(Section):
    """When gradients are exchanged, and beside what."""

    when: Annotated[
        Literal["auto", "micro_step", "accumulation_boundary"],
        Expects('"auto", "micro_step" or "accumulation_boundary"', '"accumulation_boundary"'),
    ] = Field(
        default="auto",
        description='With gradient accumulation: "accumulation_boundary" exchanges once a step and '
        "keeps earlier micro-steps in the residuals, so bytes and time are divided by the number "
        'of micro-steps. Method "dense" and methods without error feedback have no residuals; they '
        "then hold the gradients of a step in fp32, 4 bytes a parameter a process (with two levels "
        'divided by the processes of a host). "micro_step" exchanges every time, as DeepSpeed '
        'does. "auto": at the boundary where there are residuals, else every time; every time, '
        "too, where managed_gradient_accumulation is off.",
    )
    autotune: Annotated[bool, SWITCH] = Field(
        default=True,
        description="After the warm-up, and again after 1000 steps, time whole steps with "
        "gradients compressed and with DeepSpeed's own reduction (for accumulated steps that are "
        "exchanged once: uncompressed), and compress only where steps are shown to be shorter with "
        "it: on a fast link compression costs more than it saves. What runs then depends on the "
        "machine. false: compress always.",
    )
    levels: Annotated[
        Literal["auto", 1, 2], BeforeValidator(_whole), Expects('"auto", 1 or 2', "2")
    ] = Field(
        default="auto",
        description="2: gradients are summed exactly among the processes of a host, then "
        "compressed between hosts: fewer bytes on the link, and residuals of 1 / processes a host "
        'of the size. 1: compressed between all processes. "auto": 2 where there are several hosts '
        "with equally many processes, several each; else 1.",
    )
    overlap: Annotated[bool, SWITCH] = Field(
        default=True,
        description="With gloo: exchange a bucket in a thread of its own, over a process group of "
        "its own, while backward goes on; gradients are the same to the bit. Up to two more "
        "buffers of zero_optimization.reduce_bucket_size entries are held, and nothing is hidden "
        "where all gradients fit into one bucket: choose that size so that a backward has five or "
        "more.",
    )


class GuardConfig(Section):
    """Watches what compression leaves behind, and acts when validation has not seen the like."""

    action: Annotated[
        Literal["off", "warn", "dense"], Expects('"off", "warn" or "dense"', '"warn"')
    ] = Field(
        default="off",
        description='What to do when a limit is passed in two looks in a row. "warn": one line in '
        'the log each time it begins. "dense": send every gradient whole from the next step on, '
        "what is owed with it, on all processes alike, to the end of the run. Each look costs two "
        "passes over the gradients and an all-reduce of two numbers.",
    )
    error: Annotated[float | None, Expects("a number above 0 and at most 1", "0.2")] = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Largest compression error: norm of what a step leaves behind over norm of "
        "what there was to send, all processes together. Default, with residual_norm absent too: "
        "what validate-accuracy saw with these settings and a quarter more.",
    )
    residual_norm: Annotated[float | None, Expects("a number above 0", "5.0")] = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Largest norm of what is left behind, in norms of the averaged gradient: how "
        "many steps' worth the weights are owed. Default: as error.",
    )
    every_n_steps: Annotated[int, Expects("a whole number, 1 or more", "10")] = Field(
        default=10, ge=1, description="Optimizer steps from one look to the next."
    )

    @property
    def active(self) -> bool:
        """Whether anything is watched."""
        return self.action != "off"


_METHOD_WORDS = '"dense", "topk", "powersgd", "quantize" or "hybrid"'


class RuleConfig(Section):
    """One rule: tensors that match travel by a method of their own. The first that fits decides."""

    match: Annotated[ModuleName, Expects("a pattern over parameter names", '"*embed*"')] = Field(
        description="Shell pattern (fnmatch) over parameter names."
    )
    method: Annotated[
        Literal["dense", "topk", "powersgd", "quantize", "hybrid"],
        Expects(_METHOD_WORDS, '"topk"'),
    ] = Field(description='How these tensors travel; "dense": whole.')
    dims: Annotated[int | None, Expects("a whole number, 1 or more", "2")] = Field(
        default=None, ge=1, description="Only tensors of so many dimensions. Default: any."
    )
    min_numel: Annotated[int | None, Expects("a whole number, 0 or more", "4096")] = Field(
        default=None, ge=0, description="Only tensors with at least so many entries."
    )
    max_numel: Annotated[int | None, Expects("a whole number, 0 or more", "1000000")] = Field(
        default=None, ge=0, description="Only tensors with at most so many entries."
    )
    topk: Annotated[TopKConfig | None, Expects("an object", '{"density": 0.01}')] = Field(
        default=None, description="Instead of the common section of this name."
    )
    powersgd: Annotated[PowerSGDConfig | None, Expects("an object", '{"rank": 16}')] = Field(
        default=None, description="Instead of the common section of this name."
    )
    quantize: Annotated[QuantizeConfig | None, Expects("an object", '{"bits": 3}')] = Field(
        default=None, description="Instead of the common section of this name."
    )
    hybrid: Annotated[HybridConfig | None, Expects("an object", '{"remainder": "topk"}')] = Field(
        default=None, description="Instead of the common section of this name."
    )


class CompressionConfig(Section):
    """How gradients travel in ZeRO-3's reduction."""

    method: Annotated[
        Literal["none", "dense", "topk", "powersgd", "quantize", "hybrid"],
        Expects(f'"none", {_METHOD_WORDS}', '"topk"'),
    ] = Field(
        default="none",
        description='"none": DeepSpeed\'s own reduce-scatter. "dense": every entry sent once by '
        "all-to-all and summed at its owner: lossless, half the bytes of gloo's reduce-scatter; "
        "16-bit gradients are summed in fp32, with less error than DeepSpeed's sum. "
        '"topk": the largest entries only; fewer bytes, and it costs loss. "powersgd": low-rank '
        'factors of each matrix; fewest bytes for wide matrices, and it costs loss. "quantize": '
        "every entry in 8, 4, 3 or 2 bits; more bytes and a smaller error. "
        '"hybrid": low rank, then few-bit or Top-K values of what it missed.',
    )
    topk: Annotated[TopKConfig, Expects("an object", '{"density": 0.01}')] = Field(
        default_factory=TopKConfig, description='Settings of method "topk".'
    )
    quantize: Annotated[QuantizeConfig, Expects("an object", '{"bits": 3}')] = Field(
        default_factory=QuantizeConfig, description='Settings of method "quantize".'
    )
    powersgd: Annotated[PowerSGDConfig, Expects("an object", '{"rank": 16}')] = Field(
        default_factory=PowerSGDConfig,
        description='Settings of method "powersgd", and of the low rank of "hybrid".',
    )
    hybrid: Annotated[HybridConfig, Expects("an object", '{"remainder": "quantize"}')] = Field(
        default_factory=HybridConfig, description='Settings of method "hybrid".'
    )
    rules: Annotated[
        tuple[RuleConfig, ...],
        BeforeValidator(list_as_tuple),
        Expects("a list of objects", '[{"match": "*embed*", "method": "topk"}]'),
    ] = Field(
        default=(),
        description="Methods for single tensors, by name, dimensions and size. The first rule that "
        "fits decides; the rest travels by the method above, biases and norms whole, and, where "
        "that is a low rank, untied embeddings of 8192 rows or more by Top-K.",
    )
    error_feedback: Annotated[ErrorFeedbackConfig, Expects("an object", '{"enabled": true}')] = (
        Field(
            default_factory=ErrorFeedbackConfig,
            description="Residuals of every method that does not send everything.",
        )
    )
    exchange: Annotated[
        ExchangeConfig, Expects("an object", '{"when": "accumulation_boundary"}')
    ] = Field(
        default_factory=ExchangeConfig,
        description="When gradients are exchanged.",
    )
    guard: Annotated[GuardConfig, Expects("an object", '{"action": "warn"}')] = Field(
        default_factory=GuardConfig,
        description="What to do when compression leaves more behind than validation has seen.",
    )
    warmup_steps: Annotated[int, Expects("a whole number, 0 or more", "100")] = Field(
        default=100,
        ge=0,
        description="Optimizer steps that are sent dense before compression begins. A longer dense "
        "warm-up costs bytes and lowers the price in loss.",
    )
    min_numel: Annotated[int, Expects("a whole number, 0 or more", "4096")] = Field(
        default=4096,
        ge=0,
        description="Tensors with fewer entries are sent dense; so are all with less than two "
        "dimensions (biases, norms), whatever their size, unless a rule takes them.",
    )

    @property
    def lossy(self) -> bool:
        """Whether anything is left behind."""
        return self.method not in ("none", "dense") or any(r.method != "dense" for r in self.rules)
