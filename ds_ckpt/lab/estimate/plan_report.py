"""A plan in words and tables: the best, those near it and why they were beaten, what would change.

And how far the figures can be trusted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ds_ckpt.lab.estimate.baselines import ZERO1, best_zero1
from ds_ckpt.lab.estimate.search import (
    BUDGET,
    HPZ,
    OWN_FIGURES,
    TIE,
    ZERO3,
    Candidate,
    Question,
    Search,
    Setting,
    deepspeed_file,
)
from ds_ckpt.lab.estimate.simulate import RESOURCES, timeline
from ds_ckpt.lab.hosts.hardware import Figure
from ds_ckpt.lab.report import charts
from ds_ckpt.telemetry.units import GIB

NETWORK, MEMORY = (0.25, 4.0), 2.0
"""Times what there is, asked for what would change the choice."""
WEIGHTS = {ZERO3: "ZeRO-3's weights", HPZ: "hpZ", ZERO1: ZERO1}
_NOTHING = 5e-4
"""Of a step: what is not worth a word."""


def words(setting: Setting) -> str:
    """A setting on one line."""
    policy = f"checkpointing {setting.policy}" + ", inputs offloaded" * setting.offload
    where = WEIGHTS.get(setting.weights, f"resident, {setting.weights}")
    batch = f"micro-batch {setting.sequences} x {setting.micro_steps}"
    return f"{policy}; {where}; gradients {setting.method.name}; {batch}"


def neighbours(search: Search, best: Candidate) -> Iterator[tuple[str, Candidate | None]]:
    """What changes, and the best with one thing changed; None: it does not fit."""
    at = best.setting
    kept = (at.sequences, at.weights, at.method)
    for policy in ("none", "block", "attention", "mlp"):
        if policy != at.policy and policy in search.words(at.sequences):
            yield f"checkpointing {policy}", search.alike(at, policy)
    if best.plan.recompute_s or at.offload:
        change = "inputs not offloaded" if at.offload else "inputs offloaded"
        yield change, search.mixture(*kept, not at.offload)
    for kind in search.kinds:
        if kind != at.weights and at.method in search.methods_with(kind):
            where = WEIGHTS.get(kind, f"weights resident, {kind}")
            yield where, search.mixture(at.sequences, kind, at.method, at.offload)
    for method in search.methods_with(at.weights):
        if method != at.method:
            other = search.mixture(at.sequences, at.weights, method, at.offload)
            yield f"gradients {method.name}", other
    sizes = list(search.micro_batches())
    place = sizes.index(at.sequences)
    for n in (*sizes[max(place - 1, 0) : place], *sizes[place + 1 : place + 2]):
        name = f"micro-batch {n} x {search.each // n}"
        yield name, search.mixture(n, at.weights, at.method, at.offload)


def beaten_by(best: Candidate, other: Candidate | None) -> str:
    """Why a neighbour is not the best."""
    if other is None:
        return "does not fit"
    if not other.fits:
        more = other.needed_bytes - other.capacity_bytes
        return f"needs {more / GIB:.1f} GiB more" if more > 0 else "host memory is too small"
    least = _NOTHING * best.step.seconds
    kinds = best.step.parts_s.keys() | other.step.parts_s.keys()
    differ = {k: other.step.parts_s.get(k, 0.0) - best.step.parts_s.get(k, 0.0) for k in kinds}
    most = sorted((k for k in kinds if abs(differ[k]) > least), key=lambda k: -abs(differ[k]))
    tie = "a tie: " if other.step.seconds <= (1 + TIE) * best.step.seconds else ""
    return tie + (", ".join(f"{kind} {differ[kind]:+.3g} s" for kind in most[:3]) or "as fast")


def would_change(search: Search, best: Candidate) -> Iterator[str]:
    """What a faster or slower link, more memory and ZeRO-1 would lead to."""
    question = search.question
    link = question.machine.network
    for factor in NETWORK if question.machine.hosts > 1 else ():
        other = search.best(replace(link, bytes_per_s=factor * link.bytes_per_s))
        rate = f"{factor * question.cluster.rate.value / 1e9:g} Gbit/s"
        yield f"Links of {rate}: {_compared(question, best, other)}"
    larger = Search(replace(question, memory=MEMORY)).best()
    memory = MEMORY * question.cluster.device["memory_bytes"] / 1e9
    yield f"{memory:g} GB of memory: {_compared(question, best, larger)}"
    rival = best_zero1(question)
    if rival is None:
        yield f"{ZERO1}, no candidate, does not fit"
        return
    faster = "faster" if (1 + TIE) * rival.step.seconds < best.step.seconds else "not faster"
    yield f"{ZERO1}, no candidate, is {faster}: {_compared(question, best, rival)}"


def _compared(question: Question, best: Candidate, other: Candidate) -> str:
    rate = f"{question.tokens / other.step.seconds:,.0f} tokens/s"
    if other.setting == best.setting:
        return f"the same choice, {rate}"
    return f"{words(other.setting)}: {rate}"


def figures(question: Question) -> dict[str, list[Figure]]:
    """What the plan stands on, by how far it can be trusted."""
    cluster = question.cluster
    everything = chain(cluster.device.figures(), (cluster.rate, cluster.latency), OWN_FIGURES)
    found: dict[str, list[Figure]] = {}
    for figure in everything:
        found.setdefault(figure.kind, []).append(figure)
    return found


def show(search: Search, best: Candidate, console: Console) -> None:
    """The whole answer."""
    question, step = search.question, best.step
    model = question.model
    loss = question.loss if isinstance(question.loss, str) else f"{100 * question.loss:g}%"
    console.print(
        f"{model.name}: {model.elements / 1e9:.2f} G parameters, {len(model.blocks)} blocks, "
        f"sequences of {model.tokens} tokens; {question.cluster.text}; {question.sequences} "
        f"sequences ({question.tokens / 1e6:.2f} M tokens) a step; loss: {loss}"
    )
    console.print(f"\n[bold]Best:[/bold] {words(best.setting)}")
    console.print(
        f"  {question.tokens / step.seconds:,.0f} tokens/s, {step.seconds:.3g} s a step; "
        f"{best.needed_bytes / GIB:.1f} of {best.capacity_bytes / GIB:.1f} GiB"
        f" (90% of the accelerator's), {best.offloaded_bytes / GIB:.1f} GiB offloaded a process"
    )
    if betas := best.setting.method.betas:
        console.print(
            f"  with AdamW's betas {betas[0]:g} and {betas[1]:g}, as its verdicts have them"
        )
    if best.setting.policy == BUDGET:
        console.print("  " + ", ".join(_counted(best)))
    parts = ("s on the longest path", step.parts_s, 1.0)
    sent = ("GB over a host's link", step.sent_bytes, 1e9)
    for title, values, unit in (parts, sent, ("GiB of memory", best.memory, GIB)):
        table = Table("", title, box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for what, value in sorted(values.items(), key=lambda item: -item[1]):
            if value > _NOTHING * sum(values.values()):
                table.add_row(f"  {what}", f"{value / unit:,.3f}")
        if table.row_count:
            console.print(table)
    console.print("\n[bold]Beaten, with one thing changed:[/bold]")
    table = Table("", "s a step", "tokens/s", "GiB", "against the best", box=None, pad_edge=False)
    found = [(change, one) for change, one in neighbours(search, best)]
    slow = float("inf")
    found.sort(key=lambda pair: pair[1].step.seconds if pair[1] and pair[1].fits else slow)
    for change, one in found:
        cells = ["", "", ""]
        if one is not None:
            seconds = f"{one.step.seconds:.3g}" if one.fits else ""
            rate = f"{question.tokens / one.step.seconds:,.0f}" if one.fits else ""
            cells = [seconds, rate, f"{one.needed_bytes / GIB:.1f}"]
        table.add_row(Padding.indent(change, 2), *cells, beaten_by(best, one))
    console.print(table)
    if search.refused:
        names = ", ".join(method.name for method in search.refused)
        console.print(f"  not tried, as verdicts do not allow them (--loss any): {names}")
    console.print("\n[bold]What would change it:[/bold]")
    for line in would_change(search, best):
        console.print(f"  {line}")
    console.print("\n[bold]Where the figures are from:[/bold]")
    for kind, some in figures(question).items():
        for figure in some:
            console.print(f"  {kind}: {figure.what} {figure.value:.4g} ({figure.source})")


def picture(candidate: Candidate) -> list[charts.Panel]:
    """Its step over time: what occupies each resource."""
    found = timeline(candidate.machine, candidate.blocks, candidate.way)
    seen = [s for s in found if s.end_s > s.start_s]
    rows = [name for name in RESOURCES if any(s.resource == name for s in seen)]
    kinds: dict[str, list[tuple[int, float, float]]] = {}
    for s in seen:
        row = rows.index(s.resource)
        kinds.setdefault(s.kind, []).append((row, s.start_s, s.end_s - s.start_s))
    return [charts.Strips(rows, "s since the optimizer of the step before", kinds)]


def content(search: Search, best: Candidate) -> dict[str, Any]:
    """The whole answer as plain data: seconds, bytes, tokens a second."""
    question = search.question
    others = [
        {"change": change, "fits": one is not None and one.fits, "why": beaten_by(best, one)}
        | (_plain(question, one) if one is not None else {})
        for change, one in neighbours(search, best)
    ]
    return {
        "model": question.model.name,
        "parameters": question.model.elements,
        "tokens": question.model.tokens,
        "cluster": question.cluster.text,
        "sequences": question.sequences,
        "loss": question.loss,
        "best": _plain(question, best),
        "deepspeed": deepspeed_file(question, best.setting, best.plan),
        "beaten": others,
        "not_tried": [method.name for method in search.refused],
        "would_change": list(would_change(search, best)),
        "figures": [
            {"trust": kind, "what": f.what, "value": _or_null(f.value), "source": f.source}
            for kind, some in figures(question).items()
            for f in some
        ],
    }


def _or_null(value: float) -> float | None:
    """JSON knows no infinity: the rate between nodes of a single one."""
    return value if math.isfinite(value) else None


def _plain(question: Question, one: Candidate) -> dict[str, Any]:
    setting, step = one.setting, one.step
    return {
        "policy": setting.policy,
        "blocks": dict(Counter(one.plan.choices)),
        "offload": setting.offload,
        "weights": setting.weights,
        "gradients": setting.method.name,
        "micro_batch": setting.sequences,
        "micro_steps": setting.micro_steps,
        "tokens_per_s": question.tokens / step.seconds,
        "step_s": step.seconds,
        "parts_s": dict(step.parts_s),
        "busy_s": dict(step.busy_s),
        "sent_bytes": dict(step.sent_bytes),
        "memory_bytes": one.memory,
        "needed_bytes": one.needed_bytes,
        "capacity_bytes": one.capacity_bytes,
        "offloaded_bytes": one.offloaded_bytes,
    }


def _counted(best: Candidate) -> list[str]:
    return [f"{n} x {word}" for word, n in Counter(best.plan.choices).items()]
