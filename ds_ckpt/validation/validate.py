"""One call of the command from options to exit code: tasks, runs, verdicts, record, report."""

from __future__ import annotations

import dataclasses
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ds_ckpt.config.verdicts import read_verdicts, write_verdicts
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.validation.candidates import DENSE, read_candidates, versions, virtual_versions
from ds_ckpt.validation.compare import Comparison, Margins, compare, exit_code, false_alarms
from ds_ckpt.validation.experiment import Plan, run_virtual
from ds_ckpt.validation.options import Wanted, check_options
from ds_ckpt.validation.records import records
from ds_ckpt.validation.report import SelfCheck, table, write_report
from ds_ckpt.validation.store import Store
from ds_ckpt.validation.tasks import Opened, make_spec, open_task

RESULTS = "results.jsonl"


def run(wanted: Wanted, console: Console) -> int:
    """Do what is asked for, results in `wanted.output`, words to the console; the exit code.

    Raises:
        DsCkptError: options, files, data or packages do not allow it; runs that are finished are
            kept.
    """
    check_options(wanted)
    for path in wanted.records:
        read_verdicts(path)  # what cannot be added to is told before hours of training
    started_s = time.monotonic()
    candidates = read_candidates(wanted.files)
    store = Store(wanted.output / RESULTS)
    world = wanted.processes or wanted.virtual_workers or 4
    margins = _margins(wanted)
    device = wanted.device or "cpu"
    comparisons: list[Comparison] = []
    checks: list[SelfCheck] = []
    link_mbit = wanted.link_mbit or 1000.0
    threads = torch.get_num_threads()
    if wanted.mode == "virtual" and device == "cpu":
        torch.set_num_threads(1)  # sums in one order, whatever the machine
    try:
        for kind in wanted.kinds:
            spec = make_spec(kind, world=world, **wanted.sizes)
            console.print(f"{spec.words()}: loading")
            task = open_task(spec, wanted.output / "states", device=device)
            _check_resolution(task, margins)
            seeds = range(max(wanted.seeds if candidates else 0, wanted.self_check or 0))
            plan = Plan(task, candidates, range(wanted.seeds), device=device)
            work = [plan] if candidates else []
            if wanted.self_check:
                work.insert(0, dataclasses.replace(plan, candidates=(), seeds=seeds))
            for part in work:
                _train(part, store, wanted, console)
            comparisons += [
                compare(plan, c, store, margins, mode=wanted.mode, link_mbit=link_mbit)
                for c in candidates
            ]
            if wanted.self_check:
                checks.append(_self_check(work[0], store, wanted, margins))
    finally:
        torch.set_num_threads(threads)
    report = write_report(wanted.output, comparisons, checks)
    for path in wanted.records:
        write_verdicts(path, records(comparisons))
    for line in table(comparisons, checks):
        console.print(line)
    minutes = (time.monotonic() - started_s) / 60
    console.print(f"report: {report}; {minutes:.1f} minutes", soft_wrap=True, highlight=False)
    if comparisons:
        return exit_code(comparisons)
    return 0 if all(check.seeds > 1 for check in checks) else 2


def _margins(wanted: Wanted) -> Margins:
    usual = Margins()
    loss, accuracy = wanted.margin, wanted.accuracy_margin
    return Margins(
        usual.loss if loss is None else loss, usual.accuracy if accuracy is None else accuracy
    )


def _check_resolution(task: Opened, margins: Margins) -> None:
    """Refuse held-out data of which one example is more than the margin: most differences as large
    would then be seen as none."""
    held_out, margin = task.run.held_out, margins.accuracy
    if task.spec.metric == "accuracy" and held_out * margin < 1:
        raise ConfigError(
            Problem(
                where="--data",
                found=f"{held_out} held-out examples",
                why=f"one of them is {100 / held_out:.3g} points of accuracy, more than the margin "
                f"of {100 * margin:g}",
                remedy="give more examples, or a larger --accuracy-margin",
            ),
            headline="the data are too few to judge by",
        )


def _check_versions(plan: Plan, store: Store, wanted: Wanted) -> None:
    """Refuse to go on beside runs of other packages: a pair would differ in more than its file."""
    now = virtual_versions() if wanted.mode == "virtual" else versions()
    for candidate in (DENSE, *plan.candidates):
        for seed in plan.seeds_of(candidate):
            result = store.find(plan.key(candidate, seed, wanted.mode))
            then = result.about.get("versions", now) if result else now
            other = [name for name in now if then.get(name) != now[name]]
            if other:
                raise StateError(
                    Problem(
                        where=str(wanted.output / RESULTS),
                        found="runs of " + ", ".join(f"{n} {then.get(n)}" for n in other),
                        why="runs with " + ", ".join(f"{n} {now[n]}" for n in other) + " are still "
                        "to come, and a pair must differ in nothing but its file",
                        remedy="name another --output, or install what those were made with",
                    ),
                    headline="the comparison cannot go on with these packages",
                )


def _train(plan: Plan, store: Store, wanted: Wanted, console: Console) -> None:
    missing = plan.missing(store, wanted.mode)
    if not missing:
        return
    _check_versions(plan, store, wanted)
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
