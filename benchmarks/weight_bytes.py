"""Bytes a host sends in a step, all traffic: resident weights against stock, hpZ and ZeRO-2.

    sudo python benchmarks/weight_bytes.py [--json FILE] [--layouts 2x1,2x2] [--model wider]
        [--accumulation 1,8] [--lr 1e-4] [--steps 2]

Two emulated hosts of one or two processes, bf16, a Llama of random tokens with AdamW; each cell has
an engine of its own. The kernel's counter of the hosts' interface, the busiest host, a mean over
the counted steps; headers are in it. `needs`: what stock needs, its gathers and a ring's
reduce-scatter, by arithmetic: gloo's reduce-scatter sends twice that for gradients.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import _cells
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt import workload
from ds_ckpt.hosts.interfaces import INTERFACE, interface_counter
from ds_ckpt.zero3.weights import forget_hpz

WARM_UP_STEPS = 2
RESIDENT = {"weights": {"resident": True, "deltas": "lossless"}}
ONCE = {"when": "accumulation_boundary"}
THREE_BITS = {"method": "quantize", "quantize": {"bits": 3}, "warmup_steps": 0}
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stock ZeRO-3": ({"stage": 3}, {}),
    "hpZ": ({"stage": 3, "zero_hpz_partition_size": 0}, {}),
    "ZeRO-2": ({"stage": 2}, {}),
    "3-bit gradients": (
        {"stage": 3},
        {"compression": {**THREE_BITS, "exchange": {"autotune": False}}},
    ),
    "resident, whole": ({"stage": 3}, {"weights": {"resident": True, "deltas": "none"}}),
    "resident, lossless": ({"stage": 3}, RESIDENT),
    "resident, lossless; dense gradients once a step": (
        {"stage": 3},
        {**RESIDENT, "compression": {"method": "dense", "exchange": ONCE}},
    ),
    "resident, lossless; 3-bit gradients": (
        {"stage": 3},
        {**RESIDENT, "compression": {**THREE_BITS, "exchange": {"autotune": False, **ONCE}}},
    ),
}
"""`zero_optimization` and the section `ds_ckpt` of each."""


def worker(spec: dict[str, Any], out: Path) -> None:
    """What `deepspeed` launches: every cell in turn, results by process 0."""
    _cells.join()
    rows = []
    for accumulation in spec["accumulation"]:
        for name, (zero, section) in CELLS.items():
            if name == "hpZ":
                if spec["slots"] == 1:
                    continue
                zero = {**zero, "zero_hpz_partition_size": spec["slots"]}
            sent, losses = measure(zero, section, accumulation, spec)
            rows.append({"cell": name, "accumulation": accumulation, "sent": sent, "loss": losses})
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    zero: dict[str, Any], section: dict[str, Any], accumulation: int, spec: dict[str, Any]
) -> tuple[float, list[float]]:
    """Bytes a step of the busiest host, and this process's losses."""
    model = workload.llama(seed=0, **_cells.SHAPES[spec["model"]])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 2_000_000, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": spec["lr"], "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        **({"ds_ckpt": section} if section else {}),
    }
    if zero["stage"] == 3:
        config["zero_optimization"]["stage3_max_reuse_distance"] = 0
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = ds_ckpt.initialize(model=model, config=config)
    forget_hpz()
    cell = _cells.Running("", engine, None)
    for step in range(WARM_UP_STEPS):
        cell.step(1, 16, step)
    start = _sent()
    for step in range(spec["steps"]):
        cell.step(1, 16, WARM_UP_STEPS + step)
    sent = (_sent() - start) / spec["steps"]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sent)
    data = torch.arange(64).view(1, 64)
    with torch.no_grad():
        loss = float(engine(input_ids=data, labels=data).loss)
    cell.end()
    return max(everyone), [loss]


def _sent() -> int:
    """Bytes sent by eth0 when nothing is under way."""
    dist.barrier()
    time.sleep(0.3)
    found = interface_counter(Path("/proc/self/net/dev"), INTERFACE, 8)
    dist.barrier()
    return found


def run_layout(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one layout, such as 2x1: two hosts with one process each."""
    from ds_ckpt.hosts.emulated import EmulatedHosts
    from ds_ckpt.hosts.launcher import deepspeed

    count, slots = map(int, layout.split("x"))
    spec = {
        "accumulation": [int(a) for a in options.accumulation.split(",")],
        "slots": slots,
        "model": options.model,
        "lr": options.lr,
        "steps": options.steps,
    }
    with (
        tempfile.TemporaryDirectory() as temporary,
        EmulatedHosts(count, rate_mbit=None, slots=slots) as hosts,
    ):
        folder = Path(temporary)
        (folder / "spec.json").write_text(json.dumps(spec))
        script = [str(Path(__file__).resolve()), "--worker", str(folder)]
        deepspeed(hosts, script, folder, limit_s=options.limit_s)
        rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return [{"layout": layout, **row} for row in rows]


def show(rows: list[dict[str, Any]], numel: int) -> None:
    """One table a layout and accumulation."""
    heading = None
    for row in rows:
        processes = 1
        for count in row["layout"].split("x"):
            processes *= int(count)
        share, micro_steps = (processes - 1) / processes, row["accumulation"]
        needs = 6 * numel * micro_steps * share
        if heading != (heading := (row["layout"], micro_steps)):
            print(f"\n{row['layout']}, accumulation {micro_steps}; needs {needs / 1e6:,.1f} MB")
            print("| | MB a host and step | fewer than stock needs | loss |\n|---|---|---|---|")
        fewer = f"{needs / row['sent']:.1f}x"
        print(f"| {row['cell']} | {row['sent'] / 1e6:,.2f} | {fewer} | {row['loss'][0]:.6f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", default="2x1,2x2")
    parser.add_argument("--model", default="wider")
    parser.add_argument("--accumulation", default="1,8")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--worker", type=Path, help="the launched script's own option")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads((options.worker / "spec.json").read_text()), options.worker / "rows.json")
        return
    rows = [r for layout in options.layouts.split(",") for r in run_layout(layout, options)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    numel = workload.count_parameters(workload.llama(seed=0, **_cells.SHAPES[options.model]))
    print(f"Llama, {numel:,} parameters, bf16, AdamW at {options.lr:g}, torch {torch.__version__}")
    show(rows, numel)


if __name__ == "__main__":
    main()
