"""`ds-ckpt validate-accuracy`, from options to exit code: runs, verdicts, records, report."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ds_ckpt.config.verdicts import FILE_NAME, read_verdicts, write_verdicts
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.lab.validate.accuracy_report import accuracy_document
from ds_ckpt.lab.validate.compare import MARGINS, compare, exit_code, grid_step
from ds_ckpt.lab.validate.data import has_labels
from ds_ckpt.lab.validate.experiment import (
    Mode,
    RunPlan,
    add_result,
    read_candidates,
    read_results,
    train_missing,
    train_virtual,
)
from ds_ckpt.lab.validate.task import Kind, Task, make_spec, open_task

RESULTS = "results.jsonl"


def run(
    files: Sequence[Path],
    *,
    seeds: int,
    margin: float | None,
    virtual_workers: int | None,
    processes: int | None,
    device: str | None,
    output: Path,
    console: Console,
    **sizes: Any,
) -> int:
    """Train, judge, write results into `output` and return the exit code.

    Arguments are options of the command; `sizes` are fields of `TaskSpec`. Raises DsCkptError if
    options, files, data or packages are unusable; finished runs are kept.
    """
    virtual = {
        "--virtual-workers": virtual_workers,
        "--device": device,
        "--dense-correction": sizes["dense_correction"],
    }
    wrong = [name for name, value in virtual.items() if value is not None]
    if processes and wrong:
        why, found = "these are for virtual workers", f"{processes} beside {', '.join(wrong)}"
        raise ConfigError(Problem("--processes", found, why, "drop them, or --processes"))
    mode: Mode = "processes" if processes else "virtual"
    read_verdicts(output / FILE_NAME)  # fail before hours of training
    candidates = read_candidates(files, mode)
    kind: Kind = "labelled" if sizes["data"] and has_labels(sizes["data"]) else "language"
    spec = make_spec(kind, **sizes, world=processes or virtual_workers or 4)
    share = MARGINS[spec.metric] if margin is None else margin / 100
    threads = torch.get_num_threads()
    if mode == "virtual" and device is None:
        torch.set_num_threads(1)  # sums in one order on every machine
    try:
        console.print(f"{spec.describe()}: loading")
        task = open_task(spec, device=device or "cpu")
        _check_resolution(task, share)
        plan = RunPlan(task, candidates, range(seeds), mode)
        _train(plan, output, console)
    finally:
        torch.set_num_threads(threads)
    results = read_results(output / RESULTS)
    comparisons = [compare(plan, one, results, share) for one in candidates]
    report = accuracy_document(comparisons)
    try:
        written = report.write(output)[0]
    except UnsupportedError:  # no packages for the HTML file; report.md is written
        written = output / "report.md"
    compressed = [c.record for c in comparisons if c.record.settings["method"] != "none"]
    write_verdicts(output / FILE_NAME, compressed)
    report.print(console)
    console.print(f"report: {written}", soft_wrap=True, highlight=False)
    return exit_code(comparisons)


def _check_resolution(task: Task, margin: float) -> None:
    """Refuse held-out data of which one example is more than the margin."""
    step = grid_step(task)
    if step > margin:
        found = f"{1 / step:.0f} held-out examples"
        why = f"one is {100 * step:.3g} points of accuracy, more than the margin {100 * margin:g}"
        remedy = f"hold out {math.ceil(1 / margin)} examples, or give a larger --margin"
        raise ConfigError(Problem("--data", found, why, remedy))


def _train(plan: RunPlan, folder: Path, console: Console) -> None:
    """Train the missing runs, with a progress bar in a terminal."""
    path, steps = folder / RESULTS, plan.task.spec.steps
    results = read_results(path)
    runs = len(plan.missing(results))
    if results and not runs:
        console.print(f"all runs are in {folder}: nothing is trained")
    begun: list[str] = []
    with Progress(console=console, disable=not console.is_terminal or not runs) as progress:
        bar = progress.add_task("training", total=runs * steps)

        def report(name: str, done: int, loss: float) -> None:
            if name not in begun:
                begun.append(name)
                console.print(f"run {len(begun)} of {runs}: {name}", highlight=False)
            completed = (len(begun) - 1) * steps + done
            progress.update(bar, description=f"loss {loss:.3f}", completed=completed)

        if plan.mode == "virtual":
            for result in train_missing(plan, results, train_virtual, report):
                add_result(path, result)
        elif runs:
            from ds_ckpt.lab.validate.processes import run_processes

            run_processes(plan, path, folder, report)
