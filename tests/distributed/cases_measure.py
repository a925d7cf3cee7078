"""Run in the worker processes: the engines that `ds-ckpt measure` holds beside each other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from ds_ckpt.lab.measure.spec import Configuration, Spec
from ds_ckpt.lab.measure.worker import EngineRun, Worker, of_ids
from ds_ckpt.lab.workload import Corpus

SHAPE = {"hidden_size": 32, "layers": 1, "intermediate_size": 64, "heads": 2}


def stored_weights(names: list[str]) -> dict[str, float]:
    """Return the share of the weights that a process stores, on two hosts of two."""
    spec = Spec(hosts=2, slots=2, bf16=True, batch=1, tokens=8, shape=SHAPE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = [of_ids(torch.randint(0, 256, (1, 8), generator=generator))]
    running = {name: EngineRun(Configuration.of(name), spec) for name in names}
    found = {}
    for name, one in running.items():
        one.step(batch)
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in one.engine.module.parameters())
        found[name] = one.stored_weight_bytes / (2 * whole)
        one.end()
    return found


@contextlib.contextmanager
def traffic(limit_s: float = 60.0) -> Iterator[None]:
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


def trials_beside_traffic(folder: str) -> None:
    """Measure two configurations: repetition 0 alone, 1 beside another program's traffic."""
    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 344}
    spec = Spec("loopback", hosts=1, slots=2, batch=1, tokens=8, steps=2, shape=shape)
    worker = Worker(spec, Corpus("", bytes(range(256)) * 4, b""), MagicMock(folder=Path(folder)))
    for name in ("block/dense", "block/topk"):
        one = EngineRun(Configuration.of(name), spec)
        for repetition in (0, 1):
            sends = repetition == 1 and dist.get_rank() == 0
            with traffic() if sends else contextlib.nullcontext():
                worker._measure_trial(one, None, repetition)
        one.end()
