"""Report of a run: a page that loads nothing, Markdown, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Figure, Row
from ds_ckpt.lab.measure.findings import ComparisonRow, Findings, byte_notes, find, headline
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import SPEC, Configuration, Spec, link, title
from ds_ckpt.lab.measure.trials import read_runs
from ds_ckpt.lab.report.charts import Band, Line, Lines, Rows
from ds_ckpt.lab.report.document import (
    Code,
    Document,
    Heading,
    Paragraph,
    Plot,
    ReportBlock,
    ReportSection,
    Table,
)
from ds_ckpt.lab.workload import DENSE
from ds_ckpt.telemetry.units import number

REPORT_FORMAT = "ds_ckpt measure 5"
MAX_SHARE = 2.0
"""Largest share in the chart; larger ones are drawn at this value."""
_SCREEN = ("step_s", "link_bytes", "stored_weight_bytes", "peak_bytes")
"""Figures of the terminal's table."""
_NOTE = (
    "Steps and parts are means over the middle half. 95% intervals resample repetitions "
    "(jackknife). MB are 10^6 bytes. link: bytes to other nodes (on one "
    "node, to other ranks), counted at the collectives. "
    "dense: every gradient sent once; no_comm: no gradient is sent. docs/measuring.md defines the "
    "figures, and lists what they do not show."
)
_WHY_DENSE = (
    "Why none/dense is here: on gloo DeepSpeed's default (stock) sends gradients twice, dense "
    "sends them once. Recomputation and compression are compared with dense."
)
_CAPTION = (
    "Share of recomputation's time that compression saves, with 95% intervals, on paired steps; "
    "uncompressed is dense. Losses are not measured here: run ds-ckpt validate-accuracy."
)


@dataclass
class Report:
    """Content of a report in all its forms."""

    runs: list[dict[str, Any]]
    findings: Findings

    @classmethod
    def of(cls, path: Path) -> Report:
        """Evaluate a run's folder; StateError if it holds no run, or nothing measured yet."""
        if not (path / SPEC).exists():
            raise _nothing(path, "no spec.json")
        findings = find(Spec.load(path), Store(path).read())
        if not findings.rows:
            raise _nothing(path, "no repetition in which every configuration had its trial")
        return cls(read_runs(path), findings)

    def write(self, path: Path) -> list[Path]:
        """Write all files into the folder `path`; return the report's, the page first."""
        data = path / "report.json"
        data.write_bytes(to_json(self.json(), indent=1, inf_nan_mode="null") + b"\n")
        return [*self.document().write(path), data]  # last: the page may lack its packages

    def print(self, console: Console) -> None:
        """Print the headline, the configurations at the first rate, and the JSON to use."""
        first = [c for c in self.findings.comparisons if c.rate_mbit == self.findings.rates[0]]
        share = {f"{c.policy}/{c.method}": share_text(c) for c in first}
        columns = [one for one in MEASURED if one.name in _SCREEN]
        table = self._table(self.findings.rates[0], columns)
        heads = [head.replace(" activations", "").replace(" ", "\n") for head in table.heads]
        rows = [[*row, share.get(row[0], "-").replace(" shown", "")] for row in table.rows]
        several = self._shares() if len(self.findings.rates) > 1 else []
        why = [Paragraph(_WHY_DENSE)] * self.findings.spec.demo
        steps = ReportSection("", [*several, Table([*heads, "pays for"], rows), *why])
        unsure = ("busy", "few")
        sections = [steps, *(self._advice(one) for one in first[:1] if one.outcome not in unsure)]
        Document(headline(self.findings), self._notes(), sections).print(console)

    def _advice(self, first: ComparisonRow) -> ReportSection:
        """Return the JSON of the fastest configuration with the headline's method, or `dense`."""
        methods, rows = (DENSE, first.method.partition("/")[0]), self.findings.at(first.rate_mbit)
        names = [(row.step_s.value, Configuration.of(row.configuration)) for row in rows]
        comparable = [c for c in names if c[1].policy == first.policy and c[1].method in methods]
        best = min(comparable)[1]
        values = {"activation": best.policy, "compression": best.method, "weights": best.weights}
        section = {axis: self.findings.spec.section(axis, value) for axis, value in values.items()}
        section["weights"] = {"resident": True} if section["weights"] else {}
        content = {"ds_ckpt": {axis: value for axis, value in section.items() if value}}
        code = Code(json.dumps(content, indent=2).splitlines())
        rule = f"fastest of {first.policy} with {' or '.join(dict.fromkeys(methods[::-1]))}"
        return ReportSection(f"For your DeepSpeed file: {rule} ({best.name})", [code])

    def json(self) -> dict[str, Any]:
        """Return everything; a value that does not exist is NaN, null in the file."""
        return {
            "format": REPORT_FORMAT,
            "spec": asdict(self.findings.spec),
            "runs": self.runs,
            "headline": headline(self.findings),
            **self.findings.content(),
        }

    def document(self) -> Document:
        """Return the report before it has a form."""
        place = self.runs[-1]["place"] if self.runs else self.findings.spec.where
        how = [Paragraph(f"{place}."), Paragraph(_NOTE)]
        sections = [
            ReportSection("", self._shares()),
            ReportSection("Step time, bytes and memory", [*how, *self._steps()]),
            ReportSection("Comparisons with dense", self._comparisons()),
            ReportSection("Settings and machine", [self._facts()]),
        ]
        about = "bandwidth that compression frees for recomputation"
        return Document(headline(self.findings), self._notes(), sections, about)

    def _notes(self) -> list[str]:
        missing = self.findings.missing
        again = f"INCOMPLETE: {'; '.join(missing)}. To continue, repeat the command with --output."
        return [again] * bool(missing) + byte_notes(self.findings)

    def _shares(self) -> list[ReportBlock]:
        """Return a table and a chart of the share that compression pays for: a column per rate."""
        found = self.findings.comparisons
        if not found:
            return []
        several = len({one.policy for one in found}) > 1
        (cost,) = (figure for figure in DERIVED if figure.name == "cost_s")
        columns: dict[str, dict[str, str]] = {}
        for one in found:
            column = columns.setdefault(link(one.rate_mbit) + f", {one.policy}" * several, {})
            value = one.values[cost.name]
            text = f"at most {number(max(value.high, 0.0))}" if value.low <= 0 else cost.text(value)
            column["recomputation costs, s"] = text
            column[f"{title(one.method)} pays for"] = share_text(one)
        names = dict.fromkeys(name for column in columns.values() for name in column)
        rows = [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
        chart = share_chart(found)
        plots = [Plot("shares", [chart], _CAPTION)] * any(line.points for line in chart.lines)
        return [Table(["", *columns], rows), *plots]

    def _table(self, rate: float | None, columns: Sequence[Figure[Row]]) -> Table:
        rows = [
            [row.configuration, *(one.text(one.of(row)) for one in columns)]
            for row in self.findings.at(rate)
        ]
        return Table(["configuration", *(one.heading for one in columns)], rows)

    def _steps(self) -> list[ReportBlock]:
        found: list[ReportBlock] = []
        for place, rate in enumerate(self.findings.rates):
            rows = self.findings.at(rate)
            parts = [one for one in MEASURED if one.unit == "s" and one.name != "step_s"]
            chart = Rows(
                [row.configuration for row in rows],
                "seconds per step (black: the step with its interval)",
                [Band(one.title, list[Any](map(one.of, rows))) for one in parts],
                [(e.low, e.value, e.high) for e in (row.step_s for row in rows)],
            )
            plot = Plot(f"parts-{place}", [chart], "Parts of a step.")
            times = [one for one in MEASURED if one.unit == "s"]
            others = [one for one in MEASURED if one not in times]
            tables = [self._table(rate, columns) for columns in (times, others)]
            found += [Heading(link(rate)), *tables, plot]
        return found

    def _comparisons(self) -> list[ReportBlock]:
        found: list[ReportBlock] = []
        columns: dict[str, list[ComparisonRow]] = {}
        for one in self.findings.comparisons:
            columns.setdefault(f"{one.policy}, {one.method}", []).append(one)
        for heading, mine in columns.items():
            rows = [
                [figure.heading, *(figure.text(one.values.get(figure.name)) for one in mine)]
                for figure in DERIVED
                if any(figure.name in one.values for one in mine)
            ]
            found += [Heading(heading), Table(["", *(link(one.rate_mbit) for one in mine)], rows)]
        return found

    def _facts(self) -> Table:
        spec = self.findings.spec
        trial = f"{spec.steps} timed steps per trial after {spec.drop} dropped"
        rows = [
            ["layout", f"{spec.hosts} nodes x {spec.slots} ranks ({spec.where})"],
            [
                "batch",
                f"{spec.batch} sequence{'s' * (spec.batch > 1)} of {spec.tokens} tokens per rank",
            ],
            ["micro-steps per step", str(spec.accumulation)],
            ["repetitions", f"{spec.repetitions}, {trial}"],
            ["model", f"{spec.model or spec.shape or 'Llama'}, {'bf16' if spec.bf16 else 'fp32'}"],
        ]
        for run in self.runs:
            rows.append([run["started_utc"], run["command"]])
            for name in ("machine", "versions"):
                listed = ", ".join(f"{key} {value}" for key, value in run[name].items())
                rows.append([f"   {name}", listed])
        return Table(["", ""], rows, prose=True)


def share_text(one: ComparisonRow) -> str:
    """Describe the share that compression pays for, or the reason that there is none."""
    share = one.values["share_paid"]
    ends = f"({100 * share.low:.0f} to {100 * share.high:.0f})"
    return {
        "share": f"{100 * share.value:.0f}% {ends}",
        "all": "all of it",
        "none": f"none shown {ends}",
        "free": "costs nothing",
        "busy": "machine too busy",
        "few": "too few repetitions",
    }[one.outcome]


def share_chart(comparisons: Sequence[ComparisonRow]) -> Lines:
    """Draw the share paid over the link rate if the interval of recomputation is above 0."""
    rates = sorted({one.rate_mbit or math.inf for one in comparisons})
    lines: dict[str, list[ComparisonRow]] = {}
    several = len({one.policy for one in comparisons}) > 1
    for one in comparisons:
        name = title(one.method) + f", {one.policy}" * several
        lines.setdefault(name, []).append(one)
    drawn = []
    for place, (name, mine) in enumerate(lines.items()):
        beside = 0.06 * (place - (len(lines) - 1) / 2)  # intervals side by side
        points, spans = [], []
        for one in sorted(mine, key=lambda one: one.rate_mbit or math.inf):
            share = one.values["share_paid"]
            if not math.isnan(share.low):
                ends = (min(100 * v, 100 * MAX_SHARE) for v in (share.low, share.value, share.high))
                low, middle, high = (max(end, -100 * MAX_SHARE) for end in ends)
                points.append((rates.index(one.rate_mbit or math.inf) + beside, middle))
                spans.append((low, middle, high))
        drawn.append(Line(name, points, spans))
    levels = [(0.0, ""), (100.0, "all of the recomputation")]
    if any(span[1] == 100 * MAX_SHARE for line in drawn for span in line.spans):
        levels.append((100 * MAX_SHARE, f"{MAX_SHARE:.0%} or more"))
    names = [link(None if math.isinf(rate) else rate) for rate in rates]
    return Lines(drawn, "link", "share paid, %", levels=levels, names=names, inches=3.2)


def _nothing(path: Path, found: str) -> StateError:
    remedy = "run `ds-ckpt measure --output` with this folder to its end"
    problem = Problem(str(path), found, "a report needs a measured run", remedy)
    return StateError(problem, headline="there is nothing to report")
