"""A plan as plain data, and its tables: the best, its neighbours, ZeRO-1, and the figures used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_ckpt.lab.estimate.search import (
    OWN_FIGURES,
    TIE,
    ZERO1,
    Candidate,
    Question,
    Search,
    best_of,
    deepspeed_file,
    placement,
)
from ds_ckpt.lab.hosts.hardware import Figure
from ds_ckpt.telemetry.units import GIB

_NOTHING = 5e-4
"""Share of a step that is not worth a word."""


def neighbours(search: Search, best: Candidate) -> Iterator[tuple[str, Candidate | None]]:
    """Yield the best with one thing changed (None: it does not fit), and ZeRO-1."""
    at = best.setting
    for policy in ("none", "block", "attention", "mlp"):
        if policy != at.policy and policy in search.policies(at.sequences):
            yield f"checkpointing {policy}", search.uniform(at, policy)
    if best.plan.recompute_s or at.offload:
        change = "inputs not offloaded" if at.offload else "inputs offloaded"
        yield change, search.mixture(at.sequences, at.weights, at.method, not at.offload)
    for kind in search.kinds:
        if kind != at.weights and at.method in search.methods_with(kind):
            other = search.mixture(at.sequences, kind, at.method, at.offload)
            yield placement(kind), other
    for method in search.methods_with(at.weights):
        if method != at.method:
            other = search.mixture(at.sequences, at.weights, method, at.offload)
            yield f"gradients {method.name}", other
    sizes = list(search.micro_batches())
    place = sizes.index(at.sequences)
    for n in (*sizes[max(place - 1, 0) : place], *sizes[place + 1 : place + 2]):
        other = search.mixture(n, at.weights, at.method, at.offload)
        yield f"micro-batch {n} x {search.each // n}", other
    yield f"{ZERO1}, a baseline", best_of(search.zero1) if search.zero1 else None


def difference(best: Candidate, other: Candidate | None) -> str:
    """Name the parts of the step in which another candidate differs from the best."""
    if other is None:
        return "does not fit"
    if not other.fits:
        more = other.needed_bytes - other.capacity_bytes
        return f"needs {more / GIB:.1f} GiB more" if more > 0 else "host memory is too small"
    least = _NOTHING * best.step.seconds
    kinds = best.step.parts_s.keys() | other.step.parts_s.keys()
    differ = {k: other.step.parts_s.get(k, 0.0) - best.step.parts_s.get(k, 0.0) for k in kinds}
    most = sorted((k for k in kinds if abs(differ[k]) > least), key=lambda k: -abs(differ[k]))
    tie = "a tie: " if abs(other.step.seconds / best.step.seconds - 1) <= TIE else ""
    return tie + (", ".join(f"{kind} {differ[kind]:+.3g} s" for kind in most[:3]) or "as fast")


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
        "neighbours": [
            {
                "change": change,
                "fits": one is not None and one.fits,
                "difference": difference(best, one),
                **(_plain(question, one) if one is not None else {}),
            }
            for change, one in neighbours(search, best)
        ],
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
    console.print("\n[bold]With one thing changed:[/bold]")
    table = Table("", "s a step", "tokens/s", "GiB", "against the best", box=None, pad_edge=False)
    fitting = sorted(found["neighbours"], key=lambda n: n["step_s"] if n["fits"] else math.inf)
    for one in fitting:
        seconds = f"{one['step_s']:.3g}" if one["fits"] else ""
        rate = f"{one['tokens_per_s']:,.0f}" if one["fits"] else ""
        memory = f"{one['needed_bytes'] / GIB:.1f}" if "needed_bytes" in one else ""
        table.add_row(f"  {one['change']}", seconds, rate, memory, one["difference"])
    console.print(table)
    if found["not_tried"]:
        names = ", ".join(found["not_tried"])
        console.print(f"  not tried, as verdicts do not allow them (--loss any): {names}")
    console.print("\n[bold]Sources of the figures:[/bold]")
    for figure in sorted(found["figures"], key=lambda f: f["trust"]):
        value = "none" if figure["value"] is None else f"{figure['value']:.4g}"
        console.print(f"  {figure['trust']}: {figure['what']} {value} ({figure['source']})")
