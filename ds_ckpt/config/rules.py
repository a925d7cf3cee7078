"""Rules across keys: markers on fields, conflicts with DeepSpeed's settings.

DeepSpeed's own values may be "auto" (Hugging Face fills them in later) and then pass, except the
ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ds_ckpt.compression import methods
from ds_ckpt.config.models import CompatSection, PluginConfig
from ds_ckpt.config.paths import DEEPSPEEDS, OURS, is_auto, join, lookup, nearest, show
from ds_ckpt.errors import Problem
from ds_ckpt.fields import Requires, Section


def with_compat_keys(
    plugin: PluginConfig, compat: CompatSection, problems: list[Problem]
) -> tuple[PluginConfig, dict[str, str]]:
    """Return our section with the keys of DeepSpeed's, and where those are written, by path."""
    own = plugin.activation
    added: dict[str, Any] = {} if "policy" in own.model_fields_set else {"policy": "block"}
    origins: dict[str, str] = {}
    for theirs, key in CompatSection.ours.items():
        here, there = f"{OURS}.activation.{key}", f"{DEEPSPEEDS}.{theirs}"
        if getattr(compat, theirs) and key not in own.model_fields_set:
            added[key], origins[here] = True, there
        elif getattr(compat, theirs) and not getattr(own, key):
            why = f"{there} is true, and both keys have the same meaning"
            problems.append(Problem(here, "false", why, "write the same in both, or remove one"))
    activation = own.model_copy(update=added)
    return plugin.model_copy(update={"activation": activation}), origins


# markers on fields


def broken_requirements(plugin: PluginConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Yield written keys that have no effect; `origins` has paths of keys written elsewhere."""
    for path, section in _sections(OURS, plugin):
        for key, field in type(section).model_fields.items():
            value, where = getattr(section, key), join(path, key)
            if key not in section.model_fields_set or value is None or value == ():
                continue
            if isinstance(value, Section) and not value.model_fields_set:
                continue
            for marker in (m for m in field.metadata if isinstance(m, Requires)):
                if found := _broken(marker, value, path, section, plugin):
                    written = section.model_dump(mode="json", exclude_unset=True)[key]
                    yield Problem(origins.get(where, where), show(written), *found)
                    break


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
    marker: Requires,
    value: Any,
    path: str,
    section: Section,
    plugin: PluginConfig,
) -> tuple[str, str] | None:
    """Return reason and remedy if the requirement is not met."""
    if marker.for_values and value not in marker.for_values:
        return None
    place, values = f"{OURS}.{marker.key}", _values(plugin, section, marker.key)
    if "." not in marker.key:
        place = join(path, marker.key)
    allowed = marker.values() if callable(marker.values) else marker.values
    if any(v in allowed if allowed else v not in marker.not_in for v in values):
        return None
    suggest = show(allowed[0] if marker.suggest is None else marker.suggest)
    why = marker.why or f"ignored while {place} is {show(values[0])}"
    return why, f"remove it, or set {place} to {suggest}"


def _values(plugin: PluginConfig, section: Section, key: str) -> list[Any]:
    """Return the value of a key; for policy and method, those of rules follow."""
    part, _, name = key.rpartition(".")
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
    "expert_parallel.enabled": (_ON, "experts are sharded over other groups of ranks"),
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
    if plugin.activation.policy == "budget" and plugin.activation.budget_gib is None:
        remedy = 'write for example 6.0, or policy "auto", which uses the free memory'
        yield Problem(f"{OURS}.activation.budget_gib", "nothing", "a plan needs a limit", remedy)
    guard = plugin.compression.guard
    if guard.active and guard.error is None and guard.residual_norm is None:
        why, remedy = "a guard needs a limit", "write what ds-ckpt validate-accuracy prints for it"
        yield Problem(f"{OURS}.compression.guard.error", "nothing", why, remedy)


def misspelt(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield sections with a misspelt name, which DeepSpeed would ignore."""
    names = ("ds_ckpt", "activation_checkpointing")
    for key, value in config.items():
        section = nearest(key, names, cutoff=0.82)
        if section and key not in names:
            why = f'nothing reads this key; did you mean "{section}"?'
            yield Problem(join("$", str(key)), show(value), why, f'rename it to "{section}"')
