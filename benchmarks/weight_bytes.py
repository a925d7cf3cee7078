"""Bytes a host sends in a step, all traffic: resident weights against stock, hpZ and ZeRO-2.

    python benchmarks/weight_bytes.py [--json FILE] [--layouts 2x1,2x2] [--model wider]
        [--accumulation 1,8] [--steps 2] [--lora-rank 8]

Two emulated hosts of one or two processes, bf16, a Llama of random tokens with AdamW at 1e-4; each
cell has an engine of its own. Bytes with headers of the busiest host's interface, a mean over the
steps. `needs`: stock's gathers and a ring's reduce-scatter, by arithmetic; gloo's sends twice that.
`loss`: of a batch afterwards, on process 0. With `--lora-rank` the model is frozen under adapters.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import _cells
import torch
import torch.distributed as dist

from ds_ckpt.lab.hosts.backends import INTERFACE

WARM_UP_STEPS = 2
CELLS = (
    _cells.STOCK,
    "hpZ",
    "ZeRO-1",
    "ZeRO-2",
    "3 bits",
    "resident, whole",
    "resident, lossless",
    "resident, lossless + dense once a step",
    "resident, lossless + 3 bits",
)


def worker(spec: dict[str, Any], out: Path) -> None:
    """Run every cell in turn under `deepspeed`; rank 0 writes the results."""
    _cells.join()
    rows = []
    for accumulation in spec["accumulation"]:
        for name in CELLS:
            if name == "hpZ" and spec["slots"] == 1:
                continue
            cell = _cells.start(
                name,
                spec["model"],
                zero=_cells.GATHERED_TWICE,
                autotune=False,
                bf16=True,
                accumulation=accumulation,
                lora_rank=spec["lora_rank"],
            )
            rows.append(
                {"cell": name, "accumulation": accumulation, **measure(cell, spec["steps"])}
            )
            cell.end()
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
    _cells.leave(rows, out)


def measure(cell: _cells.Running, steps: int) -> dict[str, float]:
    """Bytes a step of the busiest host, and this process's loss."""
    for step in range(WARM_UP_STEPS):
        cell.step(1, 16, step)
    (start,) = _cells.sent_bytes(INTERFACE)
    for step in range(steps):
        cell.step(1, 16, WARM_UP_STEPS + step)
    (end,) = _cells.sent_bytes(INTERFACE)
    sent = torch.tensor((end - start) / steps, dtype=torch.float64)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    data = torch.arange(64).view(1, 64)
    with torch.no_grad():
        loss = float(cell.engine(input_ids=data, labels=data).loss)
    return {"sent": float(sent), "loss": loss}


def run_layout(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one layout, such as 2x1: two hosts with one process each."""
    count, slots = map(int, layout.split("x"))
    spec = {
        "accumulation": [int(a) for a in options.accumulation.split(",")],
        "slots": slots,
        "model": options.model,
        "steps": options.steps,
        "lora_rank": options.lora_rank,
    }
    rows = _cells.launch(__file__, spec, hosts=count, slots=slots, limit_s=options.limit_s)
    return [{"layout": layout, **row} for row in rows]


def show(rows: list[dict[str, Any]], numel: int, trained: int) -> None:
    """One table a layout and accumulation; `numel` parameters, of which so many are `trained`."""
    heading = None
    for row in rows:
        processes = math.prod(map(int, row["layout"].split("x")))
        micro_steps = row["accumulation"]
        needs = (4 * numel + 2 * trained) * micro_steps * (processes - 1) / processes
        if heading != (heading := (row["layout"], micro_steps)):
            print(f"\n{row['layout']}, accumulation {micro_steps}; needs {needs / 1e6:,.1f} MB")
            print("| | MB a host and step | fewer than stock needs | loss |\n|---|---|---|---|")
        fewer = f"{needs / row['sent']:.1f}x"
        print(f"| {row['cell']} | {row['sent'] / 1e6:,.2f} | {fewer} | {row['loss']:.6f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", default="2x1,2x2")
    parser.add_argument("--model", default="wider")
    parser.add_argument("--accumulation", default="1,8")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lora-rank", type=int, default=0)
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
    model = _cells.build(options.model, options.lora_rank)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    numel, trained = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
    print(
        f"Llama, {numel:,} parameters, of which {trained:,} are trained, bf16, AdamW at 1e-4, "
        f"random tokens; interface counter of the busiest host; torch {torch.__version__}"
    )
    show(rows, numel, trained)


if __name__ == "__main__":
    main()
