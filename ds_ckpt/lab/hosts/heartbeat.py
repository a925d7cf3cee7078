"""Heartbeat between a launcher and its processes, in a folder that both can see.

    job.json      work for the launched processes; rank 0 reads and broadcasts it
    events.jsonl  progress, appended by rank 0
    alive         identity of the launch, renewed by the launcher

A process without progress for `stall_s` ends itself, on whatever host. Rank 0 also ends if `alive`
is not renewed for `ORPHANED_S` or names another launch. The launcher ends everything if rank 0
reports nothing for `stall_s`.
"""

import argparse
import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_ckpt.files import replacing

JOB, EVENTS, ALIVE = "job.json", "events.jsonl", "alive"
ALIVE_EVERY_S = 2.0
ORPHANED_S = 45.0
START_S = 600.0
"""Limit until the first beat: imports, and DeepSpeed's compilation on a new machine."""
STALLED = 75
"""Exit code of a process that ended itself."""


class _Silence:
    """Time since the last progress, with a longer limit until the first."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s, self._begun, self._last_s = stall_s, False, time.monotonic()

    def end(self) -> None:
        self._begun, self._last_s = True, time.monotonic()

    def overdue_s(self) -> float | None:
        """Return the limit that the silence exceeds, or None."""
        limit_s = self._stall_s if self._begun else max(START_S, self._stall_s)
        return limit_s if time.monotonic() - self._last_s > limit_s else None


class Heartbeat:
    """A launched process's end."""

    def __init__(self, folder: Path, *, launch: str, stall_s: float) -> None:
        self.folder = folder
        self._launch = launch
        self._silence = _Silence(stall_s)
        self._leads = False
        # when `alive` was last renewed: by its file system's clock, and by this process's
        self._renewed = (0, time.monotonic())
        threading.Thread(target=self._watch, args=(min(1.0, stall_s / 4),), daemon=True).start()

    def lead(self) -> None:
        """Make this rank 0: it writes events, and ends with its launch."""
        self._leads = True

    def beat(self, **event: Any) -> None:
        """Report progress; rank 0 also sends `event` to the launcher."""
        self._silence.end()
        if self._leads:
            with (self.folder / EVENTS).open("a", encoding="utf-8") as sink:
                sink.write(json.dumps({"launch": self._launch, "event": event}) + "\n")

    def _watch(self, every_s: float) -> None:
        while True:
            time.sleep(every_s)
            if reason := self._reason_to_end():
                print(f"ds_ckpt: this process exits: {reason}", file=sys.stderr, flush=True)
                os._exit(STALLED)

    def _reason_to_end(self) -> str:
        if (limit_s := self._silence.overdue_s()) is not None:
            return f"no progress for {limit_s:.0f} s"
        if not self._leads:
            return ""
        named = self._launch  # also while the file is being replaced
        with contextlib.suppress(OSError):
            renewed = (self.folder / ALIVE).stat().st_mtime_ns
            if renewed != self._renewed[0]:
                self._renewed = (renewed, time.monotonic())
            named = (self.folder / ALIVE).read_text(encoding="utf-8")
        if time.monotonic() - self._renewed[1] > ORPHANED_S:
            return "its launcher is gone"
        # a launcher that is killed and started again at once would give the folder two writers
        return "" if named == self._launch else "its launch has ended, or another has begun"


def begin(description: str) -> tuple[Heartbeat, dict[str, Any]]:
    """Start a launched process: heartbeat, process group, and the job that `launch` was given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="Folder that rank 0 uses.")
    parser.add_argument("--token", required=True, help="Identity of this launch.")
    parser.add_argument("--stall-s", type=float, required=True, help="Limit without progress, s.")
    parser.add_argument("--local_rank", type=int, default=0, help="Set by the launcher, unused.")
    arguments = parser.parse_args()
    heartbeat = Heartbeat(arguments.folder, launch=arguments.token, stall_s=arguments.stall_s)
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed(verbose=False)
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        heartbeat.lead()
        content[0] = json.loads((arguments.folder / JOB).read_text(encoding="utf-8"))
    dist.broadcast_object_list(content, src=0)
    return heartbeat, content[0]


class Listener:
    """The launcher's end. Processes of an earlier launch in the folder end when it is made."""

    def __init__(self, folder: Path, *, stall_s: float) -> None:
        self.launch = secrets.token_hex(8)
        self._folder, self._silence = folder, _Silence(stall_s)
        self.overdue_s = self._silence.overdue_s
        (folder / EVENTS).unlink(missing_ok=True)
        self._offset = 0
        self._write_alive()

    def poll(self) -> Iterator[dict[str, Any]]:
        """Renew `alive` and yield new events; use it a few times a second."""
        if time.monotonic() - self._renewed_s > ALIVE_EVERY_S:
            self._write_alive()
        with contextlib.suppress(FileNotFoundError), (self._folder / EVENTS).open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    return  # half-written: next time
                self._offset += len(text)
                line = json.loads(text)
                if line["launch"] == self.launch:  # else of a killed launch that has not ended yet
                    self._silence.end()
                    yield line["event"]

    def end(self) -> None:
        """End the launch: a process that no signal reaches ends itself."""
        self.launch = "ended"
        self._write_alive()

    def _write_alive(self) -> None:
        with replacing(self._folder / ALIVE) as fresh:
            fresh.write_text(self.launch, encoding="utf-8")
        self._renewed_s = time.monotonic()
