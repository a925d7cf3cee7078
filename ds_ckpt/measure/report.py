"""A run's report: `report.html`, which loads nothing, `report.md` and `report.json`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.harness.experiment.folder import Folder
from ds_ckpt.harness.svg import missing
from ds_ckpt.measure import charts, tables, words
from ds_ckpt.measure.derive import Figures, Findings, derive
from ds_ckpt.measure.records import Loss, Model, Sample, Timeline
from ds_ckpt.measure.rows import Row
from ds_ckpt.measure.run import LIKE, RUNS
from ds_ckpt.measure.spec import DENSE, STOCK, Spec, link

FORMAT = "ds_ckpt measure 1"


@dataclass
class Report:
    """All that a report says, before it is put into any form."""

    spec: Spec
    runs: list[dict[str, Any]]
    findings: Findings
    timelines: list[Timeline]
    losses: dict[str, tuple[float, ...]]
    model: Model | None
    like: list[str]

    @classmethod
    def of(cls, path: Path) -> Report:
        """Raises StateError if the folder holds no run, or nothing measured yet."""
        folder = Folder(path)
        if not folder.spec.exists():
            raise _nothing(path, "no spec.json")
        samples: list[Sample] = folder.store.read()
        spec = Spec.load(folder.spec)
        findings = derive(spec, samples)
        if not findings.rows:
            raise _nothing(path, "no round in which every cell took its turn")
        runs, like = path / RUNS, path / LIKE
        return cls(
            spec,
            [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else [],
            findings,
            [s for s in samples if isinstance(s, Timeline)],
            {s.cell: s.train_losses for s in samples if isinstance(s, Loss)},
            next((s for s in samples if isinstance(s, Model)), None),
            json.loads(like.read_text()) if like.exists() else [],
        )

    def write(self, path: Path) -> list[Path]:
        """Write the three files into the folder `path`; their paths, the HTML page first."""
        page, text, data = (path / f"report.{kind}" for kind in ("html", "md", "json"))
        text.write_text(self.markdown(), encoding="utf-8")
        content = json.dumps(tables.without_nan(self.json()), indent=1, allow_nan=False)
        data.write_text(content + "\n", encoding="utf-8")
        page.write_text(self.html(), encoding="utf-8")  # last: it may lack its packages
        return [page, text, data]

    def json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "format": FORMAT,
            "spec": asdict(self.spec),
            "runs": self.runs,
            "model": self.model.model_dump() if self.model else None,
            "like": self.like,
            **asdict(self.findings),
            "settled": [
                [name for name in one.values if one.settled(name)] for one in self.findings.figures
            ],
        }

    def headlines(self) -> list[str]:
        """What is missing, if anything is, and what is certain."""
        found = self.findings
        return words.not_whole(found.missing) + words.headlines(found.figures)

    def break_evens(self) -> list[str]:
        several, found = len(self.spec.batches) > 1, self.findings.break_even
        return [words.break_even_words(one, name_batch=several) for one in found]

    def html(self) -> str:
        """Raises UnsupportedError where matplotlib or Jinja2 is missing."""
        try:
            import jinja2
        except ImportError as error:
            raise missing("jinja2") from error
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("ds_ckpt", "measure"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        content: str = environment.get_template("report.html.j2").render(
            ground=self.runs[-1]["ground"] if self.runs else self.spec.where,
            like=self.like,
            squares=self.squares(),
            headlines=self.headlines(),
            lossless=words.lossless(self.losses),
            timelines=self._timelines(),
            parts=[
                (title, tables.cells_table(rows), f"parts-{i}", charts.parts_svg(rows))
                for i, (title, rows) in enumerate(self._by_rate())
            ],
            bytes=[
                (title, tables.bytes_table(rows), f"bytes-{i}", charts.bytes_svg(rows))
                for i, (title, rows) in enumerate(self._by_rate()[:1])
            ],
            figures=[(t, tables.figures_table(f)) for t, f in self._by_method()],
            sweep=self._sweep(),
            break_evens=self.break_evens(),
            definitions=tables.definitions(),
            caveats=self.caveats(),
            facts=self.facts(),
        )
        return content

    def markdown(self) -> str:
        """The tables and sentences, without the charts."""
        found = ["# How much bandwidth compression frees, and what it pays for", ""]
        found += [*self.like, ""]
        for title, square in self.squares():
            found += [f"## {title}", "", tables.as_markdown(*square), ""]
        found += [f"- {text}" for text in self.headlines()]
        found += [f"- {words.lossless(self.losses)}", "", "## Parts of a step", ""]
        for title, rows in self._by_rate():
            found += [f"### {title}", "", tables.as_markdown(*tables.cells_table(rows)), ""]
        title, rows = self._by_rate()[0]
        found += [f"## Bytes by purpose, {title}", ""]
        found += [tables.as_markdown(*tables.bytes_table(rows)), "", "## What it pays for", ""]
        for title, figures in self._by_method():
            found += [f"### {title}", "", tables.as_markdown(*tables.figures_table(figures)), ""]
        found += ["* within 5% either way: a headline.", ""]
        found += [*(f"- {text}" for text in self.break_evens()), "", "## Definitions", ""]
        found += [f"- **{name}**: {text}" for name, text in tables.definitions()]
        found += ["", "## What these numbers cannot say", ""]
        found += [f"- {text}" for text in self.caveats()]
        found += ["", "## What was run on what", "", tables.as_markdown(*self.facts()), ""]
        return "\n".join(found)

    def squares(self) -> list[tuple[str, tables.Table]]:
        spec, rows = self.spec, self.findings.rows
        batch = f", {min(spec.batches)} sequences" if len(spec.batches) > 1 else ""
        return [
            (
                f"{link(rate)}: {policy}, {method}{batch}",
                tables.square(spec, rows, rate, policy, method),
            )
            for rate in dict.fromkeys(row.rate_mbit for row in rows)
            for policy in spec.policies
            if policy != "none"
            for method in spec.methods
        ]

    def caveats(self) -> list[str]:
        return words.caveats(self.spec, self.findings.rows, self.findings.figures)

    def facts(self) -> tables.Table:
        spec = self.spec
        rows = [
            ["layout", f"{spec.hosts} hosts x {spec.slots} processes ({spec.where})"],
            ["batch", f"{spec.batches} sequences of {spec.tokens} tokens a process"],
            ["rounds", f"{spec.rounds}, {spec.steps} timed steps a turn after {spec.drop} dropped"],
            ["seed", str(spec.seed)],
        ]
        if self.model:
            rows.append(["model", f"Llama, {self.model.parameters:,} parameters, fp32"])
            rows.append(["text", f"{self.model.text}, sha256 {self.model.corpus_sha256[:16]}"])
        for i, run in enumerate(self.runs, 1):
            machine = run["machine"]
            where = (
                f"{machine['cpu_model']}, {machine['cpu_cores']} cores, {machine['memory_gib']} GiB"
            )
            versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            if run["wall_time_s"] is None:
                took = f"{run['started_utc']}, killed"
            else:
                ended = "to its end" if run["ended_well"] else "stopped"
                took = f"{run['started_utc']}, {run['wall_time_s']:.0f} s, {ended}"
            rows.append([f"run {i}", took])
            rows.append(["   command", run["command"]])
            rows.append(
                [
                    "   machine",
                    f"{where}, {run['accelerator']}, {machine['system']}, "
                    f"load at the end {run['load_at_end'] or 'not known'}",
                ]
            )
            rows.append(["   versions", versions])
        return ["", ""], rows

    def _by_rate(self) -> list[tuple[str, list[Row]]]:
        rows = self.findings.rows
        rates = dict.fromkeys(row.rate_mbit for row in rows)
        return [(link(r), [row for row in rows if row.rate_mbit == r]) for r in rates]

    def _by_method(self) -> list[tuple[str, list[Figures]]]:
        groups: dict[str, list[Figures]] = {}
        for one in self.findings.figures:
            groups.setdefault(tables.title(one, self.findings.figures), []).append(one)
        return list(groups.items())

    def _timelines(self) -> list[tuple[str, str, str]]:
        policy = next((p for p in self.spec.policies if p != "none"), "none")
        wanted = [f"{policy}/{m}" for m in (STOCK, DENSE, *self.spec.methods)]
        found = []
        for i, rate in enumerate(dict.fromkeys(t.rate_mbit for t in self.timelines)):
            mine = [t for t in self.timelines if t.sequences == min(self.spec.batches)]
            here = {t.cell: t for t in mine if t.rate_mbit == rate}
            shown = [here[cell] for cell in wanted if cell in here]
            if shown:
                caption = (
                    f"{link(rate)}: what DeepSpeed's thread does and, in the last lane, the "
                    "exchange's thread beside it. Gathers and reduction are exposed: nothing is "
                    "computed in them."
                )
                found.append((f"timeline-{i}", charts.timeline_svg(shown), caption))
        return found

    def _sweep(self) -> list[tuple[str, str, str]]:
        rated = [r for r in self.findings.rows if r.rate_mbit and not r.equal_memory]
        batch = min(self.spec.batches)
        rated = [r for r in rated if r.sequences == batch]
        if len({r.rate_mbit for r in rated}) < 2:
            return []
        figures = [f for f in self.findings.figures if f.sequences == batch]
        even = [b for b in self.findings.break_even if b.sequences == batch]
        found = [
            ("sweep-steps", charts.sweep_svg(rated), "Median step over the rate, logarithmic.")
        ]
        if any(f.rate_mbit and not math.isnan(f.values["share_paid"].value) for f in figures):
            caption = "Above 1 compression pays for all recomputation, below 0 it costs time."
            found.append(("sweep-paid", charts.paid_svg(figures, even), caption))
        return found


def _nothing(path: Path, found: str) -> StateError:
    remedy = "run `ds-ckpt measure --output` with this folder to its end"
    return StateError(
        Problem(str(path), found, "a report is made from a measured run", remedy),
        headline="there is nothing to report",
    )
