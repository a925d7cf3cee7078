"""Commands on emulated hosts, `deepspeed` over pdsh or Open MPI and `mpirun` among them.

`prepare` turns a command into one that starts in the first host and reaches the others;
`on_hosts` runs `deepspeed` that way with a time limit, `on_this_machine` on loopback instead.

Not `ds_ckpt.harness.launch.launched`: a launcher that is told to end gently runs `pkill -f` over
pdsh, which on a machine that is shared could reach somebody else's run. Here it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

import ds_ckpt
from ds_ckpt.errors import Problem
from ds_ckpt.harness.cpu_op import shared_buffers_removed
from ds_ckpt.harness.hosts.emulated import EmulatedHosts
from ds_ckpt.harness.hosts.host import INTERFACE
from ds_ckpt.harness.hosts.ssh import PORT
from ds_ckpt.harness.launch import LaunchError, free_port, log_tail

Launcher = Literal["pdsh", "openmpi"]
MASTER_PORT = 29500
"""Free in emulated hosts, which have no servers but sshd."""
_OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Prepared:
    """A command to be run outside the hosts, which runs inside, and its environment."""

    command: list[str]
    environment: dict[str, str]


def prepare(
    hosts: EmulatedHosts,
    argv: Sequence[str],
    *,
    folder: Path,
    slots: int = 1,
    launcher: Launcher = "pdsh",
    port: int = MASTER_PORT,
) -> Prepared:
    """`argv` in the first host, in `folder`.

    A leading `deepspeed` gets the options that lead it to all the hosts, unless it names a
    hostfile itself. For others the environment names DeepSpeed's hostfile (`DS_CKPT_HOSTFILE`)
    and has what pdsh and Open MPI's `mpirun` need to reach the hosts.
    """
    hostfile, exported = hosts.folder / "hostfile", hosts.folder / "deepspeed_env"
    hostfile.write_text(hosts.hostfile(slots))
    everywhere = environment(INTERFACE)
    # DeepSpeed exports these on every host; pdsh would strip quotes, so there are none.
    exported.write_text("".join(f"{k}={v}\n" for k, v in everywhere.items()))
    command = list(argv)
    if Path(command[0]).name == "deepspeed":
        command[:1] = deepspeed()
        if not any(word.split("=")[0] in ("-H", "--hostfile") for word in command):
            command[1:1] = _options(hosts, hostfile, launcher, port)
    return Prepared(
        hosts.hosts[0].command(command, folder=folder),
        {
            **without_outer_launch(),
            **everywhere,
            **reach(hosts),
            "DS_ENV_FILE": str(exported),
            "DS_CKPT_HOSTFILE": str(hostfile),
        },
    )


def on_hosts(
    hosts: EmulatedHosts,
    argv: Sequence[str],
    *,
    folder: Path,
    slots: int = 1,
    limit_s: float = 240,
    launcher: Launcher = "pdsh",
    port: int = MASTER_PORT,
    while_running: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` from the first host on all of them; its output.

    `while_running` is called a few times a second. Raises LaunchError. After a launch that took
    too long the hosts are down.
    """
    command = ["deepspeed", *argv]
    prepared = prepare(hosts, command, folder=folder, slots=slots, launcher=launcher, port=port)
    return _run(prepared, folder, limit_s, hosts.down, while_running)


def on_this_machine(
    argv: Sequence[str],
    *,
    folder: Path,
    processes: int = 2,
    limit_s: float = 240,
    while_running: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` with `processes` processes over loopback; its output.

    Raises LaunchError.
    """
    where = ["--hostfile=none", f"--num_gpus={processes}", "--master_addr=127.0.0.1"]
    port = free_port()
    command = [*deepspeed(), *where, f"--master_port={port}", *argv]
    prepared = Prepared(command, {**without_outer_launch(), **environment("lo")})
    with shared_buffers_removed(port):
        return _run(prepared, folder, limit_s, lambda: None, while_running)


def run_prepared(
    prepared: Prepared, folder: Path, limit_s: float, *, while_running: Callable[[], None]
) -> str:
    """Run a command that reaches its hosts itself; its output. Raises LaunchError.

    What it has started on other machines is told to end by their launcher, or ends itself.
    """
    return _run(prepared, folder, limit_s, lambda: None, while_running)


def deepspeed() -> list[str]:
    """`deepspeed` of this Python's environment."""
    return [str(Path(sys.executable).with_name("deepspeed"))]


def environment(interface: str) -> dict[str, str]:
    """What every process needs, also those that start over ssh with a bare environment."""
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    package = str(Path(ds_ckpt.__file__).parents[1])
    return {
        "TORCH_EXTENSIONS_DIR": compiled,
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        # This Python's own tools first: DeepSpeed compiles with the ninja beside it.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
    }


def _options(hosts: EmulatedHosts, hostfile: Path, launcher: Launcher, port: int) -> list[str]:
    where = [f"--hostfile={hostfile}", f"--master_addr={hosts.hosts[0].address}"]
    where.append(f"--master_port={port}")
    if launcher == "openmpi":
        return [*where, "--no_ssh_check", "--launcher=openmpi"]
    return [*where, "--no_ssh_check", f"--ssh_port={PORT}"]


def reach(hosts: EmulatedHosts) -> dict[str, str]:
    """How pdsh and Open MPI's mpirun reach the hosts."""
    return {
        # DeepSpeed adds `-p PORT` itself
        "PDSH_SSH_ARGS_APPEND": f"-F {hosts.folder}/ssh_config",
        "PDSH_RCMD_TYPE": "ssh",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_args": f"-F {hosts.folder}/ssh_config",
        "OMPI_MCA_oob_tcp_if_include": INTERFACE,
        "OMPI_MCA_btl_tcp_if_include": INTERFACE,
        # The hosts share /tmp, and small pids and names come back in every set.
        "OMPI_MCA_orte_tmpdir_base": "/run",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


def without_outer_launch() -> dict[str, str]:
    """This process's environment without what an outer launch or worker has set."""
    return {k: v for k, v in os.environ.items() if k not in _OUTER}


def _run(
    prepared: Prepared,
    folder: Path,
    limit_s: float,
    end: Callable[[], None],
    while_running: Callable[[], None],
) -> str:
    log = folder / "launch.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            prepared.command,
            cwd=folder,
            env=prepared.environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = ""
        limit = time.monotonic() + limit_s
        try:
            while process.poll() is None:
                if time.monotonic() > limit:
                    ended = f"it took longer than {limit_s:g} s"
                    break
                while_running()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            _kill(process, end)
    if process.returncode and not ended:
        ended = f"exit code {process.returncode}"
    if ended:
        raise LaunchError(
            Problem(
                where=" ".join(prepared.command),
                found=f"{ended}; its log ends with\n{log_tail(log)}",
                why="one of the processes failed or did not come to an end",
                remedy=f"mend what the last error names; the whole log is {log}",
            )
        )
    return log.read_text(errors="replace")


def _kill(process: subprocess.Popen[bytes], end: Callable[[], None]) -> None:
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


def run_in_foreground(prepared: Prepared, *, limit_s: float | None = None) -> int:
    """Run a prepared command on this terminal; its exit code, or 124 after `limit_s` seconds."""
    with subprocess.Popen(prepared.command, env=prepared.environment) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return 124
        except BaseException:
            process.kill()
            raise
