"""`ds-ckpt measure --loopback`, from end to end, and engines that do not disturb each other."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.distributed as dist

from ds_ckpt.lab.measure.findings import _interface_excess
from ds_ckpt.lab.measure.measure_report import Report
from ds_ckpt.lab.measure.samples import Store, Trial
from ds_ckpt.lab.measure.spec import Configuration, Spec
from ds_ckpt.lab.measure.worker import EngineRun, Worker, of_ids
from tests.distributed.pool import ranks

SHAPE = {"hidden_size": 32, "layers": 1, "intermediate_size": 64, "heads": 2}


@ranks(4)
def test_engines_beside_hpz_keep_what_is_theirs() -> None:
    """DeepSpeed has one hpZ group for the whole program, and takes it for every later engine.

    Shares of the weights that a process stores, on two hosts of two.
    """
    shares = {"none/stock/hpz": 0.25 + 0.5, "none/stock": 0.25, "none/stock/zero2": 1.0}
    spec = Spec(hosts=2, slots=2, bf16=True, batch=1, tokens=8, shape=SHAPE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = [of_ids(torch.randint(0, 256, (1, 8), generator=generator))]
    running = {name: EngineRun(Configuration.of(name), spec) for name in shares}
    found = {}
    for name, one in running.items():
        one.step(batch)
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in one.engine.module.parameters())
        found[name] = one.stored_weight_bytes / (2 * whole)
        one.end()
    assert found == pytest.approx(shares, rel=0.02)


@contextlib.contextmanager
def _traffic(limit_s: float = 60.0) -> Iterator[None]:
    """Send over 127.0.0.1, at most 30 MB/s, beside what runs inside."""
    stop, ends_s, chunk = threading.Event(), time.monotonic() + limit_s, b"x" * (1 << 16)

    def send() -> None:
        while not stop.wait(0.002) and time.monotonic() < ends_s:
            sender.sendall(chunk)
            receiver.recv(len(chunk), socket.MSG_WAITALL)

    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = sockets.enter_context(socket.create_connection(server.getsockname()))
        receiver = sockets.enter_context(server.accept()[0])
        thread = threading.Thread(target=send)
        thread.start()
        sockets.callback(thread.join)
        sockets.callback(stop.set)
        yield


def _trials(folder: str) -> None:
    """Measure two configurations: repetition 0 alone, 1 beside another program's traffic."""
    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 344}
    spec = Spec("loopback", hosts=1, slots=2, batch=1, tokens=8, steps=2, shape=shape)
    worker = Worker(spec, MagicMock(folder=Path(folder)))
    for name in ("block/dense", "block/topk"):
        one = EngineRun(Configuration.of(name), spec)
        for repetition in (0, 1):
            sends = repetition == 1 and dist.get_rank() == 0
            with _traffic() if sends else contextlib.nullcontext():
                worker._measure_trial(one, None, repetition)
        one.end()


def test_other_programs_traffic_moves_no_byte_and_is_reported(world2: Any, tmp_path: Path) -> None:
    """Their bytes pass the same loopback interface."""
    world2.run(_trials, str(tmp_path))
    found = {s.key[1::2]: s for s in Store(tmp_path).read() if isinstance(s, Trial)}
    sent = {key: sum(one.far_bytes.values()) for key, one in found.items()}
    for name in ("block/dense", "block/topk"):
        alone, beside = found[name, 0], found[name, 1]
        assert sent[name, 0] == pytest.approx(sent[name, 1], rel=0.01)
        assert sum(beside.interface_bytes) > 1.1 * sum(alone.interface_bytes)
        assert (_interface_excess([beside]) or 0.0) > 0.02
    freed = [sent["block/dense", n] - sent["block/topk", n] for n in (0, 1)]
    assert freed[0] == pytest.approx(freed[1], rel=0.01)
    assert freed[0] > 0


def _measure(*options: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ds_ckpt.cli", "measure", "--loopback", *options]
    how = {"env": environment, "capture_output": True, "text": True}
    result = subprocess.run(command, **how, timeout=580)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_keeps_its_promises_and_continues(tmp_path: Path) -> None:
    """It runs on loopback; the second call continues the first."""
    folder = tmp_path / "run"
    options = ["--demo", f"--output={folder}", "--tokens=32", "--steps=1"]
    options.append("--shape=hidden_size=256,layers=2,intermediate_size=688,heads=4")
    _measure(*options, "--repetitions=1")
    output = _measure(*options, "--repetitions=2")
    assert "Continuing" in output
    assert "NOT SHAPED" in output
    samples = Store(folder).read()
    trials = [s for s in samples if isinstance(s, Trial)]
    assert set(Counter(s.key for s in trials).values()) == {1}
    names = {f"block/{m}" for m in ("dense", "3bit", "topk", "powersgd")}
    names |= {"none/stock", "none/dense"}
    assert {(t.configuration, t.repetition) for t in trials} == {
        (n, r) for n in names for r in (0, 1)
    }
    assert {trial.rate_mbit for trial in trials} == {None}
    report = Report.of(folder)
    assert report.findings.missing == []
    rows = {row.configuration: row for row in report.findings.rows}
    for row in rows.values():
        gathered, expected = (
            sum(n for purpose, n in one.far_bytes.items() if purpose.startswith("gather"))
            for one in (row, rows["none/stock"])
        )
        assert gathered == expected > 0
    assert (rows["none/stock"].peak_bytes or 0) > 1.5 * (rows["block/topk"].peak_bytes or 0) > 0
    for process in psutil.process_iter(["cmdline"]):
        assert str(folder) not in " ".join(process.info["cmdline"] or [])
