"""Variables of `ds-ckpt exec`, and locks of torch's compilations. Loads no torch, no DeepSpeed.

Names begin with PYTHON: DeepSpeed's launchers export those to other nodes.
"""

import base64
import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STARTUP = Path(__file__).with_name("startup")
SECTION_VARIABLE, REACHED_FILE_VARIABLE = "PYTHON_DS_CKPT_SECTION", "PYTHON_DS_CKPT_REACHED"
WAIT_VARIABLE = "PYTHON_DS_CKPT_WAIT_S"
log = logging.getLogger("ds_ckpt")

_LOCAL_TYPES = ("apfs", "btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs")
_SHARED_AGE_S = 1800.0
"""Minimum age of a stale lock on a shared file system."""
_RANK_AGE_S = 60.0
"""Minimum age of a stale lock in a rank, which may not see the other ranks' compilations."""
_REPORT_AFTER = 5


def with_plugin(base: Mapping[str, str], section: Any, marker: Path) -> dict[str, str]:
    """Return an environment in which every Python process has the plugin.

    `section` is added to configurations that have none. Processes on this node create the file
    `marker` when they call `deepspeed.initialize`.
    """
    path = os.pathsep.join(filter(None, [str(STARTUP), base.get("PYTHONPATH")]))
    added = {"PYTHONPATH": path, REACHED_FILE_VARIABLE: str(marker)}
    if section is not None:  # pdsh, mpirun and srun take away quotes, blanks or commas
        added[SECTION_VARIABLE] = base64.urlsafe_b64encode(json.dumps(section).encode()).decode()
    return {**base, **added}


def _compile_locks(variables: Mapping[str, str]) -> list[Path]:
    cache = variables.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(variables.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))
    return [*folder.glob("*/lock"), *folder.glob("*/*/lock")]


def stale_locks(
    min_age_s: float = 0.0, variables: Mapping[str, str] = os.environ
) -> dict[Path, float]:
    """Return the locks that killed compilations have left, with their times of modification.

    Torch waits for them forever. A running compilation has its lock open. On shared file systems
    a lock also has to be old.
    """
    locks = _compile_locks(variables)
    if not locks:
        return {}
    import psutil

    time.sleep(0.2)  # a compilation that ends closes the file before it removes it
    found, open_paths = {}, set[str]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            open_paths |= {file.path for file in process.open_files()}
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    for lock in locks:
        with contextlib.suppress(OSError):
            path, status = lock.resolve(), lock.stat()
            is_local = next((mounts[p] for p in path.parents if p in mounts), "") in _LOCAL_TYPES
            age_s = time.time() - status.st_mtime
            is_visible = os.geteuid() in (0, status.st_uid)
            least_s = min_age_s if is_local else max(min_age_s, _SHARED_AGE_S)
            if is_visible and str(path) not in open_paths and age_s >= least_s:
                found[lock] = status.st_mtime
    return found


def clear_stale_locks(
    min_age_s: float = _RANK_AGE_S, variables: Mapping[str, str] = os.environ
) -> None:
    """Remove stale locks, each with a log line, on the first rank of a node."""
    if variables.get("LOCAL_RANK", "0") != "0":
        return
    for lock, created in stale_locks(min_age_s, variables).items():
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime == created:
                lock.unlink()
                log.warning("ds_ckpt: removed %s, left by a killed compilation", lock)


@contextlib.contextmanager
def reported_compiling() -> Iterator[None]:
    """Log compilations of DeepSpeed's operators, from a thread: DeepSpeed does not log them."""
    ended = threading.Event()

    def report() -> None:
        seconds = Counter[Path]()
        while not ended.wait(1.0):
            locks = _compile_locks(os.environ)
            seconds.update(locks)
            for lock, lasted_s in list(seconds.items()):
                name = lock.parent.name
                if lock in locks and lasted_s == _REPORT_AFTER:
                    advice = f"If no compiler runs, remove {lock}"
                    log.warning("ds_ckpt: compiling %s: a minute or several. %s", name, advice)
                elif lock not in locks:
                    del seconds[lock]
                    if lasted_s >= _REPORT_AFTER:
                        log.warning("ds_ckpt: compiled %s in %d s", name, lasted_s)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
