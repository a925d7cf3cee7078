"""The figures of README and docs, drawn from result files and the import contract:
docs/figures/*.svg.

python benchmarks/figures.py
python benchmarks/figures.py --measure    # memory over a step anew: a minute
"""

import argparse
import ast
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from ds_ckpt.lab.measure.figures import Estimate
from ds_ckpt.lab.measure.findings import ComparisonRow
from ds_ckpt.lab.measure.measure_report import share_chart
from ds_ckpt.lab.report.charts import Band, Line, Lines, Panel, Rows, svg

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
MEMORY = RESULTS / "memory_of_a_step.json"
CELLS = {
    "stock": "ZeRO-3",
    "3 bits": "ZeRO-3, gradients in 3 bits",
    "ZeRO-1": "ZeRO-1",
    "resident, whole": "resident weights, uncompressed",
    "resident, lossless": "resident weights, lossless",
    "resident, lossless + dense once a step": "the same, gradients once a step",
    "resident, lossless + 3 bits": "the same, gradients in 3 bits",
}
"""Names in the figure, by cell of `weight_bytes.py`."""
FAMILIES = {
    "few bits": ("8 bits", "4 bits", "3 bits", "2 bits", "2 bits, no feedback"),
    "low rank": ("rank 32", "rank 16", "rank 4"),
    "Top-K": ("Top-K 10%", "Top-K 4%", "Top-K 1.2%"),
    "plain": ("plain int4", "plain Top-K 4.7%", "plain Top-K 0.4%"),
    "torch's PowerSGD hook": ("torch's hook, rank 16", "torch's hook, rank 4"),
}
"""Methods of `frontier.py`, by family."""


def bytes_of_a_step() -> Panel:
    """Bytes that a node sends in a step: two nodes of one rank, 12.9 million weights in bf16."""
    rows = json.loads((RESULTS / "weight_bytes.json").read_text())
    sent = {
        row["cell"]: row["sent"] / 1e6
        for row in rows
        if (row["layout"], row["accumulation"]) == ("2x1", 1)
    }
    widths = [sent[cell] for cell in CELLS]
    return Rows(
        list(CELLS.values()),
        "MB that a node sends per step",
        [Band("", widths)],
        notes=[f"{width:.3g} MB" for width in widths],
    )


def share_paid() -> Panel:
    """The share of recomputation that compression pays for, by link rate: a run of `measure`."""
    rows = json.loads((RESULTS / "measure" / "shares.json").read_text())["comparisons"]
    for row in rows:
        for name, ends in row["values"].items():
            known = {end: math.nan if value is None else value for end, value in ends.items()}
            row["values"][name] = Estimate(**known)
    return share_chart([ComparisonRow(**row) for row in rows])


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


POINTS = 300
"""Number of points of a memory line over a step."""


def measure_memory() -> dict[str, Any]:
    """A Llama of 7B, 4,096 tokens, bf16, fake tensors: by policy [PFLOP done, GiB of activations].

    Gradients and weights do not count, as in the profile. Each point is the most of a stretch.
    """
    import torch

    from ds_ckpt.activation.planning.costs import flops_of
    from ds_ckpt.activation.planning.trace import StepTrace
    from ds_ckpt.lab.estimate.profile import built_fake, units_of
    from ds_ckpt.lab.subject import Sizes, find_subject, run_forward
    from ds_ckpt.telemetry.units import GIB

    sections = {"none": None, "selective": {"policy": "selective"}, "block": {"policy": "block"}}
    made = built_fake(find_subject("llama-7b", Sizes(4096, torch.bfloat16)), 1)
    found: dict[str, Any] = {"command": "python benchmarks/figures.py --measure", "lines": {}}
    for name, section in sections.items():
        course: list[tuple[float, float]] = []

        class Course(StepTrace):
            """With what is alive at each operator."""

            done = 0.0

            def _ran(self, operator: Any) -> None:
                super()._ran(operator)
                self.done += flops_of(operator)
                self._note()

            def _count(self, *made: Any) -> None:
                super()._count(*made)
                self._note()

            def _note(self) -> None:
                course.append((self.done, self.live_bytes))  # noqa: B023

        with made.entered():
            units = units_of(name, section, made.model)
            Course(made.model).run(lambda: run_forward(made.model, made.batch), units)
        stretches: dict[int, tuple[float, float]] = {}
        for done, nbytes in course:
            place = int(POINTS * done / course[-1][0])
            most = stretches.get(place, (0.0, 0.0))[1]
            stretches[place] = (done, max(most, nbytes))
        points = [[round(d / 1e15, 4), round(b / GIB, 3)] for d, b in stretches.values()]
        found["lines"][name] = points
    return found


def memory_of_a_step() -> Panel:
    """Activations that are alive over the work that is done: up in the forward, then down."""
    lines = json.loads(MEMORY.read_text())["lines"]
    drawn = []
    for name, points in lines.items():
        most = max(nbytes for _, nbytes in points)
        words = f"{name}: at most {most:.3g} GiB"
        drawn.append(Line(words, [(1e3 * x, y) for x, y in points], shown="line"))
    return Lines(drawn, "work done in the step, TFLOP", "activations alive, GiB")


@dataclass(frozen=True)
class Boxes:
    """Boxes by their middle, in a field of so many units, and arrows between them.

    Attributes:
        boxes: name -> (x, y, words). Names that begin with * are filled.
        arrows: (from, to, words beside it); "-" before the words draws it dashed.
        words: (x, y, text) beside.
    """

    size: tuple[float, float]
    boxes: dict[str, tuple[float, float, str]]
    arrows: tuple[tuple[str, str, str], ...] = ()
    words: tuple[tuple[float, float, str], ...] = ()

    @property
    def inches(self) -> float:
        return 0.62 * self.size[1]

    def draw(self, axes: Any) -> None:
        axes.set_axis_off()
        axes.set_xlim(0, self.size[0])
        axes.set_ylim(self.size[1], 0)
        drawn = {}
        for name, (x, y, words) in self.boxes.items():
            fill = "#dbe7f3" if name.startswith("*") else "#ffffff"
            box = {"boxstyle": "round,pad=0.45", "facecolor": fill, "edgecolor": "#333333"}
            style = {"ha": "center", "va": "center", "fontsize": 8.5}
            drawn[name] = axes.text(x, y, words, bbox=box, **style)
        for start, end, words in self.arrows:
            dashed, text = words.startswith("-"), words.removeprefix("-")
            shape = {"arrowstyle": "-|>", "color": "#1b4f8a", "linestyle": ":" if dashed else "-"}
            shape |= {"patchA": drawn[start].get_bbox_patch(), "shrinkA": 0, "shrinkB": 1}
            shape["patchB"] = drawn[end].get_bbox_patch()
            here, there = self.boxes[start][:2], self.boxes[end][:2]
            axes.annotate("", there, here, arrowprops=shape)
            upright = here[0] == there[0]
            x, y = (here[0] + there[0]) / 2, (here[1] + there[1]) / 2
            beside = {"fontsize": 7.5, "va": "center", "ha": "left" if upright else "center"}
            axes.text(x + 0.08 * upright, y - 0.2 * (not upright), text, color="#1b4f8a", **beside)
        for x, y, text in self.words:
            axes.text(x, y, text, fontsize=7.5, va="center", color="#444444")


ROOMS = {
    "cli": "commands",
    "lab": "measures, estimates, judges",
    "run": "ways in for scripts, trainers",
    "engine": "the plugin on one engine",
    "config": "the JSON file and its rules",
    "zero3": "hooks; blocks; a bucket's way",
    "weights": "resident copies",
    "compression": "methods",
    "telemetry": "counters, memory tracker",
    "sealed": "files with a checksum",
    "errors": "errors, files, patches",
}
"""Layers by their first room, and what is in them."""


def _imports_deepspeed(room: str) -> bool:
    folder = ROOT / "ds_ckpt" / room
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    for node in (n for file in files for n in ast.walk(ast.parse(file.read_text()))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.partition(".")[0] == "deepspeed" for name in names):
            return True
    return False


def architecture() -> Boxes:
    """The layers of the import contract in pyproject.toml; what imports DeepSpeed is filled."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = project["tool"]["importlinter"]["contracts"][0]["layers"]
    layers = [[r.strip().removeprefix("ds_ckpt.") for r in one.split("|")] for one in contract]
    apart, boxes, words = 0.66, dict[str, tuple[float, float, str]](), []
    for place, rooms in enumerate(layers):
        y = 0.5 + apart * place
        for column, room in enumerate(rooms):
            name = ("*" if _imports_deepspeed(room) else "") + room
            boxes[name] = (2.2 + 1.75 * column, y, room)
        words.append((8.5, y, ROOMS[rooms[0]]))
    bottom = 0.5 + apart * len(layers)
    boxes |= {"above": (0.6, 0.5, "may\nimport"), "below": (0.6, bottom - apart, "what is\nbelow")}
    words.append((1.6, bottom, "filled: imports DeepSpeed"))
    return Boxes((12, bottom + 0.4), boxes, (("above", "below", ""),), tuple(words))


def gradients_way() -> Boxes:
    """From the hook to the owner's shard; each box names the file that does it."""
    boxes = {
        "autograd": (2.2, 0.6, "autograd fills DeepSpeed's bucket"),
        "*hook": (2.2, 1.8, "gradient hook\nzero3/gradient_hook.py"),
        "add": (2.2, 3.0, "add the residual\nexchange/exchange.py"),
        "code": (2.2, 4.2, "select or round, pack\ncompression/"),
        "send": (2.2, 5.4, "all-to-all\nexchange/transport.py"),
        "residual": (6.2, 3.9, "pending residual:\nwhat was not sent"),
        "*verdict": (6.2, 1.5, "verdict of the step:\ncommitted, or rolled back"),
        "sum": (9.9, 5.4, "unpack, sum over processes\nexchange/exchange.py"),
        "*shard": (9.9, 3.6, "DeepSpeed's partition:\nmy shard of the mean"),
        "*step": (9.9, 1.5, "the optimizer's step"),
    }
    arrows = (
        ("autograd", "*hook", "a full bucket"),
        ("*hook", "add", "this process's gradients"),
        ("add", "code", "residual + gradient"),
        ("code", "send", "a packet for each owner"),
        ("code", "residual", ""),
        ("residual", "add", "-next step"),
        ("*verdict", "residual", "-"),
        ("send", "sum", "the wire"),
        ("sum", "*shard", "once, in fp32"),
        ("*shard", "*step", ""),
    )
    for _, _, text in boxes.values():
        file = text.splitlines()[-1]
        assert "/" not in file or (ROOT / "ds_ckpt" / file).exists(), file
    words = ((0.2, 6.3, "every process"), (8.6, 6.3, "the owner of a part: every process is one"))
    return Boxes((12, 6.7), boxes, arrows, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="memory over a step, anew")
    if parser.parse_args().measure:
        MEMORY.write_text(json.dumps(measure_memory()) + "\n")
    FIGURES.mkdir(exist_ok=True)
    for draw in (
        bytes_of_a_step,
        share_paid,
        loss_against_bytes,
        memory_of_a_step,
        architecture,
        gradients_way,
    ):
        (FIGURES / f"{draw.__name__}.svg").write_text(svg([draw()]), encoding="utf-8")


if __name__ == "__main__":
    main()
