"""The experiment: configurations, their DeepSpeed files, and the trials of a run. Pure.

A configuration is a checkpointing policy, a gradient method and a weight placement. Three gradient
methods are always measured. `stock` is DeepSpeed's own reduction, and `dense` sends every gradient
once (on gloo half of stock's bytes). `no_comm` sends no gradient: the upper bound for any method.
Weights are `stock` (ZeRO-3), resident on every node, or a DeepSpeed baseline.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ds_ckpt.activation.policies import policy_names
from ds_ckpt.compression import methods
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.lab.workload import BUCKETS, DENSE, RESIDENT, STOCK, llama

SPEC = "spec.json"
NO_COMM = "no_comm"
METHODS: dict[str, dict[str, Any]] = {
    STOCK: {},
    DENSE: {"method": "dense"},
    NO_COMM: {},
    **{
        preset: {"method": name, **sections}
        for name, kind in methods().items()
        for preset, sections in kind.presets.items()
    },
}
WEIGHTS: dict[str, dict[str, Any]] = {STOCK: {}} | {
    name: {"resident": True, "deltas": deltas} for name, deltas in RESIDENT.items()
}
BASELINES: dict[str, dict[str, Any]] = {"hpz": {}, "zero2": {"stage": 2}, "zero1": {"stage": 1}}
"""Changes of `zero_optimization`; hpZ's partition size is the number of processes per node."""
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "activation": {
        name: {} if name == "none" else {"policy": name}
        for name in ("none", *policy_names(planned=False))
    },
    "compression": METHODS,
    "weights": WEIGHTS,
}
"""Named values of each axis, by the section of `ds_ckpt` that they fill."""
SHAPE: dict[str, int] = {
    name: of.default for name, of in inspect.signature(llama).parameters.items() if name != "seed"
}
"""Default shape of the built-in Llama."""
Where = Literal["emulated", "hostfile", "loopback"]
MIN_REPETITIONS = 4
"""Fewest repetitions with an interval; also the fewest of a run that a time limit ends."""


@dataclass(frozen=True, order=True)
class Configuration:
    """One way to train."""

    policy: str
    method: str
    weights: str = STOCK

    @property
    def exchange(self) -> str:
        """Gradient method, with the weight placement unless that is ZeRO-3's."""
        return self.method if self.weights == STOCK else f"{self.method}/{self.weights}"

    @property
    def name(self) -> str:
        """Name in tables and records."""
        return f"{self.policy}/{self.exchange}"

    @classmethod
    def of(cls, name: str) -> Configuration:
        """Parse a name."""
        return cls(*name.split("/"))


@dataclass(frozen=True)
class Spec:
    """Settings that decide what a run measures. Runs with equal settings can be combined.

    Placements of weights and DeepSpeed baselines are measured beside `stock`. `sections` are from
    users' files, by `activation/NAME`, `compression/NAME`, `weights/NAME`. Rates are in Mbit/s;
    None is not limited. `drop` steps of a trial are not timed. `shape` is the built-in Llama's.
    `demo` leaves out the configurations that the headline does not need: see `_is_in_demo`.
    """

    where: Where = "emulated"
    hosts: int = 2
    slots: int = 1
    policies: tuple[str, ...] = ("none", "block")
    methods: tuple[str, ...] = ("topk", "powersgd", "3bit")
    weights: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: tuple[float | None, ...] = (200.0,)
    batch: int = 4
    tokens: int = 128
    accumulation: int = 1
    bf16: bool = False
    repetitions: int = 6
    steps: int = 2
    drop: int = 1
    warm_up: int = 3
    seed: int = 1
    shape: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    demo: bool = False

    @property
    def configurations(self) -> list[Configuration]:
        """Policies x placements x methods, and policies x baselines."""
        methods = dict.fromkeys((STOCK, DENSE, *self.methods, NO_COMM))
        weights = dict.fromkeys((STOCK, *self.weights))
        exchanges = [(method, where) for where in weights for method in methods]
        exchanges += [(STOCK, baseline) for baseline in self.baselines]
        found = [Configuration(policy, *one) for policy in self.policies for one in exchanges]
        return [one for one in found if not self.demo or self._is_in_demo(one)]

    def _is_in_demo(self, one: Configuration) -> bool:
        """Return whether a demo measures a configuration.

        Without checkpointing that is `stock`, where the user starts, and `dense`, the reference of
        the headline. With it that is `dense`, the methods, and resident weights beside the first.
        """
        if one.weights in BASELINES:
            return True
        if one.policy == "none":
            return one.exchange in (STOCK, DENSE)
        return one.method in (*self.methods[:1], *(DENSE, *self.methods) * (one.weights == STOCK))

    def steps_in(self, trials: Sequence[object]) -> int:
        """Return the number of steps of a launch: warm-up and trials."""
        return self.warm_up * len(self.configurations) + len(trials) * (self.drop + self.steps)

    @property
    def compared(self) -> list[Configuration]:
        """Configurations that are compared with `dense`."""
        others = [c for c in self.configurations if c.policy != "none" and c.method != NO_COMM]
        return [one for one in others if one.exchange not in (STOCK, DENSE)]

    @property
    def processes(self) -> int:
        """World size."""
        return self.hosts * self.slots

    @property
    def nodes(self) -> int:
        """Number of senders whose bytes are counted: nodes; on one node, ranks."""
        return self.hosts if self.hosts > 1 else self.slots

    def crosses_host(self, process: int) -> Callable[[int], bool]:
        """Return a test for ranks on other nodes than `process`; on one node, for other ranks."""
        local = self.slots if self.hosts > 1 else 1
        return lambda other: other // local != process // local

    def section(self, axis: str, value: str) -> dict[str, Any]:
        """Return the section of `ds_ckpt` for a value of an axis."""
        own = self.sections.get(f"{axis}/{value}")
        return AXES[axis].get(value, {}) if own is None else own

    def save(self, folder: Path) -> None:
        """Write the settings into the run's folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / SPEC).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Spec:
        """Read the settings; StateError if another version wrote them."""
        path = folder / SPEC
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if unknown := sorted(content.keys() ^ {one.name for one in fields(cls)}):
            why = "another version of ds_ckpt began this run"
            remedy = "continue with that version, or name a new folder"
            problem = Problem(str(path), f"settings {', '.join(unknown)}", why, remedy)
            raise StateError(problem, headline="this run cannot be read")
        return SPECS.validate_python(content)


SPECS = TypeAdapter(Spec)
"""Reads the settings that `asdict` turned into JSON."""


def link(rate_mbit: float | None) -> str:
    """Describe a link's rate."""
    return "link not shaped" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"


def title(exchange: str) -> str:
    """Return a method's display name, with its weight placement."""
    method, _, weights = exchange.partition("/")
    method = next((k.titles[method] for k in methods().values() if method in k.titles), method)
    resident = " resident weights" * (weights in WEIGHTS)
    return f"{method} with {weights}{resident}" if weights else method


def check_spec(spec: Spec) -> None:
    """Raise ConfigError with every setting that cannot work."""
    problems = []

    def wrong(where: str, found: object, why: str, remedy: str) -> None:
        problems.append(Problem(where, str(found), why, remedy))

    for option, names, known, axis in (
        ("--policies", spec.policies, AXES["activation"], "activation"),
        ("--methods", spec.methods, METHODS, "compression"),
        ("--weights", spec.weights, WEIGHTS, "weights"),
        ("--baselines", spec.baselines, BASELINES, ""),
    ):
        unknown = [n for n in names if n not in known and f"{axis}/{n}" not in spec.sections]
        if unknown or len(set(names)) < len(names):
            also = " and names of DeepSpeed JSON files" if axis else ""
            remedy = f"name each once, of {', '.join(known)}{also}"
            wrong(option, ", ".join(unknown or names), "it is unknown, or named twice", remedy)
    if "none" not in spec.policies:
        why = "the cost of recomputation is measured against no checkpointing"
        wrong("--policies", ", ".join(spec.policies), why, "add none")
    layout = f"{spec.hosts} nodes x {spec.slots} ranks"
    resident = [name for name in spec.weights if name != STOCK]
    if resident and spec.hosts < 2:
        why = "on one node no weight is sent between nodes"
        wrong("--weights", ", ".join(resident), why, "leave it out, or use several nodes")
    lossless = [n for n in resident if spec.section("weights", n).get("deltas") == "lossless"]
    if lossless and not spec.bf16:
        why = "lossless changes need 16-bit weights, and this run is in fp32"
        wrong("--weights", ", ".join(lossless), why, "add --bf16, or name whole")
    if "hpz" in spec.baselines and (spec.slots < 2 or spec.hosts < 2):
        why = "hpZ's secondary partition needs several ranks on each of several nodes"
        wrong("--baselines", f"hpz on {layout}", why, "leave it out, or use --slots 2 or more")
    if spec.where != "emulated" and spec.rates != (None,):
        why = "only the links of emulated nodes can be given a rate"
        wrong("--rates", ", ".join(map(link, spec.rates)), why, "leave it out")
    if spec.processes < 2:
        wrong("--hosts, --slots", layout, "a single rank exchanges nothing", "use at least 2")
    if spec.model is not None and (
        spec.shape or (":" in spec.model and not Path(spec.model).exists())
    ):
        why = "measure trains Hugging Face models on tokens, and --shape is the built-in Llama's"
        wrong("--model, --shape", spec.model, why, "name a configuration, without --shape")
    if problems:
        raise ConfigError(problems, headline="this cannot be measured")


def deepspeed_config(
    spec: Spec, configuration: Configuration, *, parameters: int
) -> dict[str, Any]:
    """Return the DeepSpeed file, with ZeRO-3 set as for a model larger than memory.

    The autotuner is off, so the report also shows where compression loses. With several micro-steps
    `dense` sends their sum once, as compressed gradients do.
    """
    compression = spec.section("compression", configuration.method)
    once = {"when": "accumulation_boundary"} if spec.accumulation > 1 else {}
    exchange: dict[str, Any] = {**once, **compression.get("exchange", {})}
    if compression and (compression["method"] != "dense" or compression.get("rules")):
        exchange["autotune"] = False
        compression = {**compression, "warmup_steps": 0}
    if compression and exchange:
        compression = {**compression, "exchange": exchange}
    sections = {
        "activation": spec.section("activation", configuration.policy),
        "compression": compression,
        "weights": spec.section("weights", configuration.weights),
    }
    baseline = BASELINES.get(configuration.weights, {})
    if configuration.weights == "hpz":
        baseline = {"zero_hpz_partition_size": spec.slots}
    return {
        **({"bf16": {"enabled": True}} if spec.bf16 else {}),
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_accumulation_steps": spec.accumulation,
        "steps_per_print": 1_000_000,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "reduce_bucket_size": -(-parameters // BUCKETS),
            **baseline,
        },
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True},
        },
        "ds_ckpt": {
            "telemetry": {"enabled": True, "every_n_steps": 1_000_000},
            **{name: section for name, section in sections.items() if section},
        },
    }
