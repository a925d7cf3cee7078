"""Report of a run: a page that loads nothing, Markdown, JSON, and DeepSpeed files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Estimate, measured
from ds_ckpt.lab.measure.findings import (
    ComparisonRow,
    Findings,
    break_even,
    exactness,
    find,
    headline,
)
from ds_ckpt.lab.measure.parts import COMPUTE, NETWORK
from ds_ckpt.lab.measure.run import RUNS
from ds_ckpt.lab.measure.samples import Model, Store
from ds_ckpt.lab.measure.spec import (
    REFERENCES,
    SPEC,
    Spec,
    deepspeed_config,
    link,
)
from ds_ckpt.lab.report.charts import Band, Line, Lines, Rows, Span
from ds_ckpt.lab.report.document import (
    Block,
    Document,
    Heading,
    Items,
    Paragraph,
    Plot,
    Section,
    Table,
    Terms,
)
from ds_ckpt.telemetry.units import MB, number

FORMAT = "ds_ckpt measure 2"
TITLE = "Step time, bytes and memory of each configuration"
_COSTS = (
    *("step_s", "tokens_per_s", "link_bytes"),
    *("link_gather_bytes", "link_weight_bytes", "link_gradient_bytes"),
    *("kept_weight_bytes", "peak_bytes", "heldout_loss"),
)
_TERMINAL = ("step_s", "link_bytes", "peak_bytes", "kept_weight_bytes", "heldout_loss")
_PARTS = {
    "compute": COMPUTE,
    "recomputation": ("recompute",),
    "network, forward": NETWORK[:1],
    "network, recomputation": NETWORK[1:2],
    "network, backward": NETWORK[2:3],
    "network, update": NETWORK[3:],
    "compression": ("compression",),
}
_PURPOSES = {
    "weights, forward": ("gather_forward",),
    "weights, recomputation": ("gather_recompute",),
    "weights, backward": ("gather_backward",),
    "weights, after the step": ("weights",),
    "gradients": ("reduce",),
    "activations": ("partition",),
    "other": ("other",),
}
_NOTE = (
    "Medians with 95% intervals (bootstrap over repetitions). MB are 10^6 bytes. link: bytes to "
    "other nodes, of the node that sends most. dense: every gradient sent once; no_comm: no "
    "gradient is sent. docs/measuring.md defines the figures and lists what they do not show."
)


@dataclass
class Report:
    """Content of a report in all its forms."""

    runs: list[dict[str, Any]]
    findings: Findings
    model: Model | None

    @classmethod
    def of(cls, path: Path) -> Report:
        """Evaluate a run's folder; StateError if it holds no run, or nothing measured yet."""
        if not (path / SPEC).exists():
            raise _nothing(path, "no spec.json")
        samples = Store(path).read()
        findings = find(Spec.load(path), samples)
        if not findings.rows:
            raise _nothing(path, "no repetition in which every configuration had its trial")
        runs = path / RUNS
        return cls(
            [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else [],
            findings,
            next((s for s in samples if isinstance(s, Model)), None),
        )

    @property
    def spec(self) -> Spec:
        """Settings of the run."""
        return self.findings.spec

    def write(self, path: Path) -> list[Path]:
        """Write all files into the folder `path`; return the report's, the page first."""
        data, configs = path / "report.json", path / "configs"
        data.write_bytes(to_json(self.json(), indent=1, inf_nan_mode="null") + b"\n")
        configs.mkdir(exist_ok=True)
        steps = self.spec.loss_steps or 1000
        for one in self.spec.configurations:
            content = deepspeed_config(
                self.spec,
                one,
                parameters=self.model.parameters if self.model else 0,
                start_step=0 if one.method in REFERENCES else steps // 4,
                total_steps=steps,
            )
            text = json.dumps(content, indent=2) + "\n"
            (configs / f"{one.name.replace('/', '-')}.json").write_text(text, encoding="utf-8")
        return [*self.document().write(path), data]  # last: the page may lack its packages

    def print(self, console: Console) -> None:
        """Print the summary and the first table."""
        lines = Items(self._summary())
        Document(TITLE, [], [Section("", [self._costs_at(0, _TERMINAL), lines])]).print(console)

    def json(self) -> dict[str, Any]:
        """Return everything; a value that does not exist is NaN, null in the file."""
        return {
            "format": FORMAT,
            "spec": asdict(self.spec),
            "runs": self.runs,
            "model": self.model.model_dump() if self.model else None,
            "headline": headline(self.findings),
            **self.findings.content(),
        }

    def document(self) -> Document:
        """Return the report before it has a form."""
        place = self.runs[-1]["place"] if self.runs else self.spec.where
        sections = [
            Section("Summary", [Items(self._summary())]),
            Section("Cost of a step", self._costs()),
            Section("Parts of a step", self._parts()),
            Section("Bytes by purpose", self._purposes()),
            Section("Comparisons", self._comparisons()),
            Section("By link rate", self._sweep()),
            Section("Training loss", self._losses()),
            Section("Definitions", [Terms([(f.title, f.definition) for f in DERIVED])]),
            Section("Settings and machine", [self._facts()]),
        ]
        return Document(TITLE, [f"{place}."], sections)

    def _summary(self) -> list[str]:
        missing = self.findings.missing
        again = f"INCOMPLETE: {'; '.join(missing)}. Repeat the command to continue."
        found = [headline(self.findings), exactness(self.findings.losses)]
        return [again, *found] if missing else found

    def _costs_at(self, place: int, names: Sequence[str]) -> Table:
        """Return the table of one rate, smallest batch."""
        rows = self.findings.at(self.findings.rates[place])
        cells = [
            [row.configuration, *(row.text(name, interval=name == "step_s") for name in names)]
            for row in rows
        ]
        return Table(["", *(measured(name).heading for name in names)], cells)

    def _costs(self) -> list[Block]:
        found = list[Block]()
        for place, rate in enumerate(self.findings.rates):
            found += [Heading(link(rate)), self._costs_at(place, _COSTS)]
        return [*found, Paragraph(_NOTE)]

    def _parts(self) -> list[Block]:
        found: list[Block] = []
        for place, rate in enumerate(self.findings.rates):
            rows = self.findings.at(rate)
            seconds = [{name: part.value for name, part in row.parts_s.items()} for row in rows]
            x = "seconds per step (black: median step with its interval)"
            spans = [_span(row.step_s) for row in rows]
            chart = Rows([row.configuration for row in rows], x, _bands(_PARTS, seconds), spans)
            plot = Plot(f"parts-{place}", [chart], "Means over the steps in the middle half.")
            heads = ["configuration", *(figure.heading for figure in MEASURED)]
            cells = [[row.text(figure.name, interval=True) for figure in MEASURED] for row in rows]
            named = zip([row.configuration for row in rows], cells, strict=True)
            found += [
                Heading(link(rate)),
                plot,
                Table(heads, [[name, *one] for name, one in named]),
            ]
        return found

    def _purposes(self) -> list[Block]:
        rows = self.findings.at(self.findings.rates[0])
        megabytes = [{name: v / MB for name, v in row.purpose_bytes.items()} for row in rows]
        counted = [row.interface_bytes / MB for row in rows]
        names, purposes = [row.configuration for row in rows], list(megabytes[0])
        bands = _bands(_PURPOSES, megabytes)
        spans = [(n, n, n) for n in counted]
        chart = Rows(names, "MB per step, all processes", bands, spans, "at the interfaces")
        caption = "Payload counted at each collective; the mark is the interfaces' count."
        heads = [*(f"{p.replace('_', ' ')}, MB" for p in purposes), "sum, MB", "interfaces, MB"]
        cells = [
            [name, *(number(n) for n in [*(mb[p] for p in purposes), sum(mb.values()), count])]
            for name, mb, count in zip(names, megabytes, counted, strict=True)
        ]
        return [Plot("bytes-0", [chart], caption), Table(["configuration", *heads], cells)]

    def _comparisons(self) -> list[Block]:
        found: list[Block] = []
        lines: dict[str, list[ComparisonRow]] = {}
        for one in self.findings.comparisons:
            lines.setdefault(one.title, []).append(one)
        for title, mine in lines.items():
            rows = [
                [figure.heading, *(figure.text(one.values.get(figure.name)) for one in mine)]
                for figure in DERIVED
                if any(figure.name in one.values for one in mine)
            ]
            found += [Heading(title), Table(["", *(link(one.rate_mbit) for one in mine)], rows)]
        return found

    def _sweep(self) -> list[Block]:
        found = self.findings
        rated = [r for r in found.rows if r.rate_mbit]
        if len({r.rate_mbit for r in rated}) < 2:
            return []
        x: Any = {"x": "rate of each link, Mbit/s"}
        lines = [
            _line(name, ((r.rate_mbit, r.step_s) for r in rated if r.configuration == name))
            for name in dict.fromkeys(row.configuration for row in rated)
        ]
        steps = Lines(lines, y="seconds per step", logarithmic="xy", **x)
        blocks: list[Block] = [Plot("sweep-steps", [steps], "Median step, logarithmic.")]
        mine = found.comparisons
        lines = [
            _line(title, ((c.rate_mbit, c.values["share_paid"]) for c in mine if c.title == title))
            for title in dict.fromkeys(c.title for c in mine)
        ]
        if any(line.points for line in lines):
            paid = Lines(lines, y="time saved / recomputation", logarithmic="x", **x)
            caption = "Above 1 compression pays for all recomputation, below 0 it costs time."
            blocks.append(Plot("sweep-paid", [paid], caption))
        even = break_even(mine).items()
        text = "{}: compression pays for all recomputation up to about {:.0f} Mbit/s."
        return [*blocks, Items([text.format(title, rate) for title, rate in even])]

    def _losses(self) -> list[Block]:
        lines = [
            Line(
                name,
                list(enumerate(one.train_losses)),
                shown="line" if name.startswith("none/") else "marks",
            )
            for name, one in self.findings.losses.items()
            if len(one.train_losses) > 1
        ]
        chart = Lines(lines, "step", "training loss")
        caption = "Before each step's update, mean over the processes."
        return [Plot("losses", [chart], caption)] if lines else []

    def _facts(self) -> Table:
        spec = self.spec
        trial = f"{spec.steps} timed steps per trial after {spec.drop} dropped"
        rows = [
            ["layout", f"{spec.hosts} nodes x {spec.slots} processes ({spec.where})"],
            ["batch", f"{spec.batch} sequences of {spec.tokens} tokens per process"],
            ["micro-steps per step", str(spec.accumulation)],
            ["repetitions", f"{spec.repetitions}, {trial}"],
            ["seed", str(spec.seed)],
        ]
        if self.model:
            dtype = "bf16" if spec.bf16 else "fp32"
            count = f"{self.model.parameters:,} parameters"
            rows.append(["model", f"{spec.model or 'Llama'}, {count}, {dtype}"])
            rows.append(["text", f"{self.model.text}, sha256 {self.model.corpus_sha256[:16]}"])
        for place, run in enumerate(self.runs, 1):
            took = f"{run['started_utc']}, killed"
            if run["wall_time_s"] is not None:
                ended = "completed" if run["completed"] else "stopped"
                took = f"{run['started_utc']}, {run['wall_time_s']:.0f} s, {ended}"
            rows += [[f"run {place}", took], ["   command", run["command"]]]
            for name in ("machine", "versions"):
                listed = ", ".join(f"{key} {value}" for key, value in run[name].items())
                rows.append([f"   {name}", listed])
        return Table(["", ""], rows, prose=True)


def _bands(parts: Mapping[str, Sequence[str]], values: Sequence[Mapping[str, float]]) -> list[Band]:
    return [
        Band(label, [sum(one.get(name, 0.0) for name in names) for one in values])
        for label, names in parts.items()
    ]


def _line(label: str, values: Iterable[tuple[float | None, Estimate]]) -> Line:
    """Return the line; points without a rate or a value are left out."""
    known = [(rate, v) for rate, v in values if rate and not math.isnan(v.value)]
    known.sort(key=lambda pair: pair[0])
    return Line(label, [(rate, v.value) for rate, v in known], [_span(v) for _, v in known])


def _span(value: Estimate) -> Span:
    return value.low, value.value, value.high


def _nothing(path: Path, found: str) -> StateError:
    remedy = "run `ds-ckpt measure --output` with this folder to its end"
    return StateError(
        Problem(str(path), found, "a report needs a measured run", remedy),
        headline="there is nothing to report",
    )
