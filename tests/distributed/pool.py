"""A pool of worker processes that stay up for the whole pytest session.

A `deepspeed` launch costs about 8 s, so the multi-process tests share workers. Each of them has
torch.distributed (gloo) and DeepSpeed initialised. A test under `@ranks(2)` runs in two workers,
with its assertions. `pool.run(case, *args)` runs another top-level function of a module in every
worker and returns the results in order of dp_rank. What raises or hangs fails its test with the
workers' words, and the next test gets a new pool. What runs inside the workers is in `worker.py`.
"""

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_ckpt.lab.hosts import backends
from ds_ckpt.lab.hosts.launcher import lock_cleared_on_failure, remove_shared_buffers
from tests.distributed.worker import fresh, hosts, once

__all__ = ["Pool", "PoolError", "fresh", "hosts", "once", "ranks"]

ROOT = Path(__file__).resolve().parents[2]
START_S = 480.0
"""The first start on a machine compiles DeepSpeed's CPU operator."""
_AFTER_AN_ERROR_S = 5.0
"""Seconds for other ranks to end after one has raised: they may wait for it forever."""
_LOG_LINES = 80


def ranks(*slots: int, timeout: float = 120) -> Callable[[Callable[..., None]], Any]:
    """Run a test in as many workers, which act as hosts of so many ranks each if there are several.

    Without `slots` they are the argument of this name. Arguments are sent as pickles.
    """

    def decorate(test: Callable[..., None]) -> Any:
        signature = inspect.signature(test)
        takes_slots = "slots" in signature.parameters

        def inside(placed: Sequence[int], arguments: dict[str, Any]) -> None:
            with hosts(placed) if len(placed) > 1 else contextlib.nullcontext():
                test(**arguments)

        @functools.wraps(test)
        def outside(request: pytest.FixtureRequest, **arguments: Any) -> None:
            placed = slots or arguments["slots"]
            if not takes_slots:
                arguments.pop("slots", None)
            pool = request.getfixturevalue(f"world{sum(placed)}")
            pool.run(outside, placed, arguments, timeout=timeout)

        names = ["request"] if slots or takes_slots else ["request", "slots"]
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        outside.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *own]
        )
        outside.inside = inside  # type: ignore[attr-defined]
        return outside

    return decorate


class PoolError(AssertionError):
    """A case raised, hung or lost a process. The message has each worker's output."""


class Pool:
    """`world` processes on this machine, started on first use."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._parent: int | None = None
        self._watched = -1  # who closes it ends the parent
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self._logs = Path()
        self.port = 0
        atexit.register(self.stop)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers by dp_rank; empty before the first use."""
        return list(self._pids)

    def run(self, case: Callable, *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Results of `case(*args, **kwargs)`, one a process, in order of dp_rank.

        Arguments and results are sent as pickles; tensors are copied. Raises PoolError if a process
        raises, dies, or has not answered after `timeout` seconds.
        """
        if "." in case.__qualname__:
            raise TypeError(f"{case.__qualname__} is not a top-level function of a module")
        message = pickle.dumps((f"{case.__module__}:{case.__qualname__}", args, kwargs))
        try:
            if self._parent is None:
                self._start()
            for pipe in self._pipes:
                pipe.send_bytes(message)
            return self._collect(f"{case.__qualname__}", timeout)
        except BaseException:  # KeyboardInterrupt and pytest-timeout's too: nothing may go on
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the workers and everything they have started. Returns when all are gone."""
        parent, self._parent = self._parent, None
        if parent is None:
            return
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(parent).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent, signal.SIGKILL)
        for member in family:  # ninja gives each compiler a process group of its own
            with contextlib.suppress(psutil.Error):
                member.kill()
        os.close(self._watched)
        _wait_for_the_end(parent, family)
        remove_shared_buffers(self.port)
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._pids = [], []
        shutil.rmtree(self._logs, ignore_errors=True)

    def _start(self) -> None:
        self._logs = Path(tempfile.mkdtemp(prefix="ds_ckpt_pool_"))
        self.port = backends.free_port()
        pairs = [socket.socketpair() for _ in range(self.world)]
        self._pipes = [Connection(ours.detach()) for ours, _ in pairs]
        theirs = [their.detach() for _, their in pairs]
        environment = os.environ | backends.environment("lo")
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        watched, self._watched = os.pipe()
        with lock_cleared_on_failure(environment):
            try:
                self._parent = importer().fork((environment, self._logs), [watched, *theirs])
            finally:
                for fd in (watched, *theirs):
                    os.close(fd)
            try:
                self._pids = self._collect("the start of the workers", START_S)
            except BaseException:
                self.stop()  # before the lock of an unfinished build is taken away
                raise

    def _collect(self, what: str, timeout: float) -> list[Any]:
        limit = time.monotonic() + timeout
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.world:
            waiting = {self._pipes[i]: i for i in range(self.world) if i not in answers}
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = _receive(pipe)
            if any(kind == "error" for kind, _ in answers.values()):
                limit = min(limit, time.monotonic() + _AFTER_AN_ERROR_S)
        errors = {i: text for i, (kind, text) in answers.items() if kind == "error"}
        silent = [i for i in range(self.world) if i not in answers]
        if errors or silent:
            raise PoolError(self._report(what, timeout, errors, silent))
        return [answers[i][1] for i in range(self.world)]

    def _report(self, what: str, timeout: float, errors: dict[int, str], silent: list[int]) -> str:
        for i in silent:  # ask for a stack dump
            if self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[i], signal.SIGUSR1)
        if silent:
            time.sleep(1.0)
        lines = [f"{what} failed in a pool of {self.world} processes"]
        lines += [f"\nprocess {i} raised\n{_indented(text)}" for i, text in sorted(errors.items())]
        for i in silent:
            why = "waited on" if errors else f"gave no answer within {timeout:g} s"
            lines.append(f"\nprocess {i} {why}; its log, with its stack at the end:")
            lines.append(_indented(_tail(self._logs / f"{i}.log")))
        start = _tail(self._logs / "start.log")
        if start:
            lines.append(f"\noutput of the workers' parent\n{_indented(start)}")
        return "\n".join(lines)


class _Importer:
    """The process that imports for all pools of this one, and forks their parents."""

    def __init__(self) -> None:
        self._asked, theirs = socket.socketpair()
        self._asked.settimeout(START_S)
        own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-u", "-m", "tests.distributed.worker"]
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdin=theirs)

    def fork(self, message: Any, fds: Sequence[int]) -> int:
        """Return the process id of a new pool's parent, which gets these."""
        socket.send_fds(self._asked, [pickle.dumps(message)], fds)
        answer = self._asked.recv(100)
        if not answer:
            raise PoolError("the process that imports for all pools has ended: see its output")
        return int(pickle.loads(answer))

    def end(self) -> None:
        self._asked.close()
        self._process.wait()


importer = functools.cache(_Importer)


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())  # type: ignore[no-any-return]
    except (EOFError, ConnectionResetError):
        return "error", "(the process ended without an answer)"


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    return "(no log)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _wait_for_the_end(group: int, family: Sequence[psutil.Process], limit_s: float = 10.0) -> None:
    """Until nothing of the group or the family runs; reaps what this process has adopted."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG) != (0, 0):
                pass
        if not any(map(_runs, family)) and not any(
            _runs(process) for process in psutil.process_iter() if _in_group(group, process)
        ):
            return
        time.sleep(0.02)
    raise PoolError(f"processes of group {group} still run {limit_s:g} s after SIGKILL")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _in_group(group: int, process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except (ProcessLookupError, PermissionError):
        return False
