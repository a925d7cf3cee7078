"""A run's report: `report.html`, which loads nothing, `report.md` and `report.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Row, measured
from ds_ckpt.lab.measure.findings import Comparison, Findings, find, title
from ds_ckpt.lab.measure.parts import COMPUTE, NETWORK
from ds_ckpt.lab.measure.resampling import Estimate
from ds_ckpt.lab.measure.run import RUNS
from ds_ckpt.lab.measure.samples import Loss, Model, Store
from ds_ckpt.lab.measure.spec import BASELINES, DENSE, SPEC, STOCK, Configuration, Spec, link
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


@dataclass
class Report:
    """All that a report says, before it is put into any form."""

    runs: list[dict[str, Any]]
    findings: Findings
    losses: dict[str, Loss]
    model: Model | None

    @classmethod
    def of(cls, path: Path) -> Report:
        """Read a run's folder.

        Raises:
            StateError: The folder holds no run, or nothing is measured yet.
        """
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
            {s.configuration: s for s in samples if isinstance(s, Loss)},
            next((s for s in samples if isinstance(s, Model)), None),
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
            "spec": asdict(self.spec),
            "runs": self.runs,
            "model": self.model.model_dump() if self.model else None,
            **self.findings.content(),
        }

    @property
    def spec(self) -> Spec:
        return self.findings.spec

    def conclusions(self) -> list[str]:
        """Missing parts, the headline, and whether checkpointing stayed exact."""
        return [*missing(self.findings), headline(self.findings), exactness(self.losses)]

    def document(self) -> Document:
        ground = self.runs[-1]["ground"] if self.runs else self.spec.where
        sections = [
            Section("What a step costs and sends", self._costs()),
            Section("What it is made of", self._parts()),
            Section("Bytes by purpose", self._purposes()),
            Section("What compression pays for", self._compared()),
            Section("Over the links' rates", self._sweep()),
            Section("Training loss", self._losses()),
            Section("What the figures are", [Terms([(f.words, f.definition) for f in DERIVED])]),
            Section("What these numbers cannot say", [Items(caveats(self.findings))]),
            Section("What was run on what", [self._facts()]),
        ]
        return Document(TITLE, [f"{ground}."], sections)

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
        found.append(Items(self.conclusions()))
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
            lines.setdefault(title(one, self.findings), []).append(one)
        for heading, mine in lines.items():
            found += [Heading(heading), comparisons_table(mine)]
        note = "* the interval is within 5% of the value either way."
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
        return [*blocks, break_even_table(found)]

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
                str(row.sequences),
                *(row.text(figure.name, interval=True) for figure in MEASURED),
            ]
            for row in rows
        ],
    )


def _labels(rows: Sequence[Row]) -> list[str]:
    """A name for each row of one rate, with the batch if there are several."""
    several = len({row.sequences for row in rows}) > 1
    return [
        f"{row.configuration}{f', {row.sequences} sequences' if several else ''}" for row in rows
    ]


def break_even_table(findings: Findings) -> Table:
    """Rates between measured ones at which compression stops paying; they have no interval."""

    def at(rate: float | None) -> str:
        return f"{rate:.0f}" if rate else "-"

    return Table(
        ["break-even", "pays for all recomputation up to, Mbit/s", "costs time above, Mbit/s"],
        [
            [title(one, findings), at(one.pays_for_recompute_mbit), at(one.frees_nothing_mbit)]
            for one in findings.break_even
        ],
    )


def missing(findings: Findings) -> list[str]:
    """One sentence if the run is incomplete, else nothing."""
    if not findings.missing:
        return []
    return [f"INCOMPLETE: {'; '.join(findings.missing)}. Run the same command to continue."]


def headline(findings: Findings) -> str:
    """The time that the best compression frees, compared with the time that recomputation adds.

    Gradients only, at the first measured rate, against the best uncompressed exchange.
    """
    rate, batch = findings.rates[0], min(findings.spec.batches)
    mine = [
        one
        for one in findings.comparisons
        if (one.rate_mbit, one.baseline, one.sequences) == (rate, DENSE, batch)
        and "share_paid" in one.values
    ]
    if not mine:
        return "No headline: it needs a policy beside none and a compressed method."
    best = max(mine, key=lambda one: one.values["time_freed_s"].value)
    freed, added = best.values["time_freed_s"], best.values["recompute_dense_s"]
    interval = "" if freed.low == freed.high else f" ({number(freed.low)} to {number(freed.high)})"
    start = f"{link(rate)}, {title(best, findings)}: compression"
    if freed.value <= 0:
        return f"{start} frees no time; it adds {number(-freed.value)} s a step{interval}."
    share = best.values["share_paid"].value
    paid = "" if math.isnan(share) else f", of which that is {share:.0%}"
    return (
        f"{start} frees {number(freed.value)} s a step{interval}. Recomputation adds "
        f"{number(added.value)} s{paid}."
    )


def exactness(losses: Mapping[str, Loss]) -> str:
    """Whether checkpointing or resident weights changed a training loss or a final weight."""
    exact = {
        name: one for name in losses if (one := Configuration.of(name)).weights not in BASELINES
    }
    pairs = {
        name: (losses[plain], losses[name])
        for name, one in exact.items()
        if (plain := f"none/{one.method}") in losses and plain != name
    }
    if not pairs:
        return "Exactness: no losses were compared."
    different = [
        name
        for name, (plain, other) in pairs.items()
        if other.train_losses != plain.train_losses
        or len({other.weights_sha256, plain.weights_sha256} - {""}) > 1
    ]
    if different:
        return (
            f"Exactness: NOT met. Losses or final weights of {', '.join(different)} differ from "
            "those without checkpointing and resident weights. On CPU they must be equal; please "
            "report it."
        )
    return "Exactness: met. Checkpointing and resident weights changed no training loss by a bit."


def caveats(findings: Findings) -> list[str]:
    """Limits of these numbers."""
    spec, rows = findings.spec, findings.rows
    found = [
        f"On gloo, {STOCK} sends an all-reduce's bytes for its reduce-scatter, twice what it "
        f"needs. Compare with {DENSE}.",
        f"Losses: one seed ({spec.seed}), {spec.loss_steps} steps. `ds-ckpt validate-accuracy` "
        "gives verdicts.",
        "The autotuner is off, so compression also runs where it loses.",
        "A step is as long as its slowest rank; waiting for another rank counts as network.",
    ]
    if not spec.bf16:
        found.append(
            "fp32: every uncompressed byte counts double. A link of 200 Mbit/s here equals one of "
            "100 Mbit/s in 16-bit training."
        )
    if spec.accumulation > 1:
        found.append(
            f"{DENSE} and compressed gradients are sent once in {spec.accumulation} micro-steps; "
            f"{STOCK} sends every micro-step's."
        )
    if spec.where == "emulated":
        found.append("All nodes share one machine's CPU and memory. Only bandwidth is emulated.")
    if spec.where == "loopback":
        found.append("The link is memory and not shaped.")
    for share, what in (
        ("parts_over_step", "The parts differ from the median step"),
        ("interface_over_purposes", "The interfaces differ from the collectives' payload"),
    ):
        if wrong := [r.configuration for r in rows if abs(r.number(share) - 1) > 0.03]:
            which = ", ".join(dict.fromkeys(wrong))
            found.append(f"{what} by more than 3% in {len(wrong)} of {len(rows)} rows: {which}.")
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
