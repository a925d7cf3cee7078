"""Records of sets of emulated hosts that are up or were left behind: one folder each.

The kernel takes a set down when its maker ends (see `emulated`), even if killed. A killed maker
leaves its folder with keys and logs; `take_down` removes it, and kills processes that outlived it.

Folders lie in the temporary folder. A process is identified by its pid and start time, so that a
reused pid is never taken for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from ds_ckpt.errors import DsCkptError, Problem
from ds_ckpt.files import replacing

_PREFIX, _RECORD = "ds_ckpt_set_", "record.json"
_KILL_LIMIT_S = 15.0


class HostsError(DsCkptError, RuntimeError):
    """Hosts cannot be emulated here, or one of them did not come up or go down."""

    headline = "the emulated hosts"


@dataclass(frozen=True)
class ProcessId:
    """A process of this boot."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Identify a running process; psutil.NoSuchProcess if it has ended."""
        return cls(pid, psutil.Process(pid).create_time())

    @property
    def is_alive(self) -> bool:
        """True until it ends."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            same = process.create_time() == self.started
            return bool(same and process.status() != psutil.STATUS_ZOMBIE)
        return False


@dataclass(frozen=True)
class HostSet:
    """Record of one set. `processes` are the first ones, whose end ends all others."""

    folder: Path
    owner: ProcessId
    processes: tuple[ProcessId, ...]
    count: int
    rate_mbit: float | None

    @property
    def name(self) -> str:
        """Name for `ds-ckpt hosts`."""
        return self.folder.name

    def write(self) -> None:
        """Write the record atomically."""
        with replacing(self.folder / _RECORD) as fresh:
            fresh.write_bytes(TypeAdapter(HostSet).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> HostSet | None:
        """Read the record in `folder`; None if there is none that can be read."""
        try:
            return TypeAdapter(cls).validate_json((folder / _RECORD).read_bytes())
        except (OSError, ValueError):
            return None


def new_folder() -> Path:
    """Make a folder for a set that only its owner can read: it holds the hosts' keys."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def all_sets() -> list[HostSet]:
    """Return every set with a record."""
    return [found for folder in _folders() if (found := HostSet.read(folder)) is not None]


def take_down(names: Iterable[str] = (), *, living: bool = False) -> tuple[list[str], list[str]]:
    """Kill the remaining processes of sets, and remove their folders.

    Args:
        names: only these; also if their owner runs.
        living: also all sets whose owner runs.

    Returns:
        Names of the sets that were taken down, and of those left alone because their owner runs.

    Raises:
        HostsError: no set has one of `names`, or a killed process does not end.
    """
    wanted = set(names)
    sets = {found.name: found for found in all_sets()}
    if unknown := wanted - sets.keys():
        raise HostsError(
            Problem(
                where=", ".join(sorted(unknown)),
                found="no such set of hosts",
                why=f"the sets are: {', '.join(sets) or 'none'}",
                remedy="name one from `ds-ckpt hosts list`",
            )
        )
    removed, left = [], []
    for name, found in sets.items():
        if wanted and name not in wanted:
            continue
        if found.owner.is_alive and not living and not wanted:
            left.append(name)
        else:
            _kill(found)
            shutil.rmtree(found.folder, ignore_errors=True)
            removed.append(name)
    for folder in () if wanted else _folders():
        # its maker was killed before it wrote the record, or is about to write it
        if HostSet.read(folder) is None and time.time() - folder.stat().st_mtime > 60:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed, left


def _folders() -> list[Path]:
    """Return this user's folders; other users' are ignored."""
    found = sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    return [folder for folder in found if folder.lstat().st_uid == os.geteuid()]


def _kill(found: HostSet) -> None:
    for process in found.processes:
        if process.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    limit = time.monotonic() + _KILL_LIMIT_S
    while alive := [p.pid for p in found.processes if p.is_alive]:
        if time.monotonic() > limit:
            why = f"they were killed {_KILL_LIMIT_S:.0f} s ago"
            remedy = "find what blocks them with ps, then try again"
            raise HostsError(Problem(found.name, f"processes {alive} still exist", why, remedy))
        time.sleep(0.02)
