"""One call of the command from options to exit code: tasks, runs, verdicts, record, report."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ds_ckpt.config.verdicts import FILE_NAME, read_verdicts, write_verdicts
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.lab.validate.compare import (
    MARGINS,
    Comparison,
    compare,
    exit_code,
    false_alarms,
    grid_step,
    records,
)
from ds_ckpt.lab.validate.data import has_labels
from ds_ckpt.lab.validate.experiment import (
    DENSE,
    Plan,
    read_candidates,
    surroundings,
    train_missing,
    train_virtual,
)
from ds_ckpt.lab.validate.report import document, write_report
from ds_ckpt.lab.validate.store import Mode, Store
from ds_ckpt.lab.validate.task import DEFAULT_TASKS, KINDS, Kind, Task, make_spec, open_task

RESULTS = "results.jsonl"
_OWN_DATA = ("digits", "topics")
_BUILT_IN_LANGUAGE = ("hidden_size", "layers", "attention")
_SIZES = (
    *("data", "model", "steps", "learning_rate", "batch", "length", "accumulation", "dense_lead"),
    *_BUILT_IN_LANGUAGE,
)

_BETAS = ("betas", "dense_betas")


@dataclass(frozen=True)
class Arguments:
    """The command's options, see `commands.validate_accuracy`; None is the default."""

    files: tuple[Path, ...]
    tasks: str | None = None
    seeds: int = 5
    margin: float | None = None
    accuracy_margin: float | None = None
    virtual_workers: int | None = None
    processes: int | None = None
    data: str | None = None
    model: str | None = None
    steps: int | None = None
    learning_rate: float | None = None
    betas: str | None = None
    dense_betas: str | None = None
    dense_lead: float | None = None
    batch: int | None = None
    length: int | None = None
    accumulation: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    attention: str | None = None
    device: str | None = None
    self_check: int | None = None
    output: Path = Path("runs/accuracy")
    record: Path | None = None

    @property
    def records(self) -> list[Path]:
        """The files of verdicts."""
        return [self.output / FILE_NAME, *([self.record] if self.record else [])]

    @property
    def mode(self) -> Mode:
        """Who trains."""
        return "processes" if self.processes else "virtual"

    @property
    def margins(self) -> dict[str, float]:
        """As shares."""
        given = {"loss": self.margin, "accuracy": self.accuracy_margin}
        return MARGINS | {name: v / 100 for name, v in given.items() if v is not None}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The tasks, in order."""
        if self.tasks:
            return cast(
                tuple[Kind, ...], tuple(filter(None, map(str.strip, self.tasks.split(","))))
            )
        if self.data is None:
            only_check = self.self_check and not self.files
            return ("language",) if only_check or self.model else DEFAULT_TASKS
        return ("labelled",) if has_labels(self.data) else ("language",)


def check(given: Arguments) -> None:
    """Options that cannot be served, or that nothing would come of.

    Raises:
        ConfigError: with every one that is wrong.
    """
    problems: list[Problem] = []
    kinds, named = given.kinds, bool(given.tasks)

    def wrong(name: str, found: object, why: str, remedy: str) -> None:
        problems.append(Problem("--" + name.replace("_", "-"), str(found), why, remedy))

    def idle(names: tuple[str, ...], why: str) -> None:
        for name in names:
            value = getattr(given, name)
            if value is not None:
                wrong(name, value, f"it does nothing {why}", "remove it")

    if not given.files and not given.self_check:
        why = "there is nothing to compare"
        problems.append(Problem("CONFIG", "no file", why, "name a DeepSpeed JSON file"))
    for kind in kinds:
        if kind not in KINDS:
            wrong("tasks", kind, "no such task is known", f"choose from {', '.join(KINDS)}")
    if given.processes and given.virtual_workers:
        found = f"{given.processes} beside --virtual-workers"
        wrong("processes", found, "both say who trains", "give one")
    own = [kind for kind in kinds if kind in _OWN_DATA]
    if given.data and named and own:
        why = f"{', '.join(own)} have data of their own"
        wrong("data", given.data, why, "--tasks language or labelled")
    if given.model and own:
        why = "a checkpoint is for language or labelled"
        wrong("model", given.model, why, "add --tasks language, or --data FILE")
    if given.output.exists() and not given.output.is_dir():
        wrong("output", given.output, "it is not a folder", "name a folder, there or new")
    if given.record is not None and given.record.is_dir():
        wrong("record", given.record, "it is not a file", "name a file, there or new")
    if given.mode == "processes":
        idle(("device",), "with --processes, which train on DeepSpeed's accelerator")
        idle(("dense_lead",), "with --processes, whose dense runs are plain DeepSpeed's")
    if "language" not in kinds or given.model:
        idle(_BUILT_IN_LANGUAGE, "without the built-in language model")
    if set(kinds) <= set(_OWN_DATA):
        idle(("length",), "where the task has a length of its own")
    if "language" not in kinds:
        idle(("margin",), "where verdicts are on accuracy: --accuracy-margin")
    if set(kinds) == {"language"}:
        idle(("accuracy_margin",), "where verdicts are on loss: --margin")
    if given.device is not None and given.mode == "virtual":
        try:
            torch.empty(0, device=given.device)
        except (RuntimeError, AssertionError) as error:
            wrong("device", given.device, str(error).splitlines()[0], "cpu, or cuda with a GPU")
    for name in _BETAS:
        said = getattr(given, name)
        if said is not None and betas_of(said) is None:
            wrong(name, said, "AdamW has two numbers, each from 0 to below 1", "0.7,0.95")
    if given.dense_lead is not None and not 0 < given.dense_lead < 1:
        wrong("dense_lead", given.dense_lead, "a lead is above 0 and below 1", "0.3")
    if given.attention not in (None, "eager", "sdpa"):
        wrong("attention", given.attention, "the built-in model has two kinds", "eager or sdpa")
    if problems:
        raise ConfigError(problems, headline="the comparison cannot be made with these options")


def betas_of(said: str) -> tuple[float, float] | None:
    """What an option says; None where it is no pair of betas."""
    try:
        b1, b2 = map(float, said.split(","))
    except ValueError:
        return None
    return (b1, b2) if 0 <= b1 < 1 and 0 <= b2 < 1 else None


def run(given: Arguments, console: Console) -> int:
    """Do what is asked for, results in `given.output`, words to the console; the exit code.

    Raises:
        DsCkptError: options, files, data or packages do not allow it; runs that are finished are
            kept.
    """
    check(given)
    for path in given.records:
        read_verdicts(path)  # what cannot be added to is told before hours of training
    started_s = time.monotonic()
    candidates = read_candidates(given.files)
    store = Store(given.output / RESULTS)
    world = given.processes or given.virtual_workers or 4
    device = given.device or "cpu"
    sizes = {name: getattr(given, name) for name in _SIZES}
    sizes |= {name: betas_of(said) for name in _BETAS if (said := getattr(given, name))}
    same = [c.name for c in candidates if not c.lossy]
    for option, other in (("--dense-betas", given.dense_betas), ("--dense-lead", given.dense_lead)):
        if other and same:
            why = "they change no bit, which another optimizer would hide"
            remedy = f"leave them out, or remove {option}"
            raise ConfigError(Problem(option, f"beside {', '.join(same)}", why, remedy))
    comparisons: list[Comparison] = []
    checks: list[str] = []
    threads = torch.get_num_threads()
    if given.mode == "virtual" and device == "cpu":
        torch.set_num_threads(1)  # sums in one order, whatever the machine
    try:
        for kind in given.kinds:
            spec = make_spec(kind, world=world, **sizes)
            console.print(f"{spec.words()}: loading")
            task = open_task(spec, given.output / "states", device=device)
            margin = given.margins[spec.metric]
            _check_resolution(task, margin)
            plan = Plan(task, candidates, range(given.seeds), given.mode, device)
            if given.self_check:
                seeds = range(max(given.seeds if candidates else 0, given.self_check))
                alone = dataclasses.replace(plan, candidates=(), seeds=seeds)
                _train(alone, store, given, console)
                checks.append(_self_check(alone, store, given.seeds, margin))
            if candidates:
                _train(plan, store, given, console)
            comparisons += [compare(plan, c, store, margin) for c in candidates]
    finally:
        torch.set_num_threads(threads)
    report = write_report(given.output, comparisons, checks)
    for path in given.records:
        write_verdicts(path, records(comparisons))
    document(comparisons, checks).print(console)
    minutes = (time.monotonic() - started_s) / 60
    console.print(f"report: {report}; {minutes:.1f} minutes", soft_wrap=True, highlight=False)
    return exit_code(comparisons) if comparisons else 0


def _check_resolution(task: Task, margin: float) -> None:
    """Refuse held-out data of which one example is more than the margin: most differences as large
    would then be seen as none."""
    step = grid_step(task)
    if step > margin:
        own = task.spec.kind in _OWN_DATA
        raise ConfigError(
            Problem(
                where="--accuracy-margin" if own else "--data",
                found=f"{100 * margin:g}" if own else f"{1 / step:.0f} held-out examples",
                why=f"one held-out example is {100 * step:.3g} points of accuracy, more than the "
                f"margin of {100 * margin:g}",
                remedy="give a larger margin"
                if own
                else "give more examples, or a larger --accuracy-margin",
            ),
            headline="the data are too few to judge by",
        )


def _check_versions(plan: Plan, store: Store, results: Path) -> None:
    """Refuse to go on beside runs of other packages or of another accelerator: a pair would differ
    in more than its file."""
    now = surroundings(plan.mode)
    if plan.mode == "virtual":  # DeepSpeed has no part in them
        del now["deepspeed"]
    for candidate in (DENSE, *plan.candidates):
        for seed in plan.seeds_of(candidate):
            result = plan.find(candidate, seed, store)
            then = {"accelerator": "cpu", **result.about.get("versions", now)} if result else now
            other = [name for name in now if then.get(name) != now[name]]
            if other:
                raise StateError(
                    Problem(
                        where=str(results),
                        found="runs of " + ", ".join(f"{n} {then.get(n)}" for n in other),
                        why="runs with " + ", ".join(f"{n} {now[n]}" for n in other) + " are still "
                        "to come, and a pair must differ in nothing but its file",
                        remedy="name another --output, or go on with what those were made with",
                    ),
                    headline="the comparison cannot go on here",
                )


def _train(plan: Plan, store: Store, given: Arguments, console: Console) -> None:
    """Train what is missing, under a bar; without a terminal with a line for each run."""
    results, steps = given.output / RESULTS, plan.task.spec.steps
    runs = len(plan.missing(store))
    if not runs:
        return
    _check_versions(plan, store, results)
    begun: list[str] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=runs * steps)

        def tell(name: str, done: int, loss: float) -> None:
            if name not in begun:
                begun.append(name)
                if progress.disable:
                    console.print(f"  run {len(begun)} of {runs}: {name}", highlight=False)
            completed = (len(begun) - 1) * steps + done
            progress.update(bar, description=f"{name}: loss {loss:.3f}", completed=completed)

        if plan.mode == "virtual":
            train_missing(plan, store, train_virtual, tell)
        else:
            from ds_ckpt.lab.validate.processes import run_processes

            run_processes(plan, store, results, given.output, tell)


def _self_check(plan: Plan, store: Store, seeds: int, margin: float) -> str:
    """A sentence on dense training against itself, other seeds."""
    spec = plan.task.spec
    outcomes = [run.outcome for seed in plan.seeds if (run := store.find(plan.key(DENSE, seed)))]
    values = [one.final(spec.metric) for one in outcomes if not one.diverged]
    seeds = min(seeds, len(values) // 2)
    if seeds < 2:
        few = f"{len(values)} dense runs that did not diverge"
        raise ConfigError(Problem("--self-check", few, "a trial is two pairs", "take more"))
    step = grid_step(plan.task)
    found = false_alarms(values, seeds, margin, metric=spec.metric, step=step)
    shares = ", ".join(f"{word} {share:.1%}" for word, share in found.items())
    return (
        f"{spec.words()}: dense against dense, {len(values)} runs paired at random, "
        f"{seeds} pairs a trial, margin {100 * margin:g}%: {shares}. "
        '"worse" and "better" may each be wrong in 5% of trials.'
    )
