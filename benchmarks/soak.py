"""A long run of a small model: does anything grow?

    deepspeed --num_gpus 2 benchmarks/soak.py [--steps 10000] [--minutes 15] [--save-every 500]
        [--json benchmarks/results/soak.json] [--plot benchmarks/results/soak.svg]

DeepSpeed ZeRO-3 in bf16 with everything of the plugin that keeps something: policy `block` with its
inputs in host memory, 3 bits with residuals, an exchange beside backward, two micro-steps a step,
and a checkpoint every so often, of which the last two stay on disk. What is recorded of each
process, 200 times: resident memory, memory of the accelerator, threads, open handles, the seconds
and the processor time of a step since the last record; of the folder the files.

Flat means: from the first 100 steps on (a quarter of a shorter run; one save is among them) the
median of the last fifth of the records is no more than 8 MiB above that of the first fifth, threads
and handles are no more at the end than they were then, and a step takes no more than 1.25 times the
processor time. Seconds are recorded, and judged by nobody: others use the machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_ckpt
from ds_ckpt.lab.report.charts import Line, Lines, Panel, svg
from ds_ckpt.telemetry.units import MIB

WIDTH, BLOCKS, ENTRIES = 64, 4, 16
SETTLED_AFTER = 100
GROWTH_BYTES = 8 * MIB
DRIFT = 1.25


@dataclass(frozen=True)
class Record:
    """One process's state after `step` steps; `step_s` and `processor_s` are of one step."""

    step: int
    resident_bytes: int
    accelerator_bytes: int
    threads: int
    handles: int
    files: int
    step_s: float
    processor_s: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return nn.functional.mse_loss(self.head(y), x.roll(1, -1))


def start() -> Any:
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": ENTRIES,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 40_000,
        },
        "ds_ckpt": {
            "activation": {
                "policy": "block",
                "modules": ["Block"],
                "offload": True,
                "offload_min_bytes": 0,
            },
            "compression": {
                "method": "quantize",
                "quantize": {"bits": 3},
                "warmup_steps": 2,
                "exchange": {"autotune": False},
            },
        },
    }
    engine, *_ = ds_ckpt.initialize(model=model, config=config)
    engine.train()
    return engine


def soak(
    steps: int,
    folder: Path,
    *,
    save_every: int = 500,
    records: int = 200,
    until_s: float = float("inf"),
    each_step: Callable[[int], None] = lambda step: None,
) -> list[Record]:
    """Train; this process's records. Collective.

    Args:
        folder: shared by all processes; checkpoints are written to it.
        until_s: no further step begins after so many seconds.
        each_step: called after each step, with its number.
    """
    engine, me, found = start(), psutil.Process(), list[Record]()
    accelerator = get_accelerator()
    saves = {_settled(steps) // 2, *range(save_every, steps + 1, save_every)}
    tags: list[str] = []
    every = max(1, steps // records)
    data = torch.Generator().manual_seed(dist.get_rank())
    began_s = last_s = time.perf_counter()
    last_processor_s = time.process_time()
    for step in range(1, steps + 1):
        for _ in range(2):
            x = torch.randn(ENTRIES, WIDTH, generator=data, dtype=torch.float32).bfloat16()
            engine.backward(engine(x.to(engine.device)))
            engine.step()
        each_step(step)
        if step in saves:
            tags.append(f"step{step}")
            engine.save_checkpoint(str(folder), tag=tags[-1])
            if len(tags) > 2:
                old = tags.pop(0)
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(folder / old)
        if step % every == 0:
            over = torch.tensor(float(time.perf_counter() - began_s > until_s))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            now_s, now_processor_s = time.perf_counter(), time.process_time()
            found.append(
                Record(
                    step,
                    me.memory_info().rss,
                    int(accelerator.memory_allocated() or 0) if torch.cuda.is_available() else 0,
                    me.num_threads(),
                    me.num_fds(),
                    sum(1 for _ in folder.rglob("*")),
                    (now_s - last_s) / every,
                    (now_processor_s - last_processor_s) / every,
                )
            )
            last_s, last_processor_s = time.perf_counter(), time.process_time()
            if over:
                break
    engine.destroy()
    return found


def _settled(steps: int) -> int:
    return min(SETTLED_AFTER, steps // 4)


def verdict(records: Sequence[Record]) -> list[str]:
    """Return a text for each quantity that has grown on one rank; empty if none has."""
    settled = [r for r in records if r.step >= _settled(records[-1].step)]
    fifth = max(1, len(settled) // 5)
    first, last = settled[:fifth], settled[-fifth:]
    taken = last[-1].step - first[0].step
    grown = []

    def both(of: Callable[[Record], float]) -> tuple[float, float]:
        return statistics.median(map(of, first)), statistics.median(map(of, last))

    for name in ("resident", "accelerator"):
        before, after = both(lambda r, name=name: getattr(r, f"{name}_bytes"))  # type: ignore[misc]
        if after - before > GROWTH_BYTES:
            grown.append(
                f"{name} memory: {before / MIB:.1f} MiB, then {after / MIB:.1f} MiB: "
                f"{(after - before) / max(taken, 1):.0f} bytes a step"
            )
    for name in ("threads", "handles"):
        before, after = max(getattr(r, name) for r in first), getattr(last[-1], name)
        if after > before:
            grown.append(f"{name}: {before}, then {after}")
    before, after = both(lambda r: r.processor_s)
    if after > DRIFT * before:
        grown.append(f"processor time of a step: {1e3 * before:.1f} ms, then {1e3 * after:.1f} ms")
    return grown


def panels(processes: Sequence[Sequence[Record]]) -> list[Panel]:
    """Memory, threads and handles, and step times over the steps."""

    def lines(of: Callable[[Record], float], what: str) -> list[Line]:
        return [
            Line(f"{what}, process {p}", [(r.step, of(r)) for r in records], shown="line")
            for p, records in enumerate(processes)
        ]

    memory = lines(lambda r: r.resident_bytes / MIB, "resident")
    if any(r.accelerator_bytes for records in processes for r in records):
        memory += lines(lambda r: r.accelerator_bytes / MIB, "accelerator")
    counts = lines(lambda r: r.threads, "threads") + lines(lambda r: r.handles, "handles")
    times = lines(lambda r: 1e3 * r.processor_s, "processor") + lines(
        lambda r: 1e3 * r.step_s, "clock"
    )
    return [
        Lines(memory, "step", "MiB"),
        Lines(counts, "step", "number"),
        Lines(times, "step", "ms a step"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="ends after so many")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    shared: list[Any] = [tempfile.mkdtemp(prefix="ds_ckpt_soak_") if not dist.get_rank() else ""]
    dist.broadcast_object_list(shared)
    try:
        mine = soak(
            options.steps,
            Path(shared[0]),
            save_every=options.save_every,
            until_s=60 * options.minutes,
        )
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    finally:
        dist.barrier()
        if not dist.get_rank():
            shutil.rmtree(shared[0], ignore_errors=True)
    grown = [f"process {p}: {line}" for p, records in enumerate(every) for line in verdict(records)]
    if dist.get_rank() == 0:
        print(f"{mine[-1].step} steps of {options.steps}, {len(every)} processes")
        print("\n".join(grown) if grown else "flat: nothing has grown")
        if options.json:
            found = {
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "steps": mine[-1].step,
                "grown": grown,
                "processes": [[asdict(record) for record in records] for records in every],
            }
            options.json.write_text(json.dumps(found) + "\n")
        if options.plot:
            options.plot.write_text(svg(panels(every)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(grown))


if __name__ == "__main__":
    raise SystemExit(main())
