"""Sets of emulated hosts that are up or were left behind: one folder each, with a record in it.

The kernel takes a set down when its maker ends (see `emulated`), a kill included. What a killed
maker leaves is the folder with keys and logs; should a process outlive it after all, the record
says which. `take_down` clears both away, for `ds-ckpt hosts down`.

Folders lie where temporary ones do. A process is named by its pid and when it was started, so that
one that has got the pid of another later is never taken for it.
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

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from ds_ckpt.errors import DsCkptError, Problem
from ds_ckpt.files import replacing

_PREFIX, _RECORD = "ds_ckpt_set_", "record.json"
_GONE_S = 15.0


class HostsError(DsCkptError, RuntimeError):
    """Hosts cannot be emulated here, or one of them did not come up or go down."""

    headline = "the emulated hosts"


@dataclass(frozen=True)
class ProcessId:
    """A process of this boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises ProcessLookupError if it has ended."""
        ticks = _start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid, ticks)

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True)
class HostSet:
    """One set as its record tells. `processes` are the first ones, whose end ends all others."""

    folder: Path
    owner: ProcessId
    processes: tuple[ProcessId, ...]
    count: int
    rate_mbit: float | None

    @property
    def name(self) -> str:
        return self.folder.name

    def write(self) -> None:
        """Write the record, whole or not at all."""
        with replacing(self.folder / _RECORD) as fresh:
            fresh.write_bytes(TypeAdapter(HostSet).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> HostSet | None:
        """The set in `folder`; None if it has no record that can be read."""
        try:
            return TypeAdapter(cls).validate_json((folder / _RECORD).read_bytes())
        except (OSError, ValueError):
            return None


def new_folder() -> Path:
    """A new folder for a set, for its owner only: the hosts' keys are kept there."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def all_sets() -> list[HostSet]:
    """Every set with a record."""
    return [found for folder in _folders() if (found := HostSet.read(folder)) is not None]


def take_down(names: Iterable[str] = (), *, living: bool = False) -> tuple[list[str], list[str]]:
    """Kill what still runs of sets, and remove their folders.

    Args:
        names: only these; they are taken down even if their owner runs.
        living: also all those whose owner runs.

    Returns:
        Names of the sets that were taken down, and of those left alone because their owner runs.

    Raises:
        HostsError: no set has one of `names`, or a process does not end when it is killed.
    """
    wanted = set(names)
    sets = {found.name: found for found in all_sets()}
    if unknown := wanted - sets.keys():
        raise HostsError(
            Problem(
                where=", ".join(sorted(unknown)),
                found="no such set of hosts",
                why=f"the sets are: {', '.join(sets) or 'none'}",
                remedy="name one that `ds-ckpt hosts list` shows",
            )
        )
    downed, left = [], []
    for name, found in sets.items():
        if wanted and name not in wanted:
            continue
        if found.owner.alive and not living and not wanted:
            left.append(name)
        else:
            _kill(found)
            shutil.rmtree(found.folder, ignore_errors=True)
            downed.append(name)
    for folder in () if wanted else _folders():
        # its maker was killed before it wrote the record, or is about to write it
        if HostSet.read(folder) is None and time.time() - folder.stat().st_mtime > 60:
            shutil.rmtree(folder, ignore_errors=True)
            downed.append(folder.name)
    return downed, left


def _folders() -> list[Path]:
    """This user's; what somebody else has put there under such a name is not looked into."""
    found = sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    return [folder for folder in found if folder.lstat().st_uid == os.geteuid()]


def _kill(found: HostSet) -> None:
    for process in found.processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    limit = time.monotonic() + _GONE_S
    while alive := [p.pid for p in found.processes if p.alive]:
        if time.monotonic() > limit:
            why = f"they were killed {_GONE_S:.0f} s ago"
            remedy = "look with ps at what holds them, then try again"
            raise HostsError(Problem(found.name, f"processes {alive} still there", why, remedy))
        time.sleep(0.02)


def _start_ticks(pid: int) -> int | None:
    """When a running process was started, in clock ticks since boot; None if it has ended.

    With the pid it names one process for as long as the machine is up: pids come back, this not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
