"""Settings that would do nothing as the rest of the file stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from ds_ckpt.activation.policies import policy_names, users_of
from ds_ckpt.compression import methods
from ds_ckpt.config.conflicts import ZERO, stage_problem
from ds_ckpt.config.paths import lookup, show
from ds_ckpt.config.sections import OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem

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
    """Keys of the section that no method here acts on."""
    if method is None:
        return
    known = methods()
    lossy = [name for name, kind in known.items() if not kind.lossless]
    users = {key: [n for n, kind in known.items() if key in kind.looks_at()] for key in known}
    users |= dict.fromkeys(("error_feedback", "guard", "warmup_steps", "min_numel"), lossy)
    users |= {f"exchange.{key}": [*known] for key in ("when", "levels", "overlap")}
    users |= {"exchange.autotune": lossy, "rules": [*known]}
    path = f"{OURS}.compression"
    here = {method} if method == "none" else {method, *(m for _, _, m in _rules(section))}
    for key, names in users.items():
        value = lookup(section, key.split("."))
        if not here & set(names) and _written(value):
            lossless = method in known and known[method].lossless
            why = f'it does nothing with method "{method}"'
            why += ", which sends everything" if lossless else ""
            choices = " or ".join(f'"{m}"' for m in names)
            remedy = f"remove it, or set {path}.method to {choices}"
            yield Problem(f"{path}.{key}", show(value), why, remedy)
        elif key in known and _written(value) and method != "none":
            places = [(path, section, method), *_rules(section)]
            reasons = [_passed_over(key, *place, section) for place in places]
            if all(reasons):
                yield Problem(f"{path}.{key}", show(value), *next(r for r in reasons if r))
    for where, rule, of_rule in _rules(section):
        for key in known:
            value = lookup(rule, (key,))
            if _written(value) and (reason := _passed_over(key, where, rule, of_rule, section)):
                yield Problem(f"{where}.{key}", show(value), *reason)
    for key in ("dtype", "device"):
        feedback = lookup(section, ("error_feedback",))
        value = lookup(feedback, (key,))
        if lookup(feedback, ("enabled",)) is False and _written(value):
            why = "it does nothing while error feedback is off: there are no residuals"
            remedy = f"remove it, or set {path}.error_feedback.enabled to true"
            yield Problem(f"{path}.error_feedback.{key}", show(value), why, remedy)


def _passed_over(
    key: str, where: str, place: Any, method: str, common: Any
) -> tuple[str, str] | None:
    """Why the method of a rule, or of the section itself, does not look at the section `key`, and
    what to do; None if it does, or if nobody can tell."""
    kind = methods().get(method)
    if kind is None:
        return None
    sparse = (kind.sparse,) if place is common else ()  # rules say themselves what is sparse
    if key in (kind.name, *kind.uses, *sparse):
        return None
    if kind.chooses is not None and key in kind.looks_at():
        at = where if lookup(place, (kind.name,)) is not None else f"{OURS}.compression"
        own = lookup(place if at == where else common, (kind.name,))
        field = kind.model_fields[kind.chooses]
        chosen = lookup(own, (kind.chooses,)) or field.default
        choices = get_args(field.annotation)
        if key == chosen or chosen not in choices:
            return None
        if key in choices:
            setting = f"{at}.{kind.name}.{kind.chooses}"
            why = f"it does nothing while {setting} is {show(chosen)}"
            return why, f'remove it, or set {setting} to "{key}"'
    why = f'it does nothing with method "{method}"'
    return why, f"remove it, or set {where}.method to one that uses it"


def _rules(section: Any) -> list[tuple[str, Any, str]]:
    """Place, content and method of each rule whose method is known."""
    rules = lookup(section, ("rules",))
    return [
        (f"{OURS}.compression.rules[{i}]", rule, method)
        for i, rule in enumerate(rules if isinstance(rules, list | tuple) else ())
        if isinstance(method := lookup(rule, ("method",)), str)
    ]


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
