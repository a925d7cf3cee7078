"""Rules across keys: markers on fields, conflicts with DeepSpeed's settings.

DeepSpeed's own values may be "auto", because Hugging Face fills them in later. Exceptions are the
ZeRO stage and keys that nothing fills in.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from ds_ckpt.activation.selective import unknown_operators
from ds_ckpt.compression import methods
from ds_ckpt.config.models import CompatSection, PluginConfig
from ds_ckpt.config.paths import DEEPSPEEDS, OURS, is_auto, join, lookup, nearest, precision, show
from ds_ckpt.errors import Problem
from ds_ckpt.fields import Requires, Section, warn


def with_compat_keys(plugin: PluginConfig, theirs: Mapping[str, Any]) -> PluginConfig:
    """Return our section with the keys of DeepSpeed's; a warning names each that is ignored.

    Added keys are not in `model_fields_set`: our own section does not request them.
    """
    if "policy" not in plugin.activation.model_fields_set:
        block = plugin.activation.model_copy(update={"policy": "block"})
        plugin = plugin.model_copy(update={"activation": block})
    own, here, fields = plugin.activation, f"{OURS}.activation", CompatSection.model_fields
    added: dict[str, Any] = {}
    for name, value in theirs.items():
        key, why = CompatSection.ours.get(name), None
        if value is None or _OFF(value):
            continue
        if name not in fields:
            close = nearest(name, fields)
            why = "DeepSpeed has no such key" + (f'; did you mean "{close}"?' if close else "")
        elif key is None:
            why = str(fields[name].description).removeprefix("No effect: ")
        elif not _ON(value):
            why = f"{show(value)} is neither true nor false"
        elif key in own.model_fields_set:
            why = None if getattr(own, key) else f"{here}.{key} is false"
        elif found := _broken(type(own).model_fields[key], True, here, own, plugin):
            why = found[0]
        else:
            added[key] = True
        if why:
            warn(f"{join(DEEPSPEEDS, str(name))}: no effect: {why}")
    activation = type(own).model_construct(own.model_fields_set, **{**dict(own), **added})
    return plugin.model_copy(update={"activation": activation})


# markers on fields


def broken_requirements(plugin: PluginConfig) -> Iterator[Problem]:
    """Yield written keys that have no effect."""
    for path, section in _sections(OURS, plugin):
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if key not in section.model_fields_set or value is None or value == ():
                continue
            if isinstance(value, Section) and not value.model_fields_set:
                continue
            if found := _broken(field, value, path, section, plugin):
                written = section.model_dump(mode="json", exclude_unset=True)[key]
                yield Problem(join(path, key), show(written), *found)


def _sections(path: str, section: Section) -> Iterator[tuple[str, Section]]:
    """Yield a section and all sections in it, items of lists included."""
    yield path, section
    for key in type(section).model_fields:
        value, there = getattr(section, key), join(path, key)
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, item in items:
            if isinstance(item, Section):
                yield from _sections(there if index is None else join(there, index), item)


def _broken(
    field: FieldInfo, value: Any, path: str, section: Section, plugin: PluginConfig
) -> tuple[str, str] | None:
    """Return reason and remedy of the first requirement that is not met."""
    for marker in (m for m in field.metadata if isinstance(m, Requires)):
        if marker.for_values and value not in marker.for_values:
            continue
        place, values = f"{OURS}.{marker.key}", _values(plugin, section, marker.key)
        if "." not in marker.key:
            place = join(path, marker.key)
        allowed = marker.values() if callable(marker.values) else marker.values
        if any(v in allowed if allowed else v not in marker.not_in for v in values):
            continue
        suggest = show(allowed[0] if marker.suggest is None else marker.suggest)
        why = marker.why or f"ignored while {place} is {show(values[0])}"
        return why, f"remove it, or set {place} to {suggest}"
    return None


def _values(plugin: PluginConfig, section: Section, key: str) -> list[Any]:
    """Return the value of a key; for policy and method, those of rules follow."""
    part, _, name = key.rpartition(".")
    if key == "activation.offload":  # a plan, or policy "offload", may move tensors, too
        activation = plugin.activation
        moves = activation.planned or "offload" in activation.policies_used()
        return [activation.offload or moves]
    if key == "activation.policy":
        return list(plugin.activation.policies_used())
    if key == "compression.method":
        known = methods().get(plugin.compression.method)
        return [*plugin.compression.methods_used(), *([known.sparse] if known else [])]
    return [getattr(getattr(plugin, part) if part else section, name)]


# DeepSpeed's settings


def _is(*words: str) -> Callable[[Any], bool]:
    return lambda value: str(value).strip().lower() in words


def _number(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and test(float(value))
        except (TypeError, ValueError):
            return False

    return holds


# switches as DeepSpeed reads them
_ON = _is("true", "t", "yes", "y", "on", "1", "1.0")
_OFF = _is("false", "f", "no", "n", "off", "0", "0.0")
_SEVERAL = _number(lambda number: number > 1)
_Rows = dict[str, tuple[Callable[[Any], bool], str]]
_ZERO = "zero_optimization"
_HPZ, _QUANTIZED = f"{_ZERO}.zero_hpz_partition_size", f"{_ZERO}.zero_quantized_weights"
_COMPRESSION: _Rows = {
    f"{_ZERO}.reduce_scatter": (_OFF, "gradients are then all-reduced, past compression"),
    f"{_ZERO}.zero_quantized_gradients": (_ON, "DeepSpeed then sends gradients by its own codec"),
    f"{_ZERO}.offload_optimizer.super_offload": (_ON, "SuperOffload rolls steps back by itself"),
    "optimizer.type": (_is("muon"), "Muon needs whole gradients and refuses reduce-scatter"),
    "gradient_predivide_factor": (_number(lambda n: n != 1), "ZeRO-3 supports only 1.0"),
    "prescale_gradients": (_ON, "ZeRO-3 does not support it with reduce-scatter"),
    "gradient_allreduce_op": (_is("sum"), "ZeRO-3 and compression deliver the mean over ranks"),
}
_SENT: _Rows = {
    f"{_ZERO}.zenflow": (lambda _: True, "ZenFlow moves gradients and weights past ZeRO-3"),
    f"{_ZERO}.mics_shard_size": (lambda _: True, "MiCS shards over subgroups of ranks"),
    "checkpoint.use_node_local_storage": (_ON, "plugin state needs a folder that all nodes share"),
    "expert_parallel.enabled": (
        _ON,
        "DeepSpeed shards, reduces and saves experts apart, which was not tried",
    ),
}
_WEIGHTS: _Rows = {
    f"{_ZERO}.cpu_offload_param": (_ON, "all-gathers then take weights from the host"),
    f"{_ZERO}.offload_param.device": (_is("cpu", "nvme"), "all-gathers then read from there"),
    _QUANTIZED: (_ON, "DeepSpeed then rounds weights in every all-gather; copies are not rounded"),
    f"{_ZERO}.zero_quantized_nontrainable_weights": (_ON, "copies of frozen weights are rounded"),
    f"{_ZERO}.offload_optimizer.device": (_is("nvme"), "weight changes there are not observed"),
}
_ACTIVATION: _Rows = {
    "hybrid_engine.enabled": (_ON, "the hybrid engine replaces the forward of blocks"),
    _HPZ: (_SEVERAL, "recomputation would read weights that hpZ quantized a second time"),
}
_ALL: _Rows = {
    "compile.deepcompile": (_ON, "DeepCompile gathers and reduces past the hooks of ds_ckpt")
}
_BOUNDARY: _Rows = {"managed_gradient_accumulation": (_OFF, "the last micro-step is then unknown")}
CONFLICTS = (
    (("compression",), _COMPRESSION),
    (("compression", "weights"), _SENT),
    (("weights",), _WEIGHTS),
    (("activation",), _ACTIVATION),
    (("activation", "compression", "weights"), _ALL),
    (("boundary",), _BOUNDARY),
)
"""Parts of the plugin: keys of DeepSpeed with values that they do not support, and the reason."""
_STAGE = {
    "share_gather": "weights are gathered by ZeRO stage 3 only",
    "compression": "compression replaces the gradient reduction of ZeRO stage 3",
    "weights": "only ZeRO stage 3 shards the weights; below it every rank has all of them",
    "budget": "the accelerator's other memory is known for ZeRO stage 3 only",
}
"""Parts that need ZeRO stage 3."""

_COMPILED = ("adam", "adamw", "adagrad", "lamb", "lion")
_MONITORS = ("tensorboard", "wandb", "comet")


def _active(plugin: PluginConfig) -> dict[str, str]:
    """Return the parts in use, and the remedy that avoids each."""
    activation, active = plugin.activation, {}
    if plugin.compression.method != "none":
        active["compression"] = f'set {OURS}.compression.method to "none"'
    if activation.active:
        active["activation"] = f'set {OURS}.activation.policy to "none"'
    if "share_gather" in activation.model_fields_set:
        active["share_gather"] = f"remove {OURS}.activation.share_gather"
    if plugin.compression.exchange.when == "accumulation_boundary":
        active["boundary"] = f'set {OURS}.compression.exchange.when to "auto"'
    if plugin.weights.resident:
        active["weights"] = f"set {OURS}.weights.resident to false"
    if activation.planned and activation.budget_is_of == "accelerator":
        active["budget"] = f'set {OURS}.activation.budget_of to "activations"'
        if activation.budget_gib is None:
            active["budget"] += f" and {OURS}.activation.budget_gib to their limit"
    return active


def conflicts(plugin: PluginConfig, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield settings of DeepSpeed that the parts in use do not support, each once."""
    active = _active(plugin)
    stage, staged = lookup(config, (_ZERO, "stage")), [part for part in _STAGE if part in active]
    if staged and stage != 3:
        found = "nothing (DeepSpeed's default is 0)" if stage is None else show(stage)
        remedy = f"write 3, or {' and '.join(active[part] for part in staged)}"
        why = _STAGE[staged[0]] + ('; nothing fills in "auto" here' if is_auto(stage) else "")
        yield Problem(f"$.{_ZERO}.stage", found, why, remedy)
    for parts, rows in CONFLICTS:
        ways_out = " and ".join(active[part] for part in parts if part in active)
        for key, (is_unsupported, why) in rows.items() if ways_out else ():
            value = lookup(config, key.split("."))
            if value is None or not is_unsupported(value):
                continue
            if key != _HPZ or _ON(lookup(config, _QUANTIZED.split("."))):
                remedy = f"change or remove it, or {ways_out}"
                yield Problem(f"$.{key}", show(value), why, remedy)
    for path, section in _sections(f"{OURS}.activation", plugin.activation):
        yield from unknown_operators(getattr(section, "save_ops", ()), join(path, "save_ops"))
    if plugin.activation.policy == "budget" and plugin.activation.budget_gib is None:
        remedy = 'write for example 6.0, or policy "auto", which uses the free memory'
        yield Problem(f"{OURS}.activation.budget_gib", "nothing", "a plan needs a limit", remedy)
    guard = plugin.compression.guard
    if guard.active and guard.error is None and guard.residual_norm is None:
        why, remedy = "a guard needs a limit", "write what ds-ckpt validate-accuracy prints for it"
        yield Problem(f"{OURS}.compression.guard.error", "nothing", why, remedy)


def misspelt(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield sections with a misspelt name, which DeepSpeed would ignore."""
    names = ("ds_ckpt", "activation_checkpointing", _ZERO)
    for key, value in config.items():
        section = nearest(key, names, cutoff=0.82)
        if section and key not in names:
            why = f'nothing reads this key; did you mean "{section}"?'
            yield Problem(join("$", str(key)), show(value), why, f'rename it to "{section}"')


FILLED_BY_HF = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
    "optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay "
    "scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr "
    "scheduler.params.warmup_num_steps scheduler.params.total_num_steps"
)
"""Keys that Hugging Face fills in, and whose "auto" DeepSpeed would compute with."""
NEVER_FILLED = (
    "steps_per_print gradient_predivide_factor gradient_allreduce_op communication_data_type "
    "seq_parallel_communication_data_type wall_clock_breakdown flops_profiler.enabled log_level "
    "torch_autocast.dtype data_types.grad_accum_dtype data_types.param_dtype vocabulary_size "
    "checkpoint.tag_validation tensor_parallel.autotp_size"
)
_FILL_REMEDY = "write a number, or train with the HF Trainer or accelerate, which fill it in"


def _autos(config: Mapping[str, Any], keys: str) -> list[str]:
    return [f"$.{key}" for key in keys.split() if is_auto(lookup(config, key.split(".")))]


def unfilled(config: Mapping[str, Any], given: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Yield each "auto" on which DeepSpeed fails. It treats any other as its default.

    `given`: arguments of `deepspeed.initialize`; None: before a start, Hugging Face may fill it in.
    """
    why = "DeepSpeed fails on it, and nothing "
    for path in _autos(config, NEVER_FILLED):
        yield Problem(path, '"auto"', f"{why}fills it in", "write a value, or remove it")
    if given is None:
        return
    passed = {name for name in ("optimizer", "lr_scheduler") if given.get(name) is not None}
    unread = tuple(f"$.{name.removeprefix('lr_')}." for name in passed)
    if "optimizer" not in passed | config.keys():  # inference
        unread = (*unread, "$.gradient_clipping")
    if paths := [path for path in _autos(config, FILLED_BY_HF) if not path.startswith(unread)]:
        yield Problem(", ".join(paths), '"auto"', f"{why}has filled it in", _FILL_REMEDY)


_NARROW = 512
"""Condition only from this width on: smaller matrices are a small part of a model."""
_UNSAVED = "with one rank per node square matrices of {0} x {0} entries or less stay uncompressed"


_ROUNDED = "int8 residuals from 2^30 entries per rank on; verdicts were measured with fp32"


def conditions(plugin: PluginConfig, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield conditions that only a start checks: of the model, the script, ranks and nodes."""
    activation, compression, weights = plugin.activation, plugin.compression, plugin.weights
    written = "partition" in activation.model_fields_set
    size = lookup(config, ("tensor_parallel", "autotp_size"))
    split = activation.partition and not _SEVERAL(size)
    needs = "needs a tensor-parallel group (an mpu)"
    nodes = "on several nodes needs"
    two_levels, compresses = compression.exchange.levels == 2, compression.method != "none"
    theirs, nvme, autos = (
        json.dumps({**config, "ds_ckpt": None}),
        '"nvme"',
        _autos(config, FILLED_BY_HF),
    )
    more = f" and {len(autos) - 1} more" if autos[1:] else ""
    others, elsewhere = theirs.count('"auto"') > len(autos), " elsewhere" if autos else ""
    attaches, floats = plugin.active or plugin.telemetry.enabled, precision(config)
    kind = str(lookup(config, ("optimizer", "type"))).lower()
    compiled = kind in _COMPILED and not lookup(config, ("optimizer", "params", "torch_adam"))
    monitors = (key for key in _MONITORS if _ON(lookup(config, (key, "enabled"))))
    rank = lookup(config, ("ds_ckpt", "compression", "powersgd", "rank"))
    narrow = 8 * (rank or 0) * (compression.method == "powersgd")
    rounds = compression.lossy and compression.error_feedback.enabled
    rounds = rounds and compression.error_feedback.dtype == "auto"
    lossless = weights.deltas == "lossless" and precision(config) is None
    for holds, path, words in (
        (attaches and config.get("pipeline"), "$.pipeline", "a PipelineModule's engine is refused"),
        (attaches, OURS, "all ranks attach, to engines with ZeRO's optimizer and no pipeline"),
        (activation.active, f"{OURS}.activation", "blocks and parts are looked up in the model"),
        (activation.planned, f"{OURS}.activation", "the first batch decides if a plan fits"),
        (split and written, f"{OURS}.activation.partition", needs),
        (split and not written, f"{DEEPSPEEDS}.partition_activations", f"{needs} or is ignored"),
        (compresses, f"{OURS}.compression", "kernels must run, and residuals fit into memory"),
        (compression.rules, f"{OURS}.compression.rules", "each must match parameters"),
        (rounds, f"{OURS}.compression.error_feedback.dtype", _ROUNDED),
        (narrow > _NARROW, f"{OURS}.compression.powersgd.rank", _UNSAVED.format(narrow)),
        (two_levels, f"{OURS}.compression.exchange.levels", "2 needs nodes of equally many ranks"),
        (weights.resident, f"{OURS}.weights.resident", f"{nodes} equally many ranks, and memory"),
        (lossless, f"{OURS}.weights.deltas", f"{nodes} 16-bit weights"),
        (plugin.active and "optimizer" not in config, "$.optimizer", "the script passes one"),
        (compiled, "$.optimizer.type", "DeepSpeed compiles its operator on every node (ds_report)"),
        (floats in ("bf16", "fp16"), f"$.{floats}.enabled", "the device must support it"),
        *((True, f"$.{key}.enabled", "its package must be installed") for key in monitors),
        (_SEVERAL(config.get("train_batch_size")), "$.train_batch_size", "the ranks divide it"),
        (nvme in theirs, nvme, "needs DeepSpeed's operator async_io on every node (ds_report)"),
        (autos, "".join(autos[:1]) + more, f'"auto": {_FILL_REMEDY}'),
        (others, f'"auto"{elsewhere}', "DeepSpeed's default, if Hugging Face does not fill it in"),
    ):
        if holds:
            yield f"{path}: {words}"
