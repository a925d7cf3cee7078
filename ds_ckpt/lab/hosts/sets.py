"""Folders of sets of emulated hosts that are up or were left behind.

The kernel takes a set down when its maker ends (see `emulated`), even if killed. A killed maker
leaves its folder with keys and logs, which `take_down` removes. The owner is identified by its pid
and start time, so that a reused pid is never taken for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from ds_ckpt.errors import DsCkptError
from ds_ckpt.files import replacing

_PREFIX, _OWNER = "ds_ckpt_set_", "owner.json"
_END_S = 30.0


class HostsError(DsCkptError, RuntimeError):
    """Hosts cannot be emulated here, or one of them did not come up or go down."""

    headline = "the emulated nodes"


def new_set() -> Path:
    """Make this process's folder of a set, which only its user can read: it holds the keys."""
    folder, owner = Path(tempfile.mkdtemp(prefix=_PREFIX)), psutil.Process()
    with replacing(folder / _OWNER) as fresh:
        fresh.write_text(json.dumps([owner.pid, owner.create_time()]))
    return folder


def owner_of(folder: Path) -> psutil.Process | None:
    """Return the process that made a set, or None if it has ended."""
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        pid, started = json.loads((folder / _OWNER).read_text())
        process = psutil.Process(pid)
        same = process.create_time() == started
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    return None


def take_down(*, living: bool = False) -> tuple[list[str], list[str]]:
    """Remove this user's folders of sets whose owner has ended; return their names, and others'.

    With `living`, owners that run are ended first, and take their sets down.
    """
    removed, left = [], []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        state, owner = folder.lstat(), owner_of(folder)
        begins = not (folder / _OWNER).exists() and time.time() - state.st_mtime < 60
        if begins or state.st_uid != os.geteuid():
            continue
        if owner is not None and not living:
            left.append(folder.name)
            continue
        if owner is not None:
            owner.terminate()
            if psutil.wait_procs([owner], timeout=_END_S)[1]:
                owner.kill()
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    return removed, left
