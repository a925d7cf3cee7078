"""One heartbeat between whoever launches and the launched, in a folder that both can see.

job.json      what is to be done; process 0 reads it and hands it to the others
events.jsonl  process 0 appends to it: that it goes on, and with what; what it asks for
alive         whoever launched renews it: which launch this is, how many questions are answered

Every process says that it goes on with `Heartbeat.beat`. Three silences end a launch:

    a process that has not come on for `stall_s` ends itself, on whatever host, whatever it hangs
        in: a collective whose peer has gone waits for half an hour, and the ssh that could end it
        may be gone with the network
    process 0 ends when `alive` is not renewed for `ORPHANED_S` or does not name its launch; the
        others then do not come on
    whoever launched hears nothing of process 0 for `stall_s`, and ends all that it has started
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
"""Until the first beat: imports, the first time on a machine DeepSpeed's compilation."""
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
        self._asked = 0
        self._renewed = (0, time.monotonic())
        """When `alive` was last renewed: by the clock of its file system, and of here."""
        threading.Thread(target=self._watch, daemon=True).start()

    def lead(self) -> None:
        """This is process 0: it sees the folder, speaks for all, and ends with its launch."""
        self._leads = True

    def beat(self, **event: Any) -> None:
        """This process goes on; process 0 says so to whoever launched, with what it has to tell."""
        self._last_s = time.monotonic()
        self._begun = True
        self._write({"tell": event})

    def ask(self, **question: Any) -> None:
        """Have whoever launched do something; returns when it is done. Only process 0 asks."""
        if self._leads:
            self._asked += 1
            self._write({"ask": question})
            while _state(self.folder, self._launch) != (self._launch, self._asked):
                time.sleep(0.02)

    def _write(self, line: dict[str, Any]) -> None:
        if self._leads:
            with (self.folder / EVENTS).open("a", encoding="utf-8") as sink:
                sink.write(json.dumps({"launch": self._launch, **line}) + "\n")

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._stall_s / 4))
            if words := self._why_to_end():
                print(f"ds_ckpt: this process ends itself: {words}", file=sys.stderr, flush=True)
                os._exit(STALLED)

    def _why_to_end(self) -> str:
        limit_s = self._stall_s if self._begun else max(START_S, self._stall_s)
        if time.monotonic() - self._last_s > limit_s:
            return f"nothing has come on for {limit_s:.0f} s"
        if self._leads:
            with contextlib.suppress(OSError):
                renewed = (self.folder / ALIVE).stat().st_mtime_ns
                if renewed != self._renewed[0]:
                    self._renewed = (renewed, time.monotonic())
            if time.monotonic() - self._renewed[1] > ORPHANED_S:
                return "who launched it is gone"
            # who launched may be killed and started again at once: two would write into one folder
            if _state(self.folder, self._launch)[0] != self._launch:
                return "its launch has ended, or another has begun in its folder"
        return ""


def begin(description: str) -> tuple[Heartbeat, dict[str, Any]]:
    """What every launched process does first: it is watched, meets the others, gets the job.

    The other end is `launcher.launch`, which has named the folder in the arguments.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="process 0 reads and writes it")
    parser.add_argument("--token", required=True, help="the name of this launch")
    parser.add_argument("--stall-s", type=float, required=True, help="end after so long a silence")
    parser.add_argument("--port", type=int, required=True, help="where processes of mpirun meet")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher, unused")
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
    """The end of whoever launches. What an earlier launch has left in the folder ends with it.

    Args:
        heard: gets what process 0 tells.
        asked: does what process 0 asks for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stall_s: float,
        heard: Callable[[dict[str, Any]], object],
        asked: Callable[[dict[str, Any]], object],
    ) -> None:
        self.launch = secrets.token_hex(8)
        self._folder, self._stall_s = folder, stall_s
        self._heard, self._asked = heard, asked
        self._answered = 0
        self._begun = False
        self._last_s = self._renewed_s = time.monotonic()
        (folder / EVENTS).unlink(missing_ok=True)
        self._offset = 0
        self._say()

    def listen(self, *, answer: bool = True) -> None:
        """Take what has come, and be known to listen. A few times a second."""
        if time.monotonic() - self._renewed_s > ALIVE_EVERY_S:
            (self._folder / ALIVE).touch()
            self._renewed_s = time.monotonic()
        for line in self._new_lines():
            if line["launch"] != self.launch:
                continue  # of a launch that was killed, and has not ended yet
            self._begun, self._last_s = True, time.monotonic()
            if "ask" in line and answer:
                self._asked(line["ask"])
                self._answered += 1
                self._say()
            elif "tell" in line:
                self._heard(line["tell"])

    def overdue_s(self) -> float | None:
        """The bound of a silence that has lasted for longer than it, or None."""
        limit_s = self._stall_s if self._begun else max(START_S, self._stall_s)
        return limit_s if time.monotonic() - self._last_s > limit_s else None

    def end(self) -> None:
        """Nothing of this launch is to go on: what no signal reaches ends by itself."""
        self.launch = "ended"
        self._say()

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), (self._folder / EVENTS).open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # half-written: next time
                self._offset += len(line)
                yield json.loads(line)

    def _say(self) -> None:
        with replacing(self._folder / ALIVE) as fresh:
            fresh.write_text(f"{self.launch} {self._answered}", encoding="utf-8")
        self._renewed_s = time.monotonic()


def _state(folder: Path, launch: str) -> tuple[str, int]:
    """The launch that `alive` names, and how many questions are answered.

    A file that cannot be read, as may happen while it is replaced, names none but `launch`.
    """
    try:
        named, answered = (folder / ALIVE).read_text(encoding="utf-8").split()
        return named, int(answered)
    except (OSError, ValueError):
        return launch, 0
