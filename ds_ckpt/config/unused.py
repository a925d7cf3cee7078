"""Settings that would do nothing as the rest of the file stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_ckpt.activation.policies import policy_names, users_of
from ds_ckpt.config.conflicts import ZERO, stage_problem
from ds_ckpt.config.paths import lookup, show
from ds_ckpt.config.sections import OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem

_LOSSY = ("topk", "powersgd", "quantize", "hybrid")
_USED_BY = {
    "topk": ("topk", "powersgd", "hybrid"),
    "powersgd": ("powersgd", "hybrid"),
    "quantize": ("quantize", "hybrid"),
    "hybrid": ("hybrid",),
    "error_feedback": _LOSSY,
    "guard": _LOSSY,
    "exchange.when": ("dense", *_LOSSY),
    "exchange.gate": _LOSSY,
    "exchange.levels": ("dense", *_LOSSY),
    "exchange.overlap": ("dense", *_LOSSY),
    "rules": ("dense", *_LOSSY),
    "start_step": _LOSSY,
    "min_numel": _LOSSY,
}
"""The methods that act on each key of the compression section."""


_OF_POLICIES = ("every_n", "segment_size", "save_ops")
"""Keys of the activation section that some policies act on."""


def _written(value: object) -> bool:
    """Whether anything is set: null and objects of nulls leave everything at its default."""
    if isinstance(value, Mapping):
        return any(_written(v) for v in value.values())
    return value is not None


def would_do_nothing(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Settings that no code would act on as the rest stands."""
    activation = lookup(wanted.ours, ("activation",))
    if wanted.policy == "none":
        for key in ("modules", "share_gather", "check_determinism", *_OF_POLICIES):
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
    if wanted.policy not in (None, "none"):
        yield from _unused_by_policy(activation, f"{OURS}.activation", wanted.policy)
    rules = lookup(activation, ("rules",))
    for i, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        policy = lookup(rule, ("policy",))
        if policy in policy_names(planned=False):
            yield from _unused_by_policy(rule, f"{OURS}.activation.rules[{i}]", str(policy))
    compression = lookup(wanted.ours, ("compression",))
    yield from _unused_compression(compression, wanted.method)
    yield from _unused_in_rules(compression)
    yield from _unused_by_others(compression, wanted.method)
    yield from _impossible_boundary(config, compression)
    yield from _unused_guard(compression)
    telemetry = lookup(wanted.ours, ("telemetry",))
    enabled = lookup(telemetry, ("enabled",))
    for key in ("every_n_steps", "path"):
        value = lookup(telemetry, (key,))
        on = lookup(activation, ("profile",)) is True and wanted.policy != "none"
        profiled = key == "every_n_steps" and on
        if _written(value) and enabled in (None, False) and not profiled:
            why = "it does nothing while telemetry is not enabled"
            remedy = f"remove it, or set {OURS}.telemetry.enabled to true"
            yield Problem(f"{OURS}.telemetry.{key}", show(value), why, remedy)


def _unused_by_policy(section: Any, path: str, policy: str) -> Iterator[Problem]:
    for key in _OF_POLICIES:
        value, users = lookup(section, (key,)), users_of(key)
        if _written(value) and policy not in users:
            named = " or ".join(f'"{user}"' for user in users)
            why = f"it belongs to policy {named}"
            yield Problem(f"{path}.{key}", show(value), why, f"remove it, or write policy {named}")


def _unused_compression(section: Any, method: str | None) -> Iterator[Problem]:
    if method is None:
        return
    here = {method} if method == "none" else {method, *_methods_of_rules(section)}
    for key, methods in _USED_BY.items():
        value = lookup(section, key.split("."))
        if not here & set(methods) and _written(value):
            lossless = ", which sends everything" if method == "dense" else ""
            why = f'it does nothing with method "{method}"{lossless}'
            choices = " or ".join(f'"{m}"' for m in methods)
            remedy = f"remove it, or set {OURS}.compression.method to {choices}"
            yield Problem(f"{OURS}.compression.{key}", show(value), why, remedy)


def _unused_in_rules(section: Any) -> Iterator[Problem]:
    rules = lookup(section, ("rules",))
    for i, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        method = lookup(rule, ("method",))
        for key in ("topk", "powersgd", "quantize", "hybrid"):
            value = lookup(rule, (key,))
            if not isinstance(method, str) or not _written(value):
                continue
            where = f"{OURS}.compression.rules[{i}]"
            remedy = f"remove it, or set {where}.method to one that uses it"
            # embeddings by Top-K, which the section's own low rank has, is not in a rule
            built_in = key == "topk" and method == "powersgd"
            if method not in _USED_BY[key] or built_in:
                why = f'it does nothing with method "{method}"'
                yield Problem(f"{where}.{key}", show(value), why, remedy)
            elif method == "hybrid" and key in ("topk", "quantize"):
                remainder = _remainder(rule, section)
                if key != remainder:
                    why = f'what the factors missed goes by "{remainder}" in this rule'
                    yield Problem(f"{where}.{key}", show(value), why, remedy)


def _unused_by_others(section: Any, method: str | None) -> Iterator[Problem]:
    """Settings that another setting of the same section leaves without a use."""
    path = f"{OURS}.compression"
    feedback = lookup(section, ("error_feedback",))
    for key in ("dtype", "device"):
        value = lookup(feedback, (key,))
        if lookup(feedback, ("enabled",)) is False and _written(value):
            why = "it does nothing while error feedback is off: there are no residuals"
            remedy = f"remove it, or set {path}.error_feedback.enabled to true"
            yield Problem(f"{path}.error_feedback.{key}", show(value), why, remedy)
    quantize, remainder = lookup(section, ("quantize",)), _remainder(section)
    others = _methods_of_rules(section) & set(_USED_BY["quantize"])
    if method == "hybrid" and remainder != "quantize" and _written(quantize) and not others:
        why = f'it does nothing while {path}.hybrid.remainder is "{remainder}"'
        remedy = f'remove it, or set {path}.hybrid.remainder to "quantize"'
        yield Problem(f"{path}.quantize", show(quantize), why, remedy)
    rules = lookup(section, ("rules",))
    places = [(path, section)]
    for i, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        places.append((f"{path}.rules[{i}]", rule))
    for where, place in places:
        offsets = lookup(place, ("topk", "offsets"))
        selection = lookup(place, ("topk", "selection"))
        if _written(offsets) and selection in ("exact", "sampled"):
            why = f'it does nothing with selection "{selection}", which packs its places in one way'
            remedy = f'remove it, or set {where}.topk.selection to "blocks"'
            yield Problem(f"{where}.topk.offsets", show(offsets), why, remedy)


def _remainder(*places: Any) -> str:
    """What a hybrid's remainder goes by, by the first of these that has a section for it."""
    for place in places:
        if lookup(place, ("hybrid",)) is not None:
            return str(lookup(place, ("hybrid", "remainder")) or "quantize")
    return "quantize"


def _unused_guard(section: Any) -> Iterator[Problem]:
    guard = lookup(section, ("guard",))
    if lookup(guard, ("action",)) not in (None, "off"):
        return
    for key in ("error", "residual_norm", "every_n_steps"):
        value = lookup(guard, (key,))
        if _written(value):
            why = "it does nothing while nobody acts on it"
            remedy = f'remove it, or set {OURS}.compression.guard.action to "warn" or "dense"'
            yield Problem(f"{OURS}.compression.guard.{key}", show(value), why, remedy)


def _methods_of_rules(section: Any) -> set[str]:
    rules = lookup(section, ("rules",))
    if not isinstance(rules, list | tuple):
        return set()
    return {str(lookup(rule, ("method",))) for rule in rules}


def _impossible_boundary(config: Mapping[str, Any], compression: Any) -> Iterator[Problem]:
    """`accumulation_boundary`, written down, where micro-steps cannot be held back."""
    when = lookup(compression, ("exchange", "when"))
    if when != "accumulation_boundary":
        return
    path = f"{OURS}.compression.exchange.when"
    if config.get("managed_gradient_accumulation") is False:
        why = "with managed_gradient_accumulation off nobody knows which micro-step is the last"
        remedy = 'write "micro_step", or set $.managed_gradient_accumulation to true'
        yield Problem(path, show(when), why, remedy)
