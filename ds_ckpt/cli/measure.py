"""`ds-ckpt measure` and `ds-ckpt report`. Heavy imports stay inside the commands."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_ckpt.cli.common import exit_on_error, file_option, given_options, split_names
from ds_ckpt.lab.hosts import Launcher

if TYPE_CHECKING:
    from rich.console import Console


def measure(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The run's folder. One that was stopped goes on.")
    ],
    hostfile: Annotated[
        Path | None, file_option("Real machines, one `name slots=N` a line.")
    ] = None,
    on_loopback: Annotated[
        bool, typer.Option("--loopback", help="This machine alone; the link is not shaped.")
    ] = False,
    hosts: Annotated[int, typer.Option(min=1, max=200, help="Emulated hosts.")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="Processes a host; on loopback in all.")] = 1,
    rates: Annotated[
        str | None,
        typer.Option(help="Of the emulated links: 50mbit,1gbit,unlimited. [default: 200mbit]"),
    ] = None,
    like: Annotated[
        str | None, typer.Option(help='"4 nodes x 8 A100, 100 Gbit/s, llama-7b" sets the rate.')
    ] = None,
    hardware: Annotated[
        Path | None, file_option("Figures for --like; a copy of hardware.json to edit.")
    ] = None,
    links: Annotated[
        Path | None, file_option("For --like: the rate from a file of `ds-ckpt probe`.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Of checkpointing: names, `none` among them, or DeepSpeed files.")
    ] = "none,block",
    methods: Annotated[
        str,
        typer.Option(
            help="Of compression: names (of a wrong one the error lists them), or DeepSpeed "
            "files. The two dense baselines and the ceiling are always there."
        ),
    ] = "4bit",
    weights: Annotated[
        str,
        typer.Option(
            help="Where they are: whole and lossless are resident on every host, or DeepSpeed "
            "files. ZeRO-3's way is always there."
        ),
    ] = "",
    rivals: Annotated[
        str, typer.Option(help="Other ways of plain DeepSpeed: hpz, zero2, zero1.")
    ] = "",
    batches: Annotated[str, typer.Option(help="Sequences a process and micro-step.")] = "4",
    tokens: Annotated[int, typer.Option(min=1, help="Of a sequence.")] = 128,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-steps of a step.")] = 1,
    bf16: Annotated[bool, typer.Option("--bf16", help="16-bit weights; else fp32.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="As of `ds-ckpt profile`: a common model by name, a Hugging Face configuration "
            "or checkpoint, or module:callable, which returns (model, batch). [default: a Llama]"
        ),
    ] = None,
    deepspeed: Annotated[
        Path | None,
        file_option("DeepSpeed JSON of all configurations: optimizer, precision, ZeRO, batch."),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="Of the Llama: hidden_size=256,layers=6,intermediate_size=688.")
    ] = "",
    repetitions: Annotated[
        int,
        typer.Option("--repetitions", "--rounds", min=1, help="Trials of each configuration."),
    ] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a trial.")] = 2,
    loss_steps: Annotated[
        int, typer.Option(min=0, help="Of the training for the held-out loss; 0: none.")
    ] = 60,
    equal_memory: Annotated[
        bool, typer.Option(help="Also the batch that checkpointing leaves memory for.")
    ] = True,
    text: Annotated[Path | None, file_option("Train on it, not on Python's texts.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 1,
    launcher: Annotated[Launcher, typer.Option(help="For deepspeed.")] = "pdsh",
    interface: Annotated[
        str | None, typer.Option(help="With a hostfile: the network interface, such as eth0.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where the processes meet, on the first host.")] = 29500,
    ssh_port: Annotated[int | None, typer.Option(help="With a hostfile: sshd's.")] = None,
    stall_s: Annotated[
        float, typer.Option(min=5, help="End after so long a silence: more than a step takes.")
    ] = 180.0,
    limit_s: Annotated[float, typer.Option(min=10, help="End it after so long.")] = 6 * 3600.0,
) -> None:
    """Measure how much bandwidth compression frees and how much of recomputation it pays for.

    As root on emulated hosts, with --hostfile on real machines, else on loopback. Leaves
    report.html, report.md and report.json in the folder. Given again, it goes on where it was, also
    with more --repetitions.
    """
    from rich.console import Console

    from ds_ckpt.cli import measure_arguments as arguments
    from ds_ckpt.config.paths import precision
    from ds_ckpt.lab.hosts.backends import Backend, Hostfile, Loopback
    from ds_ckpt.lab.hosts.emulated import EmulatedHosts, missing
    from ds_ckpt.lab.hosts.launcher import signals_as_exit
    from ds_ckpt.lab.measure.run import measure as run
    from ds_ckpt.lab.measure.spec import Spec, Where, check

    console = Console()
    given = given_options(context)

    def unused(*names: str, why: str) -> None:
        spelt = {"on_loopback": "loopback"}
        found = [f"--{spelt.get(n, n).replace('_', '-')}" for n in names if n in given]
        if found:
            said = f"{', '.join(found)} would change nothing, for {why}: leave out"
            raise typer.BadParameter(said)

    with exit_on_error():
        chosen, sections = arguments.sections_of(
            activation=policies, compression=methods, weights=weights
        )
        base: dict[str, Any] = {}
        if deepspeed is not None:
            unused("bf16", why="the DeepSpeed file says so")
            base, batch = arguments.deepspeed_of(deepspeed)
            bf16 = precision(base) == "bf16"
            if "batches" not in given:
                batches = str(batch.get("train_micro_batch_size_per_gpu", batches))
            if "accumulation" not in given:
                accumulation = batch.get("gradient_accumulation_steps", accumulation)
        chosen_rates = arguments.rates_of(rates) if rates is not None else None
        place: AbstractContextManager[Backend]
        where: Where = "emulated"
        if hostfile is not None:
            unused("hosts", "slots", "on_loopback", why="the hostfile says so")
            machines = Hostfile(hostfile, interface, launcher, port, ssh_port)
            hosts, slots = len(machines.names), next(iter(machines.counts.values()))
            where, place = "hostfile", nullcontext(machines)
        else:
            unused("interface", "ssh_port", why="there is no --hostfile")
            if on_loopback or (reasons := missing()):
                unused("hosts", "launcher", "port", why="this runs on loopback")
                if not on_loopback:
                    console.print(f"No emulated hosts here: {'; '.join(reasons)}.", highlight=False)
                hosts, slots = 1, slots if "slots" in given else 2
                where, place = "loopback", nullcontext(Loopback(slots))
            else:
                place = EmulatedHosts(  # not shaped until a rate is asked for
                    hosts, rate_mbit=None, slots=slots, launcher=launcher, port=port
                )
        spec = Spec(
            where=where,
            hosts=hosts,
            slots=slots,
            policies=chosen["activation"],
            methods=chosen["compression"],
            weights=chosen["weights"],
            rivals=split_names(rivals),
            sections=sections,
            rates=chosen_rates or ((200.0,) if where == "emulated" else (None,)),
            batches=arguments.batches_of(batches),
            tokens=tokens,
            accumulation=accumulation,
            bf16=bf16,
            model=arguments.model_of(model),
            folder=str(Path.cwd()) if model else "",
            deepspeed=base,
            shape=arguments.shape_of(shape),
            repetitions=repetitions,
            steps=steps,
            loss_steps=loss_steps,
            equal_memory=equal_memory,
            text=str(text) if text else None,
            seed=seed,
        )
        check(spec)
        if like is None:
            unused("hardware", "links", why="there is no --like")
        elif rates is not None or where != "emulated":
            raise typer.BadParameter("--like sets the rate of emulated links: leave out --rates")
        with signals_as_exit(), place as backend:
            measured = partial(
                run, backend=backend, console=console, stall_s=stall_s, limit_s=limit_s
            )
            account: list[str] = []
            if like is not None:
                spec, account = arguments.alike(
                    spec, output, measured, console, like, hardware, links
                )
            measured(spec, output, account=account)
        _write_report(output, console)


def report(
    folder: Annotated[Path, typer.Argument(help="Of a measured run.")],
    against: Annotated[
        Path | None, typer.Option(help="Another run: how far its headlines are from this one's.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="For --against: exit 1 beyond it.")] = 0.05,
) -> None:
    """Make a run's report again; with --against hold its headlines against another run's."""
    from rich.console import Console

    console = Console()
    with exit_on_error():
        _write_report(folder, console)
        if against is None:
            return
        from ds_ckpt.lab.measure.report import compare

        lines, worst = compare(folder, against)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if worst > tolerance:
        console.print(f"beyond {tolerance:.0%}", highlight=False)
        raise typer.Exit(1)


def _write_report(output: Path, console: Console) -> None:
    from ds_ckpt.lab.measure import words
    from ds_ckpt.lab.measure.report import Report

    made = Report.of(output)
    paths = made.write(output)
    for line in words.headlines(made.findings):
        console.print(f"* {line}", highlight=False, soft_wrap=True)
    console.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
