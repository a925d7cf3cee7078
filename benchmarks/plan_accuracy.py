"""What `ds-ckpt plan` simulates, held against measured steps: seconds and bytes of a grid.

    sudo python benchmarks/plan_accuracy.py --measure 50,200,1000,unlimited [--accumulation 1,4]
    python benchmarks/plan_accuracy.py --predict

Measuring adds to `--json`, a launch a rate and accumulation; what stands there is not measured
again. Two emulated hosts of one process, bf16, a small Llama with ZeRO-3 as of a model larger than
memory (weights gathered twice, nothing ahead). All cells of a launch live in the same processes and
take turns. A turn is `IN_A_ROW` steps from nothing under way to nothing under way; the fastest of
`TURNS` counts, of the slowest process: other work on the machine only adds to a step.

Predicting calibrates the machine's few rates on `CALIBRATED` alone (least squares of the logarithm)
and says how well they predict the other configurations: the median error, how many are within 20%,
Kendall's tau of their order, the error of bytes at the interface.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import _cells
import torch
import torch.distributed as dist
from step_time import _ask_for, set_rate

from ds_ckpt.hosts.interfaces import INTERFACE

RESULTS = Path(__file__).parent / "results" / "plan_accuracy.json"
MODEL, TOKENS = "demo", 128
WARM_UP, IN_A_ROW, TURNS = 2, 2, 2
CELLS: dict[int, list[tuple[str, str, int]]] = {
    1: [
        *(
            (policy, method, 1)
            for policy in ("none", "block")
            for method in (
                _cells.STOCK,
                "dense",
                "3 bits",
                "resident, whole",
                "resident, lossless",
                "resident, lossless + 3 bits",
            )
        ),
        ("none", _cells.STOCK, 4),
        ("block", "3 bits", 4),
    ],
    4: [
        ("none", _cells.STOCK, 1),
        ("block", "dense, once a step", 1),
        ("block", "3 bits", 1),
        ("block", "resident, lossless + 3 bits", 1),
    ],
}
"""By micro-steps of a step: policy, cell of `_cells`, sequences."""


def worker(spec: dict[str, Any], folder: Path) -> None:
    """What `deepspeed` launches for one rate and accumulation."""
    _cells.join()
    _ask_for(spec["rate"], folder)
    cells = []
    for policy, method, sequences in CELLS[spec["accumulation"]]:
        cell = _cells.start(
            method,
            MODEL,
            zero=_cells.GATHERED_TWICE,
            autotune=False,
            bf16=True,
            accumulation=spec["accumulation"],
            policy=policy,
        )
        for step in range(WARM_UP):
            cell.step(sequences, TOKENS, step)
        cell.land()
        cells.append((policy, method, sequences, cell, []))
    for turn in range(TURNS):
        for _, _, sequences, cell, seen in cells:
            seen.append(timed(cell, sequences, WARM_UP + turn * IN_A_ROW))
    rows = [
        {
            "rate_mbit": spec["rate"],
            "accumulation": spec["accumulation"],
            "policy": policy,
            "method": method,
            "sequences": sequences,
            "step_s": [seconds for seconds, _ in seen],
            "sent_bytes": statistics.median(sent for _, sent in seen),
        }
        for policy, method, sequences, _, seen in cells
    ]
    _cells.leave(rows, folder / "rows.json")


def timed(cell: _cells.Running, sequences: int, first: int) -> tuple[float, float]:
    """Seconds and bytes a step, of the slowest process and the busiest host."""
    (before,) = _cells.sent_bytes(INTERFACE)
    start_s = time.perf_counter()
    for step in range(IN_A_ROW):
        cell.step(sequences, TOKENS, first + step)
    cell.land()
    taken_s = time.perf_counter() - start_s
    (after,) = _cells.sent_bytes(INTERFACE)
    most = torch.tensor([taken_s, float(after - before)], dtype=torch.float64) / IN_A_ROW
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most[0]), float(most[1])


def measure(options: argparse.Namespace) -> None:
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    done = {(row["rate_mbit"], row["accumulation"]) for row in rows}
    for word in options.measure.split(","):
        rate = None if word == "unlimited" else float(word)
        for accumulation in map(int, options.accumulation.split(",")):
            if (rate, accumulation) in done:
                continue
            spec = {"rate": rate, "accumulation": accumulation}
            rows += _cells.launch(__file__, spec, limit_s=options.limit_s, attend=set_rate)
            options.json.write_text(json.dumps(rows, indent=1))
            print(f"measured: {word}, {accumulation} micro-steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", default="", help="rates, Mbit/s")
    parser.add_argument("--accumulation", default="1,4")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--limit-s", type=float, default=1200, help="of each launch")
    parser.add_argument("--worker", type=Path, help="the launched script's own option")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads((options.worker / "spec.json").read_text()), options.worker)
        return
    if options.measure:
        measure(options)


if __name__ == "__main__":
    main()
