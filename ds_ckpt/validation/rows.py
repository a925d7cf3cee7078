"""A comparison in words: the cells of a table, limits for a guard, what the numbers hold for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ds_ckpt.config.verdicts import with_leeway
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.compare import Comparison

COLUMNS = (
    ("configuration", "file"),
    ("verdict", "against dense training of the same seeds"),
    ("difference", "mean and 90% interval; more than 0 is worse"),
    ("dense", "held-out, at the end"),
    ("compressed", "held-out, at the end"),
    ("fewer bytes", "of gradients a compressed step, 16 bits"),
    ("to dense's end", "steps, bytes and time in shares of dense training's"),
    ("left behind", "largest compression error and residual norm seen"),
)


def row(one: Comparison) -> list[str]:
    """The cells of COLUMNS."""
    return [
        one.candidate.name,
        one.verdict_words(),
        _difference(one),
        _result(one, one.dense),
        _result(one, one.ours),
        f"{one.fewer_bytes:.2f}x" if one.candidate.lossy else "",
        _reached(one),
        f"{one.left.error:.3f}, {one.left.residual_norm:.2f}" if one.left else "",
    ]


def heading(one: Comparison) -> str:
    """The task with what runs were made of."""
    spec, task = one.plan.task.spec, one.plan.task
    who = "virtual workers" if one.mode == "virtual" else "ZeRO-3 processes"
    return (
        f"{spec.words()}: {task.model}; {spec.world} {who}, {spec.steps} steps, "
        f"AdamW {spec.learning_rate:g}"
    )


def _difference(one: Comparison) -> str:
    if one.diverged:
        count = len(one.diverged)
        return f"{count} of {len(one.differences)} runs diverged"
    if not one.candidate.lossy:
        return (
            "losses and weights equal to the bit" if one.verdict == "identical" else "bits differ"
        )
    if one.interval is None:
        return "one seed has no interval"
    unit = "%" if one.metric == "loss" else " points"
    mean, low, high = (100 * v for v in (one.interval.mean, one.interval.low, one.interval.high))
    return f"{mean:+.2f}{unit} ({low:+.2f} to {high:+.2f})"


def _result(one: Comparison, value: float) -> str:
    if not math.isfinite(value):
        return ""
    if one.metric == "accuracy":
        return f"{value:.1%}"
    return f"{value:.4f} (perplexity {math.exp(min(value, 700)):.3f})"


def _reached(one: Comparison) -> str:
    if not one.candidate.lossy:
        return ""
    there, of = one.reached.runs
    found = one.reached
    if found.steps is None or found.sent_bytes is None or found.seconds is None:
        return f"not reached in {of - there} of {of} runs"
    return f"{found.steps:.2f}, {found.sent_bytes:.2f}, {found.seconds:.2f}"


def guards(comparisons: Sequence[Comparison]) -> list[str]:
    """The limits to write into a configuration, by candidate."""
    found: dict[str, list[ResidualStats]] = {}
    for one in comparisons:
        if one.left is not None:
            seen = ResidualStats(error=one.left.error, residual_norm=one.left.residual_norm)
            found.setdefault(one.candidate.name, []).append(seen)
    lines = []
    for name, lefts in found.items():
        limit = with_leeway(
            ResidualStats(
                error=max(left.error for left in lefts),
                residual_norm=max(left.residual_norm for left in lefts),
            )
        )
        lines.append(
            f'{name}: "guard": {{"action": "warn", "error": {limit.error:.3g}, '
            f'"residual_norm": {limit.residual_norm:.3g}}}'
        )
    return lines


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What the numbers hold for."""
    found = []
    for one in comparisons:
        configured = one.candidate.settings.start_step
        if one.candidate.lossy and configured > one.warm_up:
            found.append(
                f"{one.candidate.name}: its dense warm-up of {configured} steps was cut to "
                f"{one.warm_up} in runs of {one.plan.task.spec.steps}"
            )
        found += _idle_rules(one)
    if any(one.mode == "virtual" for one in comparisons):
        found.append(
            "virtual workers have no network: time is their own CPU seconds, one worker's share, "
            "and the bytes of gradients over the link that was named"
        )
    found.append(
        "a verdict holds for this task, model and length of run; validate your own with --data, "
        "--model, --steps"
    )
    return sorted(set(found), key=found.index)


def _idle_rules(one: Comparison) -> list[str]:
    """Rules that took no parameter of the task's model, so that nothing was found out of them."""
    try:
        one.candidate.settings.choose().check(one.plan.task.shapes)
    except UnsupportedError as error:
        model = one.plan.task.model
        return [f"{one.candidate.name} in {model}: {p.where}: {p.why}" for p in error.problems]
    return []


def about(one: Comparison) -> str:
    """Day and versions."""
    versions: Any = one.about.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{one.about.get('date', '')}: {named}"
