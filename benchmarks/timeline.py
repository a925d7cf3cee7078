"""Holds the parts of a step, as `ds-ckpt measure` records them, against torch's profiler.

    sudo python benchmarks/timeline.py [--rate 200] [--cell block/4bit] [--json F] [--plot F]

Two emulated hosts with a process each (--rate 0: not shaped; without root: loopback). One step is
recorded both ways at once. The profiler knows nothing of this package's spans: it sees operators in
DeepSpeed's thread (`aten::...`) and gloo's collectives (`gloo:...`, from their start to their end,
in threads of gloo's). From its trace alone:

    busy      DeepSpeed's thread is inside an operator that is no collective
    network   a collective is under way, and DeepSpeed's thread is not busy
    neither   the rest of the step: Python

Recorded, the same thread's time is `compute`, `recompute` and `compression`, which have Python in
them, or `network`. The first three together belong beside busy + neither, the last beside network.
The profiler does not look into the thread in which the plugin exchanges buckets beside backward, so
the cells held against it are those whose collectives DeepSpeed's thread starts. A collective that
runs on while Python prepares the next thing is network in the trace and compute
in the record, so the two differ by as much as that happens; both are printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Intervals = list[tuple[float, float]]


def worker(spec: dict[str, Any], folder: Path) -> None:
    """What `deepspeed` launches."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    from ds_ckpt.lab.measure.spec import Configuration, Spec
    from ds_ckpt.lab.measure.worker import Running, of_ids

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    one = Running(Configuration(*spec["cell"].split("/")), Spec())
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = [of_ids(torch.randint(0, 256, (4, 128), generator=generator))]
    for _ in range(4):
        one.plain_step(batch)
    one.step(batch)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        with record_function("whole step"):
            times, _ = one.step(batch)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        recorded = {"step_s": times.step_s, **times.parts_s}
        (folder / "recorded.json").write_text(json.dumps(recorded))
    dist.barrier()
    one.end()
    dist.destroy_process_group()


def of_trace(trace: dict[str, Any]) -> dict[str, float]:
    """Seconds of the step by what the profiler saw."""
    start, end, busy, network = intervals_of(trace)
    return {
        "step": (end - start) / 1e6,
        "busy": length(busy) / 1e6,
        "network": length(network) / 1e6,
        "neither": (end - start - length(busy) - length(network)) / 1e6,
    }


def draw(trace: dict[str, Any], path: Path) -> None:
    """The measured step, as `ds-ckpt plan --plot` draws a simulated one."""
    from ds_ckpt.lab.report import charts

    start, _, *found = intervals_of(trace)
    rows = ["DeepSpeed's thread", "network"]
    kinds = {
        name: [(row, (a - start) / 1e6, (b - a) / 1e6) for a, b in intervals]
        for row, (name, intervals) in enumerate(
            zip(("operators", "collectives"), found, strict=True)
        )
    }
    charts.save([charts.Strips(rows, "s", kinds)], path)


def intervals_of(trace: dict[str, Any]) -> tuple[float, float, Intervals, Intervals]:
    """Begin and end of the step, where DeepSpeed's thread is busy, where the network alone."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    (whole,) = [e for e in events if e["name"] == "whole step"]
    start, end = whole["ts"], whole["ts"] + whole["dur"]
    inside = [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > start]

    def intervals(chosen: Sequence[dict[str, Any]]) -> Intervals:
        return union([(max(e["ts"], start), min(e["ts"] + e["dur"], end)) for e in chosen])

    collectives = intervals([e for e in inside if e["name"].startswith("gloo:")])
    main = [e for e in inside if e["tid"] == whole["tid"]]
    # nodes of autograd are no operators: gathers run in their hooks
    busy = intervals([e for e in main if e["name"].startswith("aten::")])
    return start, end, busy, without(collectives, busy)


def union(intervals: Intervals) -> Intervals:
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """What of disjoint sorted intervals lies outside of `others`."""
    found: Intervals = []
    for start, end in intervals:
        at = start
        for first, last in others:
            if last <= at or first >= end:
                continue
            if first > at:
                found.append((at, first))
            at = max(at, last)
        if at < end:
            found.append((at, end))
    return found


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def run(
    cell: str, rate_mbit: float | None, trace_to: Path | None, plot: Path | None
) -> dict[str, Any]:
    """One launch; both views of one step."""
    from ds_ckpt.lab.hosts.backends import Loopback
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts, missing
    from ds_ckpt.lab.hosts.launcher import deepspeed

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "spec.json").write_text(json.dumps({"cell": cell}))
        script = [str(Path(__file__).resolve()), "--worker", str(folder)]
        if missing():
            deepspeed(Loopback(), script, folder, limit_s=580)
        else:
            with EmulatedHosts(2, rate_mbit=rate_mbit) as hosts:
                deepspeed(hosts, script, folder, limit_s=580)
        text = (folder / "trace.json").read_text()
        if trace_to is not None:
            trace_to.write_text(text)
        if plot is not None:
            draw(json.loads(text), plot)
        recorded = json.loads((folder / "recorded.json").read_text())
    return {
        "cell": cell,
        "rate_mbit": rate_mbit,
        "recorded": recorded,
        "trace": of_trace(json.loads(text)),
    }


def show(row: dict[str, Any]) -> None:
    """Both views beside each other."""
    recorded, trace = row["recorded"], row["trace"]
    network = sum(v for k, v in recorded.items() if k.startswith("network"))
    own = sum(v for k, v in recorded.items() if k.startswith(("comp", "recompute")))
    rate = f"{row['rate_mbit']:g} Mbit/s" if row["rate_mbit"] else "not shaped"
    print(f"\n{row['cell']}, {rate}, one step, seconds")
    print("| | recorded | torch's profiler |\n|---|---|---|")
    print(f"| step | {recorded['step_s']:.3f} | {trace['step']:.3f} |")
    print(f"| network, exposed | {network:.3f} | {trace['network']:.3f} |")
    busy = f"{trace['busy'] + trace['neither']:.3f} = {trace['busy']:.3f} + {trace['neither']:.3f}"
    print(f"| compute, recompute, compression (busy + Python) | {own:.3f} | {busy} |")
    for name, seconds in recorded.items():
        if name != "step_s":
            print(f"| &nbsp; {name} | {seconds:.3f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="keep the profiler's trace of the last cell")
    parser.add_argument("--plot", type=Path, help="draw the last cell's step: .png or .svg")
    parser.add_argument("--cell", default="none/stock,block/stock", help="with commas")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--worker", type=Path, help="the launched script's own option")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads((options.worker / "spec.json").read_text()), options.worker)
        return
    rows = [
        run(cell, options.rate or None, options.trace, options.plot)
        for cell in options.cell.split(",")
    ]
    for row in rows:
        show(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
