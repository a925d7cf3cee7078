"""The ways to exchange gradients that the benchmarks on emulated hosts compare.

`METHODS` is the table: a line is a cell, by the `compression` section of its JSON file. Without a
section it is plain DeepSpeed; `CEILING` sends nothing.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import ds_ckpt
from ds_ckpt.lab import workload
from ds_ckpt.lab.hosts.backends import read_sent_bytes
from ds_ckpt.zero3.weights_hook import forget_hpz

if TYPE_CHECKING:
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts

STOCK, CEILING = workload.STOCK, "nothing sent"
ONCE = {"when": "accumulation_boundary"}
METHODS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    "dense": {"method": "dense"},
    "dense, one level": {"method": "dense", "exchange": {"levels": 1}},
    "dense, once a step": {"method": "dense", "exchange": ONCE},
    "4 bits": {"method": "quantize", "quantize": {"bits": 4}},
    "3 bits": {"method": "quantize", "quantize": {"bits": 3}},
    "2 bits": {"method": "quantize", "quantize": {"bits": 2}},
    "2 bits, no feedback, once a step": {
        "method": "quantize",
        "quantize": {"bits": 2},
        "error_feedback": {"enabled": False},
        "exchange": ONCE,
    },
    "1 bit": {"method": "entropy_coded", "entropy_coded": {"bits": 1.0, "metric": "steps"}},
    "0.31 bits": {"method": "entropy_coded", "entropy_coded": {"bits": 0.31, "metric": "steps"}},
    "Top-K 1.2% int8": {"method": "topk", "topk": {"density": 0.012, "values": "int8"}},
    "PowerSGD rank 4": {"method": "powersgd", "powersgd": {"rank": 4}},
    CEILING: None,
}
NOTHING = "nothing sent, weights neither"
RESIDENT = {"weights": {"resident": True}}
WHOLE = {"weights": {"resident": True, "deltas": "none"}}
LOSSLESS = {"weights": {"resident": True, "deltas": "lossless"}}
DENSE_ONCE = {"compression": METHODS["dense, once a step"]}
THREE_BITS = {"compression": METHODS["3 bits"]}
ONE_BIT = {"compression": METHODS["1 bit"]}
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO-1": ({"stage": 1}, {}),
    "ZeRO-2": ({"stage": 2}, {}),
    "hpZ": ({"zero_hpz_partition_size": 2}, {}),
    "resident, whole": ({}, WHOLE),
    "resident, lossless": ({}, LOSSLESS),
    "resident, lossless + dense once a step": ({}, {**LOSSLESS, **DENSE_ONCE}),
    "resident, lossless + 3 bits": ({}, {**LOSSLESS, **THREE_BITS}),
    "resident, lossless + 1 bit": ({}, {**LOSSLESS, **ONE_BIT}),
    "resident": ({}, RESIDENT),
    "resident where shorter": ({}, {"weights": {"resident": "auto"}}),
    "resident + dense once a step": ({}, {**RESIDENT, **DENSE_ONCE}),
    "resident + 3 bits": ({}, {**RESIDENT, **THREE_BITS}),
    "resident + 1 bit": ({}, {**RESIDENT, **ONE_BIT}),
    NOTHING: ({}, WHOLE),
}
"""`zero_optimization` and sections of cells in which weights stay on every host, and of rivals."""
DENSE = (STOCK, "dense", "dense, one level", "dense, once a step")
SHAPES: dict[str, dict[str, int]] = {
    "demo": {},
    "wider": {"hidden_size": 512, "layers": 4, "intermediate_size": 1376},
    "hidden 1024": {"hidden_size": 1024, "layers": 3, "intermediate_size": 2816, "heads": 16},
}
"""Arguments of `ds_ckpt.lab.workload.llama`; its vocabulary is 256, the bytes."""
GATHERED_TWICE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""`zero_optimization` of a model larger than memory: backward gathers weights again."""


class NoChange:
    """Sends nothing: other hosts go on with old weights."""

    name = "nothing"
    is_fixed_size = True

    def encode(self, shards: list[Tensor], masters: list[Tensor]) -> Tensor:
        torch._foreach_copy_(shards, masters)
        return torch.empty(0, dtype=torch.uint8)

    def decode_(self, held: Tensor, payload: Tensor) -> None:
        pass


@dataclass
class Running:
    """A cell with its engine."""

    name: str
    engine: Any
    session: ds_ckpt.Session | None

    def step(self, sequences: int, tokens: int, seed: int) -> None:
        """One optimizer step on random tokens, all its micro-steps."""
        self.backward(sequences, tokens, seed)
        self.engine.step()

    def backward(self, sequences: int, tokens: int, seed: int) -> None:
        """All of an optimizer step but the update: no gradient is under way after it."""
        self.engine.train()
        micro_steps = self.engine.gradient_accumulation_steps()
        for micro_step in range(micro_steps):
            generator = torch.Generator().manual_seed(
                1_000_000 * seed + 1000 * micro_step + dist.get_rank()
            )
            batch = torch.randint(0, 256, (sequences, tokens), generator=generator)
            self.engine.backward(self.engine(input_ids=batch, labels=batch).loss)
            if micro_step + 1 < micro_steps:
                self.engine.step()  # counts the micro-step, no more

    def land(self) -> None:
        """Wait for weights that are under way."""
        if self.session is not None:
            self.session.drain()

    def end(self) -> None:
        """Give its memory back."""
        self.engine.destroy()
        self.engine = self.session = None
        gc.collect()


def build(shape: str, lora_rank: int = 0) -> torch.nn.Module:
    """The model; with a rank, frozen under adapters on all its projections."""
    model: torch.nn.Module = workload.llama(seed=0, **SHAPES[shape])
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)  # adapters are drawn
        model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear"))
    return model


def start(
    name: str,
    shape: str,
    *,
    zero: dict[str, Any],
    autotune: bool,
    count: bool = False,
    bf16: bool = False,
    accumulation: int = 1,
    lora_rank: int = 0,
    policy: str = "none",
) -> Running:
    """A cell's engine on the model `shape`; `zero` goes into `zero_optimization`.

    `policy`: of checkpointing. `autotune`: whether gradients may go by DeepSpeed where that makes
    steps shorter. `count`: attach a session to stock too, for its counters. `lora_rank`: see
    `build`.
    """
    model = build(shape, lora_rank)
    bucket = -(-workload.count_parameters(model) // workload.BUCKETS)
    plugin: dict[str, Any] = {"telemetry": {"enabled": True}} if count else {}
    if policy != "none":
        plugin["activation"] = {"policy": policy}
    own, sections = WEIGHTS.get(name, ({}, {"compression": METHODS.get(name)}))
    section = sections.get("compression")
    if "weights" in sections:
        plugin["weights"] = sections["weights"]
    if section is not None:
        plugin["compression"] = dict(section)
        if section["method"] != "dense":
            exchange = {"autotune": autotune, **section.get("exchange", {})}
            plugin["compression"] |= {"warmup_steps": 0, "exchange": exchange}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": bucket, **zero, **own},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        **({"ds_ckpt": plugin} if plugin else {}),
    }
    engine, *_ = ds_ckpt.initialize(model=model, config=config)
    forget_hpz()
    session = ds_ckpt.session_of(engine)
    if name == NOTHING:
        assert session is not None
        assert session._resident is not None
        session._resident.hook.codec = NoChange()  # type: ignore[assignment]
        session._resident.tuner = None
    if name in (CEILING, NOTHING):
        session = session or ds_ckpt.attach(engine)
        session.send_no_gradients()
    return Running(name, engine, session)


def sent_bytes(*interfaces: str) -> tuple[int, ...]:
    """Return the bytes that these interfaces have sent when nothing is in flight."""
    dist.barrier()
    time.sleep(0.3)
    found = tuple(map(read_sent_bytes, interfaces))
    dist.barrier()
    return found


def leave(rows: Any, out: Path) -> None:
    """Process 0 writes the results; then all end."""
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def launch(
    script: str,
    spec: dict[str, Any],
    *,
    hosts: int = 2,
    slots: int = 1,
    rate_mbit: float | None = None,
    limit_s: float,
    prepare: Callable[[EmulatedHosts], None] = lambda hosts: None,
    attend: Callable[[EmulatedHosts, Path], None] = lambda hosts, folder: None,
) -> list[dict[str, Any]]:
    """Run `script --worker FOLDER` on emulated hosts; the rows that it has left.

    Args:
        spec: for the workers, in FOLDER/spec.json; what they find goes to FOLDER/rows.json.
        prepare: called with the hosts before.
        attend: called with them and the folder a few times a second meanwhile.
    """
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts
    from ds_ckpt.lab.hosts.launcher import deepspeed

    with (
        tempfile.TemporaryDirectory() as temporary,
        EmulatedHosts(hosts, rate_mbit=rate_mbit, slots=slots) as made,
    ):
        prepare(made)
        folder = Path(temporary)
        (folder / "spec.json").write_text(json.dumps(spec))
        argv = [str(Path(script).resolve()), "--worker", str(folder)]
        deepspeed(made, argv, folder, limit_s=limit_s, poll=lambda: attend(made, folder))
        rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return rows


def join() -> None:
    """Join the group that the launcher has made; one thread for each process."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
