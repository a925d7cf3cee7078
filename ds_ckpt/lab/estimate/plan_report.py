"""A plan in tables: the best setting, its alternatives, and the sources of figures."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from rich.console import Console
from rich.table import Table

from ds_ckpt.lab.estimate.search import (
    OWN_FIGURES,
    ZERO1,
    PlanOption,
    Question,
    Search,
    best_of,
    placement,
)
from ds_ckpt.lab.hosts.hardware import Constant
from ds_ckpt.telemetry.units import GIB, columns

_LEAST = 5e-4
"""Smallest share of a sum that is shown."""


def alternatives(search: Search) -> dict[str, PlanOption | None]:
    """Return the best of each placement of weights and of each method, and of ZeRO-1."""
    found: dict[str, list[PlanOption]] = {placement(kind): [] for kind in search.kinds}
    found |= {f"gradients {method.name}": [] for method in search.methods}
    for one in search.all:
        found[placement(one.setting.weights)].append(one)
        found[f"gradients {one.setting.method.name}"].append(one)
    found[f"{ZERO1}, a baseline"] = search.zero1
    return {name: best_of(some) if some else None for name, some in found.items()}


def figures(question: Question) -> list[Constant]:
    """List the figures that the plan rests on."""
    cluster = question.cluster
    return [*chain(cluster.device.figures(), (cluster.rate, cluster.latency), OWN_FIGURES)]


def show(search: Search, best: PlanOption, console: Console) -> None:
    """Print the best setting with its costs, the alternatives and the figures."""
    question, model, step = search.question, search.question.model, best.step
    console.print(
        f"{model.name}: {model.elements / 1e9:.2f} G parameters, {len(model.blocks)} blocks, "
        f"sequences of {model.tokens} tokens; {question.cluster.text}; {question.sequences} "
        f"sequences ({question.tokens / 1e6:.2f} M tokens) per step; loss: {question.loss}"
    )
    console.print(f"\n[bold]Best:[/bold] {best.setting.describe()}")
    console.print(
        f"  {question.tokens / step.seconds:,.0f} tokens/s, {step.seconds:.3g} s per step; "
        f"{best.needed_bytes / GIB:.1f} of {best.capacity_bytes / GIB:.1f} GiB (90% of the "
        f"accelerator's), {best.host_bytes / GIB:.1f} GiB of host memory per rank"
    )
    if best.setting.method.betas:
        b1, b2 = best.setting.method.betas
        console.print(f"  with AdamW's betas {b1:g} and {b2:g}, as in its verdicts")
    blocks = Counter(best.plan.choices)
    console.print("  blocks: " + ", ".join(f"{n} x {word}" for word, n in blocks.items()))
    console.print(f"  the accelerator waits for {step.waits_s:.3g} s of the step")
    parts = ("s busy", {f"{of}: {kind}": s for (of, kind), s in step.busy_s.items()}, 1.0)
    sent = ("GB over a node's link", step.sent_bytes, 1e9)
    for title, values, unit in (parts, sent, ("GiB of memory", best.memory, GIB)):
        table = Table("", title, box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for what, value in sorted(values.items(), key=lambda item: -item[1]):
            if value > _LEAST * sum(values.values()):
                table.add_row(f"  {what}", f"{value / unit:,.3f}")
        if table.row_count:
            console.print(table)
    _show_alternatives(search, console)
    console.print("\n[bold]Sources of the figures:[/bold]")
    for figure in sorted(figures(question), key=lambda f: f.kind):
        console.print(f"  {figure.kind}: {figure.what} {figure.value:.4g} ({figure.source})")


def _show_alternatives(search: Search, console: Console) -> None:
    console.print("\n[bold]Alternatives, each with its best settings:[/bold]")
    found = alternatives(search)
    fitting = [(name, one) for name, one in found.items() if one is not None]
    fitting.sort(key=lambda item: item[1].step.seconds)
    rows = [("", "s per step", "tokens/s", "GiB")]
    for name, one in fitting:
        seconds, rate = one.step.seconds, search.question.tokens / one.step.seconds
        rows.append(
            (f"  {name}", f"{seconds:.3g}", f"{rate:,.0f}", f"{one.needed_bytes / GIB:.1f}")
        )
    settings = ["settings", *(one.setting.describe() for _, one in fitting)]
    for line, setting in zip(columns(rows).splitlines(), settings, strict=True):
        console.print(f"{line}  {setting}")
    if left := [name for name, one in found.items() if one is None]:
        console.print(f"  nothing fits: {', '.join(left)}")
    if search.refused:
        names = ", ".join(method.name for method in search.refused)
        console.print(f"  not tried, as verdicts do not allow them (--loss any): {names}")
