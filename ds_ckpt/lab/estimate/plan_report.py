"""A plan in five lines, and on request its costs, its alternatives and the sources of figures."""

from collections import Counter

from rich.console import Console
from rich.table import Column, Table

from ds_ckpt.lab.estimate.search import (
    OWN_FIGURES,
    TIE,
    PlanOption,
    Question,
    Search,
    best_of,
    placement,
)
from ds_ckpt.lab.hosts.hardware import Constant
from ds_ckpt.telemetry.units import GIB, number

_LEAST = 5e-4
"""Smallest share of a sum that is shown."""


def figures(question: Question) -> list[Constant]:
    """List the figures that the plan rests on."""
    cluster = question.cluster
    return [*cluster.device.figures(), cluster.rate, cluster.latency, *OWN_FIGURES]


def print_plan(search: Search, best: PlanOption, console: Console, *, details: bool) -> None:
    """Print the best setting, the best with and without this plugin, and their difference."""
    question, model = search.question, search.question.model
    memory = question.cluster.device["memory_bytes"] / 1e9
    margins = [0.0, *(r.margin for m in search.methods for r in m.records if r.metric == "loss")]
    means = f" (verdicts on small models: within {max(margins):.1%})" * (question.loss == "equal")
    console.print(
        f"{model.name}: {model.elements / 1e9:.2f} G parameters; {question.cluster.text}; "
        f"accelerators of {memory:.0f} GB; "
        f"{question.sequences} sequence{'s' * (question.sequences > 1)} of {model.tokens} tokens "
        f"per step; loss: {question.loss}{means}"
    )
    theirs, ours = search.best_with(plugin=False), search.best_with(plugin=True)
    by = "with ds_ckpt" if best.setting.sections else "DeepSpeed alone"
    simulated = [one for one in search.all if "step" in vars(one)]  # the shortest is among them
    over = best.step.seconds / min(one.step.seconds for one in simulated) - 1
    rank = f"within {over:.1%} of the fastest" if over > _LEAST else "the fastest"
    console.print(f"[bold]Chosen ({rank}):[/bold] {by}, {_line(search, best)}")
    if theirs is None or ours is None:
        console.print(f"{'With ds_ckpt' if ours is None else 'DeepSpeed alone'}: nothing fits")
    else:
        other = theirs if best.setting.sections else ours
        by = "DeepSpeed alone" if best.setting.sections else "With ds_ckpt"
        console.print(f"{by}: {_line(search, other)}")
        console.print(f"ds_ckpt {_difference(theirs, ours)}")
    console.print(
        f"Simulated. Steps within {TIE:.0%} are a tie: the closest to plain DeepSpeed is chosen. "
        "Costs, alternatives, sources: --details"
    )
    if details:
        _show_costs(best, console)
        _show_alternatives(search, console)
        console.print("\n[bold]Sources of the figures:[/bold]")
        for figure in sorted(figures(question), key=lambda figure: figure.kind):
            console.print(f"  {figure.kind}: {figure.what} {figure.value:.4g} ({figure.source})")


def _line(search: Search, one: PlanOption) -> str:
    return (
        f"{search.question.tokens / one.step.seconds:,.0f} tokens/s, {number(one.step.seconds)} s "
        f"per step, {one.needed_bytes / GIB:.1f} of {one.capacity_bytes / GIB:.1f} GiB: "
        f"{one.setting.describe()}"
    )


def _difference(theirs: PlanOption, ours: PlanOption) -> str:
    found: dict[str, list[str]] = {"saves": [], "costs": []}
    for before, after, words in (
        (theirs.step.seconds, ours.step.seconds, "s per step"),
        (theirs.step.link_bytes / 1e9, ours.step.link_bytes / 1e9, "GB over a node's link"),
        (theirs.needed_bytes / GIB, ours.needed_bytes / GIB, "GiB of memory"),
        (theirs.host_bytes / GIB, ours.host_bytes / GIB, "GiB of host memory per rank"),
    ):
        if abs(before - after) > _LEAST * before:
            change = f"{number(abs(before - after))} {words} ({number(before)} to {number(after)})"
            found["saves" if after < before else "costs"].append(change)
    method, (is_rounded, *_) = ours.setting.method, ours.setting.distance
    found["costs"] += [f"gradients rounded ({method.name})"] * is_rounded
    if method.betas:
        found["costs"].append("AdamW's betas changed to {:g} and {:g}".format(*method.betas))
    parts = [f"{verb} {', '.join(changes)}" for verb, changes in found.items() if changes]
    return "; ".join(parts) or "changes neither time nor bytes nor memory"


def _show_costs(best: PlanOption, console: Console) -> None:
    console.print("\n[bold]Costs of the chosen:[/bold]")
    blocks = ", ".join(f"{n} x {word}" for word, n in Counter(best.plan.choices).items())
    console.print(f"  blocks: {blocks}; {best.host_bytes / GIB:.1f} GiB of host memory per rank")
    console.print(f"  the accelerator waits for {best.step.waits_s:.3g} s of the step")
    busy_s = {f"{of}: {kind}": s for (of, kind), s in best.step.busy_s.items()}
    sent = ("GB over a node's link", best.step.sent_bytes, 1e9)
    for title, values, unit in (("s", busy_s, 1.0), sent, ("GiB of memory", best.memory, GIB)):
        shown = {what: n for what, n in values.items() if n > _LEAST * sum(values.values())}
        table = Table.grid(Column(), Column(justify="right"), padding=(0, 2), pad_edge=False)
        for what, n in sorted(shown.items()):
            table.add_row(f"  {what}", f"{n / unit:,.3f} {title}")
        console.print(table)


def _show_alternatives(search: Search, console: Console) -> None:
    console.print("\n[bold]Alternatives, each with its best settings:[/bold]")
    found: dict[str, list[PlanOption]] = {placement(kind): [] for kind in search.kinds}
    found |= {f"gradients {method.name}": [] for method in search.methods}
    for one in search.all:
        found[placement(one.setting.weights)].append(one)
        found[f"gradients {one.setting.method.name}"].append(one)
    fitting = [(name, best_of(some)) for name, some in found.items() if some]
    for name, one in sorted(fitting, key=lambda item: item[1].step.seconds):
        console.print(f"  {name}: {_line(search, one)}")
    if left := [name for name, some in found.items() if not some]:
        console.print(f"  nothing fits: {', '.join(left)}")
    if search.refused:
        names = ", ".join(method.name for method in search.refused)
        console.print(f"  not tried, as verdicts do not allow them (--loss any): {names}")
