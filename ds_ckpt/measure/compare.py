"""Two runs of one experiment: how far apart their headlines are."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.measure.derive import HEADLINES, Figures
from ds_ckpt.measure.report import Report
from ds_ckpt.measure.spec import link
from ds_ckpt.measure.tables import FIGURE_WORDS, number, title

_DECIDES = ("where", "hosts", "slots", "sections", "tokens", "shape", "text")


def compare(first: Path, second: Path) -> tuple[list[str], float]:
    """Lines for people, and the largest difference over the larger value.

    Only what both reports print as a headline is compared; where one alone does, that is said.
    The difference is infinite where they have none in common. Raises StateError where a folder has
    no run to report, or the two are different experiments.
    """
    one_report, other_report = Report.of(first), Report.of(second)
    _check_same(first, one_report, second, other_report)
    figures = one_report.findings.figures
    others = {_key(f): f for f in other_report.findings.figures}
    lines: list[str] = []
    compared: list[float] = []
    for one in figures:
        other = others.get(_key(one))
        if other is None:
            continue
        where = f"{link(one.rate_mbit)}, {title(one, figures)}"
        for name in HEADLINES:
            settled = (one.settled(name), other.settled(name))
            words = FIGURE_WORDS[name][0]
            if settled == (True, True):
                a, b = one.values[name].value, other.values[name].value
                apart = abs(a - b) / max(abs(a), abs(b))
                compared.append(apart)
                lines.append(f"{where}: {words}: {number(a)} and {number(b)}, {apart:.1%} apart")
            elif any(settled):
                which = "first" if settled[0] else "second"
                lines.append(f"{where}: {words}: a headline of the {which} run alone")
    if not compared:
        lines.append("nothing to hold against each other: no figure is a headline of both")
    return lines, max(compared, default=math.inf)


def _check_same(first: Path, one: Report, second: Path, other: Report) -> None:
    """Raises StateError where the two trained different things or in different places."""
    mine, theirs = asdict(one.spec), asdict(other.spec)
    names = [name for name in _DECIDES if mine[name] != theirs[name]]
    if names:
        raise StateError(
            Problem(
                where=f"{first} and {second}",
                found=f"other settings: {', '.join(names)}",
                why="what they measured differs, whatever the runs have done",
                remedy="name two runs of one experiment; rounds, rates and cells may differ",
            ),
            headline="these runs cannot be held against each other",
        )


def _key(one: Figures) -> tuple[object, ...]:
    return (one.rate_mbit, one.policy, one.baseline, one.method, one.sequences)
