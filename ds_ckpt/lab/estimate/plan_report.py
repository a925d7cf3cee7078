"""A plan in five lines, and on request its costs, its alternatives and the sources of figures."""

from collections import Counter, defaultdict

from rich.console import Console
from rich.table import Column, Table

from ds_ckpt.config.verdicts import refusing
from ds_ckpt.lab.estimate.search import (
    HOST_BYTES,
    HPZ,
    OWN_FIGURES,
    TIE,
    PlanOption,
    Question,
    Search,
    best_of,
    placement,
)
from ds_ckpt.lab.hosts.hardware import Constant
from ds_ckpt.lab.workload import RESIDENT
from ds_ckpt.telemetry.units import GIB, number

KINDS = "with ds_ckpt", "DeepSpeed alone"
_ON_HOST = f"GiB of a node's host memory ({HOST_BYTES / GIB:.0f} assumed)"
_LEAST = 5e-4
"""Smallest share of a sum that is shown."""


def figures(question: Question) -> list[Constant]:
    """List the figures that the plan rests on."""
    cluster = question.cluster
    return [*cluster.device.figures(), cluster.rate, cluster.latency, *OWN_FIGURES]


def print_plan(
    search: Search, best: PlanOption, console: Console, *, details: bool, is_assumed: bool
) -> None:
    """Print the best setting, the best of the other kind, and their difference, in five lines.

    `is_assumed`: the batch is the default one.
    """
    question, model, n = search.question, search.question.model, search.question.sequences
    batch = f"{n} sequence{'s' * (n > 1)} of {model.tokens} tokens per step"
    batch += " (assumed; yours: --batch)" * is_assumed
    device, text = question.cluster.device.name, question.cluster.text
    size = f" ({device})" * (device.replace(" ", "") not in text.replace(" ", ""))
    console.print(f"{model.name} on {text}{size}; {batch}")
    other, is_ours = search.other(best), bool(best.setting.sections)
    simulated = [one for one in search.all if "step" in vars(one)]  # the shortest is among them
    over = best.step.seconds / min(one.step.seconds for one in simulated) - 1
    title = "Fastest" if over <= _LEAST else "Chosen"
    kind, other_kind = KINDS if is_ours else KINDS[::-1]
    console.print(f"{title}: {kind}, {_line(search, best)}", style="bold")
    words = "nothing fits" if other is None else _line(search, other)
    console.print(f"{other_kind[0].upper()}{other_kind[1:]}: {words}")
    if other is not None:
        pair = (other, best) if is_ours else (best, other)
        console.print(f"ds_ckpt {_difference(search, *pair)}")
    hides = "; larger batches hide slow links" * (question.cluster.nodes > 1)
    off = f" ({over:.1%} slower than the fastest found)" * (over > _LEAST)
    console.print(
        f"Simulated{hides}. Within {TIE:.0%} the closest to plain DeepSpeed is chosen{off}. "
        "More: --details"
    )
    if details:
        _show_question(search, console)
        _show_costs(best, console)
        _show_alternatives(search, console)
        _show_left_out(search, console)
        console.print("\nSources of the figures:", style="bold")
        for figure in sorted(figures(question), key=lambda figure: figure.kind):
            console.print(f"  {figure.kind}: {figure.what} {figure.value:.4g} ({figure.source})")


def _line(search: Search, one: PlanOption) -> str:
    return (
        f"{search.question.tokens / one.step.seconds:,.0f} tokens/s, {one.needed_bytes / GIB:.1f} "
        f"of {one.capacity_bytes / GIB:.1f} GiB: {one.setting.describe()}"
    )


def _difference(search: Search, theirs: PlanOption, ours: PlanOption) -> str:
    found: dict[str, list[str]] = {"saves": [], "costs": []}
    for before, after, words in (
        (theirs.step.seconds, ours.step.seconds, "s per step"),
        (theirs.step.link_bytes / 1e9, ours.step.link_bytes / 1e9, "GB over a node's link"),
        (theirs.needed_bytes / GIB, ours.needed_bytes / GIB, "GiB of memory"),
        (theirs.node_bytes / GIB, ours.node_bytes / GIB, _ON_HOST),
    ):
        if (change := abs(before - after)) > 0.005 * before:  # else 0%
            share = f" ({change / before:.0%})" if before and "GiB" not in words else ""
            found["saves" if after < before else "costs"].append(f"{number(change)} {words}{share}")
    method, (is_rounded, *_) = ours.setting.method, ours.setting.distance
    if is_rounded:
        margin = max((r.margin for r in method.records if r.metric == "loss"), default=0.0)
        judged = f"loss within {margin:.1%} on small models"
        judged = judged if search.question.loss == "equal" else "any loss"
        found["costs"].append(f"rounded gradients ({judged})")
        if steps := method.settings.warmup_steps if method.settings else 0:
            step_s = search.during_warm_up(ours).step.seconds
            found["costs"].append(f"a warm-up of {steps} steps of {number(step_s)} s")
    if method.betas:
        found["costs"].append("other AdamW betas")
    parts = [f"{verb} {', '.join(changes)}" for verb, changes in found.items() if changes]
    return "; ".join(parts) or "changes neither time nor bytes nor memory"


def _show_question(search: Search, console: Console) -> None:
    question, model = search.question, search.question.model
    memory_gb = question.cluster.device["memory_bytes"] / 1e9
    console.print("\nQuestion:", style="bold")
    console.print(
        f"  {model.elements / 1e9:.3g} G parameters, {model.trained / 1e9:.3g} trained; GPUs of "
        f"{memory_gb:.0f} GB; {question.tokens:,} tokens per step, "
        f"{search.each * model.tokens:,} a GPU; loss: {question.loss}"
    )


def _show_costs(best: PlanOption, console: Console) -> None:
    console.print("\nCosts of the chosen settings:", style="bold")
    blocks = ", ".join(f"{n} x {word}" for word, n in Counter(best.plan.choices).items())
    console.print(f"  blocks: {blocks}; {best.node_bytes / GIB:.1f} {_ON_HOST}")
    console.print(
        f"  the accelerator waits for {best.step.waits_s:.3g} of {best.step.seconds:.3g} s"
    )
    busy_s = {f"{of}: {kind}": s for (of, kind), s in best.step.busy_s.items()}
    sent = ("GB over a node's link", best.step.sent_bytes, 1e9)
    for title, values, unit in (("s", busy_s, 1.0), sent, ("GiB of memory", best.memory, GIB)):
        shown = {what: n for what, n in values.items() if n > _LEAST * sum(values.values())}
        table = Table.grid(Column(), Column(justify="right"), padding=(0, 2), pad_edge=False)
        for what, n in sorted(shown.items()):
            table.add_row(f"  {what}", f"{n / unit:,.3f} {title}")
        console.print(table)


def _show_alternatives(search: Search, console: Console) -> None:
    console.print("\nAlternatives, by weights and gradients:", style="bold")
    found: dict[tuple[str, str, bool], list[PlanOption]] = defaultdict(list)
    for one in search.all:
        is_ours = bool(one.setting.sections)
        found[one.setting.weights, one.setting.method.name, is_ours].append(one)
    for one in sorted(map(best_of, found.values()), key=lambda one: one.step.seconds):
        console.print(f"  {_line(search, one)}")


def _show_left_out(search: Search, console: Console) -> None:
    """Print one line with a reason for whatever is no alternative."""
    console.print("\nLeft out, with the least memory that any setting needs:", style="bold")
    used = {(one.setting.weights, one.setting.method.name) for one in search.all}
    for kind, method in search.pairs():
        if (kind, method.name) not in used:
            gradients = f"; gradients {method.name}" * bool(method.section)
            console.print(
                f"  {placement(kind)}{gradients}: {_shortage(search.least(kind, method))}"
            )
    alone = "nothing is sent between nodes: there is one"
    why = dict.fromkeys([HPZ, *RESIDENT], alone)
    if search.machine.hosts > 1:
        why[HPZ] = "a node's copy is divided among its GPUs, and a node has one: this is ZeRO-3"
    for kind, reason in why.items():
        if kind not in search.kinds:
            console.print(f"  {placement(kind)}: {reason}")
    console.print("  compressed gradients with ZeRO-1, ZeRO-2 or hpZ: not supported")
    for method in search.refused:
        found = (
            f"{r.verdict} in {r.task.split(',')[0]}, {r.workers} workers"
            for r in refusing(method.records)
        )
        verdict = next(found, "no verdict with so many workers")
        console.print(f"  gradients {method.name}: {verdict} (allowed by --loss any)")
    sizes = [one.setting.sequences for one in search.all]
    if larger := [n for n in search.micro_batches() if n > max(sizes)]:
        console.print(f"  micro-batches of {larger[0]} or more sequences: none fits")
    simulated = sum("step" in vars(one) for one in search.all)
    console.print(
        f"  {len(search.all) - simulated} of {len(search.all)} candidates are not simulated: "
        "computing or bytes alone take longer than another's step"
    )
    console.print("  ZeRO++, tensor and pipeline parallelism, offloaded optimizers: never tried")


def _shortage(one: PlanOption) -> str:
    """Return by how much the smallest candidate does not fit."""
    if (short := one.rounded_bytes - one.capacity_bytes) > 0:
        return f"needs {one.rounded_bytes / GIB:.1f} GiB, {short / GIB:.2f} more than fit"
    have = HOST_BYTES // one.machine.local / GIB
    return f"offloads {one.host_bytes / GIB:.0f} GiB per GPU, which may use {have:.0f} (a guess)"
