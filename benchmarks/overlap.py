"""What exchanging beside backward saves: step time and exposed wait, overlap on and off in turns.

    sudo python benchmarks/overlap.py [--rates 200,0] [--reuse 1000000000,0] [--steps 10] [--json F]

Two emulated hosts with a process each, the 4.9-million Llama in fp32, eight buckets a backward.
All cells have an engine in the same two processes and step in turns, so that a busy machine slows
all of them alike. `rate` is the links' in Mbit/s, 0 not shaped; `reuse` is
`stage3_max_reuse_distance`: with 0 backward gathers its weights again, as a model larger than
memory does, and so needs the link, too. `stock` is plain DeepSpeed, whose gloo reduction sends
twice what it need; `nothing sent` is the ceiling. `reduce` is the time that reductions took in any
thread, `exposed` that part of it in which backward stood still, both a step. `saved` is the median
over the steps of a step inside less the step beside that follows it, which a busy machine disturbs
least. The autotuner is off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import _cells
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.exchange.schedule import NoCommunication
from ds_ckpt.lab import workload

BUCKETS = 8
SEQUENCES, TOKENS = 4, 64
WARM_UP = 1
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "Top-K 1% int8": {"method": "topk", "topk": {"density": 0.01, "values": "int8"}},
    "4 bits": {"method": "quantize", "quantize": {"bits": 4}},
}


def sections() -> dict[str, dict[str, Any] | None]:
    """The `compression` section of every cell, those to be compared beside each other."""
    found: dict[str, dict[str, Any] | None] = {_cells.STOCK: None}
    for method, section in METHODS.items():
        for overlap in (False, True):
            exchange: dict[str, Any] = {"overlap": overlap}
            lossy = {} if method == "dense" else {"warmup_steps": 0}
            if lossy:
                exchange["autotune"] = False
            name = f"{method}, {'beside' if overlap else 'inside'} backward"
            found[name] = {**section, **lossy, "exchange": exchange}
    return {**found, _cells.CEILING: None}


def start(name: str, compression: dict[str, Any] | None, reuse: int) -> _cells.Running:
    """A cell's engine; `reuse` is `stage3_max_reuse_distance`."""
    model = workload.llama(seed=0)
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": reuse,
        "reduce_bucket_size": -(-workload.count_parameters(model) // BUCKETS),
    }
    if reuse == 0:
        zero["stage3_prefetch_bucket_size"] = 0
    plugin: dict[str, Any] = {"telemetry": {"enabled": True}}
    if compression is not None:
        plugin["compression"] = compression
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "ds_ckpt": plugin,
    }
    engine, *_ = ds_ckpt.initialize(model=model, config=config)
    session = ds_ckpt.session_of(engine)
    assert session is not None
    if name == _cells.CEILING:
        session.measure_with(NoCommunication(dist.get_world_size(), dist.get_rank()))
    return _cells.Running(name, engine, session)


def worker(spec: dict[str, Any], out: Path) -> None:
    """What `deepspeed` launches."""
    _cells.join()
    cells = [start(name, section, spec["reuse"]) for name, section in sections().items()]
    taken: dict[str, list[tuple[float, float, float]]] = {cell.name: [] for cell in cells}
    for step in range(WARM_UP + spec["steps"]):
        for cell in cells:
            before = cell.session.counters.snapshot()
            dist.barrier()
            start_s = time.perf_counter()
            cell.step(SEQUENCES, TOKENS, step)
            dist.barrier()
            step_s = time.perf_counter() - start_s
            delta = cell.session.counters.snapshot() - before
            if step >= WARM_UP:
                taken[cell.name].append((step_s, delta.reduce_s, delta.exposed_reduce_s))
    rows = [
        {"method": name, **dict(zip(("step_s", "reduce_s", "exposed_s"), columns, strict=True))}
        for name, times in taken.items()
        for columns in [[statistics.median(column) for column in zip(*times, strict=True)]]
    ]
    for row in rows:
        inside = taken.get(row["method"].replace("beside", "inside"), [])
        pairs = zip(inside, taken[row["method"]], strict=False)
        saved = [before[0] - after[0] for before, after in pairs]
        row["saved_s"] = statistics.median(saved) if saved else 0.0
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    for cell in cells:
        cell.end()
    _cells.leave([_mean(of) for of in zip(*everyone, strict=True)], out)


def _mean(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Of the processes' medians."""
    numbers = {k: statistics.mean(row[k] for row in rows) for k in rows[0] if k != "method"}
    return {"method": rows[0]["method"], **numbers}


def run(rate_mbit: float, reuse: int, steps: int, limit_s: float) -> list[dict[str, Any]]:
    """One launch."""
    spec = {"reuse": reuse, "steps": steps}
    rows = _cells.launch(__file__, spec, rate_mbit=rate_mbit or None, limit_s=limit_s)
    common = {"rate_mbit": rate_mbit, "reuse": reuse, "load": os.getloadavg()[1]}
    return [{**common, **row} for row in rows]


def show(rows: list[dict[str, Any]]) -> None:
    """One table a launch."""
    heading = None
    for row in rows:
        if heading != (row["rate_mbit"], row["reuse"]):
            heading = (row["rate_mbit"], row["reuse"])
            rate = f"{row['rate_mbit']:g} Mbit/s" if row["rate_mbit"] else "not shaped"
            print(
                f"\n{rate}, reuse distance {row['reuse']:.0e}, medians in ms; "
                f"load of the machine {row['load']:.1f} on {os.cpu_count()} cores"
            )
            print("| gradients | step | reduce | exposed | saved |\n|---|---|---|---|---|")
        times = (1e3 * row[k] for k in ("step_s", "reduce_s", "exposed_s", "saved_s"))
        print(f"| {row['method']} | " + " | ".join(f"{t:.0f}" for t in times) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rates", default="200,0")
    parser.add_argument("--reuse", default="1000000000,0")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=900)
    parser.add_argument("--worker", type=Path, help="the launched script's own option")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        spec = json.loads((options.worker / "spec.json").read_text())
        worker(spec, options.worker / "rows.json")
        return
    rows = []
    for reuse in map(int, options.reuse.split(",")):
        for rate in map(float, options.rates.split(",")):
            found = run(rate, reuse, options.steps, options.limit_s)
            show(found)
            rows += found
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
