"""Both ends of a launch: progress, silences, what is left of a killed launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

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
    """A heartbeat in pytest's own process must not end it."""
    monkeypatch.setattr(Heartbeat, "_watch", lambda self, every_s: None)


def leader(folder: Path, listener: Listener) -> Heartbeat:
    """Rank 0 of a launch."""
    found = Heartbeat(folder, launch=listener.launch, stall_s=600.0)
    found.lead()
    return found


def launched(
    stall_s: float, folder: Path, launch: str = "", *, beats: int = 0, then: str = "hang"
) -> tuple[int, str]:
    """Return a process's exit code and stderr; without a launch's name it is not rank 0."""
    arguments = [str(stall_s), str(folder), launch, str(beats), then]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    output = process.communicate(timeout=45)[1]
    return process.returncode, output


def aged(folder: Path, age_s: float) -> None:
    moment_s = time.time() - age_s
    os.utime(folder / heartbeat.ALIVE, (moment_s, moment_s))


def test_a_process_that_hangs_ends_itself_and_one_that_goes_on_does_not(tmp_path: Path) -> None:
    code, output = launched(2.0, tmp_path)
    assert code == STALLED
    assert "no progress for 2 s" in output
    assert launched(2.0, tmp_path, beats=40, then="end")[0] == 0


def test_rank_0_ends_when_its_launcher_is_gone_or_another_has_begun(tmp_path: Path) -> None:
    """A killed launcher whose command is given again at once renews the file."""
    launch = Listener(tmp_path, stall_s=60.0).launch
    aged(tmp_path, 10.0)
    code, output = launched(60.0, tmp_path, launch)
    assert code == STALLED
    assert "its launcher is gone" in output
    aged(tmp_path, -600.0)  # as if it were renewed again and again
    assert launched(60.0, tmp_path, launch, beats=5, then="end")[0] == 0
    Listener(tmp_path, stall_s=60.0)
    aged(tmp_path, -600.0)
    code, output = launched(60.0, tmp_path, launch)
    assert code == STALLED
    assert "or another has begun" in output


def test_a_process_that_no_signal_reaches_ends_with_its_launch(tmp_path: Path) -> None:
    """On the first host of a hostfile rank 0 is a child of sshd; clocks of hosts may differ."""
    listener = Listener(tmp_path, stall_s=60.0)
    process = leader(tmp_path, listener)
    for apart_s in (0.0, -1e6, 1e6):
        aged(tmp_path, apart_s)
        assert process._reason_to_end() == ""
    listener.end()
    assert "its launch has ended" in process._reason_to_end()


def test_events_of_rank_0_arrive_once_and_complete(tmp_path: Path) -> None:
    old = leader(tmp_path, Listener(tmp_path, stall_s=60.0))
    old.beat(words="old")
    listener = Listener(tmp_path, stall_s=60.0)
    assert not (tmp_path / heartbeat.EVENTS).exists()
    old.beat(words="of a killed launch")
    process = leader(tmp_path, listener)
    process.beat(words="one", done=1)
    process.beat()
    Heartbeat(tmp_path, launch=listener.launch, stall_s=600.0).beat(words="of another rank")
    assert list(listener.poll()) == [{"words": "one", "done": 1}, {}]
    line = json.dumps({"launch": listener.launch, "event": {"words": "new"}}) + "\n"
    for text, events in ((line[:20], []), (line[20:], [{"words": "new"}])):
        with (tmp_path / heartbeat.EVENTS).open("a") as sink:
            sink.write(text)
        assert list(listener.poll()) == events


def test_a_silence_has_a_bound_and_the_start_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(tmp_path, stall_s=0.2)
    time.sleep(0.3)
    assert listener.overdue_s() is None  # it may still start
    leader(tmp_path, listener).beat()
    assert len(list(listener.poll())) == 1
    assert listener.overdue_s() is None
    time.sleep(0.3)
    assert listener.overdue_s() == 0.2
    monkeypatch.setattr(heartbeat, "START_S", 0.1)
    again = Listener(tmp_path, stall_s=0.05)
    time.sleep(0.2)
    assert again.overdue_s() == 0.1
