"""`deepspeed` on emulated hosts, or on this machine alone, with a time limit.

Not `ds_ckpt.harness.launch`: a launcher that is told to end gently runs `pkill -f` over pdsh,
which on a machine that is shared could reach somebody else's run. Here it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ds_ckpt.harness.cpu_op import shared_buffers_removed
from ds_ckpt.harness.launch import free_port
from tests.hosts import ssh
from tests.hosts.emulated import INTERFACE, EmulatedHosts

_TAIL = 6000
ROOT = Path(__file__).resolve().parents[2]


class LaunchError(AssertionError):
    """A launch ended with an error, or took too long. The message has the end of its output."""


def on_hosts(
    hosts: EmulatedHosts, argv: Sequence[str], *, folder: Path, slots: int = 1, limit_s: float = 240
) -> str:
    """Run `deepspeed ... argv` in `folder` from the first host on all of them; its output.

    Raises LaunchError. After a launch that took too long the hosts are down.
    """
    (folder / "hostfile").write_text(hosts.hostfile(slots))
    environment = {**_environment(INTERFACE), "PATH": _path()}
    # DeepSpeed exports these on every host; pdsh would strip quotes, so there are none.
    (folder / ".deepspeed_env").write_text("".join(f"{k}={v}\n" for k, v in environment.items()))
    port = free_port()
    command = [
        *_deepspeed(),
        f"--hostfile={folder / 'hostfile'}",
        "--no_ssh_check",
        f"--ssh_port={ssh.PORT}",
        f"--master_addr={hosts.hosts[0].address}",
        f"--master_port={port}",
        *argv,
    ]
    command = hosts.hosts[0].command(command, folder=folder)
    environment = {**_cleaned(), **environment, **hosts.environment()}
    with shared_buffers_removed(port):
        return _run(command, environment, folder, limit_s, hosts.down)


def on_this_machine(
    argv: Sequence[str], *, folder: Path, processes: int = 2, limit_s: float = 240
) -> str:
    """Run `deepspeed ... argv` in `folder` with `processes` processes over loopback; its output."""
    where = ["--hostfile=none", f"--num_gpus={processes}", "--master_addr=127.0.0.1"]
    port = free_port()
    command = [*_deepspeed(), *where, f"--master_port={port}", *argv]
    environment = {**_cleaned(), **_environment("lo"), "PATH": _path()}
    with shared_buffers_removed(port):
        return _run(command, environment, folder, limit_s, lambda: None)


def _deepspeed() -> list[str]:
    return [str(Path(sys.executable).with_name("deepspeed"))]


def _environment(interface: str) -> dict[str, str]:
    """What every process needs, also those that start over ssh with a bare environment."""
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    return {
        "TORCH_EXTENSIONS_DIR": compiled,
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _cleaned() -> dict[str, str]:
    """This process's environment without what an outer launch or worker has set."""
    outer = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {k: v for k, v in os.environ.items() if k not in outer}
    return {**kept, "PYTHONPATH": str(ROOT)}


def _path() -> str:
    """With this Python's own tools first: DeepSpeed compiles with the ninja beside it."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"


def _run(
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    limit_s: float,
    end: Callable[[], None],
) -> str:
    log = folder / "launch.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = f"took longer than {limit_s:g} s"
        try:
            code = process.wait(limit_s)
            ended = f"gave exit code {code}"
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            family: list[psutil.Process] = []
            if process.poll() is None:
                end()  # from the inside first, then from the outside
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            process.wait()
    output = log.read_text(errors="replace")
    if code:
        raise LaunchError(f"{' '.join(command)}\n{ended}; its output ends with\n{output[-_TAIL:]}")
    return output
