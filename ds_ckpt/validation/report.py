"""What was found, for people: a table in the terminal, Markdown, and one HTML file without network.

Nothing is judged here; `compare` has done that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ds_ckpt.errors import UnsupportedError
from ds_ckpt.validation.compare import Comparison
from ds_ckpt.validation.plots import curves_svg, intervals_svg
from ds_ckpt.validation.rows import COLUMNS, about, guards, heading, notes, row

_LIMITS = (
    "The largest values seen, and a quarter more, for the compression section of a run like these:"
)


@dataclass(frozen=True)
class SelfCheck:
    """Dense training against itself, other seeds.

    Attributes:
        values: results of the dense runs.
        seeds: pairs of a trial.
        shares: of each verdict.
    """

    task: str
    values: tuple[float, ...]
    seeds: int
    margin: float
    shares: dict[str, float]

    def words(self) -> str:
        """One sentence."""
        shares = ", ".join(f"{word} {share:.1%}" for word, share in self.shares.items())
        return (
            f"{self.task}: dense against dense, {len(self.values)} runs paired at random, "
            f"{self.seeds} pairs a trial, margin {100 * self.margin:g}%: {shares}. "
            '"worse" and "better" may each be wrong in 5% of trials.'
        )


def table(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> Iterator[Any]:
    """What the terminal shows."""
    for task, group in _by_task(comparisons):
        shown = Table(title=task, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, _ in COLUMNS[:4] + COLUMNS[5:7]:
            shown.add_column(name, overflow="fold")
        for one in group:
            cells = row(one)
            shown.add_row(*cells[:4], *cells[5:7])
        yield shown
    for line in guards(comparisons):
        yield Text(line)
    for check in checks:
        yield check.words()


def _by_task(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, list[Comparison]]]:
    for task, group in itertools.groupby(comparisons, key=heading):
        yield task, list(group)


def markdown(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> str:
    """The report as Markdown."""
    lines = ["# Accuracy: dense training against compression", ""]
    for task, group in _by_task(comparisons):
        margin = 100 * group[0].margin
        unit = "% of the dense loss" if group[0].metric == "loss" else " points of accuracy"
        lines += [f"## {task}", "", f"Margin {margin:g}{unit}.", ""]
        lines += ["| " + " | ".join(name for name, _ in COLUMNS) + " |"]
        lines += ["|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row(one)) + " |" for one in group]
        lines += [""]
    if limits := guards(comparisons):
        lines += ["## Limits for a guard", "", _LIMITS, ""]
        lines += [*(f"- `{line}`" for line in limits), ""]
    if checks:
        lines += ["## Dense against itself", "", *(f"- {c.words()}" for c in checks), ""]
    if comparisons:
        lines += ["## What this holds for", "", *(f"- {note}" for note in notes(comparisons))]
        lines += ["- " + about(comparisons[0]), ""]
    return "\n".join(lines)


def write_report(
    folder: Path, comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]
) -> Path:
    """Write `report.md`, and `report.html` where matplotlib and Jinja2 are installed.

    Returns:
        The HTML file, or the Markdown file without those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "report.md"
    plain.write_text(markdown(comparisons, checks), encoding="utf-8")
    try:
        page = _html(comparisons, checks)
    except UnsupportedError:
        return plain
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _html(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> str:
    from ds_ckpt.harness.svg import missing

    try:
        import jinja2
    except ImportError as error:
        raise missing("jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_ckpt", "validation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = [
        {
            "task": task,
            "margin": f"{100 * group[0].margin:g}"
            + ("% of the dense loss" if group[0].metric == "loss" else " points of accuracy"),
            "rows": [(one.verdict, row(one)) for one in group],
            "curves": curves_svg(group),
            "intervals": intervals_svg(group),
        }
        for task, group in _by_task(comparisons)
    ]
    page: str = environment.get_template("report.html.j2").render(
        groups=groups,
        columns=COLUMNS,
        limits=guards(comparisons),
        limits_words=_LIMITS,
        checks=[check.words() for check in checks],
        notes=notes(comparisons) if comparisons else [],
        about=about(comparisons[0]) if comparisons else "",
    )
    return page
