"""One call of the command from options to exit code: tasks, runs, verdicts, record, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ds_ckpt.config.verdicts import FILE_NAME, write_verdicts
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.validation.candidates import DENSE, read_candidates
from ds_ckpt.validation.compare import Comparison, Margins, compare, exit_code, false_alarms
from ds_ckpt.validation.data import has_labels
from ds_ckpt.validation.experiment import Plan, run_virtual
from ds_ckpt.validation.records import records
from ds_ckpt.validation.report import SelfCheck, table, write_report
from ds_ckpt.validation.store import Mode, Store
from ds_ckpt.validation.tasks import DEFAULT_TASKS, KINDS, Kind, make_spec, open_task


@dataclass(frozen=True)
class Wanted:
    """What the options ask for; see `commands.validate_accuracy`. Margins are shares."""

    files: tuple[Path, ...]
    tasks: tuple[str, ...] | None = None
    seeds: int = 5
    margin: float = 0.005
    accuracy_margin: float = 0.01
    virtual_workers: int | None = None
    processes: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    link_mbit: float = 1000.0
    self_check: int | None = None
    output: Path = Path("runs/accuracy")
    record: Path | None = None

    @property
    def mode(self) -> Mode:
        """Who trains."""
        return "processes" if self.processes else "virtual"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The tasks, in order."""
        if self.tasks:
            return cast(tuple[Kind, ...], tuple(self.tasks))
        data = self.sizes.get("data")
        if data is None:
            return ("language",) if self.self_check or self.sizes.get("model") else DEFAULT_TASKS
        return ("labelled",) if has_labels(data) else ("language",)


def run(wanted: Wanted, console: Console) -> int:
    """Do what is asked for, results in `wanted.output`, words to the console; the exit code.

    Raises:
        DsCkptError: options, files, data or packages do not allow it; runs that are finished are
            kept.
    """
    _check(wanted)
    started_s = time.monotonic()
    candidates = read_candidates(wanted.files)
    store = Store(wanted.output / "results.jsonl")
    world = wanted.processes or wanted.virtual_workers or 4
    margins = Margins(wanted.margin, wanted.accuracy_margin)
    comparisons: list[Comparison] = []
    checks: list[SelfCheck] = []
    threads = torch.get_num_threads()
    if wanted.mode == "virtual" and wanted.device == "cpu":
        torch.set_num_threads(1)  # sums in one order, whatever the machine
    try:
        for kind in wanted.kinds:
            spec = make_spec(kind, world=world, **wanted.sizes)
            console.print(f"{spec.words()}: loading")
            task = open_task(spec, wanted.output / "states", device=wanted.device)
            seeds = range(max(wanted.seeds if candidates else 0, wanted.self_check or 0))
            plan = Plan(task, candidates, range(wanted.seeds), device=wanted.device)
            work = [plan] if candidates else []
            if wanted.self_check:
                work.insert(0, dataclasses.replace(plan, candidates=(), seeds=seeds))
            for part in work:
                _train(part, store, wanted, console)
            comparisons += [
                compare(plan, c, store, margins, mode=wanted.mode, link_mbit=wanted.link_mbit)
                for c in candidates
            ]
            if wanted.self_check:
                checks.append(_self_check(work[0], store, wanted, margins))
    finally:
        torch.set_num_threads(threads)
    report = write_report(wanted.output, comparisons, checks)
    found = records(comparisons)
    for path in {wanted.output / FILE_NAME, wanted.record} - {None}:
        write_verdicts(cast(Path, path), found)
    for line in table(comparisons, checks):
        console.print(line)
    minutes = (time.monotonic() - started_s) / 60
    console.print(f"report: {report}; {minutes:.1f} minutes", soft_wrap=True, highlight=False)
    return exit_code(comparisons) if comparisons else 0


def _train(plan: Plan, store: Store, wanted: Wanted, console: Console) -> None:
    missing = plan.missing(store, wanted.mode)
    if not missing:
        return
    total = len(missing) * plan.task.spec.steps
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tell = _Told(progress, total, len(missing), console)
        if wanted.mode == "virtual":
            run_virtual(plan, store, wanted.output / "states", tell)
        else:
            from ds_ckpt.validation.processes import run_processes

            run_processes(plan, store, wanted.output, tell)


class _Told:
    """Progress as a bar, or as a line a run where there is no terminal; a `Tell`."""

    def __init__(self, progress: Progress, total: int, runs: int, console: Console) -> None:
        self._progress, self._runs, self._console = progress, runs, console
        self._task = progress.add_task("training", total=total)
        self._run, self._before, self._done, self._begun = "", 0, 0, 0

    def __call__(self, name: str, done: int, steps: int, loss: float) -> None:
        if name != self._run:
            self._done += self._before
            self._run, self._before = name, 0
            self._begun += 1
            if self._progress.disable:
                self._console.print(f"  run {self._begun} of {self._runs}: {name}", highlight=False)
        self._before = done
        words = f"{name}: loss {loss:.3f}"
        self._progress.update(self._task, description=words, completed=self._done + done)


def _self_check(plan: Plan, store: Store, wanted: Wanted, margins: Margins) -> SelfCheck:
    spec = plan.task.spec
    values = []
    for seed in plan.seeds:
        result = store.find(plan.key(DENSE, seed, wanted.mode))
        if result is not None and not result.outcome.diverged:
            outcome = result.outcome
            curve = outcome.accuracy if spec.metric == "accuracy" else outcome.heldout
            values.append(curve[-1][1])
    seeds = min(wanted.seeds, len(values) // 2)
    margin = margins.of(spec.metric)
    shares = false_alarms(values, seeds, margin, metric=spec.metric)
    return SelfCheck(spec.words(), tuple(values), seeds, margin, shares)


def _check(wanted: Wanted) -> None:
    problems: list[Problem] = []

    def wrong(where: str, found: str, why: str, remedy: str) -> None:
        problems.append(Problem(where, found, why, remedy))

    if not wanted.files and not wanted.self_check:
        wrong("CONFIG", "no file", "there is nothing to compare", "name a DeepSpeed JSON file")
    for kind in wanted.tasks or ():
        if kind not in KINDS:
            wrong("--tasks", kind, "no such task is known", f"choose from {', '.join(KINDS)}")
    if wanted.processes and wanted.virtual_workers:
        why = "both say who trains"
        wrong("--processes", f"{wanted.processes} beside --virtual-workers", why, "give one")
    if wanted.sizes.get("data") and wanted.tasks:
        builtin: Sequence[str] = [kind for kind in wanted.tasks if kind in ("digits", "topics")]
        if builtin:
            why = f"{', '.join(builtin)} have data of their own"
            wrong("--data", str(wanted.sizes["data"]), why, "--tasks language or labelled")
    if wanted.sizes.get("model") and set(wanted.kinds) & {"digits", "topics"}:
        why = "a checkpoint is for language or labelled"
        wrong("--model", str(wanted.sizes["model"]), why, "add --tasks language, or --data FILE")
    if wanted.sizes.get("attention") not in (None, "sdpa"):
        why = "the built-in model has two kinds"
        wrong("--attention", str(wanted.sizes["attention"]), why, "eager or sdpa")
    if problems:
        raise ConfigError(problems, headline="the comparison cannot be made with these options")
