"""DeepSpeed's CPU operator: compiled at the first start on a machine, then kept.

`deepspeed.comm` builds `deepspeed_shm_comm` whenever it starts on a CPU; no setting turns that
off. torch guards the build with a lock file and waits for it without end, so that a build that
is killed would hang every later start: the lock is taken away here if this run has left it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path


def locks(environment: Mapping[str, str]) -> set[Path]:
    """Lock files of builds that run, or that were stopped without clearing up."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    compiled = Path(named) if named else Path.home() / ".cache" / "torch_extensions"
    return set(compiled.glob("**/deepspeed_shm_comm/lock"))


@contextlib.contextmanager
def lock_cleared_on_failure(environment: Mapping[str, str]) -> Iterator[None]:
    """Remove the lock if what runs inside fails while building. Its processes must have ended."""
    before = locks(environment)
    try:
        yield
    except BaseException:
        for lock in locks(environment) - before:
            lock.unlink(missing_ok=True)
        raise


def remove_shared_buffers(port: int) -> None:
    """Free the memory that the operator leaves behind: 69 MB a process and start, until reboot.

    DeepSpeed never unlinks its segments in /dev/shm. Their names have the master port in them, so
    those of other runs stay.
    """
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        with contextlib.suppress(OSError):
            segment.unlink()
