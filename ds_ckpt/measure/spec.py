"""What is to be measured: configurations, their DeepSpeed files, and the trials of a run. Pure.

A configuration is a checkpointing policy with a compression method. `stock` is DeepSpeed's own
reduction, `dense` the plugin's exchange that sends everything (on gloo half of stock's bytes),
`silent` an exchange that sends no gradient: the ceiling.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ds_ckpt.compression import methods
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.measure.records import Key, Memory, Sample
from ds_ckpt.workload import llama

SPEC = "spec.json"
"""In a run's folder, beside the corpus and `records.Store`'s samples."""
STOCK, DENSE, SILENT = "stock", "dense", "silent"
BASELINES = (STOCK, DENSE, SILENT)
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "block": {"policy": "block"},
    "attention": {"policy": "attention"},
    "mlp": {"policy": "mlp"},
}
METHODS: dict[str, dict[str, Any]] = {
    STOCK: {},
    DENSE: {"method": "dense"},
    SILENT: {},
    **{
        preset: {"method": name, **sections}
        for name, kind in methods().items()
        for preset, sections in kind.presets.items()
    },
}
DEFAULT_METHOD = "4bit"
"""Of those that train like dense the one that packs fastest."""
SHAPE: dict[str, int] = {
    name: of.default for name, of in inspect.signature(llama).parameters.items() if name != "seed"
}
"""What `Spec.shape` may change, and what it is otherwise."""
BUCKETS = 8
"""Buckets that a backward has, about: DeepSpeed's own size would put every gradient into one."""
MOST_BATCHES = 8
"""Checkpointing takes at most so many times the batch, however much memory it leaves."""
Where = Literal["emulated", "hostfile", "loopback"]


@dataclass(frozen=True, order=True)
class Configuration:
    """One way to train."""

    policy: str
    method: str

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.method}"


@dataclass(frozen=True)
class Spec:
    """All that decides what a run measures. Two runs with equal ones can be put together.

    Attributes:
        sections: taken from users' files, by `activation/NAME` or `compression/NAME`.
        rates: Mbit/s, None is not shaped.
        batches: sequences a process and step.
        repetitions: trials of each configuration at a rate; `rounds` on disk.
        steps: timed steps of a trial, after `drop` that are not.
        shape: arguments of `ds_ckpt.workload.llama`.
        ceiling: also measure `silent`.
        equal_memory: also time checkpointed configurations with the batch that their memory allows.
    """

    where: Where = "emulated"
    hosts: int = 2
    slots: int = 1
    policies: tuple[str, ...] = ("none", "block")
    methods: tuple[str, ...] = (DEFAULT_METHOD,)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: tuple[float | None, ...] = (200.0,)
    batches: tuple[int, ...] = (4,)
    tokens: int = 128
    repetitions: int = 6
    steps: int = 2
    drop: int = 1
    warm_up: int = 3
    loss_steps: int = 60
    seed: int = 1
    shape: dict[str, int] = field(default_factory=dict)
    ceiling: bool = True
    equal_memory: bool = True
    text: str | None = None

    @property
    def configurations(self) -> list[Configuration]:
        """The policies with the two dense baselines, the methods and the ceiling."""
        methods = [STOCK, DENSE, *(m for m in self.methods if m not in BASELINES)]
        if self.ceiling:
            methods.append(SILENT)
        return [Configuration(policy, method) for policy in self.policies for method in methods]

    @property
    def processes(self) -> int:
        return self.hosts * self.slots

    @property
    def content(self) -> dict[str, Any]:
        """As it stands in files."""
        content = asdict(self)
        content["rounds"] = content.pop("repetitions")
        return content

    def save(self, folder: Path) -> None:
        (folder / SPEC).write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Spec:
        """Raises StateError where the file has settings that this version does not know."""
        path = folder / SPEC
        content = json.loads(path.read_text(encoding="utf-8"))
        if "rounds" in content:
            content["repetitions"] = content.pop("rounds")
        if unknown := sorted(content.keys() - {one.name for one in fields(cls)}):
            why = "another version of ds_ckpt has begun this run"
            remedy = "go on with that version, or name a new folder"
            raise StateError(
                Problem(str(path), f"settings {', '.join(unknown)}", why, remedy),
                headline="this run cannot be read",
            )
        for name in ("policies", "methods", "rates", "batches"):
            content[name] = tuple(content[name])
        return cls(**content)


def link(rate_mbit: float | None) -> str:
    """A link's rate in words."""
    return "link not shaped" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"


def check(spec: Spec) -> None:
    """Raises ConfigError with everything that cannot work."""
    problems = []

    def wrong(where: str, found: object, why: str, remedy: str) -> None:
        problems.append(Problem(where, str(found), why, remedy))

    for option, names, known, section in (
        ("--policies", spec.policies, POLICIES, "activation"),
        ("--methods", spec.methods, METHODS, "compression"),
    ):
        files = spec.sections
        if unknown := [n for n in names if n not in known and f"{section}/{n}" not in files]:
            why = f"known are {', '.join(known)} and names of DeepSpeed JSON files"
            wrong(option, ", ".join(unknown), why, "name one of those")
        if len(set(names)) < len(names):
            wrong(option, ", ".join(names), "a configuration is measured once", "name each once")
    if "none" not in spec.policies:
        why = "what recomputing costs is measured against no checkpointing"
        wrong("--policies", ", ".join(spec.policies), why, "add none")
    if spec.where != "emulated" and spec.rates != (None,):
        why = "only the links of emulated hosts can be given a rate"
        wrong("--rates", ", ".join(map(link, spec.rates)), why, "leave it out")
    if spec.processes < 2:
        why = "a single process exchanges nothing"
        wrong("--hosts, --slots", "1 process", why, "take at least 2")
    if (batch := min(spec.batches)) < 1:
        wrong("--batches", batch, "nothing would be measured", "1 or more")
    # what the Llama cannot be built with, the launched processes would be the first to say
    width, heads = (spec.shape.get(name, SHAPE[name]) for name in ("hidden_size", "heads"))
    if empty := [f"{name}={value}" for name, value in spec.shape.items() if value < 1]:
        wrong("--shape", ", ".join(empty), "no model has it", "1 or more")
    elif width % (2 * heads):
        why = f"{width} is not {heads} heads of an even width, which rotary positions need"
        remedy = f"write a hidden_size that is a multiple of {2 * heads}, or other heads"
        wrong("--shape", f"hidden_size={width}, heads={heads}", why, remedy)
    if problems:
        raise ConfigError(problems, headline="this cannot be measured")


def deepspeed_config(
    spec: Spec,
    configuration: Configuration,
    *,
    parameters: int,
    start_step: int = 0,
    total_steps: int = 1000,
) -> dict[str, Any]:
    """Its DeepSpeed file: ZeRO-3 as if the model were larger than the memory, in fp32.

    The autotuner is off: the report shows what compression does, also where it loses.
    """
    activation = spec.sections.get(
        f"activation/{configuration.policy}", POLICIES.get(configuration.policy, {})
    )
    own = spec.sections.get(f"compression/{configuration.method}")
    compression = METHODS.get(configuration.method, {}) if own is None else own
    if compression and (compression["method"] != "dense" or compression.get("rules")):
        exchange = {**compression.get("exchange", {}), "autotune": False}
        compression = {**compression, "exchange": exchange, "warmup_steps": start_step}
    plugin: dict[str, Any] = {"telemetry": {"enabled": True, "every_n_steps": 1_000_000}}
    if activation:
        plugin["activation"] = activation
    if compression:
        plugin["compression"] = compression
    return {
        "train_micro_batch_size_per_gpu": min(spec.batches),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "reduce_bucket_size": -(-parameters // BUCKETS),
        },
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": total_steps,
                "warmup_num_steps": max(2, total_steps // 10),
                "warmup_type": "linear",
                "cos_min_ratio": 0.05,
            },
        },
        "ds_ckpt": plugin,
    }


def equal_memory(spec: Spec, records: Mapping[Any, Sample]) -> list[Key]:
    """Those of the other policies with the batch whose activations take what `none`'s take.

    A policy's peaks with one batch and with two lie on a line; its batch is the largest that stays
    within the peak of no checkpointing at the usual batch.
    """
    base = min(spec.batches)

    def peak(policy: str, sequences: int) -> int:
        record = records["memory", Configuration(policy, STOCK).name, sequences]
        assert isinstance(record, Memory)
        return record.peak_bytes

    found = []
    for policy in spec.policies:
        one = peak(policy, base)
        each = (peak(policy, 2 * base) - one) / base
        fits = base + int((peak("none", base) - one) // each) if each > 0 else base
        if policy != "none" and fits > base:
            batch = min(fits, MOST_BATCHES * base)
            methods = dict.fromkeys((STOCK, DENSE, *spec.methods))
            found += [Key(f"{policy}/{method}", batch, equal_memory=True) for method in methods]
    return found
