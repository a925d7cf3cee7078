"""The figures of README and docs, drawn from result files: docs/figures/*.svg.

python benchmarks/figures.py
"""

from __future__ import annotations

import json
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


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for draw in (bytes_of_a_step, loss_against_bytes):
        save([draw()], FIGURES / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
