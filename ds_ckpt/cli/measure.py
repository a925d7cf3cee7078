"""`ds-ckpt measure` and `ds-ckpt report`. Heavy imports stay inside the commands."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ds_ckpt.cli.common import file_option, given_options, parse_rate, refuse_options, split_names

if TYPE_CHECKING:
    from rich.console import Console

DEMO_OPTIONS: dict[str, Any] = {
    "methods": "3bit,topk,powersgd",
    "weights": "whole",
    "steps": 1,
    "shape": "hidden_size=192,layers=4,intermediate_size=512,heads=6",
}
"""Options of `measure --demo` that are not on the command line; `weights` on several nodes."""
DEMO_S = 155.0
"""Time limit of the demo in seconds: after four repetitions none begins that would exceed it."""


def measure(
    context: typer.Context,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Folder of the run. [default: runs/TIME]")
    ] = None,
    demo: Annotated[
        bool, Option("--demo", help="Short run: fewer configurations and trials, a small model.")
    ] = False,
    hostfile: Annotated[
        Path | None, file_option("Hostfile of real nodes: `name slots=N` per line.")
    ] = None,
    on_loopback: Annotated[
        bool, Option("--loopback", help="Use this machine only, with an unshaped link.")
    ] = False,
    hosts: Annotated[int, Option(min=1, max=200, help="Number of emulated nodes.")] = 2,
    slots: Annotated[int, Option(min=1, help="Ranks per node; on loopback, all ranks.")] = 1,
    rates: Annotated[
        str | None, Option(help="Link rates to measure: 50mbit,1gbit,unlimited. [default: 200mbit]")
    ] = None,
    policies: Annotated[
        str,
        Option(help="Checkpointing policies to compare: none,block,selective or DeepSpeed files."),
    ] = "none,block",
    methods: Annotated[
        str, Option(help="Compression methods to compare, beside `stock`, `dense` and `no_comm`.")
    ] = "topk,powersgd,3bit",
    weights: Annotated[
        str, Option(help="Resident weights to add: `whole`, `lossless` or DeepSpeed files.")
    ] = "",
    baselines: Annotated[str, Option(help="DeepSpeed baselines to add: hpz, zero2, zero1.")] = "",
    batch: Annotated[int, Option(min=1, help="Micro-batch size, in sequences.")] = 4,
    tokens: Annotated[int, Option(min=2, help="Sequence length, in tokens.")] = 128,
    accumulation: Annotated[int, Option(min=1, help="Gradient accumulation steps.")] = 1,
    bf16: Annotated[bool, Option("--bf16", help="Train in bf16 instead of fp32.")] = False,
    model: Annotated[
        str | None,
        Option(help="Hugging Face model as in `ds-ckpt profile`. [default: a small Llama]"),
    ] = None,
    shape: Annotated[
        str, Option(help="Shape of the Llama: hidden_size=256,layers=6,intermediate_size=688.")
    ] = "",
    repetitions: Annotated[
        int, Option(min=1, help="Trials of each configuration at each rate.")
    ] = 6,
    steps: Annotated[int, Option(min=1, help="Timed steps per trial.")] = 2,
    interface: Annotated[
        str | None, Option(help="Network interface, such as eth0; needs --hostfile.")
    ] = None,
    port: Annotated[int, Option(help="Master port on the first node.")] = 29500,
    ssh_port: Annotated[int | None, Option(help="Port of sshd; needs --hostfile.")] = None,
    stall_s: Annotated[
        float, Option(min=5, help="Stop if there is no progress for this many seconds.")
    ] = 180.0,
) -> None:
    """Measure how much bandwidth compression frees and how much of recomputation it pays for.

    Runs on emulated nodes, on real nodes with --hostfile, else on loopback. Writes report.html,
    report.md and report.json into the folder. The same command continues a stopped run, also with
    more --repetitions.
    """
    from rich.console import Console

    from ds_ckpt.cli import measure_arguments as arguments
    from ds_ckpt.lab.hosts.backends import Backend, Hostfile, Loopback
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts, emulation_obstacles
    from ds_ckpt.lab.hosts.launcher import signals_as_exit
    from ds_ckpt.lab.measure.spec import Spec, Where, check_spec
    from ds_ckpt.lab.measure.trials import measure as run

    console = Console()
    given = given_options(context)
    output = output or Path("runs") / datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    overridden = given | {"shape"} if "model" in given else given
    preset = {k: v for k, v in DEMO_OPTIONS.items() if demo and k not in overridden}
    chosen_rates = tuple(dict.fromkeys(map(parse_rate, rates.split(",")))) if rates else ()
    place: AbstractContextManager[Backend]
    where: Where = "emulated"
    nodes = {"--hosts": "hosts", "--slots": "slots", "--loopback": "on_loopback"}
    ssh = {"--interface": "interface", "--ssh-port": "ssh_port"}
    reasons: list[str] = [] if on_loopback or hostfile else emulation_obstacles()
    if hostfile is not None:
        refuse_options(context, nodes, "the hostfile decides it")
        machines = Hostfile(hostfile, interface, port, ssh_port)
        hosts, slots = len(machines.names), next(iter(machines.counts.values()))
        where, place = "hostfile", nullcontext(machines)
    elif on_loopback or reasons:
        refuse_options(context, ssh | {"--hosts": "hosts"}, "this runs on loopback")
        if "port" in given:
            console.print("--port is ignored: loopback takes a free port.", highlight=False)
        if reasons:
            console.print(f"No emulated nodes: {'; '.join(reasons)}.", highlight=False)
        hosts, slots = 1, slots if "slots" in given else 2
        where, place = "loopback", nullcontext(Loopback(slots, gpus=demo))
    else:
        refuse_options(context, ssh, "there is no --hostfile")
        place = EmulatedHosts(hosts, rate_mbit=None, slots=slots, port=port)
    if hosts > 1:
        weights = preset.get("weights", weights)
    methods, shape = preset.get("methods", methods), preset.get("shape", shape)
    chosen, sections = arguments.sections_of(
        activation=policies, compression=methods, weights=weights
    )
    spec = Spec(
        where=where,
        hosts=hosts,
        slots=slots,
        policies=chosen["activation"],
        methods=chosen["compression"],
        weights=chosen["weights"],
        baselines=split_names(baselines),
        sections=sections,
        rates=chosen_rates or ((200.0,) if where == "emulated" else (None,)),
        batch=batch,
        tokens=tokens,
        accumulation=accumulation,
        bf16=bf16,
        model=arguments.model_of(model),
        shape=arguments.shape_of(shape),
        repetitions=repetitions,
        steps=preset.get("steps", steps),
        warm_up=1 if demo else Spec.warm_up,
        demo=demo,
    )
    check_spec(spec)
    with signals_as_exit(), place as backend:
        budget_s = DEMO_S if demo else math.inf
        run(spec, output, backend, console=console, stall_s=stall_s, budget_s=budget_s)
    _write_report(output, console)


def report(folder: Annotated[Path, Argument(help="Folder of a measured run.")]) -> None:
    """Write a run's report again."""
    from rich.console import Console

    _write_report(folder, Console())


def _write_report(output: Path, console: Console) -> None:
    from ds_ckpt.lab.measure.measure_report import Report

    made = Report.of(output)
    made.print(console)
    paths = made.write(output)
    console.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
