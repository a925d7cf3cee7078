"""Both ends of a launch: signs of life, questions, silences, what is left of a killed launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.hosts import heartbeat
from ds_ckpt.lab.hosts.heartbeat import STALLED, Heartbeat, Listener

LAUNCHED = """
import sys, time
from pathlib import Path
from ds_ckpt.lab.hosts import heartbeat
heartbeat.START_S, heartbeat.ORPHANED_S = 0.1, 1.0
beating = heartbeat.Heartbeat(Path(sys.argv[2]), launch=sys.argv[3], stall_s=float(sys.argv[1]))
beating.beat()
if sys.argv[3]:
    beating.lead()
print("watched", flush=True)
for _ in range(int(sys.argv[4])):
    time.sleep(0.1)
    beating.beat()
time.sleep(60 if sys.argv[5] == "hang" else 0)
"""


@pytest.fixture(autouse=True)
def this_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test lets a launched process's end say, it says in pytest's own process."""
    monkeypatch.setattr(Heartbeat, "_watch", lambda self: None)


class Received:
    """What comes to whoever launched."""

    def __init__(self, folder: Path, stall_s: float = 60.0) -> None:
        self.events: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.listener = Listener(
            folder, stall_s=stall_s, on_event=self.events.append, on_request=self.requests.append
        )

    def leader(self, folder: Path) -> Heartbeat:
        """Process 0 of this launch."""
        found = Heartbeat(folder, launch=self.listener.launch, stall_s=600.0)
        found.lead()
        return found


def launched(
    stall_s: float, folder: Path, launch: str = "", *, beats: int = 0, then: str = "hang"
) -> tuple[int, str]:
    """Exit code and last words of a process; without a launch's name it does not lead."""
    arguments = [str(stall_s), str(folder), launch, str(beats), then]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    said = process.communicate(timeout=45)[1]
    return process.returncode, said


def aged(folder: Path, age_s: float) -> None:
    moment_s = time.time() - age_s
    os.utime(folder / heartbeat.ALIVE, (moment_s, moment_s))


def test_a_process_that_hangs_ends_itself_and_one_that_goes_on_does_not(tmp_path: Path) -> None:
    code, said = launched(2.0, tmp_path)
    assert code == STALLED
    assert "no progress for 2 s" in said
    assert launched(2.0, tmp_path, beats=40, then="end")[0] == 0


def test_process_0_ends_when_whoever_launched_it_is_gone(tmp_path: Path) -> None:
    launch = Received(tmp_path).listener.launch
    aged(tmp_path, 10.0)
    code, said = launched(60.0, tmp_path, launch)
    assert code == STALLED
    assert "its launcher is gone" in said


def test_what_is_left_of_a_killed_launch_ends_when_another_begins(tmp_path: Path) -> None:
    """Its launcher was killed and the command given again at once: the file is renewed again."""
    launch = Received(tmp_path).listener.launch
    aged(tmp_path, -600.0)  # as if it were renewed again and again
    assert launched(60.0, tmp_path, launch, beats=5, then="end")[0] == 0
    Received(tmp_path)
    aged(tmp_path, -600.0)
    code, said = launched(60.0, tmp_path, launch)
    assert code == STALLED
    assert "or another has begun" in said


def test_what_no_signal_reaches_ends_with_its_launch(tmp_path: Path) -> None:
    """On the first host of a hostfile process 0 is a child of sshd."""
    received = Received(tmp_path)
    process = received.leader(tmp_path)
    assert process._reason_to_end() == ""
    received.listener.end()
    assert "its launch has ended" in process._reason_to_end()


@pytest.mark.parametrize("apart_s", [-1e6, 1e6])
def test_clocks_of_hosts_may_differ(tmp_path: Path, apart_s: float) -> None:
    process = Received(tmp_path).leader(tmp_path)
    aged(tmp_path, apart_s)
    assert process._reason_to_end() == ""


def test_what_is_told_arrives_once_and_what_is_asked_for_is_done(tmp_path: Path) -> None:
    received = Received(tmp_path)
    process = received.leader(tmp_path)
    process.beat(words="one", done=1)
    process.beat()
    for rate in (50.0, None):
        asking = threading.Thread(target=process.request, kwargs={"rate_mbit": rate})
        asking.start()
        asking.join(0.1)
        assert asking.is_alive()  # nobody has done it yet
        received.listener.poll()
        asking.join(10)
        assert not asking.is_alive()
    assert received.events == [{"words": "one", "done": 1}, {}]
    assert received.requests == [{"rate_mbit": 50.0}, {"rate_mbit": None}]


def test_only_process_0_speaks_and_nobody_else_waits(tmp_path: Path) -> None:
    received = Received(tmp_path)
    other = Heartbeat(tmp_path, launch=received.listener.launch, stall_s=600.0)
    other.beat(words="mine")
    other.request(rate_mbit=1.0)
    received.listener.poll()
    assert (received.events, received.requests) == ([], [])


def test_a_half_written_line_waits_and_lines_of_a_killed_launch_are_not_heard(
    tmp_path: Path,
) -> None:
    before = Received(tmp_path)
    old = before.leader(tmp_path)
    old.beat(words="old")
    received = Received(tmp_path)
    assert not (tmp_path / heartbeat.EVENTS).exists()
    old.beat(words="still there")
    with (tmp_path / heartbeat.EVENTS).open("a") as sink:
        line = json.dumps({"launch": received.listener.launch, "event": {"words": "new"}}) + "\n"
        sink.write(line[:20])
        sink.flush()
        received.listener.poll()
        assert received.events == []
        sink.write(line[20:])
    received.listener.poll()
    assert received.events == [{"words": "new"}]


def test_a_silence_has_a_bound_and_the_start_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = Received(tmp_path, stall_s=0.2)
    time.sleep(0.3)
    assert received.listener.overdue_s() is None  # it may still start
    received.leader(tmp_path).beat()
    received.listener.poll()
    assert received.listener.overdue_s() is None
    time.sleep(0.3)
    assert received.listener.overdue_s() == 0.2
    monkeypatch.setattr(heartbeat, "START_S", 0.1)
    again = Received(tmp_path, stall_s=0.05)
    time.sleep(0.2)
    assert again.listener.overdue_s() == 0.1
