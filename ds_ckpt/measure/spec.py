"""What is to be measured: cells, their DeepSpeed configurations, and the tasks of a run.

A cell is a checkpointing policy with a compression method. `stock` is DeepSpeed's own reduction,
`dense` the plugin's exchange that sends everything (on gloo half of stock's bytes), `silent` an
exchange that sends no gradient: the ceiling.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.harness.models import llama

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
    "4bit": {"method": "quantize", "quantize": {"bits": 4}},
    "3bit": {"method": "quantize", "quantize": {"bits": 3}},
    "2bit": {"method": "quantize", "quantize": {"bits": 2}},
    "topk": {"method": "topk", "topk": {"density": 0.01, "values": "int8"}},
    "powersgd": {"method": "powersgd", "powersgd": {"rank": 4}},
    "hybrid": {
        "method": "hybrid",
        "powersgd": {"rank": 4},
        "quantize": {"bits": 2},
        "hybrid": {"remainder": "quantize"},
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
class Cell:
    """One way to train."""

    policy: str
    method: str

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.method}"

    @classmethod
    def of(cls, name: str) -> Cell:
        return cls(*name.split("/", 1))


@dataclass(frozen=True)
class Spec:
    """All that decides what a run measures. Two runs with equal ones can be put together.

    Attributes:
        sections: taken from users' files, by `activation/NAME` or `compression/NAME`.
        rates: Mbit/s, None is not shaped.
        batches: sequences a process and step.
        rounds: times that all cells take their turn.
        steps: timed steps of a turn, after `drop` that are not.
        shape: arguments of `ds_ckpt.harness.models.llama`.
        equal_memory: also time checkpointed cells with the batch that their memory allows.
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
    rounds: int = 6
    steps: int = 2
    drop: int = 1
    warm_up: int = 3
    loss_steps: int = 60
    seed: int = 1
    shape: dict[str, int] = field(default_factory=dict)
    equal_memory: bool = True
    text: str | None = None

    @property
    def cells(self) -> list[Cell]:
        """The policies with the two dense baselines, the methods and the ceiling."""
        methods = [STOCK, DENSE, *(m for m in self.methods if m not in BASELINES), SILENT]
        return [Cell(policy, method) for policy in self.policies for method in methods]

    @property
    def processes(self) -> int:
        return self.hosts * self.slots

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Spec:
        content = json.loads(path.read_text(encoding="utf-8"))
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
            why = "a cell is measured once"
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
    for option, value in (
        ("--rounds", spec.rounds),
        ("--steps", spec.steps),
        ("--batches", min(spec.batches, default=0)),
    ):
        if value < 1:
            problems.append(Problem(option, str(value), "nothing would be measured", "1 or more"))
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
    spec: Spec, cell: Cell, *, parameters: int, start_step: int = 0, total_steps: int = 1000
) -> dict[str, Any]:
    """A cell's DeepSpeed file: ZeRO-3 as if the model were larger than the memory, in fp32.

    The gate is off: the report shows what compression does, also where it loses.
    """
    activation = spec.sections.get(f"activation/{cell.policy}", POLICIES.get(cell.policy, {}))
    own = spec.sections.get(f"compression/{cell.method}")
    compression = METHODS.get(cell.method, {}) if own is None else own
    if compression and (compression["method"] != "dense" or compression.get("rules")):
        exchange = {**compression.get("exchange", {}), "gate": False}
        compression = {**compression, "exchange": exchange, "start_step": start_step}
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
