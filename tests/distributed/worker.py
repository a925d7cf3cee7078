"""The side of the pool that lives in the worker processes.

`python -m tests.distributed.worker` imports DeepSpeed and transformers once for all pools of a test
run. For each pool it forks a parent, which forks one worker a dp_rank and then watches a pipe: when
the pool closes it, or dies, all of them are killed.
The messages are pickles between parent and child of one test run, never anything from outside.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import itertools
import os
import pickle
import random
import reprlib
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
PRELOAD = (
    "deepspeed",
    # DeepSpeed imports it with the first engine, and with it torch's compiler: 3 s in each worker
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
"""Modules that are imported once for all pools."""


def own_network() -> None:
    """Move to a new network namespace with a loopback, whose counters count the workers alone.

    Needs root; without it nothing changes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNET) != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
    os.environ["DS_CKPT_TEST_OWN_NETWORK"] = "1"


def fresh() -> None:
    """Reset the process: no engine alive, no DeepSpeed globals, seeds set.

    The worker calls it before every case. A case that trains twice calls it in between.
    """
    import numpy
    import torch
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

    gc.collect()
    # type() and not isinstance(): some lazy objects import things when asked for their class.
    engines = [o for o in gc.get_objects() if issubclass(type(o), DeepSpeedEngine)]
    for engine in engines:
        with contextlib.suppress(Exception):
            engine.destroy()
    if engines:
        del engine, engines
        gc.collect()
    parameter_offload.FWD_MODULE_STACK.clear()
    # A case that ends earlier in one process than in others leaves their counts apart, and
    # DeepSpeed holds the numbers of modules and parameters against those of process 0.
    partition_parameters.Init.param_id = 0
    register = inspect.unwrap(parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module)
    (count,) = register.__defaults__
    count[0] = 0
    # set by the first engine with zero_hpz_partition_size, and obeyed by every later one
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    # set by the first engine with torch_autocast, and obeyed by every later one
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def once(
    case: Callable[..., Any] | None = None, *, when: Callable[..., bool] = lambda *_, **__: True
) -> Callable[..., Any]:
    """Keep the case's results in this process, by its arguments and host; also as a decorator.

    For runs of plain DeepSpeed, which come out alike every time: whoever compares with one shares
    it. Nobody may change what it returns.

    Args:
        when: gets the arguments and returns whether such a run is kept.
    """
    if case is None:
        return functools.partial(once, when=when)
    kept: dict[str, Any] = {}

    @functools.wraps(case)
    def from_then_on(*args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return case(*args, **kwargs)
        key = repr((os.environ.get("CROSS_RANK"), args, sorted(kwargs.items())))
        if key not in kept:
            kept[key] = case(*args, **kwargs)
        return kept[key]

    return from_then_on


@contextlib.contextmanager
def hosts(slots: Sequence[int]) -> Iterator[None]:
    """The launcher's host numbers for hosts with so many processes each."""
    number = [host for host, count in enumerate(slots) for _ in range(count)]
    before = os.environ.get("CROSS_RANK")
    os.environ["CROSS_RANK"] = str(number[int(os.environ["RANK"])])
    try:
        yield
    finally:
        del os.environ["CROSS_RANK"]
        if before is not None:
            os.environ["CROSS_RANK"] = before


def _described(error: BaseException) -> str:
    """The traceback, and for a failed assertion the values that it may be about."""
    frames = list(traceback.walk_tb(error.__traceback__))
    values = frames[-1][0].f_locals if isinstance(error, AssertionError) else {}
    lines = [f"  {name} = {reprlib.repr(value)}\n" for name, value in values.items()]
    return traceback.format_exc() + "".join(lines)


def _serve(pipe: Connection, dp_rank: int, world: int, logs: Path) -> None:
    log = os.open(logs / f"{dp_rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Works also while the interpreter is stuck in C code.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update(RANK=str(dp_rank), LOCAL_RANK=str(dp_rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    try:
        import deepspeed

        from ds_ckpt.engine import entry

        if "DS_CKPT_TESTS_WITHOUT_OPERATOR" in os.environ:  # as where DeepSpeed cannot compile it
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        fresh()
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        raise
    pipe.send_bytes(pickle.dumps(("ready", os.getpid())))
    for number in itertools.count(1):
        try:
            case, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        print(f"--- {case}", flush=True)
        try:
            fresh()
            # ranks that a case ended apart meet again in the next one
            entry._comparisons = itertools.count(1000 * number)
            gc.freeze()  # modules and caches: the next collections need not look at them
            module, _, name = case.partition(":")
            function = getattr(importlib.import_module(module), name)
            result = getattr(function, "inside", function)(*args, **kwargs)
            answer = pickle.dumps(("result", result))
        except BaseException as error:
            answer = pickle.dumps(("error", _described(error)))
        pipe.send_bytes(answer)


def _be_parent(environment: dict[str, str], logs: Path, watched: int, pipes: list[int]) -> None:
    """Fork a pool's workers, and kill them when nobody holds the other end of `watched`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(logs / "start.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own_network()
    for dp_rank, own in enumerate(pipes):
        if os.fork() == 0:
            for other in (*pipes, watched):  # only the parent may hold the watched pipe
                if other != own:
                    os.close(other)
            code = 1
            try:
                _serve(Connection(own), dp_rank, len(pipes), logs)
                code = 0
            finally:
                with contextlib.suppress(Exception):
                    traceback.print_exc() if code else None
                    sys.stdout.flush()
                os._exit(code)
    for fd in pipes:
        os.close(fd)
    os.read(watched, 1)
    shutil.rmtree(logs, ignore_errors=True)
    for member in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            member.kill()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as asked:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import torch

        torch.set_num_threads(1)
        for module in PRELOAD:
            with contextlib.suppress(ImportError):  # whoever needs it will say so
                importlib.import_module(module)
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for parents
        while True:
            message, fds, *_ = socket.recv_fds(asked, 1 << 20, 64)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                asked.close()
                _be_parent(*pickle.loads(message), *fds[:1], fds[1:])
            for fd in fds:
                os.close(fd)
            asked.send(pickle.dumps(pid))


if __name__ == "__main__":
    main()
