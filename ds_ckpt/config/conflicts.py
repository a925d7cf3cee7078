"""Rules across sections: what the plugin cannot serve, what contradicts or lacks something, and our
sections in a wrong place.

They run on the raw configuration, so that they report beside type errors. Values of DeepSpeed's own
keys may be "auto" (Hugging Face fills them in later) and then pass, except the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ds_ckpt.activation.policies import PLANNED
from ds_ckpt.config.activation import ActivationConfig, KeepingConfig
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.paths import is_auto, join, lookup, plain, show
from ds_ckpt.config.sections import DEEPSPEEDS, OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem

_ACTIVATION = f"{OURS}.activation"


@dataclass(frozen=True)
class Conflict:
    """A setting of DeepSpeed that cannot be served beside ours; `key` is its path below `$`."""

    key: str
    holds: Callable[[Any], bool]
    why: str
    remedy: str


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: str(value).strip().lower() in words


def _number(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and test(float(value))
        except (TypeError, ValueError):
            return False

    return holds


# as DeepSpeed reads a switch
_on = _one_of("true", "t", "yes", "y", "on", "1", "1.0")
_off = _one_of("false", "f", "no", "n", "off", "0", "0.0")
_above_one, _not_one = _number(lambda number: number > 1), _number(lambda number: number != 1)


def _present(value: object) -> bool:
    return value is not None


ZERO = "zero_optimization"
COMPRESSION = (
    Conflict(
        "zero_optimization.reduce_scatter",
        _off,
        "gradients are then all-reduced in one buffer, past the call that compression replaces",
        "write true or remove the key",
    ),
    Conflict(
        "zero_optimization.zero_quantized_gradients",
        _on,
        "DeepSpeed then reduces gradients by its own quantized all-to-all, past compression",
        "write false or remove the key",
    ),
    Conflict(
        "zero_optimization.zenflow",
        _present,
        "ZenFlow transposes and selects gradients around the reduction and delays their update",
        "remove the section",
    ),
    Conflict(
        "zero_optimization.offload_optimizer.super_offload",
        _on,
        "SuperOffload has a ZeRO-3 optimizer of its own, which steps while gradients still arrive "
        "and rolls back afterwards; compression keeps or drops its residuals by the usual verdict",
        "write false or remove the key (offload_optimizer without it is served)",
    ),
    Conflict(
        "zero_optimization.mics_shard_size",
        _present,
        "MiCS shards over subgroups of processes, and DeepSpeed has removed it",
        "remove the key",
    ),
    Conflict(
        "checkpoint.use_node_local_storage",
        _on,
        "residuals are loaded from the files of all processes, as another number of processes "
        "needs them; a host then sees its own alone",
        "write false or remove the key, and save to a folder that all hosts share",
    ),
    Conflict(
        "optimizer.type",
        _one_of("muon"),
        "Muon needs whole gradients and refuses reduce-scatter, which compression replaces",
        'write for example "AdamW"',
    ),
    Conflict(
        "expert_parallel.enabled",
        _on,
        "expert gradients are averaged over other groups of processes than the rest, "
        "and residuals belong to one group",
        "write false or remove the section",
    ),
    Conflict(
        "tensor_parallel.autotp_size",
        _above_one,
        "one parameter name then stands for different slices in different processes, "
        "and residuals are kept by parameter name",
        "write 1 or remove the key",
    ),
    Conflict(
        "sequence_parallel_size",
        _above_one,
        "gradients are then averaged over sequence-parallel and data-parallel processes together, "
        "a group that compression has not been tested with",
        "write 1 or remove the key",
    ),
    Conflict(
        "gradient_predivide_factor",
        _not_one,
        "ZeRO-3 supports no other factor than 1.0 with reduce-scatter, which compression replaces",
        "write 1.0 or remove the key",
    ),
    Conflict(
        "prescale_gradients",
        _on,
        "ZeRO-3 does not support it with reduce-scatter, which compression replaces",
        "write false or remove the key",
    ),
    Conflict(
        "gradient_allreduce_op",
        _one_of("sum"),
        "ZeRO-3 and compression deliver the mean over processes",
        'write "mean" or remove the key',
    ),
)
CHECKPOINTING = (
    Conflict(
        "hybrid_engine.enabled",
        _on,
        "the hybrid engine swaps the blocks' forward between inference and training, "
        "which drops the checkpointed one",
        "write false or remove the section",
    ),
)
EITHER = (
    Conflict(
        "compile.deepcompile",
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
        if _on(lookup(config, (ZERO, "zero_quantized_weights"))) and _above_one(hpz):
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
        value = lookup(config, conflict.key.split("."))
        if value is not None and conflict.holds(value):
            remedy = f"{conflict.remedy}, {alternative}"
            yield Problem(f"$.{conflict.key}", show(value), conflict.why, remedy)


def budget_problems(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Keys of a budget without a plan, and a plan without what it needs."""
    activation = lookup(wanted.ours, ("activation",))
    gib, of = lookup(activation, ("budget_gib",)), lookup(activation, ("budget_of",))
    if wanted.policy is None:
        return
    if wanted.policy not in PLANNED:
        for key, value in (("budget_gib", gib), ("budget_of", of)):
            if value is not None:
                why = 'it belongs to the policies "budget" and "auto"'
                remedy = f'remove it, or set {_ACTIVATION}.policy to "budget"'
                yield Problem(f"{_ACTIVATION}.{key}", show(value), why, remedy)
        return
    if gib is None and wanted.policy == "budget":
        why = "without a number there is nothing to plan for"
        remedy = 'write for example 6.0, or policy "auto", which takes what the accelerator has'
        yield Problem(f"{_ACTIVATION}.budget_gib", "nothing", why, remedy)
    elif gib is None and of not in (None, "accelerator"):
        why = "without budget_gib the accelerator's memory is the limit, of everything on it"
        yield Problem(
            f"{_ACTIVATION}.budget_of",
            show(of),
            why,
            f"remove it, or write {_ACTIVATION}.budget_gib",
        )
    elif of == "accelerator" or gib is None:
        why = "what else is on the accelerator is known for ZeRO stage 3 and no other"
        remedy = f'write 3, or set {_ACTIVATION}.budget_of to "activations"'
        if stage := stage_problem(config, why, remedy):
            yield stage
    rules = lookup(activation, ("rules",))
    if rules is not None and rules != [] and rules != ():
        why = "the plan decides for every block"
        remedy = f"remove them, or write another {_ACTIVATION}.policy"
        yield Problem(f"{_ACTIVATION}.rules", show(rules), why, remedy)
    if lookup(activation, ("partition",)) is True:
        own = lookup(config, ("ds_ckpt", "activation", "partition")) is not None
        where = f"{_ACTIVATION}.partition" if own else f"{DEEPSPEEDS}.partition_activations"
        why = "a plan does not count what partitioning saves, and would recompute too much"
        yield Problem(where, "true", why, f'write false, or set {_ACTIVATION}.policy to "block"')


SERVED = {
    "partition_activations": "partition",
    "cpu_checkpointing": "offload",
    "contiguous_memory_optimization": "contiguous",
    "number_checkpoints": "contiguous_count",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""DeepSpeed's key -> ours. DeepSpeed parses its section and acts on none of it; here its keys are
taken as if they stood in ours."""
_NEEDS = {
    "offload_prefetch": ("offload", "partition"),
    "offload_min_bytes": ("offload",),
    "partition_min_bytes": ("partition",),
    "contiguous_count": ("contiguous",),
}
"""A key -> the switches of which it needs one, or it does nothing."""


def _on_there(value: object) -> bool:
    return value is True or (isinstance(value, int) and value >= 1)


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
        if _on_there(deepspeeds.get(key)) and lookup(activation, (our_key,)) is None
    }
    return {**ours, "activation": {**(activation or {}), **said}} if said else ours


def keeping_problems(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Keys that contradict each other, or that would do nothing as the rest stands."""
    deepspeeds = config.get("activation_checkpointing")
    activation = lookup(wanted.ours, ("activation",))
    raw = lookup(config, ("ds_ckpt", "activation"))
    theirs = {ours: key for key, ours in SERVED.items()}
    for ours, key in theirs.items():
        said, own = lookup(deepspeeds, (key,)), lookup(raw, (ours,))
        if _on_there(said) and own is not None and own != said:
            why = f"{DEEPSPEEDS}.{key} says {show(said)}, and both keys mean the same"
            remedy = "write the same in both, or remove one"
            yield Problem(f"{_ACTIVATION}.{ours}", show(own), why, remedy)
    for key in KeepingConfig.model_fields:
        value, own = lookup(activation, (key,)), lookup(raw, (key,))
        if value is None:
            continue

        def place(key: str, here: bool = own is not None) -> str:
            """Of a key in the section in which the user wrote this one."""
            return f"{_ACTIVATION}.{key}" if here else f"{DEEPSPEEDS}.{theirs[key]}"

        switches = _NEEDS.get(key, ())
        if wanted.policy == "none" and (not switches or own is not None):
            why = 'it does nothing while the policy is "none"'
            remedy = f"remove it, or set {_ACTIVATION}.policy"
            yield Problem(place(key), show(value), why, remedy)
        elif switches and all(lookup(activation, (s,)) in (None, False) for s in switches):
            named = " or ".join(place(switch) for switch in switches)
            why = f"it does nothing without {named}"
            remedy = f"remove it, or set {named} to true"
            yield Problem(place(key), show(value), why, remedy)


_MISSPELT = {
    "ds_ckpt": ("dsckpt", "dscheckpoint", "dscheckpointing", "deepspeedckpt", "ckptds"),
    "activation_checkpointing": (
        "activationcheckpointing",
        "gradientcheckpointing",
        "actckpt",
        "actcheckpointing",
        "activationckpt",
    ),
}
_OUR_PARTS = {
    "activation": set(ActivationConfig.model_fields),
    "compression": set(CompressionConfig.model_fields),
    "telemetry": {"every_n_steps"},
}
_DEEPSPEED_SECTIONS = (
    "zero_optimization",
    "optimizer",
    "checkpoint",
    "compile",
    "fp16",
    "bf16",
    "data_types",
)


def _meant_section(key: object) -> str | None:
    if key in _MISSPELT:
        return None
    word = plain(key)
    for section, spellings in _MISSPELT.items():
        if word in spellings or _close(word, spellings[0]):
            return section
    return None


def _close(word: str, target: str) -> bool:
    return SequenceMatcher(None, word, target).ratio() > 0.82


def misplaced(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Our sections under a wrong name or in a wrong place: DeepSpeed would pass over them."""
    for key, value in config.items():
        if section := _meant_section(key):
            why = f'nothing reads this key; did you mean "{section}"?'
            yield Problem(join("$", str(key)), show(value), why, f'rename it to "{section}"')
        parts = _OUR_PARTS.get(str(key), set())
        if isinstance(value, Mapping) and parts & {str(k) for k in value}:
            why = f"nothing reads this section here; it is a part of {OURS}"
            yield Problem(join("$", key), show(value), why, f"move it to {OURS}.{key}")
        if key in _DEEPSPEED_SECTIONS and isinstance(value, Mapping):
            for section in set(_MISSPELT) & {str(k) for k in value}:
                why = f"nothing reads this section inside {key}: it stands at the top of the file"
                where = join(join("$", key), section)
                yield Problem(where, show(value[section]), why, f"move it to $.{section}")
