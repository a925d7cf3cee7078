"""`ds-ckpt validate-accuracy`, from options to exit code: runs, verdicts, records, report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ds_ckpt.config.verdicts import FILE_NAME, read_verdicts, write_verdicts
from ds_ckpt.errors import ConfigError, Problem, StateError, UnsupportedError
from ds_ckpt.lab.validate.compare import MARGINS, compare, exit_code, grid_step, records
from ds_ckpt.lab.validate.data import has_labels
from ds_ckpt.lab.validate.experiment import (
    DENSE,
    Plan,
    environment,
    read_candidates,
    train_missing,
    train_virtual,
)
from ds_ckpt.lab.validate.report import document
from ds_ckpt.lab.validate.runs import Mode, Store
from ds_ckpt.lab.validate.task import Kind, Task, make_spec, open_task

RESULTS = "results.jsonl"
_NEW_MODEL = ("hidden_size", "layers", "attention")
_SIZES = (
    *("data", "model", "steps", "learning_rate", "batch", "length", "accumulation"),
    *_NEW_MODEL,
)


@dataclass(frozen=True)
class Arguments:
    """Options of the command, see `cli.validate_accuracy`; None is the default."""

    files: tuple[Path, ...]
    seeds: int = 5
    margin: float | None = None
    virtual_workers: int | None = None
    processes: int | None = None
    data: str | None = None
    model: str | None = None
    steps: int | None = None
    learning_rate: float | None = None
    betas: str | None = None
    batch: int | None = None
    length: int | None = None
    accumulation: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    attention: str | None = None
    device: str | None = None
    output: Path = Path("runs/accuracy")
    record: Path | None = None

    @property
    def verdict_files(self) -> list[Path]:
        """Return the files to which verdicts are written."""
        return [self.output / FILE_NAME, *([self.record] if self.record else [])]

    @property
    def mode(self) -> Mode:
        """Return virtual workers or ZeRO-3 ranks."""
        return "processes" if self.processes else "virtual"

    @property
    def kind(self) -> Kind:
        """Return the kind of task that the data are for."""
        return "labelled" if self.data and has_labels(Path(self.data)) else "language"


def check(given: Arguments) -> None:
    """Check the options. Raises ConfigError with every problem."""
    problems: list[Problem] = []

    def wrong(name: str, found: object, why: str, remedy: str) -> None:
        problems.append(Problem("--" + name.replace("_", "-"), str(found), why, remedy))

    def ignored(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if (value := getattr(given, name)) is not None:
                wrong(name, value, f"it is ignored {why}", "remove it")

    if given.processes and given.virtual_workers:
        found = f"{given.processes} beside --virtual-workers"
        wrong("processes", found, "either of them trains", "give one")
    if given.data and not Path(given.data).is_file():
        remedy = "give the path of a text file or JSON lines"
        wrong("data", given.data, "there is no such file", remedy)
    if given.output.exists() and not given.output.is_dir():
        wrong("output", given.output, "it is not a folder", "name a folder, existing or new")
    if given.record is not None and given.record.is_dir():
        wrong("record", given.record, "it is not a file", "name a file, existing or new")
    if given.mode == "processes":
        ignored(("device",), "with --processes, which use DeepSpeed's accelerator")
    if given.kind == "labelled" or given.model:
        ignored(_NEW_MODEL, "unless the new language model is trained")
    if given.device is not None and given.mode == "virtual":
        try:
            torch.empty(0, device=given.device)
        except (RuntimeError, AssertionError) as error:
            wrong("device", given.device, str(error).splitlines()[0], "cpu, or cuda with a GPU")
    if given.betas is not None and parse_betas(given.betas) is None:
        wrong("betas", given.betas, "AdamW has two numbers, each from 0 to below 1", "0.7,0.95")
    if given.attention not in (None, "eager", "sdpa"):
        wrong("attention", given.attention, "the new model has two kinds", "eager or sdpa")
    if problems:
        raise ConfigError(problems, headline="the comparison cannot be made with these options")


def parse_betas(text: str) -> tuple[float, float] | None:
    """Parse a pair of betas; None if it is not one."""
    try:
        b1, b2 = map(float, text.split(","))
    except ValueError:
        return None
    return (b1, b2) if 0 <= b1 < 1 and 0 <= b2 < 1 else None


def run(given: Arguments, console: Console) -> int:
    """Train, judge, write results into `given.output` and return the exit code.

    Raises:
        DsCkptError: options, files, data or packages are unusable; finished runs are kept.
    """
    check(given)
    for path in given.verdict_files:
        read_verdicts(path)  # fail before hours of training
    started_s = time.monotonic()
    candidates = read_candidates(given.files)
    results = given.output / RESULTS
    store = Store(results)
    device = given.device or "cpu"
    sizes = {name: getattr(given, name) for name in _SIZES}
    sizes["world"] = given.processes or given.virtual_workers or 4
    sizes["betas"] = parse_betas(given.betas) if given.betas else None
    spec = make_spec(given.kind, **sizes)
    margin = MARGINS[spec.metric] if given.margin is None else given.margin / 100
    threads = torch.get_num_threads()
    if given.mode == "virtual" and device == "cpu":
        torch.set_num_threads(1)  # sums in one order on every machine
    try:
        console.print(f"{spec.describe()}: loading")
        task = open_task(spec, device=device)
        _check_resolution(task, margin)
        plan = Plan(task, candidates, range(given.seeds), given.mode, device)
        _train(plan, store, results, given.output, console)
    finally:
        torch.set_num_threads(threads)
    comparisons = [compare(plan, one, store, margin) for one in candidates]
    report = document(comparisons)
    given.output.mkdir(parents=True, exist_ok=True)
    try:
        written = report.write(given.output)[0]
    except UnsupportedError:  # no packages for the HTML file; report.md is written
        written = given.output / "report.md"
    for path in given.verdict_files:
        write_verdicts(path, records(comparisons))
    report.print(console)
    minutes = (time.monotonic() - started_s) / 60
    console.print(f"report: {written}; {minutes:.1f} minutes", soft_wrap=True, highlight=False)
    return exit_code(comparisons)


def _check_resolution(task: Task, margin: float) -> None:
    """Refuse held-out data of which one example is more than the margin."""
    step = grid_step(task)
    if step > margin:
        raise ConfigError(
            Problem(
                where="--data",
                found=f"{1 / step:.0f} held-out examples",
                why=f"one of them is {100 * step:.3g} points of accuracy, more than the margin of "
                f"{100 * margin:g}",
                remedy=f"hold out {math.ceil(1 / margin)} examples, or give a larger --margin",
            ),
            headline="the data are too few to judge by",
        )


def _check_versions(plan: Plan, store: Store, results: Path) -> None:
    """Refuse to add runs to those of other packages: a pair must differ in its file alone."""
    now = environment(plan.mode)
    if plan.mode == "virtual":  # DeepSpeed has no part in it
        del now["deepspeed"]
    for candidate in (DENSE, *plan.candidates):
        for seed in plan.seeds_of(candidate):
            result = store.find(plan.key(candidate, seed))
            then = {"accelerator": "cpu", **result.about.get("versions", now)} if result else now
            other = [name for name in now if then.get(name) != now[name]]
            if other:
                raise StateError(
                    Problem(
                        where=str(results),
                        found="runs with " + ", ".join(f"{n} {then.get(n)}" for n in other),
                        why="the missing runs would use "
                        + ", ".join(f"{n} {now[n]}" for n in other)
                        + ", and a pair must differ in its file alone",
                        remedy="name another --output, or install the former versions",
                    ),
                    headline="the comparison cannot be continued here",
                )


def _train(plan: Plan, store: Store, results: Path, folder: Path, console: Console) -> None:
    """Train the missing runs under a progress bar, or with a line for each without a terminal."""
    steps, runs = plan.task.spec.steps, len(plan.missing(store))
    if not runs:
        return
    _check_versions(plan, store, results)
    begun: list[str] = []
    text, left = TextColumn("{task.description}"), TimeRemainingColumn()
    columns = (text, BarColumn(), TimeElapsedColumn(), left)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=runs * steps)

        def report(name: str, done: int, loss: float) -> None:
            if name not in begun:
                begun.append(name)
                if progress.disable:
                    console.print(f"  run {len(begun)} of {runs}: {name}", highlight=False)
            completed = (len(begun) - 1) * steps + done
            progress.update(bar, description=f"{name}: loss {loss:.3f}", completed=completed)

        if plan.mode == "virtual":
            train_missing(plan, store, train_virtual, report)
        else:
            from ds_ckpt.lab.validate.processes import run_processes

            run_processes(plan, store, results, folder, report)
