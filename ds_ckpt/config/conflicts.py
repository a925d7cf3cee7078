"""Rules across sections: settings of DeepSpeed that the seams cannot serve, and why.

They run on the raw configuration, so that they report beside type errors. Values of DeepSpeed's own
keys may be "auto" (Hugging Face fills them in later) and then pass, except the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_ckpt.config.paths import is_auto, join, lookup, show
from ds_ckpt.config.sections import OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem


@dataclass(frozen=True)
class Conflict:
    """A setting of DeepSpeed that a seam cannot serve."""

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    why: str
    remedy: str


def _on(value: object) -> bool:
    """As DeepSpeed reads a switch: also 1, "true", "yes", "on"."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "t", "yes", "y", "on", "1")
    return value is True or value == 1


def _off(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("false", "f", "no", "n", "off", "0")
    return value is False or (value == 0 and value is not None)


def _above(limit: float) -> Callable[[Any], bool]:
    def above(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and float(value) > limit
        except (TypeError, ValueError):
            return False

    return above


def _not_one(value: Any) -> bool:
    return _above(1)(value) or (_above(float("-inf"))(value) and float(value) < 1)


def _present(value: object) -> bool:
    return value is not None


def _named(name: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value.strip().lower() == name


ZERO = "zero_optimization"
COMPRESSION = (
    Conflict(
        (ZERO, "reduce_scatter"),
        _off,
        "gradients are then all-reduced in one buffer, past the call that compression replaces",
        "write true or remove the key",
    ),
    Conflict(
        (ZERO, "zero_quantized_gradients"),
        _on,
        "DeepSpeed then reduces gradients by its own quantized all-to-all, past compression",
        "write false or remove the key",
    ),
    Conflict(
        (ZERO, "zenflow"),
        _present,
        "ZenFlow transposes and selects gradients around the reduction and delays their update",
        "remove the section",
    ),
    Conflict(
        (ZERO, "offload_optimizer", "super_offload"),
        _on,
        "SuperOffload has a ZeRO-3 optimizer of its own, which steps while gradients still arrive "
        "and rolls back afterwards; compression keeps or drops its residuals by the usual verdict",
        "write false or remove the key (offload_optimizer without it is served)",
    ),
    Conflict(
        (ZERO, "mics_shard_size"),
        _present,
        "MiCS shards over subgroups of processes, and DeepSpeed has removed it",
        "remove the key",
    ),
    Conflict(
        ("checkpoint", "use_node_local_storage"),
        _on,
        "residuals are loaded from the files of all processes, as another number of processes "
        "needs them; a host then sees its own alone",
        "write false or remove the key, and save to a folder that all hosts share",
    ),
    Conflict(
        ("optimizer", "type"),
        _named("muon"),
        "Muon needs whole gradients and refuses reduce-scatter, which compression replaces",
        'write for example "AdamW"',
    ),
    Conflict(
        ("expert_parallel", "enabled"),
        _on,
        "expert gradients are averaged over other groups of processes than the rest, "
        "and residuals belong to one group",
        "write false or remove the section",
    ),
    Conflict(
        ("tensor_parallel", "autotp_size"),
        _above(1),
        "one parameter name then stands for different slices in different processes, "
        "and residuals are kept by parameter name",
        "write 1 or remove the key",
    ),
    Conflict(
        ("sequence_parallel_size",),
        _above(1),
        "gradients are then averaged over sequence-parallel and data-parallel processes together, "
        "a group that compression has not been tested with",
        "write 1 or remove the key",
    ),
    Conflict(
        ("gradient_predivide_factor",),
        _not_one,
        "ZeRO-3 supports no other factor than 1.0 with reduce-scatter, which compression replaces",
        "write 1.0 or remove the key",
    ),
    Conflict(
        ("prescale_gradients",),
        _on,
        "ZeRO-3 does not support it with reduce-scatter, which compression replaces",
        "write false or remove the key",
    ),
    Conflict(
        ("gradient_allreduce_op",),
        _named("sum"),
        "ZeRO-3 and compression deliver the mean over processes",
        'write "mean" or remove the key',
    ),
)
CHECKPOINTING = (
    Conflict(
        ("hybrid_engine", "enabled"),
        _on,
        "the hybrid engine swaps the blocks' forward between inference and training, "
        "which drops the checkpointed one",
        "write false or remove the section",
    ),
)
EITHER = (
    Conflict(
        ("compile", "deepcompile"),
        _on,
        "DeepCompile's graph passes gather weights and reduce gradients themselves, past the "
        "module hooks and the reduction that checkpointing and compression work on",
        "write false or remove the key",
    ),
)


def stage_problem(config: Mapping[str, Any], why: str, remedy: str) -> Problem | None:
    """None if the ZeRO stage is 3; else what stands there."""
    section = config.get(ZERO)
    stage = lookup(section, ("stage",))
    if stage == 3 and not isinstance(stage, str | bool):
        return None
    if section is not None and not isinstance(section, Mapping):
        return Problem(f"$.{ZERO}", show(section), why, 'write {"stage": 3}')
    found = "nothing (DeepSpeed's default is 0)" if stage is None else show(stage)
    if is_auto(stage):
        why += '; the stage must be known here, and nothing fills in "auto"'
    return Problem(f"$.{ZERO}.stage", found, why, remedy)


def across_sections(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Settings of DeepSpeed that the wanted method or policy cannot be served with."""
    off_method = f'or set {OURS}.compression.method to "none"'
    off_policy = f'or set {OURS}.activation.policy to "none"'
    if wanted.compressing:
        why = "compression stands in for the gradient reduction of ZeRO stage 3 and of no other"
        if stage := stage_problem(config, why, f"write 3, {off_method}"):
            yield stage
        yield from _conflicts(config, COMPRESSION, off_method)
    if wanted.checkpointing:
        yield from _conflicts(config, CHECKPOINTING, off_policy)
        hpz = lookup(config, (ZERO, "zero_hpz_partition_size"))
        if _on(lookup(config, (ZERO, "zero_quantized_weights"))) and _above(1)(hpz):
            why = (
                "together with zero_quantized_weights, recompute takes hpZ's copy of the weights, "
                "quantized a second time: it would not repeat the forward"
            )
            where = f"$.{ZERO}.zero_hpz_partition_size"
            remedy = f"write 1, or set zero_quantized_weights to false, {off_policy}"
            yield Problem(where, show(hpz), why, remedy)
    if wanted.checkpointing or wanted.compressing:
        both = 'or switch checkpointing and compression off ("none")'
        yield from _conflicts(config, EITHER, both)


def _conflicts(
    config: Mapping[str, Any], conflicts: tuple[Conflict, ...], alternative: str
) -> Iterator[Problem]:
    for conflict in conflicts:
        value = lookup(config, conflict.keys)
        if value is not None and conflict.holds(value):
            where = "$"
            for key in conflict.keys:
                where = join(where, key)
            remedy = f"{conflict.remedy}, {alternative}"
            yield Problem(where, show(value), conflict.why, remedy)
