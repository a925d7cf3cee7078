"""DeepSpeed's keys of `activation_checkpointing` that are read as ours, and rules for both.

DeepSpeed parses its section and acts on none of it. Its keys name something that our section has
too; they are taken as if they stood there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_ckpt.config.activation import KeepingConfig
from ds_ckpt.config.paths import lookup, show
from ds_ckpt.config.sections import DEEPSPEEDS, OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem

SERVED = {
    "partition_activations": "partition",
    "cpu_checkpointing": "offload",
    "contiguous_memory_optimization": "contiguous",
    "number_checkpoints": "contiguous_count",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""DeepSpeed's key -> ours."""
_NEEDS = {
    "offload_prefetch": ("offload", "partition"),
    "offload_min_bytes": ("offload",),
    "partition_min_bytes": ("partition",),
    "contiguous_count": ("contiguous",),
}
"""A key -> the switches of which it needs one, or it does nothing."""


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
        if _is_on(deepspeeds.get(key)) and lookup(activation, (our_key,)) is None
    }
    return {**ours, "activation": {**(activation or {}), **said}} if said else ours


def _is_on(value: object) -> bool:
    return value is True or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def keeping_problems(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Keys that contradict each other, or that would do nothing as the rest stands."""
    deepspeeds = config.get("activation_checkpointing")
    activation = lookup(wanted.ours, ("activation",))
    raw = lookup(config, ("ds_ckpt", "activation"))
    for key, ours in SERVED.items():
        said, own = lookup(deepspeeds, (key,)), lookup(raw, (ours,))
        if _is_on(said) and own is not None and own != said:
            why = f"{DEEPSPEEDS}.{key} says {show(said)}, and both keys mean the same"
            remedy = "write the same in both, or remove one"
            yield Problem(f"{OURS}.activation.{ours}", show(own), why, remedy)
    for key in KeepingConfig.model_fields:
        value = lookup(activation, (key,))
        if value is None:
            continue
        where = _written_at(key, raw)
        switches = _NEEDS.get(key, ())
        if wanted.policy == "none" and (not switches or lookup(raw, (key,)) is not None):
            why = 'it does nothing while the policy is "none"'
            yield Problem(where, show(value), why, f"remove it, or set {OURS}.activation.policy")
        elif switches and all(lookup(activation, (s,)) in (None, False) for s in switches):
            named = " or ".join(_twin(where, switch) for switch in switches)
            why = f"it does nothing without {named}"
            remedy = f"remove it, or set {named} to true"
            yield Problem(where, show(value), why, remedy)


def _written_at(key: str, raw: Any) -> str:
    """Where the user wrote it: in our section, else in DeepSpeed's."""
    if lookup(raw, (key,)) is not None:
        return f"{OURS}.activation.{key}"
    return f"{DEEPSPEEDS}.{next(d for d, ours in SERVED.items() if ours == key)}"


def _twin(where: str, switch: str) -> str:
    """The switch in the section that `where` is in."""
    if where.startswith(DEEPSPEEDS):
        return f"{DEEPSPEEDS}.{next(d for d, ours in SERVED.items() if ours == switch)}"
    return f"{OURS}.activation.{switch}"
