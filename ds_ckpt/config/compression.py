"""The section `ds_ckpt.compression`: how gradients are sent.

`with_methods` adds the sections of registered methods and the choice between them. Types and
defaults that the exchange has, too, are those of its `ExchangeSettings`.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_ckpt.compression import Method, methods
from ds_ckpt.compression.error_feedback import ResidualDevice
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.exchange.method_rules import (
    ExchangeSettings,
    Levels,
    MethodRule,
    MethodSettings,
    WarmupBits,
    When,
)
from ds_ckpt.fields import (
    WHOLE_NUMBER,
    Expects,
    Name,
    Removed,
    Requires,
    Section,
    derive,
    field_of,
    list_as_tuple,
)
from ds_ckpt.telemetry.timings import ResidualStats


def _lossy() -> list[str]:
    return [name for name, kind in methods().items() if not kind.lossless]


_ANY_METHOD = Requires("compression.method", not_in=("none",), suggest="topk")
_LOSSY = Requires("compression.method", _lossy)
_RESIDUALS = Requires("enabled", (True,))
_GUARDED = Requires("action", ("warn", "dense"))


class ErrorFeedbackConfig(Section):
    """Error feedback: add what was not sent to the next gradient."""

    removed = {
        "momentum": Removed(
            "the matched correction was removed", "write a number, such as 0.3", ("matched",)
        )
    }

    enabled: bool = Field(
        ExchangeSettings.error_feedback, description="Keep one residual per compressed parameter."
    )
    dtype: Annotated[Literal["auto", ResidualDtype], _RESIDUALS] = Field(
        ExchangeSettings.residual_dtype,
        description='Type of residuals: 8, 4 or 2.1 bytes per entry. "auto": "int8" from 2^30 '
        'entries per rank on, else "fp32".',
    )
    device: Annotated[ResidualDevice, _RESIDUALS] = Field(
        ExchangeSettings.residual_device,
        description='Device of residuals; "cpu": pinned host memory.',
    )
    momentum: Annotated[
        Literal["none"] | Annotated[float, Field(gt=0, lt=1)],
        Expects('"none" or a number above 0 and below 1', "0.3"),
        _RESIDUALS,
    ] = Field(
        ExchangeSettings.momentum,
        description="Compensates for the delay that error feedback adds. With a number a, after "
        "the warm-up, AdamW steps by a times the new gradient + (1 - a) times its first moment.",
    )


class ExchangeConfig(Section):
    """Settings of the gradient exchange."""

    renamed = {"gate": "autotune"}
    removed = {
        "overlap": Removed("the exchange thread for CPUs was removed", "remove it", constant=False)
    }

    when: Annotated[When, _ANY_METHOD] = Field(
        ExchangeSettings.when,
        description='Exchanges with gradient accumulation. "accumulation_boundary": one per step '
        '(4 bytes per parameter if there are no residuals). "micro_step": one per micro-step. '
        '"auto": the boundary if there are residuals.',
    )
    autotune: Annotated[bool, _LOSSY] = Field(
        ExchangeSettings.autotune,
        description="Time steps both ways; compress only if that shortens them.",
    )
    levels: Annotated[Levels, WHOLE_NUMBER, _ANY_METHOD] = Field(
        ExchangeSettings.levels,
        description="1: compressed between all ranks. 2: summed exactly inside a node, compressed "
        'between nodes. "auto": 2 for several nodes with several ranks each.',
    )


class GuardConfig(Section):
    """Limits on the residual, and the action if they are exceeded."""

    action: Literal["off", "warn", "dense"] = Field(
        "off",
        description='Action if a limit is exceeded in two checks in a row. "warn": one log line. '
        '"dense": uncompressed gradients until the end of the run.',
    )
    error: Annotated[float | None, _GUARDED] = Field(
        None, gt=0, le=1, description="Largest norm of the unsent part, over all there was."
    )
    residual_norm: Annotated[float | None, _GUARDED] = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Largest norm of the residual, in norms of the averaged gradient.",
    )
    every_n_steps: Annotated[int, _GUARDED] = Field(
        10, ge=1, description="Interval of checks, in optimizer steps."
    )

    @property
    def active(self) -> bool:
        """Return whether limits are checked."""
        return self.action != "off"

    def limits(self) -> ResidualStats:
        """Return the limits; one that is not written is infinite."""
        return ResidualStats(self.error or math.inf, self.residual_norm or math.inf)


class _WithMethods(Section):
    """Section that names a method and may have the settings of methods."""

    def sections(self) -> dict[str, Method]:
        """Return the settings of methods that are written here, by name."""
        found = {name: getattr(self, name, None) for name in methods()}
        return {name: values for name, values in found.items() if values is not None}


class RuleConfig(_WithMethods):
    """Method for some tensors. The first matching rule decides."""

    match: Annotated[Name, Expects("a pattern over parameter names", '"*embed*"')] = Field(
        description="Shell pattern (fnmatch) over parameter names."
    )
    method: str = Field(description='Method of these tensors; "dense": uncompressed.')
    dims: int | None = Field(None, ge=1, description="Number of dimensions; default: any.")
    min_numel: int | None = Field(None, ge=0, description="Smallest number of entries.")
    max_numel: int | None = Field(None, ge=0, description="Largest number of entries.")


class CompressionConfig(_WithMethods):
    """Encoding of gradients in ZeRO-3's reduction."""

    renamed = {"start_step": "warmup_steps"}

    method: str = "none"
    rules: Annotated[
        tuple[RuleConfig, ...],
        BeforeValidator(list_as_tuple),
        Expects("a list of objects", '[{"match": "*embed*", "method": "topk"}]'),
        _ANY_METHOD,
    ] = Field(
        (),
        description="Methods for single tensors; the first matching rule decides. Otherwise biases "
        "and norms are uncompressed, and low rank sends large untied embeddings by Top-K.",
    )
    error_feedback: Annotated[ErrorFeedbackConfig, _LOSSY] = field_of(
        ErrorFeedbackConfig, "Residuals of lossy methods."
    )
    exchange: ExchangeConfig = field_of(ExchangeConfig, "When gradients are exchanged.")
    guard: Annotated[GuardConfig, _LOSSY] = field_of(GuardConfig, "Limits on the residual.")
    warmup_steps: Annotated[int, _LOSSY] = Field(
        100, ge=0, description="Optimizer steps before compression begins."
    )
    warmup_bits: Annotated[
        WarmupBits | None, WHOLE_NUMBER, _LOSSY, Requires("warmup_steps", not_in=(0,), suggest=100)
    ] = Field(
        ExchangeSettings.warmup_bits,
        description="Bits of a value in the warm-up; default: uncompressed.",
    )
    min_numel: Annotated[int, _LOSSY] = Field(
        ExchangeSettings.min_numel,
        ge=0,
        description="Smallest number of entries of a compressed tensor.",
    )

    @property
    def lossy(self) -> bool:
        """Return whether any tensor may have a residual."""
        return not {*_lossy()}.isdisjoint(self.methods_used())

    def summary(self) -> str:
        """Describe the active settings in a few words, for any method but "none"."""
        if not self.lossy:
            return "gradients uncompressed by all-to-all (lossless)"
        compressor = MethodSettings(self.method, self.sections()).compressor()
        how = f"as {compressor.describe()}" if compressor else "uncompressed"
        rules = f", {len(self.rules)} rules" if self.rules else ""
        feedback = f"{'with' if self.error_feedback.enabled else 'without'} error feedback"
        if self.error_feedback.momentum != "none":
            feedback += f", momentum correction {self.error_feedback.momentum}"
        first = "dense" if self.warmup_bits is None else f"in {self.warmup_bits} bits"
        return f"gradients {how}{rules}, {feedback}, {first} for {self.warmup_steps} steps"

    def methods_used(self) -> list[str]:
        """Return the methods of the section and of its rules, which "none" disables."""
        rules = self.rules if self.method != "none" else ()
        return [self.method, *(rule.method for rule in rules)]


def exchange_settings(config: CompressionConfig) -> ExchangeSettings:
    """Return the exchange's settings, for any method but "none"."""
    assert config.method != "none"
    own = config.sections()
    return ExchangeSettings(
        default=MethodSettings(config.method, own),
        rules=tuple(
            MethodRule(
                where=f"$.ds_ckpt.compression.rules[{i}]",
                match=rule.match,
                settings=MethodSettings(rule.method, own | rule.sections()),
                dims=rule.dims,
                min_numel=rule.min_numel or 0,
                max_numel=rule.max_numel,
            )
            for i, rule in enumerate(config.rules)
        ),
        error_feedback=config.error_feedback.enabled,
        residual_dtype=config.error_feedback.dtype,
        residual_device=config.error_feedback.device,
        warmup_steps=config.warmup_steps if config.lossy else 0,
        warmup_bits=config.warmup_bits if config.lossy else None,
        min_numel=config.min_numel,
        levels=config.exchange.levels,
        autotune=config.exchange.autotune,
        when=config.exchange.when,
        momentum=config.error_feedback.momentum,
    )


def with_methods(known: dict[str, type[Method]]) -> type[CompressionConfig]:
    """Return the section's model with the given methods, for the section and for its rules.

    Raises:
        ValueError: a method has the name of a key.
    """
    for model in (CompressionConfig, RuleConfig):
        if taken := {*dir(model), *model.model_fields, *model.renamed} & known.keys():
            raise ValueError(f"{min(taken)!r} cannot be the name of a method: it is another key's")
    about = "".join(f' "{name}": {kind.about}.' for name, kind in known.items())
    field = Field("none", description=f'"none": DeepSpeed\'s own reduce-scatter.{about}')
    rule: dict[str, Any] = {"method": Literal[tuple(known)]}
    fields: dict[str, Any] = {"method": (Literal[("none", *known)], field)}
    for name, kind in known.items():
        if not kind.model_fields:
            continue
        expects = Expects("an object in braces", kind.example)
        rule[name] = (
            Annotated[kind | None, expects, Requires("method", (name,))],
            Field(None, description="Used instead of the section's own."),
        )
        fields[name] = (
            Annotated[kind, expects, Requires("compression.method", (name,))],
            field_of(kind, f'Settings of method "{name}".'),
        )
    rules = derive(RuleConfig, **rule)
    return derive(CompressionConfig, rules=tuple[rules, ...], **fields)  # type: ignore[valid-type]
