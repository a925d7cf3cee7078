"""What is to be measured: configurations, their DeepSpeed files, and the trials of a run. Pure.

A configuration is a checkpointing policy, a gradient method and a weight placement. Among the
methods, `stock` is DeepSpeed's own reduction, `dense` the plugin's uncompressed exchange (on gloo
half of stock's bytes) and `silent` an exchange that sends no gradient: the ceiling. Weights are
sharded by ZeRO-3 (`stock`), resident on every node, or placed by a DeepSpeed baseline.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ds_ckpt.activation.policies import policy_names
from ds_ckpt.compression import methods
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.lab.workload import llama

SPEC = "spec.json"
"""In a run's folder, beside the corpus and `records.Store`'s samples."""
STOCK, DENSE, SILENT = "stock", "dense", "silent"
REFERENCES = (STOCK, DENSE, SILENT)
POLICIES: dict[str, dict[str, Any]] = {
    name: {} if name == "none" else {"policy": name} for name in policy_names(planned=False)
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
WEIGHTS: dict[str, dict[str, Any]] = {
    STOCK: {},
    "whole": {"resident": True, "deltas": "none"},
    "lossless": {"resident": True, "deltas": "lossless"},
}
BASELINES: dict[str, dict[str, Any]] = {"hpz": {}, "zero2": {"stage": 2}, "zero1": {"stage": 1}}
"""What else `zero_optimization` has; hpZ's partition is the number of processes of a host."""
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "activation": POLICIES,
    "compression": METHODS,
    "weights": WEIGHTS,
}
"""By the section of `ds_ckpt` that a value of the axis is."""
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
    weights: str = STOCK
    """Of `WEIGHTS`, or a baseline."""

    @property
    def exchange(self) -> str:
        """What is sent, whatever the policy."""
        return self.method if self.weights == STOCK else f"{self.method}/{self.weights}"

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.exchange}"

    @classmethod
    def of(cls, name: str) -> Configuration:
        """The one of that name."""
        return cls(*name.split("/"))


@dataclass(frozen=True)
class Spec:
    """All that decides what a run measures. Two runs with equal ones can be put together.

    Attributes:
        weights: beside `stock`, which is always there; with every policy and method.
        baselines: with every policy and DeepSpeed's own reduction.
        left_out: configurations, by name, that the axes have and nobody asks for.
        sections: taken from users' files, by `activation/NAME`, `compression/NAME`, `weights/NAME`.
        rates: Mbit/s, None is not shaped.
        batches: sequences a process and micro-step.
        accumulation: micro-steps of a step.
        bf16: weights, gradients and activations in bf16; else fp32.
        repetitions: trials of each configuration at a rate.
        steps: timed steps of a trial, after `drop` that are not.
        shape: arguments of `ds_ckpt.lab.workload.llama`.
        model: as `ds-ckpt profile` takes it, in that Llama's place.
        folder: where a `module:callable` is imported from.
        deepspeed: a user's file in the place of the run's own optimizer, precision and ZeRO.
        ceiling: also measure `silent`.
    """

    where: Where = "emulated"
    hosts: int = 2
    slots: int = 1
    policies: tuple[str, ...] = ("none", "block")
    methods: tuple[str, ...] = (DEFAULT_METHOD,)
    weights: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: tuple[float | None, ...] = (200.0,)
    batches: tuple[int, ...] = (4,)
    tokens: int = 128
    accumulation: int = 1
    bf16: bool = False
    repetitions: int = 6
    steps: int = 2
    drop: int = 1
    warm_up: int = 3
    loss_steps: int = 60
    seed: int = 1
    shape: dict[str, int] = field(default_factory=dict)
    ceiling: bool = True
    text: str | None = None
    model: str | None = None
    folder: str = ""
    deepspeed: dict[str, Any] = field(default_factory=dict)

    @property
    def own_batch(self) -> bool:
        """Whether the model comes with its batch, the same in every step."""
        return self.model is not None and ":" in self.model and not Path(self.model).exists()

    @property
    def configurations(self) -> list[Configuration]:
        """Policies x weights x (`stock`, `dense`, methods, `silent`), then DeepSpeed baselines."""
        methods = [STOCK, DENSE, *(m for m in self.methods if m not in REFERENCES)]
        if self.ceiling:
            methods.append(SILENT)
        weights = dict.fromkeys((STOCK, *self.weights))
        exchanges = [(method, where) for where in weights for method in methods]
        exchanges += [(STOCK, baseline) for baseline in self.baselines]
        all_with_all = [
            Configuration(policy, *one) for policy in self.policies for one in exchanges
        ]
        return [one for one in all_with_all if one.name not in self.left_out]

    @property
    def processes(self) -> int:
        return self.hosts * self.slots

    def is_far(self, process: int) -> Callable[[int], bool]:
        """Whether another process is on another host than `process`; of a single host any other."""
        local = self.slots if self.hosts > 1 else 1
        return lambda other: other // local != process // local

    def tokens_of(self, sequences: int) -> int:
        """Of a step, all processes."""
        return sequences * self.tokens * self.accumulation * self.processes

    def save(self, folder: Path) -> None:
        (folder / SPEC).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Spec:
        """Raises StateError where the file has settings that this version does not know."""
        path = folder / SPEC
        content = json.loads(path.read_text(encoding="utf-8"))
        if unknown := sorted(content.keys() - {one.name for one in fields(cls)}):
            why = "another version of ds_ckpt has begun this run"
            remedy = "go on with that version, or name a new folder"
            raise StateError(
                Problem(str(path), f"settings {', '.join(unknown)}", why, remedy),
                headline="this run cannot be read",
            )
        for name in ("policies", "methods", "weights", "baselines", "left_out", "rates", "batches"):
            content[name] = tuple(content.get(name, ()))
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
        ("--weights", spec.weights, WEIGHTS, "weights"),
        ("--baselines", spec.baselines, BASELINES, ""),
    ):
        files = spec.sections
        if unknown := [n for n in names if n not in known and f"{section}/{n}" not in files]:
            also = " and names of DeepSpeed JSON files" if section else ""
            why = f"known are {', '.join(known)}{also}"
            wrong(option, ", ".join(unknown), why, "name one of those")
        if len(set(names)) < len(names):
            wrong(option, ", ".join(names), "a configuration is measured once", "name each once")
    if "none" not in spec.policies:
        why = "what recomputing costs is measured against no checkpointing"
        wrong("--policies", ", ".join(spec.policies), why, "add none")
    resident = [name for name in spec.weights if name != STOCK]
    if resident and spec.hosts < 2:
        why = "on one host no weight crosses between hosts, so there is nothing to keep"
        wrong("--weights", ", ".join(resident), why, "leave it out, or take several hosts")
    lossless = [n for n in resident if _section(spec, "weights", n).get("deltas") == "lossless"]
    if lossless and not spec.bf16:
        why = "lossless changes are of 16-bit weights, and this run is in fp32"
        wrong("--weights", ", ".join(lossless), why, "add --bf16, or name whole")
    if "hpz" in spec.baselines and (spec.slots < 2 or spec.hosts < 2):
        why = "hpZ divides a copy of the weights among several processes of each of several hosts"
        found = f"hpz on {spec.hosts} hosts x {spec.slots} processes"
        wrong("--baselines", found, why, "leave it out, or take 2 hosts and --slots 2 or more")
    if spec.accumulation < 1:
        wrong("--accumulation", spec.accumulation, "a step has micro-steps", "1 or more")
    if spec.where != "emulated" and spec.rates != (None,):
        why = "only the links of emulated hosts can be given a rate"
        wrong("--rates", ", ".join(map(link, spec.rates)), why, "leave it out")
    if spec.processes < 2:
        why = "a single process exchanges nothing"
        wrong("--hosts, --slots", "1 process", why, "take at least 2")
    if spec.model is not None and spec.shape:
        shape = ", ".join(f"{name}={value}" for name, value in spec.shape.items())
        wrong("--shape", shape, f"it is of the built-in Llama, not of {spec.model}", "leave it out")
    if spec.own_batch and (spec.loss_steps or spec.text):
        found = f"{spec.loss_steps} steps" + (f" on {spec.text}" if spec.text else "")
        why = f"{spec.model} has its own batch, the same in every step, and no text held out"
        wrong("--loss-steps, --text", found, why, "write --loss-steps 0, and leave --text out")
    if spec.tokens < 2 and not spec.own_batch:
        wrong("--tokens", spec.tokens, "a token is told from those before it", "2 or more")
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
    """Its DeepSpeed file: the user's, else ZeRO-3 as if the model were larger than the memory.

    The autotuner is off: the report shows what compression does, also where it loses. Where a step
    has several micro-steps, `dense` sends their sum once, as compressed gradients are sent: else
    compression would be credited with what accumulating saves. A user's file has its own word.
    """
    compression = _section(spec, "compression", configuration.method)
    once = {"when": "accumulation_boundary"} if spec.accumulation > 1 else {}
    exchange: dict[str, Any] = {**once, **compression.get("exchange", {})}
    if compression and (compression["method"] != "dense" or compression.get("rules")):
        exchange["autotune"] = False
        compression = {**compression, "warmup_steps": start_step}
    if compression and exchange:
        compression = {**compression, "exchange": exchange}
    sections = {
        "activation": _section(spec, "activation", configuration.policy),
        "compression": compression,
        "weights": _section(spec, "weights", configuration.weights),
    }
    baseline = BASELINES.get(configuration.weights, {})
    if configuration.weights == "hpz":
        baseline = {"zero_hpz_partition_size": spec.slots}
    base: dict[str, Any] = spec.deepspeed or {
        **({"bf16": {"enabled": True}} if spec.bf16 else {}),
        "gradient_clipping": 1.0,
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
    }
    return {
        **base,
        "train_micro_batch_size_per_gpu": min(spec.batches),
        "gradient_accumulation_steps": spec.accumulation,
        "steps_per_print": 1_000_000,
        "zero_optimization": {**base["zero_optimization"], **baseline},
        "ds_ckpt": {
            "telemetry": {"enabled": True, "every_n_steps": 1_000_000},
            **{name: section for name, section in sections.items() if section},
        },
    }


def _section(spec: Spec, name: str, value: str) -> dict[str, Any]:
    """What a value of an axis writes into its section of `ds_ckpt`."""
    own = spec.sections.get(f"{name}/{value}")
    return AXES[name].get(value, {}) if own is None else own
