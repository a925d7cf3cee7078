"""Settings that would do nothing as the rest of the file stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_ckpt.config.conflicts import ZERO, stage_problem
from ds_ckpt.config.models import DeepSpeedActivationSection
from ds_ckpt.config.paths import join, lookup, show
from ds_ckpt.config.sections import DEEPSPEEDS, OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem

_USED_BY = {
    "topk": ("topk",),
    "quantize": ("quantize",),
    "error_feedback": ("topk", "quantize"),
    "exchange": ("topk", "quantize"),
    "start_step": ("topk", "quantize"),
    "min_numel": ("topk", "quantize"),
}
"""The methods that act on each key of the compression section."""


def _written(value: object) -> bool:
    """Whether anything is set: null and objects of nulls leave everything at its default."""
    if isinstance(value, Mapping):
        return any(_written(v) for v in value.values())
    return value is not None


def would_do_nothing(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Settings that no code would act on as the rest stands."""
    activation = lookup(wanted.ours, ("activation",))
    if wanted.policy == "none":
        for key in ("modules", "share_gather"):
            value = lookup(activation, (key,))
            if _written(value):
                why = 'it does nothing while the policy is "none"'
                remedy = f'remove it, or set {OURS}.activation.policy to "block"'
                yield Problem(f"{OURS}.activation.{key}", show(value), why, remedy)
    elif (share := lookup(activation, ("share_gather",))) is not None:
        why = "below ZeRO stage 3 no weights are gathered, so there is nothing to share"
        if stage_problem(config, why, ""):
            remedy = f"remove it, or set $.{ZERO}.stage to 3"
            yield Problem(f"{OURS}.activation.share_gather", show(share), why, remedy)
    compression = lookup(wanted.ours, ("compression",))
    yield from _unused_compression(compression, wanted.method)
    yield from _impossible_boundary(config, compression)
    telemetry = lookup(wanted.ours, ("telemetry",))
    enabled = lookup(telemetry, ("enabled",))
    for key in ("every_n_steps", "path"):
        value = lookup(telemetry, (key,))
        if _written(value) and enabled in (None, False):
            why = "it does nothing while telemetry is not enabled"
            remedy = f"remove it, or set {OURS}.telemetry.enabled to true"
            yield Problem(f"{OURS}.telemetry.{key}", show(value), why, remedy)
    yield from _dead_keys(config.get("activation_checkpointing"))


def _unused_compression(section: Any, method: str | None) -> Iterator[Problem]:
    if method is None:
        return
    for key, methods in _USED_BY.items():
        value = lookup(section, (key,))
        if method not in methods and _written(value):
            lossless = ", which sends everything" if method == "dense" else ""
            why = f'it does nothing with method "{method}"{lossless}'
            choices = " or ".join(f'"{m}"' for m in methods)
            remedy = f"remove it, or set {OURS}.compression.method to {choices}"
            yield Problem(f"{OURS}.compression.{key}", show(value), why, remedy)


def _impossible_boundary(config: Mapping[str, Any], compression: Any) -> Iterator[Problem]:
    """`accumulation_boundary`, written down, where micro-steps cannot be held back."""
    when = lookup(compression, ("exchange", "when"))
    if when != "accumulation_boundary":
        return
    path = f"{OURS}.compression.exchange.when"
    if lookup(compression, ("error_feedback", "enabled")) is False:
        why = "earlier micro-steps wait in the residuals, and error feedback is off"
        remedy = f'write "micro_step", or set {OURS}.compression.error_feedback.enabled to true'
        yield Problem(path, show(when), why, remedy)
    if config.get("managed_gradient_accumulation") is False:
        why = "with managed_gradient_accumulation off nobody knows which micro-step is the last"
        remedy = 'write "micro_step", or set $.managed_gradient_accumulation to true'
        yield Problem(path, show(when), why, remedy)


def _dead_keys(section: Any) -> Iterator[Problem]:
    if not isinstance(section, Mapping):
        return
    for key in DeepSpeedActivationSection.model_fields:
        value = section.get(key)
        number = key == "number_checkpoints"
        if value is True or (number and isinstance(value, int)):
            why = (
                "DeepSpeed parses it and acts on it nowhere, and this release of ds_ckpt does not "
                "serve it: it would do nothing"
            )
            remedy = f"{'write null' if number else 'write false'} or remove the key"
            remedy += "; the section itself, even empty, asks for policy block"
            yield Problem(join(DEEPSPEEDS, key), show(value), why, remedy)
