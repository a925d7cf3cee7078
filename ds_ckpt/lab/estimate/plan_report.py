"""A plan as plain data and in tables: the best, its alternatives, and the sources of figures."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_ckpt.lab.estimate.search import (
    OWN_FIGURES,
    ZERO1,
    Candidate,
    Question,
    Search,
    best_of,
    deepspeed_file,
    placement,
)
from ds_ckpt.lab.hosts.hardware import Figure
from ds_ckpt.telemetry.units import GIB, columns

_NOTHING = 5e-4
"""Share of a step that is not worth a word."""


def alternatives(search: Search) -> dict[str, Candidate | None]:
    """Return the best of each placement of weights and of each method, and of ZeRO-1."""
    found: dict[str, list[Candidate]] = {placement(kind): [] for kind in search.kinds}
    found |= {f"gradients {method.name}": [] for method in search.methods}
    for one in search.all:
        found[placement(one.setting.weights)].append(one)
        found[f"gradients {one.setting.method.name}"].append(one)
    found[f"{ZERO1}, a baseline"] = search.zero1
    return {name: best_of(some) if some else None for name, some in found.items()}


def figures(question: Question) -> list[Figure]:
    """List the figures that the plan rests on."""
    cluster = question.cluster
    return [*chain(cluster.device.figures(), (cluster.rate, cluster.latency), OWN_FIGURES)]


def content(search: Search, best: Candidate) -> dict[str, Any]:
    """Return the whole answer as plain data: seconds, bytes, tokens a second."""
    question = search.question
    model = question.model
    return {
        "model": model.name,
        "parameters": model.elements,
        "blocks": len(model.blocks),
        "tokens": model.tokens,
        "cluster": question.cluster.text,
        "sequences": question.sequences,
        "loss": question.loss,
        "best": _plain(question, best),
        "deepspeed": deepspeed_file(question, best.setting, best.plan),
        "alternatives": {
            name: one and _plain(question, one) for name, one in alternatives(search).items()
        },
        "not_tried": [method.name for method in search.refused],
        "figures": [
            # JSON has no infinity: the rate between nodes of a single one
            {
                "trust": f.kind,
                "what": f.what,
                "value": f.value if math.isfinite(f.value) else None,
                "source": f.source,
            }
            for f in figures(question)
        ],
    }


def _plain(question: Question, one: Candidate) -> dict[str, Any]:
    setting, step = one.setting, one.step
    return {
        "setting": setting.describe(),
        "policy": setting.policy,
        "blocks": dict(Counter(one.plan.choices)),
        "offload": setting.offload,
        "weights": setting.weights,
        "gradients": setting.method.name,
        "betas": setting.method.betas,
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
        "host_bytes": one.host_bytes,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print the answer that `content` returned."""
    best, loss = found["best"], found["loss"]
    console.print(
        f"{found['model']}: {found['parameters'] / 1e9:.2f} G parameters, {found['blocks']} "
        f"blocks, sequences of {found['tokens']} tokens; {found['cluster']}; "
        f"{found['sequences']} sequences "
        f"({found['sequences'] * found['tokens'] / 1e6:.2f} M tokens) a step; "
        f"loss: {loss if isinstance(loss, str) else f'{100 * loss:g}%'}"
    )
    console.print(f"\n[bold]Best:[/bold] {best['setting']}")
    console.print(
        f"  {best['tokens_per_s']:,.0f} tokens/s, {best['step_s']:.3g} s a step; "
        f"{best['needed_bytes'] / GIB:.1f} of {best['capacity_bytes'] / GIB:.1f} GiB"
        f" (90% of the accelerator's), {best['host_bytes'] / GIB:.1f} GiB of host memory a rank"
    )
    if best["betas"]:
        b1, b2 = best["betas"]
        console.print(f"  with AdamW's betas {b1:g} and {b2:g}, as in its verdicts")
    if best["policy"] == "budget":
        console.print("  " + ", ".join(f"{n} x {word}" for word, n in best["blocks"].items()))
    parts = ("s on the longest path", best["parts_s"], 1.0)
    sent = ("GB over a node's link", best["sent_bytes"], 1e9)
    for title, values, unit in (parts, sent, ("GiB of memory", best["memory_bytes"], GIB)):
        table = Table("", title, box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for what, value in sorted(values.items(), key=lambda item: -item[1]):
            if value > _NOTHING * sum(values.values()):
                table.add_row(f"  {what}", f"{value / unit:,.3f}")
        if table.row_count:
            console.print(table)
    console.print("\n[bold]Alternatives, each with its best settings:[/bold]")
    fitting = {name: one for name, one in found["alternatives"].items() if one is not None}
    rows, settings = [("", "s a step", "tokens/s", "GiB")], ["settings"]
    for name, one in sorted(fitting.items(), key=lambda item: item[1]["step_s"]):
        memory, rate = f"{one['needed_bytes'] / GIB:.1f}", f"{one['tokens_per_s']:,.0f}"
        rows.append((f"  {name}", f"{one['step_s']:.3g}", rate, memory))
        settings.append(one["setting"])
    for line, setting in zip(columns(rows).splitlines(), settings, strict=True):
        console.print(f"{line}  {setting}")
    if left := [name for name, one in found["alternatives"].items() if one is None]:
        console.print(f"  nothing fits: {', '.join(left)}")
    if found["not_tried"]:
        names = ", ".join(found["not_tried"])
        console.print(f"  not tried, as verdicts do not allow them (--loss any): {names}")
    console.print("\n[bold]Sources of the figures:[/bold]")
    for figure in sorted(found["figures"], key=lambda f: f["trust"]):
        value = "none" if figure["value"] is None else f"{figure['value']:.4g}"
        console.print(f"  {figure['trust']}: {figure['what']} {value} ({figure['source']})")
