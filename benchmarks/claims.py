"""Compare published figures on activation checkpointing and compression with measurements.

    python benchmarks/claims.py                       # docs/claims.md from what is on record
    python benchmarks/claims.py --measure [NAME ...]  # measure what is missing, or these again
    python benchmarks/claims.py --row 004-25          # one claim: its figures and its verdict

`claims.toml` has the claims. Its figures are expressions over measurements, so no figure is typed
in, and the band that a claim names is an expression over them, so a figure that changes changes the
verdict. Two kinds of things are measured: steps on fake tensors, by the functions behind `ds-ckpt
profile`, kept in `results/claims.json`; and what the other files of `results/` have.

`--measure` leaves the record and the page as they are: it writes to runs/claims.json and .md, and
prints the claims that the measurement decides. `--keep` writes both anew.

A verdict is "holds", "holds under a condition", "does not hold", "needs a GPU" or "open".
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

from ds_ckpt.files import replacing
from ds_ckpt.telemetry.units import GIB

HERE = Path(__file__).resolve().parent
DATA = HERE / "claims.toml"
RECORD = HERE / "results" / "claims.json"
PAGE = HERE.parent / "docs" / "claims.md"
VERDICTS = ("holds", "holds under a condition", "does not hold", "needs a GPU", "open")
DECIDED_BY = ("fake", "arithmetic", "source", "result", "test", "gpu")


# what was measured


@dataclass(frozen=True)
class Step:
    """One policy's step on fake tensors. Bytes of one process; FLOPs and launches of each phase."""

    saved_bytes: int
    peak_bytes: int
    peak_in: str
    flops: dict[str, int]
    launches: dict[str, int]
    moved_bytes: dict[str, int]
    layer_bytes: dict[str, int]
    """Bytes of the second block, by part: the first may hold tensors that all share."""
    outside_bytes: int
    score_bytes: int
    unstored_bytes: int
    """Attention weights that the attention core did not store."""

    @property
    def layer(self) -> int:
        return sum(self.layer_bytes.values())

    @property
    def step_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def step_launches(self) -> int:
        return sum(self.launches.values())

    @property
    def step_moved(self) -> int:
        return sum(self.moved_bytes.values())

    @property
    def back_over_forward(self) -> float:
        return (self.flops["backward"] + self.flops["recompute"]) / self.flops["forward"]


@dataclass(frozen=True)
class Case:
    """One measurement by name: a model, batch and attention, several policies."""

    name: str
    model: str
    policies: tuple[str, ...] = ()
    tokens: int = 2048
    batch: int = 1
    attention: str = "sdpa"
    dtype: str = "bf16"
    worlds: tuple[int, ...] = (8,)
    layers: int | None = None

    @property
    def command(self) -> str:
        return f"python benchmarks/claims.py --measure {self.name}"

    def measure(self) -> dict[str, Any]:
        """Measure steps by policy, and what a rank keeps by world size."""
        import torch

        from ds_ckpt.lab.estimate.memory_model import Parameters, estimate
        from ds_ckpt.lab.estimate.profile import (
            NONE,
            blocks_of,
            built_fake,
            footprints,
        )
        from ds_ckpt.lab.subject import Sizes, find_subject

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        sizes = Sizes(self.tokens, dtype, self.attention, self.layers)
        subject = find_subject(_model(self.model), sizes)
        policies = {NONE: None, **{name: _section(name) for name in self.policies}}
        found = footprints(subject, self.batch, policies, None)
        made = built_fake(subject, self.batch)
        blocks, _ = blocks_of(made.model, None)
        stored, avoided = _attention_weights(made, blocks)
        parameters = Parameters.of(made.model, blocks)
        return {
            "steps": {f.policy: asdict(_step(f, stored, avoided)) for f in found},
            "states": {str(n): asdict(estimate(parameters, None, n)[0]) for n in self.worlds},
            "parameters": sum(parameters.counts),
            "width": parameters.hidden,
        }


def _model(name: str) -> str:
    return str(HERE.parent / name) if name.endswith(".json") else name


def _section(name: str) -> dict[str, Any]:
    """Return the section of a policy by its name here: block, segments 4, selective qkvo."""
    policy, _, setting = name.partition(" ")
    key = {"segments": "segment_size", "every_n": "every_n", "selective": "save_ops"}.get(policy)
    if not setting or key is None:
        return {"policy": policy}
    return {"policy": policy, key: setting if policy == "selective" else int(setting)}


def _attention_weights(made: Any, blocks: Any) -> tuple[int, int]:
    """Bytes of attention weights that are saved, and of those that a core does not store."""
    from ds_ckpt.activation.planning.trace import StepTrace
    from ds_ckpt.lab.subject import run_forward
    from ds_ckpt.telemetry.memory import OUTSIDE

    class Attention(StepTrace):
        avoided = 0

        def __init__(self) -> None:
            super().__init__(made.model, blocks)
            self.scores: dict[Any, int] = {None: 0}

        def _ran(self, operator: Any) -> None:
            super()._ran(operator)
            name = operator.func._schema.name.removeprefix("aten::")
            number, out = self.storages.number, operator.out
            if self.phase != "forward" or self.where.place[0] == OUTSIDE:
                return
            if name.startswith(("_scaled_dot_product_", "_flash_attention")):
                query, key = operator.args[0], operator.args[1]
                pairs = math.prod(query.shape[:3]) * key.shape[2]
                self.avoided += pairs * query.element_size()
            elif name == "_softmax" and out.dim() >= 3:
                self.scores[number(out)] = out.numel()
            elif not name.startswith(("mm", "bmm", "addmm", "matmul")):  # casts, dropout
                size = max((self.scores.get(number(t), 0) for t in operator.given), default=0)
                made = [t for t in operator.made if size and t.numel() == size]
                self.scores.update({number(t): size for t in made})

    with made.entered():
        trace = Attention()
        trace.run(lambda: run_forward(made.model, made.batch), None)
    held = trace.saved.held.items()
    return sum(n for s, n in held if s in trace.scores), trace.avoided


def _step(found: Any, stored: int, avoided: int) -> Step:
    from ds_ckpt.telemetry.memory import OUTSIDE

    blocks = [parts for name, parts in found.blocks.items() if name != OUTSIDE]
    parts = ("attention", "mlp", "norm", "other", "checkpointed")
    phases = {name: getattr(found, name) for name in ("forward", "recompute", "backward")}
    return Step(
        saved_bytes=found.held_bytes,
        peak_bytes=found.peak_bytes,
        peak_in=f"{found.peak_phase} of {found.peak_block}",
        flops={name: work.flops for name, work in phases.items()},
        launches={name: work.launches for name, work in phases.items()},
        moved_bytes={name: work.moved_bytes for name, work in phases.items()},
        layer_bytes={part: blocks[1][part] for part in parts},
        outside_bytes=sum(found.blocks[OUTSIDE].values()),
        score_bytes=stored if found.policy == "none" else 0,
        unstored_bytes=avoided,
    )


class Measured:
    """A case that is on record: `case["block"].peak_bytes`, `case.states(8)`, `case.total(...)`."""

    def __init__(self, case: Case, record: dict[str, Any]) -> None:
        self.case, self.record = case, record
        self.parameters: int = record["parameters"]
        self.compiled: Any = _Names(record.get("compiled") or {})

    def __getitem__(self, policy: str) -> Step:
        return Step(**self.record["steps"][policy])

    def states(self, world: int) -> Any:
        """Return `ds_ckpt.lab.estimate.memory_model.States` of one of `world` ranks."""
        from ds_ckpt.lab.estimate.memory_model import States

        return States(**self.record["states"][str(world)])

    def total(self, policy: str, world: int = 8) -> int:
        """Bytes at the peak of the passes, with what is kept beside it: grows with the batch."""
        return int(self.states(world).resident_bytes + self[policy].peak_bytes)

    def whole(self, policy: str, world: int = 8) -> int:
        """At the peak of the step, its update included."""
        return int(max(self.total(policy, world), self.states(world).step_bytes))

    @property
    def sbd(self) -> int:
        """Sequence x batch x width: entries of what a layer is given."""
        return self.case.tokens * self.case.batch * int(self.record["width"])


class _Names:
    """A mapping whose keys are attributes; a missing one is said by name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


class Results:
    """Results of other benchmarks, by the names that the claims use."""

    def json(self, name: str) -> Any:
        return json.loads((HERE / "results" / name).read_text(encoding="utf-8"))

    def gathers(self, model: str, mode: str) -> float:
        """Return the all-gathers of each weight in a first step with reuse distance 0."""
        rows = self.json("gathers.json")["rows"]
        keys = (model, 0, mode)
        (row,) = (r for r in rows if (r["model"], r["reuse"], r["mode"]) == keys)
        return float(row["gathers"][0])

    def policy(self, name: str, column: str) -> float:
        """`policies.txt`: "held", in GiB; "of none"; "FLOPs" against no policy."""
        text = (HERE / "results" / "policies.txt").read_text(encoding="utf-8")
        cells = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        values = [float(cell) for cell in cells.strip("| ").split("|")[1:]]
        return values[("held", "of none", "FLOPs").index(column)]

    def planned(self, budget: str, column: str) -> float:
        """`planning.txt`: "measured", in GiB, or "FLOPs" of the plan for a budget."""
        text = (HERE / "results" / "planning.txt").read_text(encoding="utf-8")
        line = next(x for x in text.splitlines() if x.startswith(f"| {budget} |"))
        cells = line.strip("| ").split("|")
        return float(cells[("measured", "FLOPs").index(column) * 2 + 2])

    def fewer_bytes(self, method: str, model: str = "hidden 1024", layout: str = "2x1") -> float:
        """Than the best dense exchange at a host's interface, accumulation 1."""
        wanted = {"method": method, "model": model, "layout": layout, "accumulation": 1}
        rows = self.json("wire_bytes.json")["rows"]
        row = next(r for r in rows if wanted.items() <= r.items())
        return float(row["fewer_than_best_dense"])

    def loss_gap(self, method: str) -> float:
        """Held-out loss above dense training's, a share of it: mean of paired seeds."""
        text = (HERE / "results" / "frontier.jsonl").read_text(encoding="utf-8")
        losses: dict[str, dict[int, float]] = {}
        for run in map(json.loads, text.splitlines()):
            if run["steps"] == 1500:
                losses.setdefault(run["cell"], {})[run["seed"]] = run["heldout"][-1][1]
        dense = losses["dense"]
        return statistics.fmean(loss / dense[s] - 1 for s, loss in losses[method].items())

    def verdict(self, preset: str, task: str) -> Any:
        """Return a verdict of `ds-ckpt validate-accuracy` that comes with the package."""
        path = HERE.parent / "ds_ckpt" / "verdicts.json"
        found = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
        return _Names(next(v for v in found if v["preset"] == preset and task in v["task"]))

    def equal_memory_speed(self, rate: str) -> float:
        """`measure/2x1-1.md`: sequences a second with blocks checkpointed and the batch that takes
        the same memory, over those without checkpointing."""
        text = (HERE / "results" / "measure" / "2x1-1.md").read_text(encoding="utf-8")
        _, _, part = text.partition("## Parts of a step")
        _, _, part = part.partition(f"### {rate}\n")

        def speed(start: str) -> float:
            cells = next(x for x in part.splitlines() if x.startswith(start)).split("|")
            return int(cells[2].split()[0]) / float(cells[3].split()[0])

        return speed("| block/stock | 14 (equal memory)") / speed("| none/stock")

    def spread(self, rate_mbit: float) -> float:
        """`plan_accuracy.json`: the longest over the shortest measured step of one link, all of one
        sequence on two hosts of one process."""
        wanted = {"shape": "demo", "slots": 1, "rate_mbit": rate_mbit, "accumulation": 1}
        rows = [
            min(row["step_s"])
            for row in self.json("plan_accuracy.json")
            if (wanted | {"sequences": 1}).items() <= row.items()
        ]
        return max(rows) / min(rows)

    def accelerator(self, name: str) -> Any:
        """`ds_ckpt/lab/hosts/hardware.json`: figures of data sheets."""
        path = HERE.parent / "ds_ckpt" / "lab" / "hosts" / "hardware.json"
        return _Names(json.loads(path.read_text(encoding="utf-8"))["accelerators"][name])


# the claims


@dataclass(frozen=True)
class Claim:
    """One row.

    Attributes:
        id: the file's number and the claim's.
        source: the file that makes the claim.
        theme: the table that it stands in.
        claim: in other words.
        means: what it would mean for somebody who trains, where it were true.
        by: how it is decided: one of DECIDED_BY.
        command: what a reader types.
        figures: expressions by name, each of measurements and the figures before it.
        found: what was found, with `{figure:format}`.
        holds: an expression: whether the band that the claim names has the figures in it.
        under: whether it holds under the condition that `found` names, where `holds` is false.
        verdict: only where no figure decides: of a test, or what cannot be decided here.
    """

    id: str
    source: str
    theme: str
    claim: str
    means: str
    by: str
    command: str
    found: str
    figures: dict[str, str] = field(default_factory=dict)
    holds: str = ""
    under: str = ""
    verdict: str = ""

    def judged(self, known: dict[str, Any]) -> Judged:
        """Raises whatever an expression raises, with the claim's id and the expression."""
        values: dict[str, Any] = {}

        def of(expression: str) -> Any:
            try:
                return eval(expression, {**known, **values})
            except Exception as error:
                raise ValueError(f"claim {self.id}: {expression}: {error!r}") from error

        for name, expression in self.figures.items():
            values[name] = of(expression)
        verdict = self.verdict
        if self.holds:
            verdict = "holds" if of(self.holds) else "does not hold"
        if verdict == "does not hold" and self.under and of(self.under):
            verdict = "holds under a condition"
        return Judged(self, self.found.format(**values), verdict)


@dataclass(frozen=True)
class Judged:
    """A claim, what was found, and the verdict."""

    claim: Claim
    found: str
    verdict: str


def load() -> tuple[dict[str, str], list[Case], list[Claim]]:
    """Themes by key, what is measured, the claims. TypeError or KeyError: no such form."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    cases = [
        Case(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in case.items()})
        for name, case in data["measurement"].items()
    ]
    return data["theme"], cases, [Claim(**row) for row in data.get("claim", [])]


def read_record(path: Path = RECORD) -> dict[str, Any]:
    """Read measurements; those on record if there is no such file."""
    path = path if path.exists() else RECORD
    if not path.exists():
        return {"measurements": {}}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def judge(cases: Sequence[Case], claims: Sequence[Claim], path: Path = RECORD) -> list[Judged]:
    """Judge all claims by the measurements in a file. KeyError: something was never measured."""
    record = read_record(path)
    known: dict[str, Any] = {
        case.name: Measured(case, record["measurements"][case.name]) for case in cases
    }
    known |= {"results": Results(), "GIB": GIB, "GB": 1e9, "MB": 1e6}
    known |= {"sqrt": math.sqrt, "log2": math.log2}
    return [claim.judged(known) for claim in claims]


def measure(cases: Sequence[Case], names: Sequence[str], out: Path) -> None:
    """Measure the cases that are missing or named; save each to `out` when it is done."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    by_name = {case.name: case for case in cases}
    if unknown := set(names) - set(by_name):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(by_name)}")
    for name, case in by_name.items():
        if name in names or (not names and name not in read_record(out)["measurements"]):
            start_s = time.monotonic()
            found = case.measure()
            record = read_record(out)
            about = {"seconds": round(time.monotonic() - start_s, 1), "versions": versions}
            before = record["measurements"].get(name, {})  # torch.compile's part is not repeated
            record["measurements"][name] = {**before, "command": case.command, **about, **found}
            record["measurements"] = dict(sorted(record["measurements"].items()))
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as path:
                path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {about['seconds']} s", flush=True)


def page(themes: dict[str, str], cases: Sequence[Case], judged: Sequence[Judged]) -> str:
    """docs/claims.md."""
    counts = Counter(row.verdict for row in judged)
    by = Counter(row.claim.by for row in judged)
    ways = {
        "fake": "a step on fake tensors: shapes without memory, bytes and FLOPs counted",
        "arithmetic": "arithmetic over sizes",
        "source": "the installed torch or transformers, inspected by code",
        "result": "a file of benchmarks/results",
        "test": "a test of this repository",
        "gpu": "nothing here: it needs a GPU, or more than one node with GPUs",
    }
    lines = [
        f"# Fact check: {len(judged)} claims from papers and blogs",
        "",
        "Claims of other authors about activation checkpointing and gradient compression, none of",
        "them about ds_ckpt. Each row has the claim in short, what a test here found, and the",
        "command that repeats the test. No GPU was used.",
        "",
        "| verdict on their claims | claims |",
        "|---|---|",
        *(f"| {verdict} | {counts[verdict]} |" for verdict in VERDICTS if counts[verdict]),
        "",
        "| decided by | claims |",
        "|---|---|",
        *(f"| {ways[way]} | {by[way]} |" for way in DECIDED_BY if by[way]),
        "",
        "Written by `python benchmarks/claims.py`, which computes the figures and verdicts.",
        "",
        "*Saved*: bytes that autograd keeps between forward and backward. *Peak*: the most bytes",
        "at once that a step makes. *FLOPs*: products and attention cores, relative to no policy.",
        "*All*: ZeRO-3's states of one of 8 ranks, and the peak. Fake steps are in bf16 with",
        "the language-model head and the loss "
        "([plan.md](plan.md#what-a-model-costs-ds-ckpt-profile) defines the numbers).",
    ]
    for theme, title in themes.items():
        rows = [row for row in judged if row.claim.theme == theme]
        lines += ["", f"## {title}", ""]
        lines += ["| claim | it would mean | found | verdict | command |", "|---|---|---|---|---|"]
        for row in rows:
            claim = row.claim
            name = f"{claim.claim} ({claim.id})"
            command = f"`{claim.command}`" if claim.command else "-"
            cells = (name, claim.means, row.found, f"**{row.verdict}**", command)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Steps on fake tensors", ""]
    lines += [
        "| name | model | tokens | batch | attention | policies |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        depth = f", {case.layers} layers" if case.layers else ""
        policies = ", ".join(("none", *case.policies))
        sizes = f"{case.tokens} | {case.batch} | {case.attention} | {policies}"
        lines.append(f"| {case.name} | {case.model}{depth}, {case.dtype} | {sizes} |")
    lines += [
        "",
        "`python benchmarks/claims.py --measure NAME` measures one again, into `runs/`.",
        "",
    ]
    sources = sorted({row.claim.source for row in judged})
    about = "Texts of other authors, not in this repository, by the number before the dash."
    lines += ["## Sources of the claims", "", about, ""]
    lines += [f"- `{source}`" for source in sources]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--measure", nargs="*", metavar="NAME")
    parser.add_argument("--keep", action="store_true", help="put measurements on record")
    parser.add_argument("--row", metavar="ID", help="print one claim and its verdict")
    options = parser.parse_args()
    themes, cases, claims = load()
    record, written = RECORD, PAGE
    if options.measure is not None:
        if not options.keep:
            record, written = Path("runs/claims.json"), Path("runs/claims.md")
        measure(cases, options.measure, record)
    judged = judge(cases, claims, record)
    commands = {case.command for case in cases if case.name in (options.measure or ())}
    for row in judged:
        if row.claim.command in commands:
            print(f"{row.claim.id}: {row.claim.claim}\n  {row.found}: {row.verdict}")
    if options.row is not None:
        for row in judged:
            if row.claim.id == options.row:
                print(f"{row.claim.claim}\nfound:   {row.found}\nverdict: {row.verdict}")
                return
        raise SystemExit(f"no claim {options.row}; they are {claims[0].id} to {claims[-1].id}")
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(page(themes, cases, judged), encoding="utf-8")
    print(f"wrote {written}")
    for verdict, count in Counter(row.verdict for row in judged).most_common():
        print(f"{count:4}  {verdict}")


if __name__ == "__main__":
    main()
