"""`ds-ckpt hosts` and `ds-ckpt probe`: nodes and their links.

Heavy imports stay inside the commands.
"""

import contextlib
import functools
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ds_ckpt.cli.common import file_option, parse_rate, progress, refuse_options, write_output

hosts = typer.Typer(
    help="Check the nodes of a hostfile, or run a command on emulated nodes.", no_args_is_help=True
)
_CLOCK_S = 5.0
"""Difference between clocks that is worth a warning."""
_Count = Annotated[int, Option("--hosts", min=1, max=200, help="Number of emulated nodes.")]
_Rate = Annotated[str, Option(help="Rate of each link and direction: 200mbit, 1gbit or unlimited.")]


def run(
    command: Annotated[list[str], Argument(help="Command for the first node, after --.")],
    count: _Count = 2,
    slots: Annotated[int, Option(min=1, help="Ranks per node, for the hostfile.")] = 1,
    rate: _Rate = "200mbit",
    pdsh: Annotated[
        bool, Option("--pdsh", help="Start ranks over pdsh and sshd, as on real nodes (root).")
    ] = False,
) -> None:
    """Start emulated nodes, run a command on the first one, and stop the nodes.

    `deepspeed train.py` runs on all nodes. With --pdsh, `deepspeed` gets the options for all nodes.
    Other commands find a hostfile in $DS_CKPT_HOSTFILE, and settings for pdsh in the environment.
    Returns the command's exit code.
    """
    rate_mbit = parse_rate(rate)
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts
    from ds_ckpt.lab.hosts.launcher import signals_as_exit

    nodes = EmulatedHosts(count, rate_mbit=rate_mbit, slots=slots, pdsh=pdsh)
    with signals_as_exit(), nodes as emulated:
        names = ", ".join(f"{host.name} ({host.address})" for host in emulated.hosts)
        typer.echo(f"{emulated.folder.name}: {names}; {_described(rate_mbit)}", err=True)
        prepared = emulated.prepare(command, Path.cwd())
        code = subprocess.run(prepared.command, env=prepared.environment).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)  # a shell's code for a signal


def check(
    hostfile: Annotated[Path, file_option("Hostfile of the nodes; rank 0 is on the first one.")],
    port: Annotated[int, Option(min=1, max=65535, help="Port of rank 0.")] = 29500,
    ssh_port: Annotated[int | None, Option(min=1, max=65535, help="Port of sshd.")] = None,
) -> None:
    """Check the nodes of a hostfile: ssh, paths, versions, port, clocks, interfaces, GPUs.

    Run it where you will start `deepspeed`: nodes are reached from there. Exit 1 if a node cannot
    take part; every problem is printed with its remedy.
    """
    from ds_ckpt.lab.hosts.backends import Hostfile
    from ds_ckpt.lab.hosts.launcher import check_hosts

    where = Hostfile(hostfile, port=port, ssh_port=ssh_port)
    nodes = check_hosts(where)
    by_text: dict[str, list[str]] = {}
    for node in nodes:
        warnings = []
        if abs(node.ahead_s) > _CLOCK_S:
            way = "ahead" if node.ahead_s > 0 else "behind"
            warnings.append(f"clock {abs(node.ahead_s):.0f} s {way}: times in logs do not match")
        if len(nodes) > 1 and (not node.address or node.address.startswith("127.")):
            to = node.address or "no address"
            warnings.append(
                f"its host name resolves to {to}: put GLOO_SOCKET_IFNAME={node.interface} into "
                ".deepspeed_env"
            )
        ranks, state = where.counts[node.name], "; ".join(warnings) or "ok"
        text = f"ranks {ranks}, NVIDIA GPUs {node.gpus}, interface {node.interface}; {state}"
        by_text.setdefault(text, []).append(node.name)
    for text, names in by_text.items():
        typer.echo(f"{', '.join(names)}: {text}")
    versions = ", ".join(" ".join(pair) for pair in nodes[0].versions.items())
    typer.echo(f"all nodes: {versions}; port {port} is free on {nodes[0].name}")


def probe(
    context: typer.Context,
    hostfile: Annotated[
        Path | None, file_option("Hostfile of real nodes. [default: emulated nodes]")
    ] = None,
    count: _Count = 2,
    rate: _Rate = "200mbit",
    seconds: Annotated[float, Option(min=0.2, help="Minimum seconds of each transfer.")] = 1.0,
    output: Annotated[
        Path | None, Option("--output", "-o", help="File for the JSON result.")
    ] = None,
) -> None:
    """Measure the links between nodes: latency, and payload each way while both nodes send."""
    from ds_ckpt.lab.hosts import probe
    from ds_ckpt.lab.hosts.backends import Hostfile
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts
    from ds_ckpt.lab.hosts.launcher import signals_as_exit

    rate_mbit = parse_rate(rate)
    if hostfile is not None:
        refuse_options(context, {"--hosts": "count", "--rate": "rate"}, "the hostfile decides it")
    with signals_as_exit(), contextlib.ExitStack() as stack:
        emulated = EmulatedHosts(count, rate_mbit=rate_mbit)
        where = Hostfile(hostfile) if hostfile else stack.enter_context(emulated)
        names = len(where.names)
        begin_pair = stack.enter_context(progress(names * (names - 1) // 2))
        pairs = probe.probe(
            where, seconds=seconds, on_event=lambda event: begin_pair(event["words"])
        )
    if hostfile is None:
        typer.echo(_described(rate_mbit))
    for pair in pairs:
        typer.echo(
            f"{pair.first} - {pair.second}: {1e6 * pair.latency_s:.0f} us; payload each way at "
            f"once: {8e-6 * pair.bytes_per_s:.1f} Mbit/s"
        )
    write_output(output, functools.partial(probe.save, pairs))


def _described(rate_mbit: float | None) -> str:
    return "links not shaped" if rate_mbit is None else f"links of {rate_mbit:g} Mbit/s"
