"""Runs an experiment into a folder, or goes on with one that was stopped there."""

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
from ds_ckpt.lab.hosts.checks import check_hosts
from ds_ckpt.lab.hosts.launcher import launch, signals_as_exit
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
    """Measure what is not measured yet; samples lie in `path` then.

    Args:
        stall_s: end when process 0 has been silent for so long: more than the longest step takes.

    Raises:
        ConfigError: `spec` cannot be measured, or `path` holds a run of another one.
        HostError: a host cannot take part, or has dropped out.
        LaunchError: the launched processes failed.
    """
    check(spec)
    folder = path.absolute()  # the launched work in it
    _prepare(spec, folder, backend, console)
    console.print(f"{backend.describe()}.", highlight=False)
    with signals_as_exit(), _noted(spec, folder, backend) as note:
        check_hosts(backend)
        with shown(console) as show:
            launch(
                backend,
                "ds_ckpt.lab.measure.worker",
                {},
                folder,
                stall_s=stall_s,
                limit_s=limit_s,
                heard=show,
                if_silent="; on a slow link raise --stall-s",
            )
        note["ended_well"] = True


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to call with every event: a progress bar, without a terminal a line a tenth."""
    said: tuple[str, int] = ("", 0)
    counted = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    columns = *counted, TimeElapsedColumn(), TimeRemainingColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("starting deepspeed", total=None)

        def show(event: dict[str, Any]) -> None:
            nonlocal said
            if (words := event.get("words")) is None:
                return
            total, done = event.get("total"), event.get("done", 0)
            bar.update(task, description=words, total=total, completed=done)
            now = words.lstrip("0123456789 "), 10 * done // max(total or 1, 1)
            if hidden and now != said:
                console.print(f"  {words}", highlight=False)
                said = now

        yield show


def _prepare(spec: Spec, folder: Path, backend: Backend, console: Console) -> None:
    """Make the folder, or see that what is there can be gone on with."""
    if (folder / SPEC).exists():
        there = Spec.load(folder)
        more = spec.repetitions >= there.repetitions
        if not more or replace(there, repetitions=spec.repetitions) != spec:
            raise ConfigError(
                Problem(
                    where="--output",
                    found=f"{folder}, which holds a run with other settings",
                    why="samples of different experiments cannot be put together",
                    remedy="name another folder, or give the command that runs.jsonl there names; "
                    "--repetitions may be more",
                ),
                headline="this run cannot go on here",
            )
        store = Store(folder)
        store.mend()
        count = len(store.read())
        runs = (folder / RUNS).read_text().splitlines() if (folder / RUNS).exists() else []
        then, now = json.loads(runs[-1]) if count and runs else {}, _place(spec, backend)
        why = "samples of different models, machines, launches or versions cannot be put together"
        problems = [
            Problem(
                "--output",
                f"{folder}, whose {name} were {was}, and are now {now[name]}",
                why,
                "name another folder",
            )
            for name, was in then.items()
            if name in now and was != now[name]
        ]
        if problems:
            raise ConfigError(problems, headline="this run cannot go on here")
        spec.save(folder)
        console.print(f"Going on: {count} records are there.", highlight=False)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            Problem("--output", str(folder), "it holds something else", "name a folder to be made"),
            headline="this run cannot begin here",
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        text = workload.file_corpus(Path(spec.text)) if spec.text else workload.embedded_corpus()
        text.save(folder / "corpus")
        spec.save(folder)


def _model_files(spec: Spec) -> dict[str, str]:
    """SHA-256 of the files that `--model` names, by name; of a large one of its beginning and size.

    A module is its own file: what it imports is not looked at.
    """
    if spec.model is None:
        return {}
    path = Path(spec.model)
    if spec.own_batch:
        module = spec.model.partition(":")[0].replace(".", "/")
        path = Path(spec.folder, f"{module}.py")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = {}
    for file in filter(Path.is_file, files):
        with file.open("rb") as opened:
            digest = hashlib.sha256(opened.read(_LARGE))
        found[file.name] = f"{digest.hexdigest()[:16]}, {file.stat().st_size} bytes"
    return found


def _place(spec: Spec, backend: Backend) -> dict[str, Any]:
    """What a measurement was made with and on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
        model = named[1].strip() if named else model
    return {
        "ground": backend.describe(),
        "model": _model_files(spec),
        "versions": versions(),
        "machine": {
            "cpu_model": model,
            "cpu_cores": os.cpu_count() or 1,
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
    }


@contextlib.contextmanager
def _noted(spec: Spec, folder: Path, backend: Backend) -> Iterator[dict[str, Any]]:
    """Keep what was run on what, also of a run that fails or is killed."""
    began = time.monotonic()
    path = folder / RUNS
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    note: dict[str, Any] = {
        "started_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **_place(spec, backend),
        "ended_well": False,
        "wall_time_s": None,
        "load_at_end": None,
    }

    def keep() -> None:
        with replacing(path) as fresh:  # every later call reads it, and a kill may come any time
            fresh.write_text(before + json.dumps(note) + "\n", encoding="utf-8")

    keep()
    try:
        yield note
    finally:
        note["wall_time_s"] = round(time.monotonic() - began, 1)
        note["load_at_end"] = round(os.getloadavg()[0], 2)
        keep()
