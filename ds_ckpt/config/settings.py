"""From the checked `compression` section to the exchange's plain settings."""

from __future__ import annotations

from ds_ckpt.config.compression import CompressionConfig, RuleConfig
from ds_ckpt.config.sections import OURS
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import MethodSettings, Rule


def exchange_settings(compression: CompressionConfig) -> ExchangeSettings:
    """Settings of any method but "none"."""
    assert compression.method != "none"
    return ExchangeSettings(
        default=_method(compression.method, compression),
        rules=tuple(
            Rule(
                where=f"{OURS}.compression.rules[{i}]",
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
