"""Report of a run: a page that loads nothing, Markdown, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Figure, Row
from ds_ckpt.lab.measure.findings import ComparisonRow, Findings, find, headline
from ds_ckpt.lab.measure.run import read_runs
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import SPEC, Spec, link
from ds_ckpt.lab.report.charts import Band, Rows
from ds_ckpt.lab.report.document import Block, Document, Heading, Items, Plot, Section, Table
from ds_ckpt.telemetry.units import MB, number

FORMAT = "ds_ckpt measure 3"
TITLE = "Step time, bytes and memory of each configuration"
_TERMINAL = ("step_s", "link_bytes", "peak_bytes", "stored_weight_bytes")
_PARTS = (
    "compute_s",
    "recompute_s",
    "network_forward_s",
    "network_recompute_s",
    "network_backward_s",
    "network_update_s",
    "compression_s",
)
_NOTE = (
    "Means over the steps in the middle half, with 95% intervals (jackknife over repetitions). MB "
    "are 10^6 bytes. link: bytes to other nodes, of the node that sends most. dense: every "
    "gradient sent once; no_comm: no gradient is sent. docs/measuring.md defines the "
    "figures, and lists what they do not show."
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

    @property
    def spec(self) -> Spec:
        """Settings of the run."""
        return self.findings.spec

    def write(self, path: Path) -> list[Path]:
        """Write all files into the folder `path`; return the report's, the page first."""
        data = path / "report.json"
        data.write_bytes(to_json(self.json(), indent=1, inf_nan_mode="null") + b"\n")
        return [*self.document().write(path), data]  # last: the page may lack its packages

    def print(self, console: Console) -> None:
        """Print the summary and the first table."""
        columns = [one for one in MEASURED if one.name in _TERMINAL]
        table = self._table(self.findings.rates[0], columns)
        Document(TITLE, [], [Section("", [table, Items(self._summary())])]).print(console)

    def json(self) -> dict[str, Any]:
        """Return everything; a value that does not exist is NaN, null in the file."""
        return {
            "format": FORMAT,
            "spec": asdict(self.spec),
            "runs": self.runs,
            "headline": headline(self.findings),
            **self.findings.content(),
        }

    def document(self) -> Document:
        """Return the report before it has a form."""
        place = self.runs[-1]["place"] if self.runs else self.spec.where
        sections = [
            Section("Summary", [Items(self._summary())]),
            Section("Step time, bytes and memory", self._steps()),
            Section("Bytes by purpose", self._purposes()),
            Section("Comparisons with dense", self._comparisons()),
            Section("Settings and machine", [self._facts()]),
        ]
        return Document(TITLE, [f"{place}.", _NOTE], sections)

    def _summary(self) -> list[str]:
        missing = self.findings.missing
        again = f"INCOMPLETE: {'; '.join(missing)}. Repeat the command to continue."
        return [again] * bool(missing) + [headline(self.findings)]

    def _table(self, rate: float | None, columns: Sequence[Figure[Row]]) -> Table:
        rows = [
            [row.configuration, *(one.text(one.of(row)) for one in columns)]
            for row in self.findings.at(rate)
        ]
        return Table(["configuration", *(one.heading for one in columns)], rows)

    def _steps(self) -> list[Block]:
        found: list[Block] = []
        for place, rate in enumerate(self.findings.rates):
            rows = self.findings.at(rate)
            parts = [one for one in MEASURED if one.name in _PARTS]
            seconds = [{one.title: one.of(row) for one in parts} for row in rows]
            chart = Rows(
                [row.configuration for row in rows],
                "seconds per step (black: the step with its interval)",
                _bands(seconds),
                [(e.low, e.value, e.high) for e in (row.step_s for row in rows)],
            )
            plot = Plot(f"parts-{place}", [chart], "Parts of a step.")
            found += [Heading(link(rate)), self._table(rate, MEASURED), plot]
        return found

    def _purposes(self) -> list[Block]:
        rows = self.findings.at(self.findings.rates[0])
        megabytes = [{p: n / MB for p, n in row.purpose_bytes.items()} for row in rows]
        counted = [row.interface_bytes / MB for row in rows]
        names, spans = [row.configuration for row in rows], [(n, n, n) for n in counted]
        bands = _bands(megabytes)
        chart = Rows(names, "MB per step, all ranks", bands, spans, "at the interfaces")
        caption = "Payload counted at each collective; the mark is the interfaces' count."
        heads = [f"{purpose.replace('_', ' ')}, MB" for purpose in megabytes[0]]
        cells = [
            [name, *map(number, [*mb.values(), sum(mb.values()), count])]
            for name, mb, count in zip(names, megabytes, counted, strict=True)
        ]
        heads = ["configuration", *heads, "sum, MB", "interfaces, MB"]
        return [Plot("bytes-0", [chart], caption), Table(heads, cells)]

    def _comparisons(self) -> list[Block]:
        found: list[Block] = []
        titles: dict[str, list[ComparisonRow]] = {}
        for one in self.findings.comparisons:
            titles.setdefault(f"{one.policy}, {one.method}", []).append(one)
        for title, mine in titles.items():
            rows = [
                [figure.heading, *(figure.text(one.values.get(figure.name)) for one in mine)]
                for figure in DERIVED
                if any(figure.name in one.values for one in mine)
            ]
            found += [Heading(title), Table(["", *(link(one.rate_mbit) for one in mine)], rows)]
        return found

    def _facts(self) -> Table:
        spec = self.spec
        trial = f"{spec.steps} timed steps per trial after {spec.drop} dropped"
        rows = [
            ["layout", f"{spec.hosts} nodes x {spec.slots} ranks ({spec.where})"],
            ["batch", f"{spec.batch} sequences of {spec.tokens} tokens per rank"],
            ["micro-steps per step", str(spec.accumulation)],
            ["repetitions", f"{spec.repetitions}, {trial}"],
            ["model", f"{spec.model or spec.shape or 'Llama'}, {'bf16' if spec.bf16 else 'fp32'}"],
        ]
        rows.append(["text", spec.text or "Python's documentation"])
        for run in self.runs:
            rows.append([run["started_utc"], run["command"]])
            for name in ("machine", "versions"):
                listed = ", ".join(f"{key} {value}" for key, value in run[name].items())
                rows.append([f"   {name}", listed])
        return Table(["", ""], rows, prose=True)


def _bands(values: Sequence[Mapping[str, Any]]) -> list[Band]:
    return [Band(label.replace("_", " "), [one[label] for one in values]) for label in values[0]]


def _nothing(path: Path, found: str) -> StateError:
    remedy = "run `ds-ckpt measure --output` with this folder to its end"
    problem = Problem(str(path), found, "a report needs a measured run", remedy)
    return StateError(problem, headline="there is nothing to report")
