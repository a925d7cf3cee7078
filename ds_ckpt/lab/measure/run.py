"""Run an experiment into a folder, or continue one that was stopped there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.files import replacing
from ds_ckpt.lab import workload
from ds_ckpt.lab.hosts.backends import Backend
from ds_ckpt.lab.hosts.launcher import check_hosts, launch, signals_as_exit
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import SPEC, Spec, check
from ds_ckpt.lab.workload import versions

RUNS = "runs.jsonl"
_LARGE = 1 << 24


def measure(
    spec: Spec,
    path: Path,
    *,
    backend: Backend,
    console: Console,
    stall_s: float = 180.0,
    limit_s: float = 6 * 3600.0,
) -> None:
    """Measure what `path` does not have; `stall_s` must be longer than the longest step.

    Raises:
        ConfigError: `spec` cannot be measured, or `path` holds a run of another one.
        HostError: a node cannot take part, or has dropped out.
        LaunchError: the launched processes failed.
    """
    check(spec)
    folder = path.absolute()  # the launched processes work in it
    _prepare(spec, folder, backend, console)
    console.print(f"{backend.describe()}.", highlight=False)
    with signals_as_exit(), _logged(spec, folder, backend) as entry:
        check_hosts(backend)
        with progress_shown(console) as show:
            launch(
                backend,
                "ds_ckpt.lab.measure.worker",
                {},
                folder,
                stall_s=stall_s,
                limit_s=limit_s,
                on_event=show,
                if_silent="; on a slow link raise --stall-s",
            )
        entry["completed"] = True


@contextlib.contextmanager
def progress_shown(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a callback for events: a progress bar, without a terminal a line per tenth."""
    printed: tuple[str, int] = ("", 0)
    counted = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    columns = *counted, TimeElapsedColumn(), TimeRemainingColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("starting deepspeed", total=None)

        def show(event: dict[str, Any]) -> None:
            nonlocal printed
            if (words := event.get("words")) is None:
                return
            total, done = event.get("total"), event.get("done", 0)
            bar.update(task, description=words, total=total, completed=done)
            now = words.lstrip("0123456789 "), 10 * done // max(total or 1, 1)
            if hidden and now != printed:
                console.print(f"  {words}", highlight=False)
                printed = now

        yield show


def _prepare(spec: Spec, folder: Path, backend: Backend, console: Console) -> None:
    """Make the folder, or check that the run in it can be continued."""

    def refuse(found: str, why: str, remedy: str = "name another folder") -> ConfigError:
        problem = Problem("--output", f"{folder}, {found}", why, remedy)
        return ConfigError(problem, headline="this folder cannot be used")

    if not (folder / SPEC).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise refuse("which holds something else", "a run needs a folder of its own")
        folder.mkdir(parents=True, exist_ok=True)
        text = workload.file_corpus(Path(spec.text)) if spec.text else workload.embedded_corpus()
        text.save(folder / "corpus")
        spec.save(folder)
        return
    there = Spec.load(folder)
    more = spec.repetitions >= there.repetitions
    if not more or replace(there, repetitions=spec.repetitions) != spec:
        raise refuse(
            "which holds a run with other settings",
            "samples of different experiments cannot be combined",
            "name another folder, or repeat the command in runs.jsonl; --repetitions may be larger",
        )
    store = Store(folder)
    store.truncate_partial()
    count = len(store.read())
    runs = (folder / RUNS).read_text().splitlines() if (folder / RUNS).exists() else []
    before, now = json.loads(runs[-1]) if count and runs else {}, _surroundings(spec, backend)
    for name, was in before.items():
        if name in now and was != now[name]:
            raise refuse(
                f"whose {name} was {was} and is now {now[name]}",
                "samples of different models, machines or versions cannot be combined",
            )
    spec.save(folder)
    console.print(f"Continuing: {count} records exist.", highlight=False)


def _model_files(spec: Spec) -> dict[str, str]:
    """Return digests of the files of `--model`; of a large one its beginning and size.

    For a module that is its own file, not what it imports.
    """
    if spec.model is None:
        return {}
    path = Path(spec.model)
    if spec.has_own_batch:
        path = Path(spec.folder, spec.model.partition(":")[0].replace(".", "/") + ".py")
    found = {}
    for file in filter(Path.is_file, sorted(path.iterdir()) if path.is_dir() else [path]):
        with file.open("rb") as opened:
            digest = hashlib.sha256(opened.read(_LARGE))
        found[file.name] = f"{digest.hexdigest()[:16]}, {file.stat().st_size} bytes"
    return found


def _surroundings(spec: Spec, backend: Backend) -> dict[str, Any]:
    """Return what a run must share with the run that it continues."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
        model = named[1].strip() if named else model
    return {
        "place": backend.describe(),
        "model": _model_files(spec),
        "versions": versions(),
        "machine": {
            "CPU": model,
            "cores": os.cpu_count() or 1,
            "memory in GiB": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        },
    }


@contextlib.contextmanager
def _logged(spec: Spec, folder: Path, backend: Backend) -> Iterator[dict[str, Any]]:
    """Log the run in `RUNS`, also if it fails or is killed."""
    began = time.monotonic()
    path = folder / RUNS
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    entry: dict[str, Any] = {
        "started_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **_surroundings(spec, backend),
        "completed": False,
        "wall_time_s": None,
        "load_at_end": None,
    }

    def write() -> None:
        with replacing(path) as fresh:  # every later call reads it, and a kill may come any time
            fresh.write_text(before + json.dumps(entry) + "\n", encoding="utf-8")

    write()
    try:
        yield entry
    finally:
        entry["wall_time_s"] = round(time.monotonic() - began, 1)
        entry["load_at_end"] = round(os.getloadavg()[0], 2)
        write()
