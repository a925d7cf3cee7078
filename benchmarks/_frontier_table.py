"""The table of `frontier.py`: bytes, losses, and paired gaps with their intervals."""

from __future__ import annotations

import statistics
from typing import Any

from ds_ckpt.validation.statistics import paired

ACCUMULATION = 8


def table(lines: list[dict[str, Any]], steps: int) -> str:
    """Markdown, one row a method, in the order of bytes in a step.

    Bytes of the whole run count warm-up steps as dense ones. At accumulation 8 an exchange with
    residuals runs once where ZeRO-3's runs 8 times.
    """
    done: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        if line["steps"] == steps:
            done.setdefault(line["cell"], {})[line["seed"]] = line
    dense = done.get("dense", {})
    if not dense:
        return "no dense run of this length yet"
    rows = [_row(name, runs, dense, steps) for name, runs in done.items()]
    rows.sort(key=lambda row: -row[0])
    head = [
        "| method | bits an element | fewer bytes a step | at accumulation 8 | whole run"
        " | held-out loss | against dense | 95% interval | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(text for _, text in rows)])


def _warm_up_of(settings: dict[str, Any]) -> int:
    """Runs on record have the setting's former name."""
    return int(settings.get("warmup_steps", settings.get("start_step", 0)))


def _row(
    name: str, runs: dict[int, dict[str, Any]], dense: dict[int, dict[str, Any]], steps: int
) -> tuple[float, str]:
    some, reference = next(iter(runs.values())), next(iter(dense.values()))
    sent, whole = some["sixteen_bit_bytes"], reference["sixteen_bit_bytes"]
    world = some["task"]["world"]
    bits = 8 * sent / (some["parameters"] * (world - 1) / world)
    warm_up = 0 if name == "dense" else min(_warm_up_of(some["settings"]), steps)
    in_run = steps * whole / (warm_up * whole + (steps - warm_up) * sent)
    losses = {seed: run["heldout"][-1][1] for seed, run in runs.items() if not run["diverged"]}
    pairs = [(losses[s], dense[s]["heldout"][-1][1]) for s in sorted(losses) if s in dense]
    held = 1 if name == "dense" or not some["settings"]["error_feedback"] else ACCUMULATION
    cells = [name, f"{bits:.2f}", _times(whole / sent), _times(held * whole / sent)]
    cells += [_times(in_run)]
    if len(losses) < len(runs) or not pairs:
        return sent, _line([*cells, "diverged" if len(losses) < len(runs) else "", "", "", "0"])
    cells += [_each([loss for loss, _ in pairs], ".4f")]
    gaps = [ours / theirs - 1 for ours, theirs in pairs]
    interval = ""
    if len(gaps) > 1 and name != "dense":
        found = paired(gaps)
        interval = f"{found.low:+.2%} to {found.high:+.2%}"
    cells += [_each(gaps, "+.2%") if name != "dense" else "", interval]
    return sent, _line([*cells, str(len(gaps))])


def _each(values: list[float], form: str) -> str:
    """Their mean, and the values of several."""
    each = f" ({', '.join(format(v, form) for v in values)})" if len(values) > 1 else ""
    return format(statistics.fmean(values), form) + each


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
