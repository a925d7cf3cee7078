"""Rules across sections: what the plugin cannot serve beside DeepSpeed's settings, and our sections
in a wrong place.

They run on the raw configuration, so that they report beside type errors. Values of DeepSpeed's own
keys may be "auto" (Hugging Face fills them in later) and then pass, except the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from ds_ckpt.activation.policies import policy_names
from ds_ckpt.compression import methods
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.paths import BF16, is_auto, join, lookup, nearest, plain, show
from ds_ckpt.config.sections import OURS
from ds_ckpt.config.weights import WeightsConfig
from ds_ckpt.errors import Problem


def _resolve(value: object, choices: tuple[str, ...]) -> str | None:
    """The choice that stands there, or that was meant; None where nobody can tell."""
    if value is None:
        return "none"
    if not isinstance(value, str):
        return None
    return value if value in choices else nearest(value, choices)


def _checkpointing_rules(ours: object) -> bool:
    rules = lookup(ours, ("activation", "rules"))
    policies = [lookup(r, ("policy",)) for r in rules] if isinstance(rules, list | tuple) else []
    return any(p not in (None, "none") for p in policies)


@dataclass(frozen=True)
class Wanted:
    """What the raw section asks for, as far as it can be told; None: cannot be told.

    `policy` is "rules" where the policy is "none" and rules checkpoint some blocks.
    """

    ours: Any
    policy: str | None
    method: str | None

    @classmethod
    def of(cls, ours: Any) -> Wanted:
        policy = _resolve(lookup(ours, ("activation", "policy")), policy_names())
        if policy == "none" and _checkpointing_rules(ours):
            policy = "rules"
        method = _resolve(lookup(ours, ("compression", "method")), ("none", *methods()))
        return cls(ours, policy, method)

    @property
    def checkpointing(self) -> bool:
        return self.policy not in (None, "none")

    @property
    def compressing(self) -> bool:
        return self.method not in (None, "none")

    @property
    def resident(self) -> bool:
        found = lookup(self.ours, ("weights", "resident"))
        return found is True or found == "auto"


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
_MICS = Conflict(
    "zero_optimization.mics_shard_size",
    _present,
    "MiCS shards over subgroups of processes, and DeepSpeed has removed it",
    "remove the key",
)
_DIVIDED = (
    Conflict(
        "expert_parallel.enabled",
        _on,
        "experts are divided over other groups of processes than the rest",
        "write false or remove the section",
    ),
    Conflict(
        "tensor_parallel.autotp_size",
        _above_one,
        "one parameter name then stands for different slices in different processes",
        "write 1 or remove the key",
    ),
    Conflict(
        "sequence_parallel_size",
        _above_one,
        "gradients and weights are then divided over sequence-parallel and data-parallel "
        "processes together",
        "write 1 or remove the key",
    ),
)
"""What compression and resident weights find in one group of processes alone."""
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
    _MICS,
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
    *_DIVIDED,
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
RESIDENT = (
    Conflict(
        "zero_optimization.cpu_offload_param",
        _on,
        "DeepSpeed takes it for offload_param to the host, and gathers take weights from there",
        "write false or remove the key",
    ),
    Conflict(
        "checkpoint.use_node_local_storage",
        _on,
        "what hosts hold of the weights is saved in one folder, whose files of an earlier save one "
        "process removes",
        "write false or remove the key",
    ),
    Conflict(
        "zero_optimization.offload_param.device",
        _one_of("cpu", "nvme"),
        "weights are then kept in host memory or on NVMe, and gathers take them from there",
        'write "none" or remove the section',
    ),
    Conflict(
        "zero_optimization.zero_quantized_weights",
        _on,
        "DeepSpeed then sends weights rounded to 8 bits at every gather, and what hosts keep would "
        "not be what others gather",
        "write false or remove the key",
    ),
    Conflict(
        "zero_optimization.zero_quantized_nontrainable_weights",
        _on,
        "frozen weights would be kept rounded",
        "write false or remove the key",
    ),
    Conflict(
        "zero_optimization.offload_optimizer.device",
        _one_of("nvme"),
        "weights on their way through NVMe are not where changes are told",
        'write "cpu" or "none"',
    ),
    _MICS,
    Conflict(
        "zero_optimization.zenflow",
        _present,
        "ZenFlow writes weights past the optimizer's step, after which changes are sent",
        "remove the section",
    ),
    *_DIVIDED,
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
    """Settings of DeepSpeed that what is wanted cannot be served with, each of them once.

    What several parts cannot be served with is the first one's problem, with all their ways out.
    """
    found: dict[str, Problem] = {}
    for problem in _across_sections(config, wanted):
        if first := found.get(problem.where):
            off = problem.remedy.rpartition(", or ")[2]
            more = "" if off in first.remedy else f" and {off}"
            problem = replace(first, remedy=first.remedy + more)
        found[problem.where] = problem
    yield from found.values()


def _across_sections(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
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
    if wanted.resident:
        off = f"or set {OURS}.weights.resident to false"
        why = "only ZeRO stage 3 divides the weights; below it every process has all of them"
        if stage := stage_problem(config, why, f"write 3, {off}"):
            yield stage
        yield from _conflicts(config, RESIDENT, off)
        deltas = lookup(wanted.ours, ("weights", "deltas"))
        if lookup(wanted.ours, ("weights", "resident")) == "auto" and deltas in ("3bit", "4bit"):
            where = f"{OURS}.weights.resident"
            why = (
                "hosts then hold other weights than DeepSpeed would: steps with and without differ"
            )
            remedy = f'write true, or set {OURS}.weights.deltas to "auto", {off}'
            yield Problem(where, show("auto"), why, remedy)
    when = lookup(wanted.ours, ("compression", "exchange", "when"))
    managed = config.get("managed_gradient_accumulation") is not False
    if when == "accumulation_boundary" and not managed:
        where = f"{OURS}.compression.exchange.when"
        why = "with managed_gradient_accumulation off nobody knows which micro-step is the last"
        remedy = 'write "micro_step", or set $.managed_gradient_accumulation to true'
        yield Problem(where, show(when), why, remedy)
    if wanted.checkpointing or wanted.compressing or wanted.resident:
        all_off = 'or switch checkpointing and compression off ("none"), and weights.resident'
        yield from _conflicts(config, EITHER, all_off)


def _conflicts(
    config: Mapping[str, Any], conflicts: tuple[Conflict, ...], alternative: str
) -> Iterator[Problem]:
    for conflict in conflicts:
        value = lookup(config, conflict.key.split("."))
        if value is not None and conflict.holds(value):
            remedy = f"{conflict.remedy}, {alternative}"
            yield Problem(f"$.{conflict.key}", show(value), conflict.why, remedy)


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
    "weights": set(WeightsConfig.model_fields),
    "telemetry": {"every_n_steps"},
}
_DEEPSPEED_SECTIONS = (
    "zero_optimization",
    "optimizer",
    "checkpoint",
    "compile",
    "fp16",
    *BF16,
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
