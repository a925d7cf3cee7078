"""A run's report: `report.html`, which loads nothing, `report.md` and `report.json`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.measure import words
from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Row, measured
from ds_ckpt.lab.measure.findings import Comparison, Findings, find
from ds_ckpt.lab.measure.parts import COMPUTE, NETWORK
from ds_ckpt.lab.measure.records import Loss, Model, Store
from ds_ckpt.lab.measure.run import LIKE, RUNS
from ds_ckpt.lab.measure.spec import SPEC, STOCK, Configuration, Spec, link
from ds_ckpt.lab.measure.statistics import Estimate
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

FORMAT = "ds_ckpt measure 1"
TITLE = "How much bandwidth compression frees, and how much of recomputation it pays for"
_COSTS = (
    *("step_s", "tokens_per_s", "link_bytes"),
    *("link_gather_bytes", "link_weight_bytes", "link_gradient_bytes"),
    *("kept_weight_bytes", "peak_bytes", "heldout_loss"),
)
"""Of the first table."""
_PARTS = {
    "compute": COMPUTE,
    "recompute": ("recompute",),
    "network, forward": NETWORK[:1],
    "network, recompute": NETWORK[1:2],
    "network, backward": NETWORK[2:3],
    "network, update": NETWORK[3:],
    "compression": ("compression",),
}
"""Bands of a bar, and what is summed up in them."""
_PURPOSES = {
    "weights, forward": ("gather_forward",),
    "weights, recompute": ("gather_recompute",),
    "weights, backward": ("gather_backward",),
    "weights, after the step": ("weights",),
    "gradients": ("reduce",),
    "activations": ("partition",),
    "other": ("other",),
}
_OVER_RATES: Any = {"x": "rate of each link, Mbit/s"}
_DECIDES = (
    *("where", "hosts", "slots", "sections", "tokens", "accumulation", "bf16"),
    *("shape", "text", "model", "deepspeed"),
)


@dataclass
class Report:
    """All that a report says, before it is put into any form."""

    runs: list[dict[str, Any]]
    findings: Findings
    losses: dict[str, Loss]
    model: Model | None
    like: list[str]

    @classmethod
    def of(cls, path: Path) -> Report:
        """Raises StateError if the folder holds no run, or nothing measured yet."""
        if not (path / SPEC).exists():
            raise _nothing(path, "no spec.json")
        samples = Store(path).read()
        findings = find(Spec.load(path), samples)
        if not findings.rows:
            raise _nothing(path, "no repetition in which every configuration had its trial")
        runs, like = path / RUNS, path / LIKE
        return cls(
            [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else [],
            findings,
            {s.configuration: s for s in samples if isinstance(s, Loss)},
            next((s for s in samples if isinstance(s, Model)), None),
            json.loads(like.read_text()) if like.exists() else [],
        )

    def write(self, path: Path) -> list[Path]:
        """Write the three files into the folder `path`; their paths, the HTML page first."""
        data = path / "report.json"
        data.write_bytes(to_json(self.json(), indent=1, inf_nan_mode="null") + b"\n")
        return [*self.document().write(path), data]  # last: the page may lack its packages

    def json(self) -> dict[str, Any]:
        """Everything; what has no value is NaN, in the file null."""
        return {
            "format": FORMAT,
            "spec": self.spec.content,
            "runs": self.runs,
            "model": self.model.model_dump() if self.model else None,
            "like": self.like,
            **self.findings.content(),
        }

    @property
    def spec(self) -> Spec:
        return self.findings.spec

    def claims(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """What the numbers mean, by policy and method, then by where the weights are."""
        spec, found = self.spec, self.findings
        policies = [policy for policy in spec.policies if policy != "none"]
        weights = [name for name in (*spec.weights, *spec.rivals) if name != STOCK]
        return [
            *(
                (f"{policy}, {method}", words.claims(found, policy, method))
                for policy, method in itertools.product(policies, spec.methods)
            ),
            *(
                (f"{policy}, weights {name}", words.weights(found, policy, name))
                for policy, name in itertools.product(policies, weights)
            ),
        ]

    def document(self) -> Document:
        ground = self.runs[-1]["ground"] if self.runs else self.spec.where
        sections = [
            Section("What a step costs and sends", self._costs()),
            Section("What it means", self._claimed()),
            Section("What it is made of", self._parts()),
            Section("Bytes by purpose", self._purposes()),
            Section("What compression pays for", self._compared()),
            Section("Over the links' rates", self._sweep()),
            Section("Training loss", self._losses()),
            Section("What the figures are", [Terms([(f.words, f.definition) for f in DERIVED])]),
            Section("What these numbers cannot say", [Items(words.caveats(self.findings))]),
            Section("What was run on what", [self._facts()]),
        ]
        return Document(TITLE, [f"{ground}.", *self.like], sections)

    def table(self, names: Sequence[str]) -> Table:
        """Some measured figures of every configuration, first rate, usual batch."""
        rows = self.findings.usual(self.findings.rates[0]).values()
        heads = ["", *(measured(name).heading for name in names)]
        return Table(heads, [[r.configuration, *map(r.text, names)] for r in rows])

    def _rows(self, rate: float | None) -> list[Row]:
        return [row for row in self.findings.rows if row.rate_mbit == rate]

    def _costs(self) -> list[Block]:
        """Every configuration of every rate with the usual batch, and what is certain of them."""
        spec, found = self.spec, list[Block]()
        named = f", {min(spec.batches)} sequences" if len(spec.batches) > 1 else ""
        figures = [measured(name) for name in _COSTS]
        heads = ["checkpointing", "gradients", "weights", *(one.heading for one in figures)]
        for rate in self.findings.rates:
            rows = [
                [
                    *astuple(Configuration.of(row.configuration)),
                    *(row.text(name, interval=name == "step_s") for name in _COSTS),
                ]
                for row in self.findings.usual(rate).values()
            ]
            found += [Heading(f"{link(rate)}{named}"), Table(heads, rows)]
        found.append(
            Paragraph(
                "Medians with intervals of 95%, from resampled repetitions, widened where those "
                "are few. Bytes in MB of 10^6. link: to other hosts, of the host that sends most; "
                "by purpose the mean over hosts, without headers. Kept weights and activations: of "
                "a process. dense: the best dense exchange; silent: no gradients, "
                "the ceiling."
            )
        )
        exact = words.lossless(self.losses, self.findings.spec.rounded_weights)
        found.append(Items([*words.headlines(self.findings), exact]))
        return found

    def _claimed(self) -> list[Block]:
        found: list[Block] = []
        for title, claimed in self.claims():
            found += [Heading(title), Terms(claimed)]
        return found

    def _parts(self) -> list[Block]:
        caption = "Exposed parts of a step: means over the steps in the middle half."
        found: list[Block] = []
        for place, rate in enumerate(self.findings.rates):
            rows = self._rows(rate)
            seconds = [{name: part.value for name, part in row.parts_s.items()} for row in rows]
            x = "s a step (black: the median step with its interval)"
            spans = [_span(row.step_s) for row in rows]
            chart = Rows(_labels(rows), x, _bands(_PARTS, seconds), spans)
            plot = Plot(f"parts-{place}", [chart], caption)
            found += [Heading(link(rate)), plot, _figures_table(rows)]
        return found

    def _purposes(self) -> list[Block]:
        rate = self.findings.rates[0]
        rows = self._rows(rate)
        caption = "Counted at each collective; the mark is what the interfaces counted."
        megabytes = [{name: v / MB for name, v in row.purpose_bytes.items()} for row in rows]
        counted = [(row.interface_bytes / MB,) * 3 for row in rows]
        bands, x = _bands(_PURPOSES, megabytes), "MB a step, all processes"
        plot = Plot(
            "bytes-0", [Rows(_labels(rows), x, bands, counted, "at the interfaces")], caption
        )
        return [Heading(link(rate)), plot, bytes_table(rows)]

    def _compared(self) -> list[Block]:
        found: list[Block] = []
        lines: dict[str, list[Comparison]] = {}
        for one in self.findings.comparisons:
            lines.setdefault(words.title(one, self.findings), []).append(one)
        for title, mine in lines.items():
            found += [Heading(title), comparisons_table(mine)]
        note = "* the interval is within 5% of the value either way: a headline."
        return [*found, Paragraph(note)] if found else []

    def _sweep(self) -> list[Block]:
        batch, found = min(self.spec.batches), self.findings
        rated = [r for r in found.rows if r.usual and r.rate_mbit]
        if len({r.rate_mbit for r in rated}) < 2:
            return []
        lines = [
            _line(name, ((r.rate_mbit, r.step_s) for r in rated if r.configuration == name))
            for name in dict.fromkeys(row.configuration for row in rated)
        ]
        steps = Lines(lines, y="s a step", logarithmic="xy", **_OVER_RATES)
        caption = "Median step over the rate, logarithmic."
        blocks: list[Block] = [Plot("sweep-steps", [steps], caption)]
        mine = [c for c in found.comparisons if c.sequences == batch]
        if any(c.rate_mbit and not math.isnan(c.values["share_paid"].value) for c in mine):
            lines = [
                _line(
                    f"{key[0]}: {key[2]} against {key[1]}",
                    ((c.rate_mbit, c.values["share_paid"]) for c in mine if c.line == key),
                )
                for key in dict.fromkeys(one.line for one in mine)
            ]
            notes = [
                (at, 1.0, f"break-even {at:.0f} Mbit/s ({even.baseline})")
                for even in found.break_even
                if even.sequences == batch and (at := even.pays_for_recompute_mbit)
            ]
            look: Any = {"logarithmic": "x", "levels": ((1.0, ""), (0.0, "")), "notes": notes}
            paid = Lines(lines, y="time freed / recomputing", **look, **_OVER_RATES)
            caption = "Above 1 compression pays for all recomputation, below 0 it costs time."
            blocks.append(Plot("sweep-paid", [paid], caption))
        return [*blocks, Items([words.break_even(one, found) for one in found.break_even])]

    def _losses(self) -> list[Block]:
        """Those of checkpointing are marks on the lines without."""
        lines = [
            Line(
                name,
                list(enumerate(one.train_losses)),
                shown="line" if name.startswith("none/") else "marks",
            )
            for name, one in self.losses.items()
            if len(one.train_losses) > 1
        ]
        caption = "Before each step's update, mean over the processes."
        chart = Lines(lines, "step", "training loss")
        return [Plot("losses", [chart], caption)] if lines else []

    def _facts(self) -> Table:
        spec = self.spec
        rows = [
            ["layout", f"{spec.hosts} hosts x {spec.slots} processes ({spec.where})"],
            [
                "batch",
                f"{spec.batches} sequences of {spec.tokens} tokens a process"
                + (f", {spec.accumulation} micro-steps a step" if spec.accumulation > 1 else ""),
            ],
            [
                "repetitions",
                f"{spec.repetitions}, {spec.steps} timed steps a trial after {spec.drop} dropped",
            ],
            ["seed", str(spec.seed)],
        ]
        if self.model:
            dtype = "bf16" if spec.bf16 else "fp32"
            rows.append(
                ["model", f"{spec.model or 'Llama'}, {self.model.parameters:,} parameters, {dtype}"]
            )
            rows.append(["text", f"{self.model.text}, sha256 {self.model.corpus_sha256[:16]}"])
        for place, run in enumerate(self.runs, 1):
            machine = run["machine"]
            took = f"{run['started_utc']}, killed"
            if run["wall_time_s"] is not None:
                ended = "to its end" if run["ended_well"] else "stopped"
                took = f"{run['started_utc']}, {run['wall_time_s']:.0f} s, {ended}"
            where = (
                f"{machine['cpu_model']}, {machine['cpu_cores']} cores, {machine['memory_gib']} "
                f"GiB, {run['accelerator']}, {machine['system']}, load at the end "
                f"{run['load_at_end'] or 'not known'}"
            )
            versions = ", ".join(f"{name} {found}" for name, found in run["versions"].items())
            rows += [[f"run {place}", took], ["   command", run["command"]]]
            rows += [["   machine", where], ["   versions", versions]]
        return Table(["", ""], rows, prose=True)


def compare(first: Path, second: Path) -> tuple[list[str], float]:
    """Two runs of one experiment: lines for people, and the largest difference of headlines.

    Only what both reports print as a headline is compared; where one alone does, that is said.
    The difference is over the larger value, and infinite where they have none in common. Raises
    StateError where a folder has no run to report, or the two are different experiments.
    """
    one_report, other_report = Report.of(first), Report.of(second)
    mine, theirs = asdict(one_report.spec), asdict(other_report.spec)
    if names := [name for name in _DECIDES if mine[name] != theirs[name]]:
        raise StateError(
            Problem(
                where=f"{first} and {second}",
                found=f"other settings: {', '.join(names)}",
                why="what they measured differs, whatever the runs have done",
                remedy="name two runs of one experiment; repetitions, rates and methods may differ",
            ),
            headline="these runs cannot be held against each other",
        )
    others = {(c.rate_mbit, c.line): c for c in other_report.findings.comparisons}
    lines: list[str] = []
    compared: list[float] = []
    for one in one_report.findings.comparisons:
        other = others.get((one.rate_mbit, one.line))
        if other is None:
            continue
        where = f"{link(one.rate_mbit)}, {words.title(one, one_report.findings)}"
        for figure in DERIVED:
            settled = (one.settled(figure.name), other.settled(figure.name))
            if not figure.headline or not any(settled):
                continue
            if all(settled):
                a, b = one.values[figure.name].value, other.values[figure.name].value
                compared.append(abs(a - b) / max(abs(a), abs(b)))
                said = f"{number(a)} and {number(b)}, {compared[-1]:.1%} apart"
            else:
                said = f"a headline of the {'first' if settled[0] else 'second'} run alone"
            lines.append(f"{where}: {figure.words}: {said}")
    if not compared:
        lines.append("nothing to hold against each other: no figure is a headline of both")
    return lines, max(compared, default=math.inf)


def bytes_table(rows: Sequence[Row]) -> Table:
    """Bytes by purpose, of all processes, and the interfaces' own count."""
    purposes = list(rows[0].purpose_bytes)
    spelt = (p.replace("_", " ") for p in purposes)
    heads = ["configuration", *(f"{p}, MB" for p in spelt), "sum, MB", "interfaces, MB"]
    table = []
    for name, row in zip(_labels(rows), rows, strict=True):
        counts = [*(row.purpose_bytes[p] for p in purposes), sum(row.purpose_bytes.values())]
        counts.append(row.number("interface_bytes"))
        table.append([name, *(number(count / MB) for count in counts)])
    return Table(heads, table)


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    """Derived figures over the rates, of one policy, baseline and method."""
    rows = []
    for figure in DERIVED:
        if any(figure.name in one.values for one in comparisons):
            row = [figure.heading]
            for one in comparisons:
                mark = " *" if figure.headline and one.settled(figure.name) else ""
                row.append(figure.text(one.values.get(figure.name)) + mark)
            rows.append(row)
    return Table(["", *(link(one.rate_mbit) for one in comparisons)], rows)


def _figures_table(rows: Sequence[Row]) -> Table:
    """Every configuration of one rate with all that is measured."""
    return Table(
        ["configuration", "sequences", *(figure.heading for figure in MEASURED)],
        [
            [
                row.configuration,
                f"{row.sequences}{' (equal memory)' if row.equal_memory else ''}",
                *(row.text(figure.name, interval=True) for figure in MEASURED),
            ]
            for row in rows
        ],
    )


def _labels(rows: Sequence[Row]) -> list[str]:
    """A name for each row of one rate, with the batch where there are several."""
    several = len({row.sequences for row in rows if not row.equal_memory}) > 1
    found = []
    for row in rows:
        batch = f", {row.sequences} sequences" if several or row.equal_memory else ""
        again = " (equal memory)" if several and row.equal_memory else ""
        found.append(f"{row.configuration}{batch}{again}")
    return found


def _bands(parts: Mapping[str, Sequence[str]], values: Sequence[Mapping[str, float]]) -> list[Band]:
    return [
        Band(label, [sum(one.get(name, 0.0) for name in names) for one in values])
        for label, names in parts.items()
    ]


def _line(label: str, values: Iterable[tuple[float | None, Estimate]]) -> Line:
    """Those without a rate or a value are left out."""
    known = [(rate, v) for rate, v in values if rate and not math.isnan(v.value)]
    known.sort(key=lambda pair: pair[0])
    return Line(label, [(rate, v.value) for rate, v in known], [_span(v) for _, v in known])


def _span(value: Estimate) -> Span:
    return value.low, value.value, value.high


def _nothing(path: Path, found: str) -> StateError:
    remedy = "run `ds-ckpt measure --output` with this folder to its end"
    return StateError(
        Problem(str(path), found, "a report is made from a measured run", remedy),
        headline="there is nothing to report",
    )
