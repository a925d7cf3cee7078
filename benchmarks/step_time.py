"""Step time over links of set rates: stock, the best dense exchange, every method, the ceiling.

    python benchmarks/step_time.py [--json benchmarks/results/step_time.json] [--repeats 9]
        [--rates 100,200,1000,unlimited] [--models demo,wider] [--methods "stock;4 bits;..."]
        [--accumulation 8] [--tokens 512] [--slots 2] [--bf16] [--in-a-row 3]

Two emulated hosts with one process each, or `--slots`, and one launch a model: all cells live in
the same processes, each with an engine of its own, and take turns, in an order that rotates, so
that what disturbs the machine disturbs all of them alike. The links are given the next rate while
the processes run, which then build new engines. A step is as long as its slowest process;
medians, and the quartiles beside them. `stock` is DeepSpeed alone, without the plugin.

Columns: seconds; the ratio of stock's median to the cell's, with its standard error; that of the
best dense cell's; and the share of the ceiling, which is what the cell `nothing sent` takes over
what this one takes: 1.00 is all that compressing gradients can give. Weights are still gathered for
forward and backward, as in a model that is larger than memory, but in the cells of `WEIGHTS`, whose
ceiling, `nothing sent, weights neither`, sends no weights either. Their changes travel beside the
next forward: `--in-a-row` steps of a cell are timed at a time, the last with all that is under way.

fp32, unless `--bf16`: this CPU is slow in bf16, so every dense byte is twice what 16 bits would be,
and a link of 200 Mbit/s here is one of 100 there for weights and for dense gradients. The autotuner
is as the configuration has it, on; `--autotune off` forces the methods. Steps are counted from its
choice on; a cell that it has left to DeepSpeed's own reduction or gathers is marked so.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import _cells
import torch
import torch.distributed as dist
from _cells import CEILING, DENSE, METHODS, NOTHING, STOCK

from ds_ckpt.engine.tuner import robust_median

WARM_UP_STEPS = 3
"""Steps that are not counted, at least: until ZeRO-3's trace stands."""
SEQUENCES = 1
METHODS_HERE = [name for name, section in METHODS.items() if "exchange" not in (section or {})]
"""With one process a host there is but one level, and without accumulation one micro-step."""


def worker(spec: dict[str, Any], folder: Path) -> None:
    """Measure one model under `deepspeed`."""
    _cells.join()
    methods: list[str] = spec["methods"]
    rows: list[dict[str, Any]] = []
    for rate in spec["rates"]:
        _ask_for(rate, folder)
        # new engines: what an autotuner has learned holds for the rate before
        cells = [
            _cells.start(
                name,
                spec["model"],
                zero=_cells.GATHERED_TWICE,
                autotune=spec["autotune"],
                accumulation=spec["accumulation"],
                bf16=spec["bf16"],
            )
            for name in methods
        ]
        tokens = spec["tokens"]
        by_stock = {cell.name: warmed_up(cell, tokens) for cell in cells}
        taken: dict[str, list[float]] = {cell.name: [] for cell in cells}
        for repeat in range(spec["repeats"]):
            for place in range(len(cells)):
                cell = cells[(place + repeat) % len(cells)]
                taken[cell.name].append(timed_step(cell, repeat, spec["in_a_row"], tokens))
        for cell in cells:
            cell.end()
        rows += [
            {
                "model": spec["model"],
                "rate_mbit": rate,
                "accumulation": spec["accumulation"],
                "tokens": tokens,
                "method": name,
                "by_stock": by_stock[name],
                "step_s": steps_s,
            }
            for name, steps_s in taken.items()
        ]
        if dist.get_rank() == 0:
            print(f"done: {rate}", flush=True)
    _cells.leave(rows, folder / "rows.json")


def warmed_up(cell: _cells.Running, tokens: int) -> bool:
    """Run a cell's first steps; whether it has been left to DeepSpeed's own way since."""
    built = cell.session.exchange if cell.session is not None else None
    resident = cell.session._resident if cell.session is not None else None
    parts = [resident, built.step if built is not None else None]
    tuners = [part.tuner for part in parts if part is not None and part.tuner is not None]
    step = 0
    while step < WARM_UP_STEPS or any(tuner.choice is None for tuner in tuners):
        cell.step(SEQUENCES, tokens, step)
        step += 1
    cell.step(SEQUENCES, tokens, step)  # the first by the way that is kept
    cell.land()
    return any(tuner.choice == tuner.candidates[-1] for tuner in tuners)


def timed_step(cell: _cells.Running, seed: int, in_a_row: int, tokens: int) -> float:
    """Seconds of one optimizer step, on the slowest process, nothing left under way."""
    dist.barrier()
    start_s = time.perf_counter()
    for step in range(in_a_row):
        cell.step(SEQUENCES, tokens, in_a_row * seed + step)
    cell.land()
    longest_s = torch.tensor((time.perf_counter() - start_s) / in_a_row, dtype=torch.float64)
    dist.all_reduce(longest_s, op=dist.ReduceOp.MAX)
    return float(longest_s)


def _ask_for(rate: float | None, folder: Path) -> None:
    """Have the maker of the hosts set a rate, and wait until it has."""
    dist.barrier()
    if dist.get_rank() == 0:
        wanted = folder / "wanted.new"
        wanted.write_text(json.dumps(rate))
        wanted.replace(folder / "wanted")
        while (folder / "wanted").exists():
            time.sleep(0.05)
    dist.barrier()


def set_rate(hosts: Any, folder: Path) -> None:
    """Set the rate that `_ask_for` has requested; called several times a second."""
    wanted = folder / "wanted"
    if wanted.exists():
        hosts.set_rate(json.loads(wanted.read_text()))
        wanted.unlink()


def run_model(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rates and cells of one model."""
    spec = {
        "model": model,
        "rates": [None if r == "unlimited" else float(r) for r in options.rates.split(",")],
        "methods": options.methods.split(";") if options.methods else METHODS_HERE,
        "repeats": options.repeats,
        "autotune": options.autotune == "on",
        "accumulation": options.accumulation,
        "tokens": options.tokens,
        "bf16": options.bf16,
        "in_a_row": options.in_a_row,
    }
    return _cells.launch(
        __file__, spec, slots=options.slots, limit_s=options.limit_s, attend=set_rate
    )


def compare(rows: list[dict[str, Any]]) -> None:
    """Add medians, quartiles and ratios to the rows of one model and rate."""
    for row in rows:
        steps_s = row["step_s"]
        row["median_s"] = statistics.median(steps_s)
        row["quartiles_s"] = _quartiles(steps_s)
    median_s = {row["method"]: row["median_s"] for row in rows}
    error = {
        row["method"]: math.sqrt(robust_median(row["step_s"])[1]) / row["median_s"] for row in rows
    }
    ceiling_s = median_s.get(NOTHING) or median_s[CEILING]
    best_dense_s = min(median_s[name] for name in DENSE if name in median_s)
    for row in rows:
        row["faster_than_stock"] = median_s[STOCK] / row["median_s"]
        row["error_of_that"] = row["faster_than_stock"] * math.hypot(
            error[STOCK], error[row["method"]]
        )
        row["faster_than_best_dense"] = best_dense_s / row["median_s"]
        row["share_of_ceiling"] = ceiling_s / row["median_s"]


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def show(rows: list[dict[str, Any]]) -> None:
    """The table of one model and rate."""
    rate = rows[0]["rate_mbit"]
    link = "links not shaped" if rate is None else f"{rate:g} Mbit/s"
    of = f" of {rows[0]['accumulation']} micro-steps" if rows[0]["accumulation"] > 1 else ""
    of += f" of {rows[0]['tokens']} tokens" if rows[0]["tokens"] != 128 else ""
    print(f"\nmodel {rows[0]['model']!r}, {link}, {len(rows[0]['step_s'])} steps{of} each")
    print("| gradients | step, s | quartiles | x stock | x best dense | of the ceiling |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles_s"]
        left = ", left to DeepSpeed" if row["by_stock"] else ""
        error = "" if row["method"] == STOCK else f" ± {row['error_of_that']:.2f}"
        print(
            f"| {row['method']}{left} | {row['median_s']:.3f} | {low:.3f} - {high:.3f} "
            f"| {row['faster_than_stock']:.2f}{error} | {row['faster_than_best_dense']:.2f} "
            f"| {row['share_of_ceiling']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rates", default="100,200,1000,unlimited", help="Mbit/s")
    parser.add_argument("--models", default="demo,wider")
    parser.add_argument("--methods", default="", help="names of METHODS, with ; between them")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps a step")
    parser.add_argument("--tokens", type=int, default=128, help="a sequence, one a micro-step")
    parser.add_argument("--slots", type=int, default=1, help="processes a host")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--in-a-row", type=int, default=1, help="steps of a cell at each turn")
    parser.add_argument("--autotune", choices=["on", "off"], default="on")
    parser.add_argument("--limit-s", type=float, default=7200, help="of each model")
    parser.add_argument("--worker", type=Path, help="the launched script's own option")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    methods = set(options.methods.split(";"))
    if options.methods and not (STOCK in methods and {CEILING, NOTHING} & methods):
        parser.error(
            f'--methods needs "{STOCK}" and "{CEILING}" or "{NOTHING}", which the others are held '
            "against"
        )
    if options.worker:
        worker(json.loads((options.worker / "spec.json").read_text()), options.worker)
        return
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        measured = run_model(model, options)
        for start in range(0, len(measured), count := len({r["method"] for r in measured})):
            compare(measured[start : start + count])
            show(measured[start : start + count])
        rows += measured
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps({"autotune": options.autotune, "rows": rows}, indent=1)
            )


if __name__ == "__main__":
    main()
