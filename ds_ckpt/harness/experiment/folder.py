"""A run's folder: where whoever launched and process 0 of the launched talk to each other.

spec.json       what is to be measured
corpus/         the text
samples.jsonl   what has been measured (`records`)
beats.jsonl     that process 0 goes on, and with what
alive           names a launch, touched by whoever launched, so that the launched end with that
wanted_rate     a rate that process 0 asks for; gone when the links have it
report.*        made from the above
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_ckpt.files import replacing
from ds_ckpt.harness import corpus
from ds_ckpt.measure.records import Store
from ds_ckpt.measure.spec import Spec

ALIVE_EVERY_S = 2.0
ORPHANED_S = 45.0
"""Launched processes end when nobody has touched `alive` for so long."""
START_S = 600.0
"""Until the first sign of life: imports, the first time on a machine DeepSpeed's compilation."""
STALLED = 75
"""Exit code of a process that ended itself."""


class Folder:
    """One run's folder, for both sides."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path / "samples.jsonl")
        self.spec = path / "spec.json"
        self.beats = path / "beats.jsonl"
        self.alive = path / "alive"
        self.turns_done = path / "turns_done"
        self._wanted = path / "wanted_rate"

    def handout(self) -> tuple[Spec, corpus.Corpus, set[tuple[object, ...]]]:
        """What the launched processes have to know: plan, text, keys of what is there."""
        done = {sample.key for sample in self.store.read()}
        if self.turns_done.exists():
            done.add(("turns done",))
        return Spec.load(self.spec), corpus.load_corpus(self.path / "corpus"), done

    def beat(self, words: str | None, **more: int) -> None:
        """Process 0: say that it goes on, with words for people or without."""
        with self.beats.open("a", encoding="utf-8") as sink:
            sink.write(json.dumps({"words": words, **more}) + "\n")

    def ask_for(self, rate: float | None) -> None:
        """Process 0: have the links get a rate in Mbit/s; returns when they have it."""
        with replacing(self._wanted) as fresh:
            fresh.write_text(json.dumps(rate))
        while self._wanted.exists():
            time.sleep(0.02)

    def serve_rate(self, set_rate: Callable[[float | None], Any]) -> None:
        """Whoever launched, a few times a second: the other end of `ask_for`."""
        if self._wanted.exists():
            set_rate(json.loads(self._wanted.read_text()))
            self._wanted.unlink()

    def begin_launch(self) -> str:
        """Whoever launches: a name for this launch; what is left of others in here ends."""
        launch = secrets.token_hex(8)
        with replacing(self.alive) as fresh:
            fresh.write_text(launch, encoding="utf-8")
        return launch

    def forget_wishes(self) -> None:
        """Before a launch: what a killed one has asked for."""
        self._wanted.unlink(missing_ok=True)
        self.beats.unlink(missing_ok=True)


class Watchdog:
    """Ends this process when it has not come on for `limit_s`, whatever it hangs in.

    A collective whose peer has gone waits for half an hour, and the ssh that could end this process
    may be gone with the network. So it ends itself.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_s = time.monotonic()
        self._begun = False
        self._alive: Path | None = None
        self._launch = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        self._last_s = time.monotonic()
        self._begun = True

    def look_at(self, alive: Path, launch: str) -> None:
        """End, too, when `alive` has not been touched for `ORPHANED_S`, or is not of `launch`.

        Who launched may be killed and started again at once: two would write into one folder.
        """
        self._launch, self._alive = launch, alive

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit_s / 4))
            words = ""
            limit_s = self._limit_s if self._begun else max(START_S, self._limit_s)
            if time.monotonic() - self._last_s > limit_s:
                words = f"nothing has come on for {limit_s:.0f} s"
            elif self._alive is not None and _age_s(self._alive) > ORPHANED_S:
                words = "who launched it is gone"
            elif self._alive is not None and _content(self._alive) != self._launch:
                words = "another launch has begun in its folder"
            if words:
                print(f"ds_ckpt: this process ends itself: {words}", file=sys.stderr, flush=True)
                os._exit(STALLED)


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
