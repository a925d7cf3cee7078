"""The `compression` section: how gradients travel, and what each key costs.

Its sections for single methods are those of the registered ones: `follow_registry`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic.fields import FieldInfo

from ds_ckpt.compression import Method, methods
from ds_ckpt.exchange.build import ExchangeSettings, WarmupBits
from ds_ckpt.exchange.rules import MethodSettings, Rule
from ds_ckpt.fields import (
    SWITCH,
    WHOLE_NUMBER,
    Expects,
    ModuleName,
    Removed,
    Section,
    list_as_tuple,
)


def _momentum(value: Any) -> str | float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value in ("matched", "none") or (number and 0 < value < 1):
        return cast(str | float, value)
    raise ValueError("neither a choice nor a lead")


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
    momentum: Annotated[
        Literal["matched", "none"] | float,
        PlainValidator(_momentum),
        WithJsonSchema(
            {
                "anyOf": [
                    {"enum": ["matched", "none"]},
                    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                    {"type": "null"},
                ]
            }
        ),
        Expects('"matched", "none" or a number above 0 and below 1', '"matched"'),
    ] = Field(
        default="none",
        description="What is kept back arrives late, and an optimizer's first moment m makes it "
        'later still. "matched": after the warm-up AdamW steps by (1 - a) m + a g, g being the '
        "step's gradient, with the lead a that what is left behind asks for, 0.4 at most; a "
        "number: that a. For AdamW of torch, DeepSpeedCPUAdam and FusedAdam; "
        'other optimizers are left alone. It takes one more pass over m a step. "none": m.',
    )

    def words(self) -> str:
        """A few words on what is switched on."""
        if not self.enabled:
            return "without error feedback"
        kept = "" if self.dtype == "fp32" else f" in {self.dtype}"
        where = " on the host" if self.device == "cpu" else ""
        lead = "" if self.momentum == "none" else f", lead {self.momentum}"
        return f"with error feedback{kept}{where}{lead}"


class ExchangeConfig(Section):
    """When gradients are exchanged."""

    removed = {
        "overlap": Removed(
            why="the exchange thread for CPUs was removed",
            remedy="remove it; on a GPU, exchanges run asynchronously without it",
            stays=False,
        )
    }

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
    levels: Annotated[Literal["auto", 1, 2], WHOLE_NUMBER, Expects('"auto", 1 or 2', "2")] = Field(
        default="auto",
        description="2: gradients are summed exactly among the processes of a host, then "
        "compressed between hosts: fewer bytes on the link, and residuals of 1 / processes a host "
        'of the size. 1: compressed between all processes. "auto": 2 where there are several hosts '
        "with equally many processes, several each; else 1.",
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


class _WithMethods(Section):
    """A place where methods are named and have sections."""

    def sections(self) -> dict[str, Method]:
        """Settings of methods that stand here, by name."""
        found = {name: getattr(self, name, None) for name in methods()}
        return {name: section for name, section in found.items() if section is not None}


class RuleConfig(_WithMethods):
    """One rule: tensors that match travel by a method of their own. The first that fits decides."""

    aliases = {"pattern": "match", "name": "match", "ndim": "dims"}

    match: Annotated[ModuleName, Expects("a pattern over parameter names", '"*embed*"')] = Field(
        description="Shell pattern (fnmatch) over parameter names."
    )
    method: str
    dims: Annotated[int | None, Expects("a whole number, 1 or more", "2")] = Field(
        default=None, ge=1, description="Only tensors of so many dimensions. Default: any."
    )
    min_numel: Annotated[int | None, Expects("a whole number, 0 or more", "4096")] = Field(
        default=None, ge=0, description="Only tensors with at least so many entries."
    )
    max_numel: Annotated[int | None, Expects("a whole number, 0 or more", "1000000")] = Field(
        default=None, ge=0, description="Only tensors with at most so many entries."
    )


class CompressionConfig(_WithMethods):
    """How gradients travel in ZeRO-3's reduction."""

    aliases = {
        "type": "method",
        "algorithm": "method",
        "name": "method",
        "ratio": "topk.density",
        "sparsity": "topk.density",
        "k": "topk.density",
        "start_iter": "warmup_steps",
    }

    method: str = "none"
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
        description="Optimizer steps before compression begins, sent dense or in warmup_bits. A "
        "longer warm-up lowers the price in loss: let it be twice as long as the learning rate's.",
    )
    warmup_bits: Annotated[WarmupBits | None, WHOLE_NUMBER, Expects("8, 4, 3 or null", "4")] = (
        Field(
            default=None,
            description="Bits of a value in the warm-up, with residuals and scales as those of "
            '"quantize"; null: these steps are DeepSpeed\'s own reduction.',
        )
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
        known = methods()
        return any(m != "none" and not known[m].lossless for m in self.methods_used())

    def summary(self) -> str:
        """A few words on what is switched on; of any method but "none"."""
        if not self.lossy:
            return "gradients uncompressed by all-to-all (lossless)"
        compressor = MethodSettings(self.method, self.sections()).compressor()
        how = "uncompressed" if compressor is None else f"as {compressor.describe()}"
        rules = f", {len(self.rules)} rules" if self.rules else ""
        guard = f", guard: {self.guard.action}" if self.guard.active else ""
        first = "dense" if self.warmup_bits is None else f"in {self.warmup_bits} bits"
        return (
            f"gradients {how}{rules}, {self.error_feedback.words()}, "
            f"{first} for {self.warmup_steps} steps{guard}"
        )

    def methods_used(self) -> set[str]:
        """The section's and its rules'."""
        return {self.method, *(rule.method for rule in self.rules)}


_STATIC: dict[type[Section], dict[str, FieldInfo]] = {
    model: dict(model.model_fields) for model in (RuleConfig, CompressionConfig)
}
_followed: dict[str, type[Method]] = {}


def follow_registry() -> bool:
    """Give the models a section for every registered method; whether that changed anything."""
    known = dict(methods())
    if _followed == known:
        return False
    _followed.clear()
    _followed.update(known)
    *most, last = (f'"{name}"' for name in known)
    words = f"{', '.join(most)} or {last}"
    described = "".join(f' "{name}": {kind.about}.' for name, kind in known.items())
    of_rule = _field(
        Literal[tuple(known)],
        Expects(words, '"topk"'),
        description='How these tensors travel; "dense": uncompressed.',
    )
    of_section = _field(
        Literal[("none", *known)],
        Expects(f'"none", {words}', '"topk"'),
        default="none",
        description=f'"none": DeepSpeed\'s own reduce-scatter.{described}',
    )
    rule, section = _STATIC[RuleConfig], _STATIC[CompressionConfig]
    rule, section = {**rule, "method": of_rule}, {**section, "method": of_section}
    for name, kind in known.items():
        if not kind.model_fields:
            continue
        expects = Expects("an object", kind.example)
        about = f'Settings of method "{name}".'
        section[name] = _field(kind, expects, default_factory=kind, description=about)
        about = "Instead of the common section of this name."
        rule[name] = _field(kind | None, expects, default=None, description=about)
    for model, fields in ((RuleConfig, rule), (CompressionConfig, section)):
        model.__pydantic_fields__ = fields
        model.model_rebuild(force=True)
    return True


def _field(kind: Any, expects: Expects, **about: Any) -> FieldInfo:
    return FieldInfo.from_annotated_attribute(cast(Any, Annotated[kind, expects]), Field(**about))


follow_registry()


def exchange_settings(compression: CompressionConfig) -> ExchangeSettings:
    """Settings of any method but "none"."""
    assert compression.method != "none"
    return ExchangeSettings(
        default=_method(compression.method, compression),
        rules=tuple(
            Rule(
                where=f"$.ds_ckpt.compression.rules[{i}]",
                match=rule.match,
                settings=_method(rule.method, compression, rule),
                dims=rule.dims,
                min_numel=rule.min_numel or 0,
                max_numel=rule.max_numel,
            )
            for i, rule in enumerate(compression.rules)
        ),
        error_feedback=compression.error_feedback.enabled,
        residual_dtype=compression.error_feedback.dtype,
        residual_device=compression.error_feedback.device,
        # sending everything has nothing to warm up for
        warmup_steps=compression.warmup_steps if compression.lossy else 0,
        warmup_bits=compression.warmup_bits if compression.lossy else None,
        min_numel=compression.min_numel,
        levels=compression.exchange.levels,
        autotune=compression.exchange.autotune,
        when=compression.exchange.when,
        momentum=compression.error_feedback.momentum,
    )


def _method(
    method: str, compression: CompressionConfig, rule: RuleConfig | None = None
) -> MethodSettings:
    """A rule's own sections come before the common ones."""
    sections = compression.sections() | (rule.sections() if rule is not None else {})
    return MethodSettings(method, sections)
