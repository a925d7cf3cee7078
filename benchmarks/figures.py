"""The figures of README and docs, drawn from result files: docs/figures/*.svg.

python benchmarks/figures.py
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from ds_ckpt.report.charts import Band, Line, Lines, Panel, Rows, save

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
CELLS = {
    "stock": "ZeRO-3",
    "3 bits": "ZeRO-3, gradients in 3 bits",
    "ZeRO-1": "ZeRO-1",
    "resident, whole": "resident weights, whole",
    "resident, lossless": "resident weights, lossless",
    "resident, lossless + dense once a step": "the same, gradients once a step",
    "resident, lossless + 3 bits": "the same, gradients in 3 bits",
}
"""Of `weight_bytes.py`, by what they are called in the figure."""
FAMILIES = {
    "few bits": ("8 bits", "4 bits", "3 bits", "2 bits", "2 bits, no feedback"),
    "low rank": ("rank 32", "rank 16", "rank 4"),
    "Top-K": ("Top-K 10%", "Top-K 4%", "Top-K 1.2%"),
    "plain": ("plain int4", "plain Top-K 4.7%", "plain Top-K 0.4%"),
    "torch's PowerSGD hook": ("torch's hook, rank 16", "torch's hook, rank 4"),
}
"""Of `frontier.py`, by method."""


def bytes_of_a_step() -> Panel:
    """What a host sends in a step: two hosts of one process, 12.9 million weights in bf16."""
    rows = json.loads((RESULTS / "weight_bytes.json").read_text())
    sent = {
        row["cell"]: row["sent"] / 1e6
        for row in rows
        if (row["layout"], row["accumulation"]) == ("2x1", 1)
    }
    widths = [sent[cell] for cell in CELLS]
    return Rows(
        list(CELLS.values()),
        "MB that a host sends in a step",
        [Band("", widths)],
        notes=[f"{width:.3g} MB" for width in widths],
    )


def loss_against_bytes() -> Panel:
    """Means over seeds of 1500 steps of the 4.9-million Llama, against dense training."""
    lines = (RESULTS / "frontier.jsonl").read_text().splitlines()
    runs: dict[str, dict[int, Any]] = {}
    for run in map(json.loads, lines):
        runs.setdefault(run["cell"], {})[run["seed"]] = run
    dense = runs["dense"]

    def point(cell: str) -> tuple[float, float]:
        losses = [
            run["heldout"][-1][1] / dense[seed]["heldout"][-1][1] - 1
            for seed, run in runs[cell].items()
            if seed in dense
        ]
        fewer = dense[0]["sixteen_bit_bytes"] / runs[cell][0]["sixteen_bit_bytes"]
        return fewer, 100 * statistics.fmean(losses)

    return Lines(
        [Line(name, [point(c) for c in cells], shown="marks") for name, cells in FAMILIES.items()],
        "times fewer gradient bytes a step than 16 bits",
        "held-out loss above dense, %",
        levels=[(0, "dense")],
    )


def stable_rates() -> Panel:
    """Rates that a delayed gradient bears with b1 0.9, over what it bears without delay: in theory,
    and in training, where it is the lr at which 80 steps end 3% above the best undelayed loss."""
    every = json.loads((RESULTS / "stability.json").read_text())
    points = [point for point in every if point["b1"] == 0.9]
    alone = points[0]
    most = 1.03 * min(alone["loss"].values())
    leads = {"no lead": 0, "zero at the pole": 1, 'lead "matched"': 2}
    lines = []
    for name, place in leads.items():
        of_lag: dict[float, list[Any]] = {}
        for point in points:
            of_lag.setdefault(point["c"] / (1 - point["c"]), []).append(point)
        mine = {lag: some[min(place, len(some) - 1)] for lag, some in of_lag.items()}
        theory = [(lag, p["theory"] / alone["theory"]) for lag, p in mine.items()]
        rates = {lag: _rate_at(p["loss"], most) for lag, p in mine.items()}
        reached = _rate_at(alone["loss"], most)
        assert reached is not None
        measured = [(lag, rate / reached) for lag, rate in rates.items() if rate is not None]
        lines.append(Line(f"{name}, theory", theory, shown="line"))
        lines.append(Line(f"{name}, in training", measured, shown="marks"))
    return Lines(
        lines,
        "lag of the gradient, steps",
        "largest learning rate, over that without lag",
        logarithmic="y",
        inches=4.2,
    )


def _rate_at(losses: dict[str, float], most: float) -> float | None:
    """The largest lr whose loss is `most`, between two that were tried; None where none is."""
    tried = [(math.log(float(rate)), loss) for rate, loss in losses.items()]
    for (low, under), (high, over) in reversed(list(itertools.pairwise(tried))):
        if under <= most < over:
            return math.exp(low + (most - under) / (over - under) * (high - low))
    return None


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for draw in (bytes_of_a_step, loss_against_bytes, stable_rates):
        save([draw()], FIGURES / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
