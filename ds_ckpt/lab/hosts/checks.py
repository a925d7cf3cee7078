"""What must be true of every host before anything is launched, and which host has failed after.

Each check ends within `LIMIT_S`; every host that is found wanting is named with what to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ds_ckpt.errors import DsCkptError, Problem
from ds_ckpt.lab.hosts.backends import SSH_S, Backend

LIMIT_S = 2 * SSH_S + 5
MODULES = ("ds_ckpt", "deepspeed", "torch", "transformers")
_LOOK = """
import importlib.util, json, socket, sys
missing = [m for m in sys.argv[2].split(",") if importlib.util.find_spec(m) is None]
taken = ""
if int(sys.argv[1]):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(sys.argv[1])))
        except OSError as error:
            taken = str(error)
print("ds_ckpt-look", json.dumps({"missing": missing, "taken": taken}))
"""


class HostError(DsCkptError, RuntimeError):
    """A host cannot take part, or has dropped out."""

    headline = "not every host can take part"


def check_hosts(hosts: Backend) -> None:
    """Look at every host at once: ssh, this Python, its modules, the first one's port.

    Raises HostError with all that was found.
    """
    with ThreadPoolExecutor(len(hosts.names)) as pool:
        found = list(pool.map(lambda name: _look(hosts, name), hosts.names))
    problems = [problem for host in found for problem in host]
    if problems:
        raise HostError(problems)


def unreachable(hosts: Backend) -> list[Problem]:
    """The hosts that have stopped to answer, for a run that has failed."""
    gone = hosts.gone()
    # all others are reached by way of the first one
    asked = gone if gone and gone[0] == hosts.names[0] else hosts.names

    def answer(name: str) -> str | None:
        return "the host is not there any more" if name in gone else _ask(hosts, name, ["true"])[0]

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(answer, asked))
    return [
        Problem(
            where=name,
            found=f"no answer any more: {said}",
            why="it has vanished from the network, or its link is down",
            remedy="look at the machine and its link; then give the same command again, which "
            "goes on where this run was",
        )
        for name, said in zip(asked, answers, strict=True)
        if said is not None
    ]


def _ask(
    hosts: Backend, name: str, argv: Sequence[str]
) -> tuple[str | None, subprocess.CompletedProcess[str]]:
    """Why a host does not answer, or None; and what it has said."""
    try:
        result = hosts.on(name, argv)
    except subprocess.TimeoutExpired:
        result = subprocess.CompletedProcess(argv, 255, "", f"nothing for {SSH_S:.0f} s")
    except FileNotFoundError as error:
        result = subprocess.CompletedProcess(argv, 255, "", f"no {error.filename} on this machine")
    silent = result.returncode == 255
    return (result.stderr.strip() or "ssh failed") if silent else None, result


def _look(hosts: Backend, name: str) -> list[Problem]:
    """What keeps a host from taking part."""
    port = hosts.port if name == hosts.names[0] else 0
    silent, result = _ask(hosts, name, [sys.executable, "-c", _LOOK, str(port), ",".join(MODULES)])
    if silent is not None:
        found, why = f"no answer to ssh: {silent}", "deepspeed starts the processes over it"
        remedy = f"make `ssh {name} true` work without a password from the first host"
        return [Problem(name, found, why, remedy)]
    lines = [line for line in result.stdout.splitlines() if line.startswith("ds_ckpt-look ")]
    if result.returncode or not lines:
        said = (result.stderr or result.stdout).strip()
        why = "every host runs the same Python at the same path"
        remedy = "install this environment there, at this path"
        return [Problem(name, f"{sys.executable} fails there: {said}", why, remedy)]
    problems = []
    seen = json.loads(lines[0].partition(" ")[2])
    if seen["missing"]:
        why = f"the launched training imports it, with {sys.executable}"
        remedy = "install it there: pip install 'ds_ckpt[hf]' in that environment"
        problems.append(Problem(name, f"no module {', '.join(seen['missing'])}", why, remedy))
    if seen["taken"]:
        why, remedy = "the processes meet there", "end what listens on it, or name another: --port"
        problems.append(Problem(name, f"port {port} is taken ({seen['taken']})", why, remedy))
    return problems
