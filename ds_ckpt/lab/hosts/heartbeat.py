"""Heartbeat between a launcher and its processes, in a folder that both can see.

job.json      work for the launched processes; rank 0 reads and broadcasts it
events.jsonl  appended by rank 0: progress and requests
alive         renewed by the launcher: identity of the launch, and number of answered requests

Every process reports progress with `Heartbeat.beat`. Three silences end a launch:

    a process without progress for `stall_s` ends itself, on whatever host: a collective whose peer
        is gone would wait for half an hour, and ssh may be gone with the network
    rank 0 ends if `alive` is not renewed for `ORPHANED_S` or names another launch; the others then
        make no progress
    the launcher ends everything if rank 0 reports nothing for `stall_s`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


class Heartbeat:
    """A launched process's end."""

    def __init__(self, folder: Path, *, launch: str, stall_s: float) -> None:
        self.folder = folder
        self._launch = launch
        self._stall_s = stall_s
        self._last_s = time.monotonic()
        self._begun = False
        self._leads = False
        self._requests = 0
        # when `alive` was last renewed: by its file system's clock, and by this process's
        self._renewed = (0, time.monotonic())
        threading.Thread(target=self._watch, daemon=True).start()

    def lead(self) -> None:
        """Make this rank 0: it writes events, and ends with its launch."""
        self._leads = True

    def beat(self, **event: Any) -> None:
        """Report progress; rank 0 also sends `event` to the launcher."""
        self._last_s = time.monotonic()
        self._begun = True
        self._write({"event": event})

    def request(self, **request: Any) -> None:
        """Have the launcher do something and wait until it is done. Rank 0 alone sends it."""
        if self._leads:
            self._requests += 1
            self._write({"request": request})
            while _state(self.folder, self._launch) != (self._launch, self._requests):
                time.sleep(0.02)

    def _write(self, line: dict[str, Any]) -> None:
        if self._leads:
            with (self.folder / EVENTS).open("a", encoding="utf-8") as sink:
                sink.write(json.dumps({"launch": self._launch, **line}) + "\n")

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._stall_s / 4))
            if reason := self._reason_to_end():
                print(f"ds_ckpt: this process ends itself: {reason}", file=sys.stderr, flush=True)
                os._exit(STALLED)

    def _reason_to_end(self) -> str:
        limit_s = self._stall_s if self._begun else max(START_S, self._stall_s)
        if time.monotonic() - self._last_s > limit_s:
            return f"no progress for {limit_s:.0f} s"
        if self._leads:
            with contextlib.suppress(OSError):
                renewed = (self.folder / ALIVE).stat().st_mtime_ns
                if renewed != self._renewed[0]:
                    self._renewed = (renewed, time.monotonic())
            if time.monotonic() - self._renewed[1] > ORPHANED_S:
                return "its launcher is gone"
            # a launcher that is killed and started again at once would give the folder two writers
            if _state(self.folder, self._launch)[0] != self._launch:
                return "its launch has ended, or another has begun in its folder"
        return ""


def begin(description: str) -> tuple[Heartbeat, dict[str, Any]]:
    """Start a launched process: heartbeat, process group, and the job that `launch` was given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="Folder that rank 0 uses.")
    parser.add_argument("--token", required=True, help="Identity of this launch.")
    parser.add_argument("--stall-s", type=float, required=True, help="Limit without progress, s.")
    parser.add_argument("--port", type=int, required=True, help="Master port for mpirun.")
    parser.add_argument("--local_rank", type=int, default=0, help="Set by the launcher, unused.")
    arguments = parser.parse_args()
    heartbeat = Heartbeat(arguments.folder, launch=arguments.token, stall_s=arguments.stall_s)
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed(verbose=False, distributed_port=arguments.port)
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        heartbeat.lead()
        content[0] = json.loads((arguments.folder / JOB).read_text(encoding="utf-8"))
    dist.broadcast_object_list(content, src=0)
    return heartbeat, content[0]


class Listener:
    """The launcher's end. Processes of an earlier launch in the folder end when it is made.

    Args:
        on_event: receives the events of rank 0.
        on_request: carries out the requests of rank 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stall_s: float,
        on_event: Callable[[dict[str, Any]], object],
        on_request: Callable[[dict[str, Any]], object],
    ) -> None:
        self.launch = secrets.token_hex(8)
        self._folder, self._stall_s = folder, stall_s
        self._on_event, self._on_request = on_event, on_request
        self._answered = 0
        self._begun = False
        self._last_s = self._renewed_s = time.monotonic()
        (folder / EVENTS).unlink(missing_ok=True)
        self._offset = 0
        self._write_alive()

    def poll(self, *, answer: bool = True) -> None:
        """Process new events and renew `alive`; call it a few times a second."""
        if time.monotonic() - self._renewed_s > ALIVE_EVERY_S:
            (self._folder / ALIVE).touch()
            self._renewed_s = time.monotonic()
        for line in self._new_lines():
            if line["launch"] != self.launch:
                continue  # of a killed launch that has not ended yet
            self._begun, self._last_s = True, time.monotonic()
            if "event" in line:
                self._on_event(line["event"])
            elif answer:
                self._on_request(line["request"])
                self._answered += 1
                self._write_alive()

    def overdue_s(self) -> float | None:
        """Return the limit that the current silence exceeds, or None."""
        limit_s = self._stall_s if self._begun else max(START_S, self._stall_s)
        return limit_s if time.monotonic() - self._last_s > limit_s else None

    def end(self) -> None:
        """End the launch: a process that no signal reaches ends itself."""
        self.launch = "ended"
        self._write_alive()

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), (self._folder / EVENTS).open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # half-written: next time
                self._offset += len(line)
                yield json.loads(line)

    def _write_alive(self) -> None:
        with replacing(self._folder / ALIVE) as fresh:
            fresh.write_text(f"{self.launch} {self._answered}", encoding="utf-8")
        self._renewed_s = time.monotonic()


def _state(folder: Path, launch: str) -> tuple[str, int]:
    """Return the launch that `alive` names, and the number of answered requests.

    A file that cannot be read, which happens while it is replaced, counts as this launch's.
    """
    try:
        named, answered = (folder / ALIVE).read_text(encoding="utf-8").split()
        return named, int(answered)
    except (OSError, ValueError):
        return launch, 0
