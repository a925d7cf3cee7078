"""Two runs of one experiment: how far apart their headlines are."""

from __future__ import annotations

from pathlib import Path

from ds_ckpt.harness.experiment.derive import HEADLINES, Figures
from ds_ckpt.harness.experiment.report import Report
from ds_ckpt.harness.experiment.tables import FIGURE_WORDS, link, number


def compare(first: Path, second: Path) -> tuple[list[str], float]:
    """Lines for people, and the largest difference over the larger value.

    Only what both reports print as a headline is compared; where one alone does, that is said.
    Raises StateError where a folder has no run to report.
    """
    others = {_key(f): f for f in Report.of(second).findings.figures}
    lines, worst = [], 0.0
    for one in Report.of(first).findings.figures:
        other = others.get(_key(one))
        if other is None:
            continue
        where = f"{link(one.rate_mbit)}, {one.policy}, {one.method} against {one.baseline}"
        for name in HEADLINES:
            settled = (one.settled(name), other.settled(name))
            words = FIGURE_WORDS[name][0]
            if settled == (True, True):
                a, b = one.values[name].value, other.values[name].value
                apart = abs(a - b) / max(abs(a), abs(b))
                worst = max(worst, apart)
                lines.append(f"{where}: {words}: {number(a)} and {number(b)}, {apart:.1%} apart")
            elif any(settled):
                which = "first" if settled[0] else "second"
                lines.append(f"{where}: {words}: a headline of the {which} run alone")
    return lines, worst


def _key(one: Figures) -> tuple[object, ...]:
    return (one.rate_mbit, one.policy, one.baseline, one.method, one.sequences)
