"""Compare the seconds and bytes that `ds-ckpt plan` simulates with measured steps of a grid.

    python benchmarks/plan_accuracy.py --measure 50,200,1000,unlimited [--accumulation 1,4]
        [--slots 2] [--shape wider]
    python benchmarks/plan_accuracy.py --predict --choose

Measuring adds to `--json`, a launch a rate and accumulation; what stands there is not measured
again. Two emulated hosts of `--slots` processes, bf16, a small Llama with ZeRO-3 as of a model
larger than memory (weights gathered twice, nothing ahead). All cells of a launch live in the same
processes and take turns. A turn is `IN_A_ROW` steps from nothing under way to nothing under way;
the fastest of a few counts, of the slowest process: other work on the machine only adds to a step.

Predicting calibrates the machine's few rates on `CALIBRATED` alone (least squares of the logarithm,
held to `RATES` weakly) and says how well they predict the other configurations: the median error,
how many are within 20%, Kendall's tau of their order, the error of bytes at the interface. What is
given, not calibrated: the shaper's rate and bucket. Bits of a lossless change follow from the bytes
of the calibrated configuration that has them.

Choosing takes the configurations with one model, layout, link and number of sequences in a step as
a grid, all of it measured. The choice is the one with the shortest predicted step. Its regret
is how much longer its measured step is than the shortest measured.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _cells
import torch
import torch.distributed as dist
from step_time import _ask_for, set_rate

from ds_ckpt.lab.hosts.backends import INTERFACE
from ds_ckpt.lab.workload import BUCKETS

RESULTS = Path(__file__).parent / "results" / "plan_accuracy.json"
HOSTS, TOKENS = 2, 128
WARM_UP, IN_A_ROW = 2, 2
TURNS = {50.0: 2, 200.0: 2}
"""By rate; others have `MOST_TURNS`."""
MOST_TURNS = 4
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
    """Measure one rate and accumulation under `deepspeed`."""
    _cells.join()
    cells = []
    for policy, method, sequences in CELLS[spec["accumulation"]]:
        cell = _cells.start(
            method,
            spec["shape"],
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
    _ask_for(spec["rate_mbit"], folder)
    for turn in range(TURNS.get(spec["rate_mbit"], MOST_TURNS)):
        for _, _, sequences, cell, seen in cells:
            seen.append(timed(cell, sequences, WARM_UP + turn * IN_A_ROW))
    rows = [
        {
            **spec,
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
    for word in options.measure.split(","):
        for accumulation in map(int, options.accumulation.split(",")):
            spec = {
                "shape": options.shape,
                "slots": options.slots,
                "rate_mbit": None if word == "unlimited" else float(word),
                "accumulation": accumulation,
            }
            if any(spec.items() <= row.items() for row in rows):
                continue
            rows += _cells.launch(
                __file__,
                spec,
                hosts=HOSTS,
                slots=options.slots,
                limit_s=options.limit_s,
                attend=set_rate,
            )
            options.json.write_text(json.dumps(rows, indent=1))
            print("measured:", ", ".join(f"{k} {v}" for k, v in spec.items()), flush=True)


CALIBRATED = tuple(
    ("demo", 1, *row)
    for row in (
        (None, 1, "none", _cells.STOCK, 4),
        (None, 4, "none", _cells.STOCK, 1),
        (None, 4, "block", "resident, lossless + 3 bits", 1),
        (200.0, 1, "none", _cells.STOCK, 1),
        (None, 1, "none", "resident, whole", 1),
    )
)
"""Shape, processes of a host, rate, accumulation, policy, cell, sequences. Computing shows in the
first, calls in the second, coding in the third, the link in the fourth, Python in the last."""
RATES = {
    "flop_per_s": 5e10,
    "bytes_per_s": 3e9,
    "call_s": 1e-3,
    "module_s": 1e-3,
    "update_s": 5e-9,
    "quantize_s": 2e-8,
    "lossless_s": 2.5e-8,
    "whole_s": 5e-9,
    "link_bytes_per_s": 1e9,
    "link_share": 0.956,
}
"""Start of the calibration: FLOP/s and bytes/s of one rank; seconds of a collective's call, of
AdamW, of packing and unpacking, of encoding and decoding a changed weight losslessly, of handing
over any; the rate of an unshaped link; the share that gloo reaches of a shaped one, whose frames
carry 95.6% of payload (`hosts/probe.py`)."""
HEADERS = 1.008
"""Bytes at an interface over those that are sent (docs/measuring.md)."""
SEGMENT_BYTES = 65536


CORES = 2
"""Cores of the machine: ranks that share one compute longer."""


def wider(batch: int, tokens: int) -> tuple[Any, Any]:
    """`_cells.SHAPES["wider"]` as a `module:callable`."""
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    return _cells.build("wider"), {"input_ids": ids, "labels": ids}


MODELS = {"demo": "demo", "wider": "plan_accuracy:wider"}


class Predictor:
    """Steps of the cells, simulated."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self.bits = 0.0

    def model(self, shape: str) -> Any:
        from ds_ckpt.lab.estimate.model import Model
        from ds_ckpt.lab.subject import Sizes

        if shape not in self.models:
            self.models[shape] = Model(MODELS[shape], Sizes(TOKENS, torch.bfloat16))
        return self.models[shape]

    def lossless_bits(self, rows: list[dict[str, Any]]) -> float:
        """Return the bits of a lossless change: the calibrated row's bytes less its gradients."""
        (row,) = (r for r in rows if key(r) in CALIBRATED and "lossless" in r["method"])
        self.bits = 0.0
        beside = self.step(row, RATES).link_bytes
        elements = self.model(row["shape"]).elements
        return 8 * 2 * (row["sent_bytes"] / HEADERS - beside) / elements

    def step(self, row: dict[str, Any], rates: dict[str, float]) -> Any:
        from ds_ckpt.activation.planning.costs import Rates
        from ds_ckpt.lab.estimate.methods import PlanMethod, gradients
        from ds_ckpt.lab.estimate.model import ACTIVATIONS
        from ds_ckpt.lab.estimate.simulate import Link, Machine, Strategy, Weights, in_a_row

        model, method = self.model(row["shape"]), row["method"]
        costs = Rates(rates["flop_per_s"], rates["bytes_per_s"], math.inf)
        planner = model.planner(row["sequences"], costs)
        plan = planner.uniform_plan(row["policy"], ACTIVATIONS)
        inside = link = Link(rates["link_bytes_per_s"])
        if row["rate_mbit"] is not None:
            bytes_per_s = row["rate_mbit"] * 1e6 / 8
            link = Link(
                min(rates["link_share"] * bytes_per_s, link.bytes_per_s),
                burst_bytes=max(SEGMENT_BYTES, bytes_per_s * 1e-3),
                duplex=False,
            )
        local = row["slots"]
        processes = HOSTS * local
        crowd = max(1.0, processes / CORES)
        machine = Machine(
            hosts=HOSTS,
            local=local,
            network=link,
            inside=inside,
            call_s=crowd * rates["call_s"],
            module_s=rates["module_s"],
            streams=False,
            slowest=crowd,
        )
        _, sections = _cells.WEIGHTS.get(method, ({}, {"compression": _cells.METHODS.get(method)}))
        section = sections.get("compression") or {}
        how = gradients(
            PlanMethod(method, section),
            model,
            machine,
            itemsize=2,
            accumulation=row["accumulation"],
            bytes_per_s=math.inf,
        )
        if section.get("method") == "quantize":
            each = rates["quantize_s"] / local  # a host's processes divide a bucket
            how = replace(how, encode_s=each, decode_s=each / 2, accumulate_s=each / 4)
        resident = None
        if "weights" in sections:
            lossless = sections["weights"]["deltas"] == "lossless"
            bits = self.bits if lossless else 16
            coding_s = rates["whole_s"] + lossless * rates["lossless_s"]
            each = coding_s / processes
            resident = Weights(bits / 8 * (HOSTS - 1) / HOSTS, each, each * (HOSTS - 1))
        strategy = Strategy(
            row["accumulation"],
            2,
            how,
            bucket=-(-model.elements // BUCKETS),
            prefetch=0,
            weights=resident,
            update_s=rates["update_s"] * model.elements / processes,
        )
        blocks = model.simulated(planner.forward_s, plan, persistent=0, reuse=0)
        return in_a_row(machine, blocks, strategy, IN_A_ROW)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("shape", "slots", "rate_mbit", "accumulation", "policy", "method", "sequences")
    return tuple(row[name] for name in names)


def calibrated(predictor: Predictor, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The rates that explain `CALIBRATED` best."""
    from scipy.optimize import least_squares

    known = [row for row in rows if key(row) in CALIBRATED]
    names, start = list(RATES), [math.log(value) for value in RATES.values()]

    def off(logs: Any) -> list[float]:
        rates = {name: math.exp(value) for name, value in zip(names, logs, strict=True)}
        found = [math.log(predictor.step(row, rates).seconds / min(row["step_s"])) for row in known]
        return found + [0.02 * (a - b) for a, b in zip(logs, start, strict=True)]

    best = least_squares(off, start, diff_step=1e-3)
    return {name: math.exp(value) for name, value in zip(names, best.x, strict=True)}


def predicted(file: Path) -> list[tuple[dict[str, Any], Any]]:
    """All rows with their simulated steps."""
    rows = json.loads(file.read_text())
    predictor = Predictor()
    predictor.bits = predictor.lossless_bits(rows)
    rates = calibrated(predictor, rows)
    print("calibrated on five:", ", ".join(f"{name} {value:.3g}" for name, value in rates.items()))
    return [(row, predictor.step(row, rates)) for row in rows]


def where(row: dict[str, Any]) -> tuple[str, str, str]:
    """Model, layout and link in words."""
    rate = f"{row['rate_mbit']:g}" if row["rate_mbit"] else "unlimited"
    return row["shape"], f"{HOSTS}x{row['slots']}", rate


def table(head: str, rows: Iterable[Iterable[str]]) -> None:
    print(head, "|---" * (head.count("|") - 1) + "|", sep="\n")
    for row in rows:
        print("|", " | ".join(row), "|")
    print()


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions against measurements.

    Attributes:
        errors: of a step's seconds, a share of the measured; without what is calibrated on.
        tau: Kendall's, of the order of those configurations.
        bytes_off: of a step's bytes at the interface, a share of the measured.
    """

    errors: list[float]
    tau: float
    bytes_off: list[float]


def predict(pairs: list[tuple[dict[str, Any], Any]]) -> Accuracy:
    """Print predicted beside measured, and how far apart they are."""
    from scipy.stats import kendalltau

    lines, bytes_off = [], []
    groups: dict[tuple[str, ...], list[float]] = {}
    seconds: list[tuple[float, float]] = []
    for row, step in pairs:
        measured, sent = min(row["step_s"]), HEADERS * step.link_bytes
        error, used = step.seconds / measured - 1, key(row) in CALIBRATED
        if not used:
            groups.setdefault((*where(row), str(row["accumulation"])), []).append(abs(error))
            seconds.append((measured, step.seconds))
        bytes_off.append(abs(sent / row["sent_bytes"] - 1))
        lines.append(
            [
                *where(row),
                *(str(row[name]) for name in ("accumulation", "policy", "method", "sequences")),
                *(f"{measured:.3f}", f"{step.seconds:.3f}"),
                f"{error:+.0%}{' (calibrated)' if used else ''}",
                *(f"{row['sent_bytes'] / 1e6:.2f}", f"{sent / 1e6:.2f}"),
            ]
        )
    table(
        "| model | hosts | rate | micro-steps | policy | cell | sequences | measured, s "
        "| predicted | error | MB measured | predicted |",
        lines,
    )
    errors = [error for group in groups.values() for error in group]
    groups["all", "", "", ""] = errors
    table(
        "| model | hosts | rate | micro-steps | predicted | median error | worst | within 20% |",
        (
            [*of, str(len(e)), f"{statistics.median(e):.1%}", f"{max(e):.0%}", str(within(e))]
            for of, e in groups.items()
        ),
    )
    tau = kendalltau(*zip(*seconds, strict=True)).statistic
    print(
        f"{len(errors)} predicted: median error {statistics.median(errors):.1%}, "
        f"{within(errors) / len(errors):.0%} within 20%, Kendall's tau {tau:.3f}; bytes: median "
        f"{statistics.median(bytes_off):.1%}, at most {max(bytes_off):.1%}, "
        f"{within(bytes_off, 0.03)} of {len(bytes_off)} within 3%"
    )
    return Accuracy(errors, tau, bytes_off)


def within(errors: Iterable[float], limit: float = 0.2) -> int:
    return sum(error <= limit for error in errors)


FEWEST = 6
"""Configurations that a grid has."""


def choose(pairs: list[tuple[dict[str, Any], Any]]) -> dict[tuple[str, ...], float]:
    """Print the plan's choice of each grid beside the best measured; the regrets, by model, layout,
    link and sequences of a step."""
    grids: dict[tuple[str, ...], list[tuple[dict[str, Any], Any]]] = {}
    for row, step in pairs:
        sequences = row["sequences"] * row["accumulation"]
        grids.setdefault((*where(row), str(sequences)), []).append((row, step))
    lines, regrets = [], dict[tuple[str, ...], float]()
    for of, grid in grids.items():
        if len(grid) < FEWEST:
            continue
        chosen, step = min(grid, key=lambda one: one[1].seconds)
        best, _ = min(grid, key=lambda one: min(one[0]["step_s"]))
        regrets[of] = min(chosen["step_s"]) / min(best["step_s"]) - 1
        names = [
            f"{row['policy']}, {row['method']}, {row['sequences']} x {row['accumulation']}"
            for row in (chosen, best)
        ]
        took = [f"{min(chosen['step_s']):.3f}", f"{min(best['step_s']):.3f}"]
        lines.append([*of, str(len(grid)), *names, f"{step.seconds:.3f}", *took])
        lines[-1].append(f"{regrets[of]:.1%}")
    table(
        "| model | hosts | rate | sequences | grid | chosen | best measured | predicted, s "
        "| chosen measured | best measured | regret |",
        lines,
    )
    all_of = regrets.values()
    print(
        f"{len(regrets)} grids: {within(all_of, 0.05)} with a regret of at most 5%, "
        f"worst {max(all_of):.1%}, median {statistics.median(all_of):.1%}"
    )
    return regrets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", default="", help="rates, Mbit/s")
    parser.add_argument("--accumulation", default="1,4")
    parser.add_argument("--slots", type=int, default=1, help="processes of a host")
    parser.add_argument("--shape", default="demo", help="of _cells.SHAPES")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--choose", action="store_true")
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
    if options.predict or options.choose:
        pairs = predicted(options.json)
        if options.predict:
            predict(pairs)
        if options.choose:
            choose(pairs)


if __name__ == "__main__":
    main()
