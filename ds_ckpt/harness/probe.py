"""Starts the link probe: `mpirun` with one process a host, emulated hosts or those of a hostfile.

What it measures is in `link_probe`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.harness.hosts import EmulatedHosts
from ds_ckpt.harness.hosts.launch import prepare
from ds_ckpt.harness.launch import LaunchError
from ds_ckpt.harness.link_probe import Links

_START_S, _PAIR_S = 60.0, 30.0


def probe_emulated(hosts: EmulatedHosts, *, seconds: float = 1.0) -> Links:
    """The links between emulated hosts that are up. Raises as `probe_hostfile`."""
    with tempfile.TemporaryDirectory(prefix="ds_ckpt_probe_") as folder:
        out = Path(folder) / "links.json"
        argv = _mpirun(hosts.count, hosts.folder / "hostfile", out, seconds)
        prepared = prepare(hosts, argv, folder=Path(folder))
        return _run(prepared.command, prepared.environment, out, hosts.count, seconds)


def probe_hostfile(hostfile: Path, *, seconds: float = 1.0) -> Links:
    """The links between the machines of a hostfile, reached as `mpirun` reaches them.

    They need this Python environment at the same path, as `deepspeed --hostfile` does too.

    Raises:
        UnsupportedError: no mpi4py, no mpirun, or a hostfile with fewer than two hosts.
        LaunchError: mpirun failed or did not end; the message has what it said.
    """
    lines = [line.split("#")[0].split() for line in hostfile.read_text().splitlines()]
    count = len({words[0] for words in lines if words})
    if count < 2:
        raise UnsupportedError(
            Problem(
                where=str(hostfile),
                found=f"{count} hosts",
                why="a link has two ends",
                remedy="name at least two, one a line: `host1 slots=8`",
            ),
            headline="there is no link to probe",
        )
    with tempfile.TemporaryDirectory(prefix="ds_ckpt_probe_") as folder:
        out = Path(folder) / "links.json"
        argv = _mpirun(count, hostfile.resolve(), out, seconds)
        return _run(argv, os.environ, out, count, seconds)


def _mpirun(count: int, hostfile: Path, out: Path, seconds: float) -> list[str]:
    problems = []
    if importlib.util.find_spec("mpi4py") is None:
        found, remedy = "mpi4py is not installed", "pip install 'ds_ckpt[mpi]'"
        problems.append(Problem("mpi4py", found, "the probe speaks MPI", remedy))
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        why = "it starts the probe on every host"
        remedy = "install Open MPI (Debian package openmpi-bin) on every host"
        problems.append(Problem("mpirun", "not on the PATH", why, remedy))
    if mpirun is None or problems:
        raise UnsupportedError(problems, headline="links cannot be probed here")
    where = ["-n", str(count), "--hostfile", str(hostfile), "--map-by", "ppr:1:node"]
    probe = [sys.executable, "-m", "ds_ckpt.harness.link_probe"]
    return [mpirun, *where, *probe, f"--out={out}", f"--seconds={seconds}"]


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    count: int,
    seconds: float,
) -> Links:
    pairs = count * (count - 1) // 2
    limit_s = _START_S + pairs * (_PAIR_S + 3 * seconds)
    ended = ""
    try:
        result = subprocess.run(
            command,
            env=dict(environment),
            cwd=out.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
        said = result.stdout
        if result.returncode or not out.exists():
            ended = f"exit code {result.returncode}"
    except subprocess.TimeoutExpired as error:
        ended = f"no end after {limit_s:.0f} s"
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
    if ended:
        raise LaunchError(
            Problem(
                where=" ".join(command),
                found=f"{ended}; it said\n{said[-4000:]}",
                why="a host could not be reached, or lacks what the probe needs",
                remedy="mend what it names; `mpirun ... hostname` is the shortest test",
            ),
            headline="the link probe did not finish",
        )
    return Links.load(out)
