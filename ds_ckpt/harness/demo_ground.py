"""Where the demo trains: on which accelerator, on emulated hosts or over loopback."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ds_ckpt.harness import cells
from ds_ckpt.harness.follow import following
from ds_ckpt.hosts import EmulatedHosts, cpu_op, missing
from ds_ckpt.hosts.launcher import Backend, Emulated, Loopback, launch, signals_as_exit

RATE_MBIT, SHAPED_STEPS = 200.0, 6
"""Of the emulated hosts' link, while the last so many steps are timed."""
STALL_S = 300.0
MODULE = "ds_ckpt.harness.train_cells"
_LOOPBACK = Path("/sys/class/net/lo")


def shaped_steps(steps: int) -> int:
    """Timed steps on emulated hosts: the last ones, few because each takes seconds."""
    return max(2, min(SHAPED_STEPS, steps - cells.topk_start_step(steps) - 1))


def why_no_hosts(accelerator: str) -> list[str]:
    """Why the demo does not run on emulated hosts; empty if it can."""
    return missing() if accelerator == "cpu" else ["GPUs are used where they are"]


def train(
    job: dict[str, Any], output: Path, *, on_hosts: bool, time_limit_s: float, console: Console
) -> None:
    """Launch the training of the cells and follow it. Raises LaunchError or HostError."""
    with contextlib.ExitStack() as stack:
        backend: Backend = Loopback(cells.PROCESSES, gpus=True)
        if on_hosts:
            stack.enter_context(signals_as_exit())
            hosts = stack.enter_context(EmulatedHosts(cells.PROCESSES, rate_mbit=None))
            backend = Emulated(hosts)
        heard = stack.enter_context(following(steps=job["steps"], console=console))
        launch(backend, MODULE, job, output, limit_s=time_limit_s, stall_s=STALL_S, heard=heard)


def accelerator_of(console: Console) -> tuple[str, dict[str, str]]:
    """Which accelerator to train on, and the environment of the launched processes."""
    import torch

    environment = dict(os.environ)
    # DeepSpeed compiles with the ninja of its own environment, activated or not.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["HF_HUB_OFFLINE"] = "1"
    wanted = environment.get("DS_ACCELERATOR")
    gpus = torch.cuda.device_count() if wanted in (None, "cuda") else 0
    if gpus >= cells.PROCESSES:
        console.print(f"Training on {cells.PROCESSES} of {gpus} GPUs.")
        return torch.cuda.get_device_name(0), environment
    if gpus:
        console.print(
            f"Found {gpus} GPU, and the demo needs {cells.PROCESSES}: training on the CPU instead."
        )
    environment["DS_ACCELERATOR"] = "cpu"
    cores = os.cpu_count() or cells.PROCESSES
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // cells.PROCESSES)))
    if _LOOPBACK.exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
    return "cpu", environment


def announce_compilation(environment: dict[str, str], console: Console) -> None:
    """Say what the first seconds go into."""
    if cpu_op.is_compiled(environment):
        console.print("Starting deepspeed (about 10 s) ...")
    elif locks := cpu_op.locks(environment):
        console.print(
            "DeepSpeed's CPU operator is being compiled by another process, or its compilation was"
            f" interrupted. If nothing happens for some minutes: stop, delete {min(locks)}, again.",
        )
    else:
        console.print(
            "Starting deepspeed. This first time on this machine it compiles a CPU operator, which"
            " takes about a minute ..."
        )
