"""What is to be measured: configurations, their DeepSpeed files, and the trials of a run. Pure.

A configuration is a checkpointing policy with a compression method. `stock` is DeepSpeed's own
reduction, `dense` the plugin's exchange that sends everything (on gloo half of stock's bytes),
`silent` an exchange that sends no gradient: the ceiling.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ds_ckpt import workload
from ds_ckpt.compression import methods
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.measure.records import Key, Memory, Sample, StepTime, Store
from ds_ckpt.workload import llama

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

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Raises StateError where the file has settings that this version does not know."""
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
    for option, names, known, section in (
        ("--policies", spec.policies, POLICIES, "activation"),
        ("--methods", spec.methods, METHODS, "compression"),
    ):
        files = spec.sections
        unknown = [n for n in names if n not in known and f"{section}/{n}" not in files]
        if unknown:
            why = f"known are {', '.join(known)} and names of DeepSpeed JSON files"
            problems.append(Problem(option, ", ".join(unknown), why, "name one of those"))
        if len(set(names)) < len(names):
            why = "a configuration is measured once"
            problems.append(Problem(option, ", ".join(names), why, "name each once"))
    if "none" not in spec.policies:
        why = "what recomputing costs is measured against no checkpointing"
        problems.append(Problem("--policies", ", ".join(spec.policies), why, "add none"))
    if spec.where != "emulated" and spec.rates != (None,):
        why = "only the links of emulated hosts can be given a rate"
        found = ", ".join("unlimited" if r is None else f"{r:g} Mbit/s" for r in spec.rates)
        problems.append(Problem("--rates", found, why, "leave it out"))
    if spec.processes < 2:
        why = "a single process exchanges nothing"
        problems.append(Problem("--hosts, --slots", "1 process", why, "take at least 2"))
    if (batch := min(spec.batches)) < 1:
        problems.append(Problem("--batches", str(batch), "nothing would be measured", "1 or more"))
    problems += _wrong_shape(spec.shape)
    if problems:
        raise ConfigError(problems, headline="this cannot be measured")


def _wrong_shape(shape: dict[str, int]) -> list[Problem]:
    """What the Llama could not be built with; the launched processes would be the first to say."""
    empty = [f"{name}={value}" for name, value in shape.items() if value < 1]
    if empty:
        return [Problem("--shape", ", ".join(empty), "no model has it", "1 or more")]
    width, heads = (shape.get(name, SHAPE[name]) for name in ("hidden_size", "heads"))
    if width % (2 * heads):
        why = f"{width} is not {heads} heads of an even width, which rotary positions need"
        remedy = f"write a hidden_size that is a multiple of {2 * heads}, or other heads"
        return [Problem("--shape", f"hidden_size={width}, heads={heads}", why, remedy)]
    return []


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


MOST_BATCHES = 8
"""Checkpointing takes at most so many times the batch, however much memory it leaves."""


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
            for method in (STOCK, DENSE, *spec.methods):
                batch = min(fits, MOST_BATCHES * base)
                found.append(Key(f"{policy}/{method}", batch, equal_memory=True))
    return list(dict.fromkeys(found))


def slowest(processes: Sequence[Sequence[StepTime]]) -> tuple[StepTime, ...]:
    """Of each step the process that took longest: a step is as long as that."""
    return tuple(max(step, key=lambda t: t.step_s) for step in zip(*processes, strict=True))


def median_index(values: Sequence[float]) -> int:
    """Where the value is that is nearest to the middle one."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    return order[len(order) // 2]


class Folder:
    """One run's folder, for who launches and for process 0 of the launched.

    spec.json       what is to be measured
    corpus/         the text
    samples.jsonl   what has been measured (`records`)
    report.*        made from the above

    The files through which the two talk lie there, too: `hosts.heartbeat`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path / "samples.jsonl")
        self.spec = path / "spec.json"

    def handout(self) -> tuple[Spec, workload.Corpus, dict[tuple[object, ...], Sample]]:
        """What the launched processes have to know: settings, text, what is measured."""
        done = {sample.key: sample for sample in self.store.read()}
        return Spec.load(self.spec), workload.load_corpus(self.path / "corpus"), done
