"""The table of `frontier.py`: bytes, losses, and paired gaps with their intervals."""

import statistics
from typing import Any

from ds_ckpt.lab.validate.equivalence import paired

ACCUMULATION = 8


def table(lines: list[dict[str, Any]], steps: int) -> str:
    """Markdown: for each text, number of workers, width and batch one row a method, in the order of
    bytes in a step.

    Warm-up steps count as dense ones in the bytes of the full run, unless they are sent in few
    bits. At accumulation 8 an exchange with residuals runs once where ZeRO-3's runs 8 times. Where
    dense training has run in several ways, each is held against the one of its own b1 and rate and
    against the best of them.
    """
    by_task: dict[tuple[str, int, int, int], dict[str, dict[int, dict[str, Any]]]] = {}
    for line in lines:
        if line["steps"] == steps:
            task = line["task"]
            width, world = task["hidden_size"], task["world"]
            kind = task.get("text", ""), width, world, world * task["sequences"]
            cells = by_task.setdefault(kind, {})
            cells.setdefault(line["cell"], {})[line["seed"]] = line
    several = len(by_task) > 1
    found = [
        (f"{_title(*kind)}\n\n" if several else "") + _table(done, steps)
        for kind, done in sorted(by_task.items())
        if any(map(_is_dense, done))
    ]
    return "\n\n".join(found) or "no dense run of this length yet"


def _title(text: str, width: int, workers: int, batch: int) -> str:
    sizes = f"{workers} workers, hidden size {width}, {batch} sequences"
    return f"{sizes}, {text}" if text else sizes


def _table(done: dict[str, dict[int, dict[str, Any]]], steps: int) -> str:
    dense = {name: runs for name, runs in done.items() if _is_dense(name)}
    most = max(map(len, dense.values()))
    whole = [name for name, runs in dense.items() if len(runs) == most]
    best = min(whole, key=lambda name: statistics.fmean(_losses(dense[name]).values()))
    alike = {_recipe(runs): name for name, runs in dense.items()}
    rows = []
    for name, runs in done.items():
        theirs = [best] if len(dense) == 1 else [alike.get(_recipe(runs), ""), best]
        rows.append(_row(name, runs, done, theirs, steps))
    rows.sort(key=lambda row: -row[0])
    head = ["method", "bits per element", "fewer bytes per step", "at accumulation 8", "full run"]
    head += ["held-out loss"]
    for name in [best] if len(dense) == 1 else ["dense, b1 and rate alike", best]:
        head += [f"against {name}", "95% interval"]
    head += ["seeds"]
    return "\n".join([_line(head), "|" + "---|" * len(head), *(text for _, text in rows)])


def _recipe(runs: dict[int, dict[str, Any]]) -> tuple[float, float]:
    """b1 and learning rate."""
    recipe = next(iter(runs.values()))["recipe"]
    return recipe["betas"][0], recipe["learning_rate"]


def _is_dense(name: str) -> bool:
    return name.split(",")[0] == "dense"


def _losses(runs: dict[int, dict[str, Any]]) -> dict[int, float]:
    return {s: run["heldout"][-1][1] for s, run in sorted(runs.items()) if not run["diverged"]}


def _warm_up_of(settings: dict[str, Any]) -> int:
    """Runs on record have the setting's former name."""
    return int(settings.get("warmup_steps", settings.get("start_step", 0)))


def _row(
    name: str,
    runs: dict[int, dict[str, Any]],
    done: dict[str, dict[int, dict[str, Any]]],
    against: list[str],
    steps: int,
) -> tuple[float, str]:
    some, reference = next(iter(runs.values())), next(iter(done[against[-1]].values()))
    sent, whole = some["sixteen_bit_bytes"], reference["sixteen_bit_bytes"]
    world = some["task"]["world"]
    bits = 8 * sent / (some["parameters"] * (world - 1) / world)
    dense = _is_dense(name)
    warm_up = 0 if dense else min(_warm_up_of(some["settings"]), steps)
    in_warm_up = some.get("sixteen_bit_warm_up_bytes", whole)
    in_run = steps * whole / (warm_up * in_warm_up + (steps - warm_up) * sent)
    held = 1 if dense or not some["settings"]["error_feedback"] else ACCUMULATION
    cells = [name, f"{bits:.2f}", _times(whole / sent), _times(held * whole / sent)]
    cells += [_times(in_run)]
    losses = _losses(runs)
    if len(losses) < len(runs):
        return sent, _line([*cells, "diverged", *("" for _ in 2 * against), str(len(runs))])
    cells += [_each(list(losses.values()), ".4f")]
    for theirs in against:
        other = _losses(done.get(theirs, {}))
        gaps = [losses[seed] / other[seed] - 1 for seed in losses if seed in other]
        interval = ""
        if len(gaps) > 1 and name != theirs:
            found = paired(gaps)
            interval = f"{found.low:+.2%} to {found.high:+.2%}"
        cells += [_each(gaps, "+.2%") if name != theirs and gaps else "", interval]
    return sent, _line([*cells, str(len(losses))])


def _each(values: list[float], form: str) -> str:
    """Their mean, and the values of several."""
    each = f" ({', '.join(format(v, form) for v in values)})" if len(values) > 1 else ""
    return format(statistics.fmean(values), form) + each


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
