"""Bytes of gradients that leave a host in an optimizer step, counted at its network interface.

    python benchmarks/wire_bytes.py [--json benchmarks/results/wire_bytes.json]
        [--layouts 2x1,2x2] [--models demo,"hidden 1024"] [--accumulation 1,8] [--headers]

Emulated hosts, links not shaped, bf16 weights and gradients, so that the dense rows are the 16-bit
reduction that all others are held against. For every way to exchange gradients: `tx_bytes` of each
host's eth0 while the micro-steps of an optimizer step run, less what they take when no gradient is
sent (the cell `nothing sent`). The weights stay gathered meanwhile
(`stage3_param_persistence_threshold`) and travel in the update, which is counted apart (`update`).
Scales, headers of packets, dense norms, TCP with acknowledgements are included. Three dense rows:
gloo's reduce-scatter, in stock DeepSpeed, sends twice what it needs; among several processes of a
host `dense` sums first. `x fewer` is against the best dense row, `x stock` against stock.

Large segments are counted with one header; `--headers` cuts them into packets before they are
counted, which adds 4.6% to every row alike. `sum` is the share that the counters saw of
the bytes on eth0 and lo together (processes of one host talk through lo).

The autotuner is off: on links as fast as these it would leave them to DeepSpeed. Random tokens,
one short sequence: what is sent does not depend on them.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import _cells
import torch.distributed as dist
from _cells import CEILING, DENSE, METHODS, STOCK

from ds_ckpt.lab.hosts.backends import INTERFACE
from ds_ckpt.telemetry import Purpose

WARM_UP_STEPS = 1
ZERO = {"stage3_param_persistence_threshold": 10**12}


def worker(spec: dict[str, Any], out: Path) -> None:
    """Run every cell in turn under `deepspeed`; rank 0 writes the results."""
    _cells.join()
    rows = []
    for shape in spec["models"]:
        for accumulation in spec["accumulation"]:
            for name in spec["methods"]:
                cell = _cells.start(
                    name,
                    shape,
                    zero=ZERO,
                    autotune=False,
                    count=True,
                    bf16=True,
                    accumulation=accumulation,
                )
                row = measure(cell, spec["steps"])
                cell.end()
                rows.append({"model": shape, "accumulation": accumulation, "method": name, **row})
                if dist.get_rank() == 0:
                    print(json.dumps(rows[-1]), flush=True)
    _cells.leave(rows, out)


def measure(cell: _cells.Running, steps: int) -> dict[str, Any]:
    """Bytes a step, of the busiest host's eth0; of all interfaces; counted, by purpose."""
    for step in range(WARM_UP_STEPS):
        cell.step(1, 16, step)
    before = cell.session.counters.snapshot()
    backward = update = everything = 0
    for step in range(steps):
        start = _cells.sent_bytes(INTERFACE, "lo")
        cell.backward(1, 16, WARM_UP_STEPS + step)
        middle = _cells.sent_bytes(INTERFACE, "lo")
        cell.engine.step()
        end = _cells.sent_bytes(INTERFACE, "lo")
        backward += middle[0] - start[0]
        update += end[0] - middle[0]
        everything += sum(end) - sum(start)
    delta = cell.session.counters.snapshot() - before
    leads = int(os.environ["LOCAL_RANK"]) == 0  # one process of a host tells of it
    mine = {
        "eth0": [leads * backward / steps, leads * update / steps],
        "all": leads * everything / steps,
        "purposes": {p.value: delta.bytes_sent.get(p, 0) / steps for p in Purpose},
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "backward_bytes": max(one["eth0"][0] for one in everyone),
        "update_bytes": max(one["eth0"][1] for one in everyone),
        "all_interfaces_bytes": sum(one["all"] for one in everyone),
        "counted_bytes": {
            p.value: sum(one["purposes"][p.value] for one in everyone) for p in Purpose
        },
    }


def run_layout(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one layout, such as 2x1: two hosts with one process each."""
    count, slots = map(int, layout.split("x"))
    spec = {
        "models": options.models.split(","),
        "accumulation": [int(a) for a in options.accumulation.split(",")],
        "methods": options.methods.split(";") if options.methods else list(METHODS),
        "steps": options.steps,
    }
    rows = _cells.launch(
        __file__,
        spec,
        hosts=count,
        slots=slots,
        limit_s=options.limit_s,
        prepare=_cut_segments if options.headers else lambda hosts: None,
    )
    return [{"layout": layout, **row} for row in rows]


def _cut_segments(hosts: Any) -> None:
    for host in hosts.hosts:
        segments = ["ip", "link", "set", "dev", INTERFACE, "gso_max_segs", "1"]
        subprocess.run(host.command(segments), check=True)


def gradient_bytes(rows: list[dict[str, Any]]) -> None:
    """Add to each row what it sent for gradients, and the ratios."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (row["layout"], row["model"], row["accumulation"])
        groups.setdefault(key, {})[row["method"]] = row
    for group in groups.values():
        for row in group.values():
            row["gradient_bytes"] = row["backward_bytes"] - group[CEILING]["backward_bytes"]
            counted = sum(row["counted_bytes"].values())
            row["counted_share"] = counted / row["all_interfaces_bytes"]
        best = min(group[name]["gradient_bytes"] for name in DENSE if name in group)
        for name, row in group.items():
            if name != CEILING:
                row["fewer_than_best_dense"] = best / row["gradient_bytes"]
                row["fewer_than_stock"] = group[STOCK]["gradient_bytes"] / row["gradient_bytes"]


def show(rows: list[dict[str, Any]]) -> None:
    """One table a layout, model and accumulation."""
    heading = None
    for row in rows:
        key = (row["layout"], row["model"], row["accumulation"])
        if key != heading:
            heading = key
            print(f"\n{key[0]} processes, model {key[1]!r}, accumulation {key[2]}: a step and host")
            print("| gradients | bytes | x fewer | x stock | update | sum |")
            print("|---|---|---|---|---|---|")
        if row["method"] == CEILING:
            rest = f"({row['backward_bytes']:,.0f}) | | |"
        else:
            fewer, stock = row["fewer_than_best_dense"], row["fewer_than_stock"]
            rest = f"{row['gradient_bytes']:,.0f} | {fewer:.2f} | {stock:.2f} |"
        update, share = row["update_bytes"], row["counted_share"]
        print(f"| {row['method']} | {rest} {update:,.0f} | {share:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", default="2x1,2x2")
    parser.add_argument("--models", default="demo,hidden 1024")
    parser.add_argument("--accumulation", default="1,8")
    parser.add_argument("--methods", default="", help="names of METHODS, with ; between them")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--headers", action="store_true")
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--worker", type=Path, help="the launched script's own option")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        spec = json.loads((options.worker / "spec.json").read_text())
        worker(spec, options.worker / "rows.json")
        return
    if options.methods and not {STOCK, CEILING} <= set(options.methods.split(";")):
        parser.error(
            f'--methods needs "{STOCK}" and "{CEILING}", which the others are held against'
        )
    rows = [row for layout in options.layouts.split(",") for row in run_layout(layout, options)]
    gradient_bytes(rows)
    show(rows)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"headers": options.headers, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
