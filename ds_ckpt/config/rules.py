"""Rules across keys: markers on fields, conflicts with DeepSpeed's settings, misplaced sections.

They run on the raw configuration, so that they are reported beside type errors. DeepSpeed's own
values may be "auto" (Hugging Face fills them in later) and then pass, except the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ds_ckpt.activation.policies import PLANNED
from ds_ckpt.compression import methods
from ds_ckpt.config.models import CompatSection, plugin_model
from ds_ckpt.config.paths import BF16, DEEPSPEEDS, OURS, is_auto, join, lookup, plain, show
from ds_ckpt.config.read import default_of, section_of
from ds_ckpt.errors import Problem
from ds_ckpt.fields import Requires, Section

_Place = tuple[str, Mapping[str, Any], type[Section]]


def with_compat_keys(ours: Any, deepspeeds: Any) -> tuple[Any, dict[str, str], list[Problem]]:
    """Add the keys of DeepSpeed's section to ours.

    Returns:
        Our raw section; paths of added keys, and where they are written; problems of keys that both
        sections have, with different values.
    """
    ours = {} if ours is None else ours
    activation = {} if lookup(ours, ("activation",)) is None else lookup(ours, ("activation",))
    if deepspeeds is None or not isinstance(ours, Mapping) or not isinstance(activation, Mapping):
        return ours, {}, []
    merged = {**activation}
    if merged.get("policy") is None:
        merged["policy"] = "block"
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    for theirs, key in CompatSection.ours.items():
        value, own = lookup(deepspeeds, (theirs,)), activation.get(key)
        if value is True and own is None:
            merged[key] = value
            origins[f"{OURS}.activation.{key}"] = f"{DEEPSPEEDS}.{theirs}"
        elif value is True and own is not True:
            why = f"{DEEPSPEEDS}.{theirs} is {show(value)}, and both keys have the same meaning"
            remedy = "write the same in both, or remove one"
            problems.append(Problem(f"{OURS}.activation.{key}", show(own), why, remedy))
    return {**ours, "activation": merged}, origins, problems


# markers on fields


@dataclass(frozen=True)
class RequestedConfig:
    """The raw configuration, for questions about single keys.

    Attributes:
        config: the whole file.
        ours: the `ds_ckpt` section, with DeepSpeed's keys for activations.
        wrong: paths with a reported problem; rules on them would only repeat it.
    """

    config: Mapping[str, Any]
    ours: Any
    wrong: set[str]

    def value(self, path: str) -> Any:
        """Return a value below `ds_ckpt`, or its default."""
        model: type[Section] = plugin_model()
        value: Any = self.ours
        default: Any = None
        for key in path.split("."):
            field = model.model_fields[key]
            value, default = lookup(value, (key,)), default_of(field)
            model = section_of(field.annotation) or model
        return default if value is None else value

    def values(self, key: str, place: _Place) -> tuple[str, list[Any]]:
        """Return the path of a `Requires` key and its values, those of rules included."""
        path, raw, model = place
        if key.startswith("$."):
            return key, [lookup(self.config, key.split(".")[1:])]
        if "." not in key:
            own = raw.get(key)
            return join(path, key), [default_of(model.model_fields[key]) if own is None else own]
        values = [self.value(key)]
        if key == "activation.policy":
            values += self._of_rules("activation", "policy")
        elif key == "compression.method" and values != ["none"]:
            known = methods().get(str(values[0]))
            values += [*self._of_rules("compression", "method"), known and known.sparse]
        return f"{OURS}.{key}", values

    def _of_rules(self, section: str, key: str) -> list[Any]:
        rules = lookup(self.ours, (section, "rules"))
        return [lookup(rule, (key,)) for rule in rules] if isinstance(rules, list | tuple) else []


def broken_requirements(
    requested: RequestedConfig, origins: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield written keys that have no effect, by the markers on their fields."""
    top = (OURS, requested.ours, plugin_model())
    for place in _places(top) if isinstance(requested.ours, Mapping) else ():
        path, raw, model = place
        for key, field in model.model_fields.items():
            value, where = raw.get(key), join(path, key)
            if not _is_written(value) or where in requested.wrong:
                continue
            markers = (marker for marker in field.metadata if isinstance(marker, Requires))
            broken = (_broken(marker, value, requested, place) for marker in markers)
            if found := next(filter(None, broken), None):
                yield Problem(origins.get(where, where), show(value), *found)


def _places(place: _Place) -> Iterator[_Place]:
    """Yield every section that is written, items of lists included."""
    yield place
    path, raw, model = place
    for key, field in model.model_fields.items():
        section, value = section_of(field.annotation), raw.get(key)
        if section is None:
            continue
        items = [(join(path, key), value)]
        if isinstance(value, list | tuple):
            items = [(join(join(path, key), i), item) for i, item in enumerate(value)]
        for there, item in items:
            if isinstance(item, Mapping):
                yield from _places((there, item, section))


def _is_written(value: object) -> bool:
    """Return whether anything is set: null, and objects of nulls, leave the default."""
    if isinstance(value, Mapping):
        return any(map(_is_written, value.values()))
    return value is not None and value != [] and value != ()


def _broken(
    marker: Requires, value: Any, requested: RequestedConfig, place: _Place
) -> tuple[str, str] | None:
    """Return reason and remedy if the requirement is not met."""
    if marker.for_values and value not in marker.for_values:
        return None
    keys = (marker.key,) if isinstance(marker.key, str) else marker.key
    found = dict(requested.values(key, place) for key in keys)
    allowed = marker.values() if callable(marker.values) else marker.values
    values = [value for values in found.values() for value in values]
    met = any(v in allowed if allowed else v not in marker.not_in for v in values)
    if met or requested.wrong & found.keys():
        return None
    paths = " and ".join(found)
    why = f"ignored while {paths} {'is' if len(found) == 1 else 'are'} {show(values[0])}"
    suggest = show(allowed[0] if marker.suggest is None else marker.suggest)
    return marker.why or why, f"remove it, or set {' or '.join(found)} to {suggest}"


# DeepSpeed's settings


@dataclass(frozen=True)
class Test:
    """Unsupported values of a key, and the remedy."""

    holds: Callable[[Any], bool]
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


# switches as DeepSpeed reads them
_is_on = _one_of("true", "t", "yes", "y", "on", "1", "1.0")
ON = Test(_is_on, "write false or remove the key")
OFF = Test(_one_of("false", "f", "no", "n", "off", "0", "0.0"), "write true or remove the key")
ABOVE_1 = Test(_number(lambda number: number > 1), "write 1 or remove the key")
NOT_1 = Test(_number(lambda number: number != 1), "write 1.0 or remove the key")
PRESENT = Test(lambda value: True, "remove the key")
MUON = Test(_one_of("muon"), 'write for example "AdamW"')
SUM = Test(_one_of("sum"), 'write "mean" or remove the key')
NVME = Test(_one_of("nvme"), 'write "cpu" or "none"')
OFFLOADED = Test(_one_of("cpu", "nvme"), 'write "none" or remove the section')

_ZERO = "zero_optimization"
_HPZ, _QUANTIZED = f"{_ZERO}.zero_hpz_partition_size", f"{_ZERO}.zero_quantized_weights"
_COMPRESSION = {
    f"{_ZERO}.reduce_scatter": (OFF, "gradients are then all-reduced, past compression"),
    f"{_ZERO}.zero_quantized_gradients": (ON, "DeepSpeed then sends gradients by its own codec"),
    f"{_ZERO}.offload_optimizer.super_offload": (ON, "SuperOffload rolls steps back by itself"),
    "optimizer.type": (MUON, "Muon needs whole gradients and refuses reduce-scatter"),
    "gradient_predivide_factor": (NOT_1, "ZeRO-3 supports only 1.0 with reduce-scatter"),
    "prescale_gradients": (ON, "ZeRO-3 does not support it with reduce-scatter"),
    "gradient_allreduce_op": (SUM, "ZeRO-3 and compression deliver the mean over ranks"),
}
_SENT = {
    f"{_ZERO}.zenflow": (PRESENT, "ZenFlow moves gradients and weights past ZeRO-3's reduction"),
    f"{_ZERO}.mics_shard_size": (PRESENT, "MiCS shards over subgroups of ranks"),
    "checkpoint.use_node_local_storage": (ON, "plugin state needs a folder that all nodes share"),
    "expert_parallel.enabled": (ON, "experts are sharded over other groups of ranks"),
    "tensor_parallel.autotp_size": (ABOVE_1, "parameters of one name differ between ranks"),
    "sequence_parallel_size": (ABOVE_1, "shards then span sequence- and data-parallel ranks"),
}
_WEIGHTS = {
    f"{_ZERO}.cpu_offload_param": (ON, "all-gathers then take weights from the host"),
    f"{_ZERO}.offload_param.device": (OFFLOADED, "all-gathers then take weights from there"),
    _QUANTIZED: (ON, "DeepSpeed then rounds weights in every all-gather; copies are not rounded"),
    f"{_ZERO}.zero_quantized_nontrainable_weights": (ON, "copies of frozen weights are rounded"),
    f"{_ZERO}.offload_optimizer.device": (NVME, "changes of weights on NVMe are not observed"),
}
_ACTIVATION = {
    "hybrid_engine.enabled": (ON, "the hybrid engine replaces the forward of blocks"),
    _HPZ: (ABOVE_1, "recomputation would read weights that hpZ quantized a second time"),
}
_ALL = {"compile.deepcompile": (ON, "DeepCompile gathers and reduces past the hooks of ds_ckpt")}
CONFLICTS = (
    (("compression",), _COMPRESSION),
    (("compression", "weights"), _SENT),
    (("weights",), _WEIGHTS),
    (("activation",), _ACTIVATION),
    (("activation", "compression", "weights"), _ALL),
)
"""Parts of the plugin: keys of DeepSpeed that they do not support, by path below `$`."""
_STAGE = {
    "compression": "compression replaces the gradient reduction of ZeRO stage 3",
    "weights": "only ZeRO stage 3 shards the weights; below it every rank has all of them",
    "budget": "the accelerator's other memory is known for ZeRO stage 3 only",
}
"""Parts that need ZeRO stage 3."""


def _active(requested: RequestedConfig) -> dict[str, str]:
    """Return the parts in use, and the remedy that avoids each."""
    policies = requested.values("activation.policy", (OURS, {}, plugin_model()))[1]
    policy, method = requested.value("activation.policy"), requested.value("compression.method")
    active = {}
    if isinstance(method, str) and method != "none":
        active["compression"] = f'set {OURS}.compression.method to "none"'
    if any(isinstance(one, str) and one != "none" for one in policies):
        active["activation"] = f'set {OURS}.activation.policy to "none"'
    if requested.value("weights.resident") in (True, "auto"):
        active["weights"] = f"set {OURS}.weights.resident to false"
    gib, of = (requested.value(f"activation.budget_{key}") for key in ("gib", "of"))
    if policy in PLANNED and (of == "accelerator" or (gib is None and policy == "auto")):
        active["budget"] = f'set {OURS}.activation.budget_of to "activations"'
        if gib is None:
            active["budget"] += f" and {OURS}.activation.budget_gib to their limit"
    return active


def conflicts(requested: RequestedConfig) -> Iterator[Problem]:
    """Yield settings of DeepSpeed that the parts in use do not support, each once."""
    config, active = requested.config, _active(requested)
    if stage := _stage_problem(config, [part for part in _STAGE if part in active], active):
        yield stage
    for parts, rows in CONFLICTS:
        ways_out = " and ".join(active[part] for part in parts if part in active)
        for key, (test, why) in rows.items() if ways_out else ():
            value = lookup(config, key.split("."))
            if value is None or not test.holds(value):
                continue
            if key != _HPZ or _is_on(lookup(config, _QUANTIZED.split("."))):
                yield Problem(f"$.{key}", show(value), why, f"{test.remedy}, or {ways_out}")
    if requested.value("activation.policy") == "budget":
        where = f"{OURS}.activation.budget_gib"
        if requested.value("activation.budget_gib") is None:
            remedy = 'write for example 6.0, or policy "auto", which uses the free memory'
            yield Problem(where, "nothing", "a plan needs a limit", remedy)


def _stage_problem(
    config: Mapping[str, Any], parts: list[str], active: Mapping[str, str]
) -> Problem | None:
    section = config.get(_ZERO)
    stage = lookup(section, ("stage",))
    if not parts or (stage == 3 and not isinstance(stage, str | bool)):
        return None
    why = _STAGE[parts[0]]
    if section is not None and not isinstance(section, Mapping):
        return Problem(f"$.{_ZERO}", show(section), why, 'write {"stage": 3}')
    if is_auto(stage):
        why += '; the stage must be known here, and nothing fills in "auto"'
    found = "nothing (DeepSpeed's default is 0)" if stage is None else show(stage)
    ways_out = " and ".join(active[part] for part in parts)
    return Problem(f"$.{_ZERO}.stage", found, why, f"write 3, or {ways_out}")


# sections in a wrong place


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
_DEEPSPEED_SECTIONS = (_ZERO, "optimizer", "checkpoint", "compile", "fp16", *BF16, "data_types")


def misplaced(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield sections with a wrong name or in a wrong place, which DeepSpeed would ignore."""
    parts = {name: section_of(f.annotation) for name, f in plugin_model().model_fields.items()}
    keys = {name: {*model.model_fields} for name, model in parts.items() if model is not None}
    keys["telemetry"] = {"every_n_steps"}  # DeepSpeed may have a section of this name
    for key, value in config.items():
        if section := _meant_section(key):
            why = f'nothing reads this key; did you mean "{section}"?'
            yield Problem(join("$", str(key)), show(value), why, f'rename it to "{section}"')
        if not isinstance(value, Mapping):
            continue
        if keys.get(str(key), set()) & {*map(str, value)}:
            why = f"nothing reads this section here; it is a part of {OURS}"
            yield Problem(join("$", key), show(value), why, f"move it to {OURS}.{key}")
        for section in _MISSPELT.keys() & value.keys() if key in _DEEPSPEED_SECTIONS else ():
            why = f"nothing reads this section inside {key}: it belongs to the top of the file"
            where = join(join("$", key), section)
            yield Problem(where, show(value[section]), why, f"move it to $.{section}")


def _meant_section(key: object) -> str | None:
    if key in _MISSPELT:
        return None
    word = plain(key)
    for section, spellings in _MISSPELT.items():
        if word in spellings or SequenceMatcher(None, word, spellings[0]).ratio() > 0.82:
            return section
    return None
