"""Run an experiment into a folder, or continue one that was stopped there."""

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab import workload
from ds_ckpt.lab.hosts.backends import Backend
from ds_ckpt.lab.hosts.launcher import check_hosts, launch, signals_as_exit
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import MIN_REPETITIONS, SPEC, Spec

RUNS = "runs.jsonl"
_START_S, _STEP_S, _GUESSED_STEPS = 25.0, 1.2, 8
"""First guess of a launch's and of a step's time; the latter counts as so many real steps."""


def measure(
    spec: Spec, path: Path, backend: Backend, *, console: Console, stall_s: float, budget_s: float
) -> None:
    """Measure what `path` does not have; `MIN_REPETITIONS` or more, as `budget_s` allows.

    Raises ConfigError if `path` holds a run of another `spec`, machine or version.
    """
    until = time.time() + budget_s
    folder = path.absolute()  # the launched processes work in it
    with signals_as_exit(), _reserved(folder):
        _prepare(spec, folder, backend, console)
        console.print(f"{backend.describe()}.", highlight=False)
        check_hosts(backend)
        for job in jobs(spec, {sample.key for sample in Store(folder).read()}):
            backend.set_rate(job["rate"])
            needed = [trial for trial in job["trials"] if trial[1] < MIN_REPETITIONS]
            steps, least = spec.steps_in(job["trials"]), spec.steps_in(needed)
            launch(
                backend,
                "ds_ckpt.lab.measure.worker",
                {"spec": asdict(spec), **job, "until": until},
                folder,
                stall_s=stall_s,
                on_event=_printer(console, steps, least, until),
            )


def jobs(spec: Spec, done: set[tuple[object, ...]]) -> list[dict[str, Any]]:
    """Return the launches that are needed, one per rate; configurations rotate by repetition.

    Policies of one exchange follow each other, because their steps are compared.
    """
    exchanges = [one.exchange for one in spec.configurations]
    names = [c.name for c in sorted(spec.configurations, key=lambda c: exchanges.index(c.exchange))]
    memory = [name for name in spec.policies if ("memory", name) not in done]
    found: list[dict[str, Any]] = []
    for rate in spec.rates:
        turns = [
            (names[(place + repetition) % len(names)], repetition)
            for repetition in range(spec.repetitions)
            for place in range(len(names))
        ]
        trials = [
            (n, repeated) for n, repeated in turns if ("trial", n, rate, repeated) not in done
        ]
        if trials:
            found.append({"rate": rate, "trials": trials, "memory": memory})
            memory = []
    return found


def seconds_left(
    taken: int, took_s: float, more: int, *, needed: int = 0, budget_s: float = math.inf
) -> float:
    """Estimate the time of `more` steps, after `taken` ones that took `took_s`.

    `budget_s` ends them early, but not before the first `needed`.
    """
    step_s = (_GUESSED_STEPS * _STEP_S + took_s) / (_GUESSED_STEPS + taken)
    return min(more * step_s, max(budget_s, needed * step_s, 0.0))


def _printer(
    console: Console, steps: int, least: int = 0, until: float = math.inf
) -> Callable[[dict[str, Any]], None]:
    """Return a callback that prints an event per tenth of the work, with the time left.

    The time limit `until` does not end the first `least` of the `steps`.
    """
    printed, begun_s, before = -1, 0.0, 0

    def show(event: dict[str, Any]) -> None:
        nonlocal printed, begun_s, before
        words, done, total = event.get("words"), event.get("done", 0), event.get("total", 0)
        if words and not begun_s:
            begun_s, before = time.time(), done
        if words and (not total or 10 * done // total != printed):
            printed = 10 * done // total if total else -1
            line(words, done, total, time.time() - begun_s)

    def line(words: str, done: int, total: int, took_s: float = 0.0, start_s: float = 0.0) -> None:
        more, taken, budget_s = total - done, max(done - before, 0), until - time.time() - start_s
        left_s = seconds_left(taken, took_s, more, needed=least - done, budget_s=budget_s) + start_s
        console.print(f"  {words}" + f", about {left_s:.0f} s left" * (more > 0), highlight=False)

    line("starting the ranks", 0, steps, start_s=_START_S)
    return show


def _refusal(folder: Path, found: str, why: str) -> ConfigError:
    problem = Problem("--output", f"{folder}, {found}", why, "name another folder")
    return ConfigError(problem, headline="this folder cannot be used")


@contextlib.contextmanager
def _reserved(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it as long as this process lives."""
    if folder.exists() and not folder.is_dir():
        raise _refusal(folder, "which is a file", "a run needs a folder")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = "in which another command measures"
            raise _refusal(folder, found, "it would mix both") from None
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(descriptor)


def _prepare(spec: Spec, folder: Path, backend: Backend, console: Console) -> None:
    """Begin a run, or check that the run in the folder can be continued; log the command."""
    why = "samples of different experiments, machines or versions cannot be combined"
    now, runs = _surroundings(backend), read_runs(folder)
    if not (folder / SPEC).exists():
        if any(folder.iterdir()):
            raise _refusal(folder, "which holds something else", "a run needs a folder of its own")
    else:
        there, store = Spec.load(folder), Store(folder)
        more = spec.repetitions >= there.repetitions
        if not more or replace(there, repetitions=spec.repetitions) != spec:
            found = "which holds a run with other settings (only --repetitions may grow)"
            raise _refusal(folder, found, why)
        store.truncate_partial()
        count = len(store.read())
        for name, value in now.items() if count and runs else ():
            if runs[-1][name] != value:
                found = f"whose {name} was {runs[-1][name]} and is now {value}"
                raise _refusal(folder, found, why)
        console.print(f"Continuing: {count} records exist.", highlight=False)
    spec.save(folder)
    entry = {
        "started_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **now,
    }
    with (folder / RUNS).open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the log of commands that measured into the folder."""
    path = folder / RUNS
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return list(map(json.loads, lines))


def _surroundings(backend: Backend) -> dict[str, Any]:
    """Return what a run must share with the run that it continues."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
        model = named[1].strip() if named else model
    return {
        "place": backend.describe(),
        "versions": workload.versions(),
        "machine": {
            "CPU": model,
            "cores": os.cpu_count() or 1,
            "memory in GiB": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        },
    }
