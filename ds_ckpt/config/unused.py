"""Settings that would do nothing as the rest of the file stands, or that lack what they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ds_ckpt.activation.inputs import Keeping
from ds_ckpt.activation.policies import PLANNED, policy_names, users_of
from ds_ckpt.compression import methods
from ds_ckpt.config.conflicts import ZERO, Wanted, stage_problem
from ds_ckpt.config.paths import lookup, show
from ds_ckpt.config.sections import DEEPSPEEDS, OURS
from ds_ckpt.errors import Problem

_ACTIVATION, _COMPRESSION = f"{OURS}.activation", f"{OURS}.compression"
_OF_POLICIES = ("every_n", "segment_size", "save_ops")
"""Keys of the activation section that some policies act on."""
SERVED = {
    "partition_activations": "partition",
    "cpu_checkpointing": "offload",
}
"""DeepSpeed's key -> ours. DeepSpeed parses its section and acts on none of it; here its keys are
taken as if they stood in ours."""
_NEEDS = {
    "offload_prefetch": ("offload", "partition"),
    "offload_min_bytes": ("offload",),
    "partition_min_bytes": ("partition",),
}
"""A key -> the switches of which it needs one, or it does nothing."""


def would_do_nothing(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Settings that no code would act on as the rest stands."""
    activation, compression, telemetry = (
        lookup(wanted.ours, (name,)) for name in ("activation", "compression", "telemetry")
    )
    yield from _unused_activation(config, activation, wanted.policy)
    yield from _unused_compression(compression, wanted.method)
    if not wanted.resident:
        to_use = f"set {OURS}.weights.resident to true"
        why = "it does nothing while hosts keep no weights"
        section = lookup(wanted.ours, ("weights",))
        yield from _dead(section, f"{OURS}.weights", ("deltas",), why, to_use)
    if lookup(compression, ("guard", "action")) in (None, "off"):
        keys = ("error", "residual_norm", "every_n_steps")
        why = "it does nothing while nobody acts on it"
        to_use = f'set {_COMPRESSION}.guard.action to "warn" or "dense"'
        yield from _dead(
            lookup(compression, ("guard",)), f"{_COMPRESSION}.guard", keys, why, to_use
        )
    if lookup(telemetry, ("enabled",)) in (None, False):
        unused = ("every_n_steps", "path")
        to_use = f"set {OURS}.telemetry.enabled to true"
        why = "it does nothing while telemetry is not enabled"
        yield from _dead(telemetry, f"{OURS}.telemetry", unused, why, to_use)
    yield from _keeping(config, activation, wanted.policy)
    yield from _budget(config, activation, wanted.policy)


def _written(value: object) -> bool:
    """Whether anything is set: null and objects of nulls leave everything at its default."""
    if isinstance(value, Mapping):
        return any(_written(v) for v in value.values())
    return value is not None


def _dead(section: Any, path: str, keys: Iterable[str], why: str, to_use: str) -> Iterator[Problem]:
    """Those of the section's keys that are set.

    Args:
        to_use: what lets them act.
    """
    for key in keys:
        value = lookup(section, key.split("."))
        if _written(value):
            yield Problem(f"{path}.{key}", show(value), why, f"remove it, or {to_use}")


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _unused_activation(
    config: Mapping[str, Any], activation: Any, policy: str | None
) -> Iterator[Problem]:
    if policy == "none":
        keys = ("modules", "share_gather", "check_determinism", *_OF_POLICIES)
        to_use = f'set {_ACTIVATION}.policy to "block"'
        why = 'it does nothing while the policy is "none"'
        yield from _dead(activation, _ACTIVATION, keys, why, to_use)
    else:
        why = "below ZeRO stage 3 no weights are gathered, so there is nothing to share"
        if stage_problem(config, why, ""):
            to_use = f"set $.{ZERO}.stage to 3"
            yield from _dead(activation, _ACTIVATION, ("share_gather",), why, to_use)
    places = [] if policy in (None, "none") else [(_ACTIVATION, activation, policy)]
    places += [
        (f"{_ACTIVATION}.rules[{i}]", rule, of_rule)
        for i, rule in enumerate(_list(lookup(activation, ("rules",))))
        if (of_rule := lookup(rule, ("policy",))) in policy_names(planned=False)
    ]
    for path, section, named in places:
        for key in _OF_POLICIES:
            if named not in users_of(key):
                users = " or ".join(f'"{user}"' for user in users_of(key))
                why = f"it belongs to policy {users}"
                yield from _dead(section, path, (key,), why, f"write policy {users}")


def with_deepspeeds_keys(ours: Any, deepspeeds: Any) -> Any:
    """Our raw section, with what DeepSpeed's section says where ours says nothing."""
    if not isinstance(ours, Mapping) or not isinstance(deepspeeds, Mapping):
        return ours
    activation = ours.get("activation")
    if not isinstance(activation, Mapping | None):
        return ours
    said = {
        our_key: deepspeeds[key]
        for key, our_key in SERVED.items()
        if _on(key, deepspeeds.get(key)) and lookup(activation, (our_key,)) is None
    }
    return {**ours, "activation": {**(activation or {}), **said}} if said else ours


def _on(key: str, value: object) -> bool:
    """Whether DeepSpeed's key asks for something; of a wrong type it does not."""
    return value is True


def _keeping(config: Mapping[str, Any], activation: Any, policy: str | None) -> Iterator[Problem]:
    """How inputs are kept: keys that contradict each other, and keys without their switch."""
    deepspeeds = config.get("activation_checkpointing")
    raw = lookup(config, ("ds_ckpt", "activation"))
    theirs = {ours: key for key, ours in SERVED.items()}
    for ours, key in theirs.items():
        said, own = lookup(deepspeeds, (key,)), lookup(raw, (ours,))
        if _on(key, said) and own is not None and own != said:
            why = f"{DEEPSPEEDS}.{key} says {show(said)}, and both keys mean the same"
            remedy = "write the same in both, or remove one"
            yield Problem(f"{_ACTIVATION}.{ours}", show(own), why, remedy)
    for key in Keeping.model_fields:
        value, here = lookup(activation, (key,)), lookup(raw, (key,)) is not None
        if value is None:
            continue
        # of keys in the section in which the user wrote this one
        where, *named = (
            f"{_ACTIVATION}.{k}" if here else f"{DEEPSPEEDS}.{theirs[k]}"
            for k in (key, *_NEEDS.get(key, ()))
        )
        needed = " or ".join(named)
        if policy == "none" and (here or not named):
            why, to_use = 'it does nothing while the policy is "none"', f"set {_ACTIVATION}.policy"
        elif named and all(lookup(activation, (s,)) in (None, False) for s in _NEEDS[key]):
            why, to_use = f"it does nothing without {needed}", f"set {needed} to true"
        else:
            continue
        yield Problem(where, show(value), why, f"remove it, or {to_use}")


def _budget(config: Mapping[str, Any], activation: Any, policy: str | None) -> Iterator[Problem]:
    """Keys of a budget without a plan, and a plan without what it needs."""
    if policy is None:
        return
    if policy not in PLANNED:
        why = 'it belongs to the policies "budget" and "auto"'
        to_use = f'set {_ACTIVATION}.policy to "budget"'
        yield from _dead(activation, _ACTIVATION, ("budget_gib", "budget_of"), why, to_use)
        return
    gib, of = lookup(activation, ("budget_gib",)), lookup(activation, ("budget_of",))
    if gib is None and policy == "budget":
        why = "without a number there is nothing to plan for"
        remedy = 'write for example 6.0, or policy "auto", which takes what the accelerator has'
        yield Problem(f"{_ACTIVATION}.budget_gib", "nothing", why, remedy)
    elif gib is None and of not in (None, "accelerator"):
        why = "without budget_gib the accelerator's memory is the limit, of everything on it"
        to_use = f"write {_ACTIVATION}.budget_gib"
        yield from _dead(activation, _ACTIVATION, ("budget_of",), why, to_use)
    elif of == "accelerator" or gib is None:
        why = "what else is on the accelerator is known for ZeRO stage 3 and no other"
        more = "" if gib is not None else f" and {_ACTIVATION}.budget_gib to what they may take"
        remedy = f'write 3, or set {_ACTIVATION}.budget_of to "activations"{more}'
        if stage := stage_problem(config, why, remedy):
            yield stage
    if lookup(activation, ("rules",)) not in (None, [], ()):
        why, to_use = "the plan decides for every block", f"write another {_ACTIVATION}.policy"
        yield from _dead(activation, _ACTIVATION, ("rules",), why, to_use)
    if lookup(activation, ("partition",)) is True:
        own = lookup(config, ("ds_ckpt", "activation", "partition")) is not None
        where = f"{_ACTIVATION}.partition" if own else f"{DEEPSPEEDS}.partition_activations"
        why = "a plan does not count what partitioning saves, and would recompute too much"
        yield Problem(where, "true", why, f'write false, or set {_ACTIVATION}.policy to "block"')


def _unused_compression(section: Any, method: str | None) -> Iterator[Problem]:
    """Keys of the section and its rules that no method there acts on."""
    path = _COMPRESSION
    if lookup(section, ("error_feedback", "enabled")) is False:
        keys = tuple(f"error_feedback.{key}" for key in ("dtype", "device", "momentum"))
        why = "it does nothing while error feedback is off: there are no residuals"
        yield from _dead(section, path, keys, why, f"set {path}.error_feedback.enabled to true")
    if method is None:
        return
    known = methods()
    lossy = [name for name, kind in known.items() if not kind.lossless]
    users = {key: [n for n, kind in known.items() if key in kind.depends_on()] for key in known}
    users |= dict.fromkeys(
        ("error_feedback", "guard", "warmup_steps", "warmup_bits", "min_numel"), lossy
    )
    users |= {f"exchange.{key}": [*known] for key in ("when", "levels")}
    users |= {"exchange.autotune": lossy, "rules": [*known]}
    # of each rule whose method is known
    rules = [
        (f"{path}.rules[{i}]", rule, of_rule)
        for i, rule in enumerate(_list(lookup(section, ("rules",))))
        if isinstance(of_rule := lookup(rule, ("method",)), str)
    ]
    here = {method} if method == "none" else {method, *(m for _, _, m in rules)}
    # a rule says itself what is sparse
    acting = {*here, known[method].sparse} if method in known else here
    for key, names in users.items():
        if not (key in acting if key in known else here & set(names)):
            lossless = method in known and known[method].lossless
            why = f'it does nothing with method "{method}"'
            why += ", which sends everything" if lossless else ""
            choices = " or ".join(f'"{m}"' for m in names)
            yield from _dead(section, path, (key,), why, f"set {path}.method to {choices}")
        elif key == "warmup_bits" and lookup(section, ("warmup_steps",)) == 0:
            why = "it does nothing without a warm-up"
            yield from _dead(section, path, (key,), why, f"set {path}.warmup_steps to 100")
    for where, rule, of_rule in rules:
        if of_rule in known:
            keys = tuple(key for key in known if key != of_rule)
            why = f'it does nothing with method "{of_rule}"'
            to_use = f"set {where}.method to one that uses it"
            yield from _dead(rule, where, keys, why, to_use)
