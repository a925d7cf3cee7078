"""The demo, `python -m ds_ckpt.cli.demo`: `ds-ckpt measure` with fixed settings.

A small Llama with checkpointing off and on, dense and Top-K; on hosts, weights that stay as well.
Nothing is measured here: it chooses the settings and where they run, then prints the report's first
table and what it means.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ds_ckpt.cli.common import exit_on_error
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.hosts.backends import Backend, Loopback
from ds_ckpt.lab.hosts.emulated import EmulatedHosts, missing
from ds_ckpt.lab.hosts.launcher import signals_as_exit
from ds_ckpt.lab.measure.report import Report
from ds_ckpt.lab.measure.run import measure
from ds_ckpt.lab.measure.spec import DENSE, STOCK, Spec, deepspeed_config
from ds_ckpt.lab.report.document import Document, Items, Paragraph, Section

DEFAULT_STEPS, MINIMUM_STEPS = 64, 6
PROCESSES = 2
COLUMNS = ("step_s", "held_bytes", "gradient_bytes", "weight_bytes", "heldout_loss")


def spec_of(steps: int, seed: int, text: Path | None, *, on_hosts: bool) -> Spec:
    """The demo's settings. Raises ConfigError where there are too few steps."""
    if steps < MINIMUM_STEPS:
        why = "a quarter of the steps is dense warm-up, and the rest must show a loss"
        raise ConfigError(
            Problem("--steps", str(steps), why, f"take at least {MINIMUM_STEPS}"),
            headline="the demo cannot run with these options",
        )
    return Spec(
        where="emulated" if on_hosts else "loopback",
        hosts=PROCESSES if on_hosts else 1,
        slots=1 if on_hosts else PROCESSES,
        methods=("topk",),
        weights=("whole",) if on_hosts else (),
        left_out=(*(f"none/{m}/whole" for m in (STOCK, DENSE, "topk")), f"block/{STOCK}/whole"),
        rates=(200.0 if on_hosts else None,),
        repetitions=4,
        loss_steps=steps,
        seed=seed,
        ceiling=False,
        text=str(text.resolve()) if text else None,
    )


def run(spec: Spec, folder: Path, limit_s: float, console: Console) -> Report:
    """Measure into `folder` and write the report and the DeepSpeed files there.

    Raises ConfigError, LaunchError or HostError as `ds_ckpt.lab.measure.run.measure` does.
    """
    place: AbstractContextManager[Backend] = nullcontext(Loopback(PROCESSES, gpus=True))
    if spec.where == "emulated":
        place = EmulatedHosts(PROCESSES, rate_mbit=None)
    with signals_as_exit(), place as backend:
        measure(spec, folder, backend=backend, console=console, limit_s=limit_s)
    report = Report.of(folder)
    report.write(folder)
    configs = folder / "configs"
    configs.mkdir(exist_ok=True)
    steps, parameters = spec.loss_steps, report.model.parameters if report.model else 0
    for one in spec.configurations:
        times = {"start_step": steps // 4, "total_steps": steps}
        content = deepspeed_config(spec, one, parameters=parameters, **times)
        path = configs / f"{one.name.replace('/', '-')}.json"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return report


def show(report: Report, folder: Path, console: Console) -> None:
    """The table, what it means, and what lies where."""
    note = "dense: each gradient sent once, by all-to-all; stock: DeepSpeed's own. Loss: held-out."
    title = f"ZeRO-3 on {PROCESSES} processes; bytes are of one step"
    blocks = [report.table(COLUMNS), Paragraph(note + "\n"), Items(report.conclusions())]
    console.print()
    Document(title, [], [Section("", blocks)]).print(console)
    console.print(
        f"\nLoss curves, caveats, the run's data: {escape(str(folder / 'report.html'))}\n"
        f"DeepSpeed files to take away:         {escape(str(folder / 'configs'))}",
        highlight=False,
        soft_wrap=True,
    )


def main(
    steps: Annotated[
        int, typer.Option(help="Training steps for the loss; Top-K starts after a quarter of them.")
    ] = DEFAULT_STEPS,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; a stopped run continues. [default: runs/demo-TIME]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for weights and data order.")] = 1,
    text: Annotated[
        Path | None, typer.Option(help="Training text. [default: Python's documentation]")
    ] = None,
    time_limit_s: Annotated[float, typer.Option(help="Stop after this many seconds.")] = 3600.0,
    on_loopback: Annotated[
        bool, typer.Option("--loopback", help="Use this machine only, also as root.")
    ] = False,
) -> None:
    """Train a small Llama under ZeRO-3 with checkpointing off and on, dense and Top-K.

    Two processes, started by deepspeed: as root on two emulated hosts with a link of 200 Mbit/s and
    also with weights that stay on every host, else on loopback. Prints one table and what it means,
    and leaves report.html, the samples and the DeepSpeed files in the output folder.
    `ds-ckpt measure` has everything else to choose from.
    """
    console = Console()
    folder = output or Path("runs") / datetime.now(timezone.utc).strftime("demo-%Y%m%d-%H%M%S")
    try:
        with exit_on_error():
            reasons = ["--loopback was given"] if on_loopback else missing()
            if Loopback(PROCESSES, gpus=True).on_gpus():
                reasons = ["GPUs are used where they are"]
            else:
                console.print(
                    f"Training on the CPU: {PROCESSES} GPUs would be used where they are. The "
                    "first start on a machine compiles DeepSpeed's CPU operator, which takes about "
                    "a minute."
                )
            if reasons:
                console.print(f"No emulated hosts: {'; '.join(reasons)}.", highlight=False)
            spec = spec_of(steps, seed, text, on_hosts=not reasons)
            show(run(spec, folder, time_limit_s, console), folder, console)
    except KeyboardInterrupt as error:
        console.print("\nStopped; nothing is left running. The same --output goes on.")
        raise typer.Exit(130) from error


if __name__ == "__main__":
    typer.run(main)
