"""`ds-ckpt hosts` and `ds-ckpt probe`: emulated hosts and their links for everybody's use.

Heavy imports stay inside the commands.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_ckpt.cli.common import (
    exit_on_error,
    file_option,
    given_options,
    parse_rate,
    progress,
    write_output,
)
from ds_ckpt.lab.hosts import Launcher

hosts = typer.Typer(
    help="Hosts emulated on this machine (Linux, root): run a command on them, clear up.",
    no_args_is_help=True,
)
_Count = Annotated[int, typer.Option("--hosts", min=1, max=200, help="How many.")]
_Rate = Annotated[
    str, typer.Option(help="Of each link in each direction: 200mbit, 1gbit, or unlimited.")
]


def run(
    command: Annotated[list[str], typer.Argument(help="What to run in the first host, after --.")],
    count: _Count = 2,
    slots: Annotated[int, typer.Option(min=1, help="Processes a host, for the hostfile.")] = 1,
    rate: _Rate = "200mbit",
    launcher: Annotated[Launcher, typer.Option(help="For deepspeed.")] = "pdsh",
    limit_s: Annotated[float | None, typer.Option(min=1, help="End it after so long.")] = None,
) -> None:
    """Bring hosts up, run a command in the first one, take the hosts down.

    `deepspeed` is given the options that lead it to all the hosts. Any other command finds a
    hostfile in $DS_CKPT_HOSTFILE and settings for pdsh and mpirun in its environment. Exits as
    the command does.
    """
    rate_mbit = parse_rate(rate)
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts
    from ds_ckpt.lab.hosts.launcher import run_in_foreground, signals_as_exit

    with exit_on_error(), signals_as_exit():
        with EmulatedHosts(count, rate_mbit=rate_mbit, slots=slots, launcher=launcher) as emulated:
            names = ", ".join(f"{host.name} ({host.address})" for host in emulated.hosts)
            typer.echo(f"{emulated.folder.name}: {names}; {_described(rate_mbit)}", err=True)
            prepared = emulated.prepare(command, Path.cwd())
            code = run_in_foreground(prepared, limit_s=limit_s)
    raise typer.Exit(code if code >= 0 else 128 - code)  # as a shell says of a signal


def list_sets(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Sets of hosts that are up or were left behind."""
    import json

    from ds_ckpt.lab.hosts.sets import all_sets

    rows: list[dict[str, Any]] = []
    lines = []
    with exit_on_error():
        for one in all_sets():
            living = [process.pid for process in one.processes if process.alive]
            row = {"name": one.name, "hosts": one.count, "rate_mbit": one.rate_mbit}
            row |= {"owner_pid": one.owner.pid, "owner_runs": one.owner.alive, "processes": living}
            rows.append(row)
            state = f"process {one.owner.pid} runs" if one.owner.alive else "left behind"
            lines.append(
                f"{one.name}: {one.count} hosts, {_described(one.rate_mbit)}, {state}, "
                f"{len(living)} first processes"
            )
    said = "\n".join(lines) or "no hosts are up"
    typer.echo(json.dumps(rows, indent=2) if as_json else said)


def down(
    names: Annotated[list[str] | None, typer.Argument(help="Only these, running or not.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also sets whose owner still runs.")
    ] = False,
) -> None:
    """Clear away what a killed run has left: processes, namespaces, links and folders."""
    from ds_ckpt.lab.hosts.sets import take_down

    with exit_on_error():
        downed, left = take_down(names or (), living=everything)
    typer.echo(f"taken down: {', '.join(downed) or 'nothing'}")
    if left:
        typer.echo(f"left alone, their owner runs: {', '.join(left)} (name them, or --all)")


def probe(
    context: typer.Context,
    hostfile: Annotated[
        Path | None, file_option("Real machines; without it hosts are emulated.")
    ] = None,
    count: _Count = 2,
    rate: _Rate = "200mbit",
    seconds: Annotated[float, typer.Option(min=0.2, help="A stream.")] = 1.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON to this file.")
    ] = None,
) -> None:
    """Measure the links between hosts with MPI: latency, payload one way and both ways."""
    from ds_ckpt.lab.hosts import probe
    from ds_ckpt.lab.hosts.backends import Hostfile
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts
    from ds_ckpt.lab.hosts.launcher import signals_as_exit

    rate_mbit = parse_rate(rate)
    shaping = {"--hosts": "count", "--rate": "rate"} if hostfile is not None else {}
    if found := [option for option, name in shaping.items() if name in given_options(context)]:
        raise typer.BadParameter(
            f"{', '.join(found)} would change nothing, for machines of a hostfile are as they are: "
            "leave out"
        )
    with exit_on_error(), signals_as_exit():
        with contextlib.ExitStack() as stack:
            where: Hostfile | EmulatedHosts
            if hostfile is not None:
                where = Hostfile(hostfile)
            else:
                where = stack.enter_context(EmulatedHosts(count, rate_mbit=rate_mbit))
            names = len(where.names)
            told = stack.enter_context(progress(names * (names - 1) // 2))
            links = probe.probe(where, seconds=seconds, told=told)
    if hostfile is None:
        typer.echo(_described(rate_mbit))
    for pair in links.pairs:
        typer.echo(
            f"{pair.first} - {pair.second}: {1e6 * pair.latency_s:.0f} us; payload in Mbit/s: "
            f"{8e-6 * pair.forward_bytes_per_s:.1f} there, "
            f"{8e-6 * pair.backward_bytes_per_s:.1f} back, "
            f"{8e-6 * pair.both_forward_bytes_per_s:.1f} and "
            f"{8e-6 * pair.both_backward_bytes_per_s:.1f} at once"
        )
    write_output(output, links.save)


def _described(rate_mbit: float | None) -> str:
    return "links not shaped" if rate_mbit is None else f"links of {rate_mbit:g} Mbit/s"
