"""The demo: `python -m ds_ckpt.harness.demo`.

Prepares a run folder (text, one JSON file a cell), has `deepspeed` launch the training once for
all cells, follows it, then prints the table with its meaning and writes `results.json` and
`report.html`. Measures nothing itself.
"""

from __future__ import annotations

import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.harness import cells, corpus
from ds_ckpt.harness.demo_ground import (
    RATE_MBIT,
    accelerator_of,
    announce_compilation,
    shaped_steps,
    train,
    why_no_hosts,
)
from ds_ckpt.harness.machine import machine, versions
from ds_ckpt.harness.report import terminal_table, write_html
from ds_ckpt.harness.results import Machine, Measurements, Results, RunInfo
from ds_ckpt.harness.words import findings

DEFAULT_STEPS = 64
MINIMUM_STEPS = 6


def run(
    *,
    steps: int,
    output: Path,
    seed: int,
    text: Path | None,
    time_limit_s: float,
    console: Console,
    on_loopback: bool = False,
) -> Results:
    """Run the demo into the folder `output`, which it makes. Prints progress, returns the results.

    As root on a CPU machine it runs on two emulated hosts, whose link has a rate in the steps that
    are timed; else, or with `on_loopback`, on this machine alone.

    Raises ConfigError on options that cannot work and LaunchError if the training fails or runs
    into `time_limit_s`. No process outlives the call.
    """
    _check(steps, output)
    started, started_utc = time.monotonic(), datetime.now(timezone.utc)
    console.print("Collecting the text ...")
    data = corpus.file_corpus(text) if text else corpus.embedded_corpus()
    output.mkdir(parents=True, exist_ok=True)
    data.save(output / "corpus")
    cells.write_configs(output / "configs", steps=steps)

    accelerator, settings = accelerator_of(console)
    if accelerator == "cpu":
        announce_compilation(settings, console)
    reasons = ["--loopback was given"] if on_loopback else why_no_hosts(accelerator)
    rate_mbit = None if reasons else RATE_MBIT
    job = {"steps": steps, "seed": seed, "rate_mbit": rate_mbit, "shaped_steps": 0}
    if rate_mbit is None:
        console.print(
            f"On loopback, whose link is not shaped ({'; '.join(reasons)}).", highlight=False
        )
    else:
        console.print(
            f"On two emulated hosts; their link has {rate_mbit:g} Mbit/s in the timed steps.",
            highlight=False,
        )
        job["shaped_steps"] = shaped_steps(steps)
    on_hosts = rate_mbit is not None
    train(job, output, on_hosts=on_hosts, time_limit_s=time_limit_s, console=console)
    measured = Measurements.model_validate_json(
        (output / "measurements.json").read_text(encoding="utf-8")
    )
    (output / "measurements.json").unlink()
    info = RunInfo(
        started_utc=started_utc.isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "ds_ckpt.harness.demo", *sys.argv[1:]]),
        seed=seed,
        steps=steps,
        topk_start_step=cells.topk_start_step(steps),
        processes=cells.PROCESSES,
        rate_mbit=rate_mbit,
        sequences_per_process=cells.SEQUENCES_PER_PROCESS,
        sequence_length=cells.SEQUENCE_LENGTH,
        parameters=measured.parameters,
        text=data.source,
        train_bytes=len(data.train),
        heldout_bytes=len(data.heldout),
        corpus_sha256=data.sha256,
        versions=versions(),
        machine=Machine(accelerator=accelerator, **machine()),
        wall_time_s=round(time.monotonic() - started, 1),
    )
    return Results(run=info, cells=measured.cells)


def main(
    steps: Annotated[
        int, typer.Option(help="Training steps a cell; Top-K is dense for the first third.")
    ] = DEFAULT_STEPS,
    output: Annotated[
        Path | None, typer.Option(help="Folder to make. [default: runs/demo-TIME]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the data's order.")] = 1,
    text: Annotated[
        Path | None, typer.Option(help="Train on this text file instead of Python's own texts.")
    ] = None,
    time_limit_s: Annotated[float, typer.Option(help="Stop everything after so long.")] = 1200.0,
    on_loopback: Annotated[
        bool, typer.Option("--loopback", help="On this machine alone, also as root.")
    ] = False,
) -> None:
    """Train a small Llama under ZeRO-3 in four cells: checkpointing off and on, dense and Top-K.

    Two processes, started by deepspeed: as root on two emulated hosts with a link of 200 Mbit/s,
    else on loopback. Prints one table and what it means, and
    leaves results.json, report.html and the four DeepSpeed files in the output folder.
    """
    console = Console()
    folder = output or Path("runs") / datetime.now(timezone.utc).strftime("demo-%Y%m%d-%H%M%S")
    try:
        results = run(
            steps=steps,
            output=folder,
            seed=seed,
            text=text,
            time_limit_s=time_limit_s,
            console=console,
            on_loopback=on_loopback,
        )
        results.save(folder / "results.json")
        write_html(results, folder / "report.html")
    except DsCkptError as error:
        Console(stderr=True).print(
            f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        console.print("\nStopped; nothing is left running.")
        raise typer.Exit(130) from error
    console.print()
    console.print(terminal_table(results))
    console.print(
        "Weights: gathers of forward + recompute + backward. Loss: held-out, at the end.\n"
        "* reference, its first steps only: each dense gradient sent once, by all-to-all.\n",
        highlight=False,
    )
    for finding in findings(results):
        console.print(f"* {escape(finding)}", highlight=False)
    console.print(
        f"\nLoss curves, caveats, the run's data: {escape(str(folder / 'report.html'))}\n"
        f"DeepSpeed files to take away:         {escape(str(folder / 'configs'))}\n"
        f"Took {results.run.wall_time_s:.0f} s.",
        highlight=False,
        soft_wrap=True,
    )


def _check(steps: int, output: Path) -> None:
    problems = []
    if steps < MINIMUM_STEPS:
        problems.append(
            Problem(
                where="--steps",
                found=str(steps),
                why="a third of the steps is dense warm-up, and the rest must allow a median",
                remedy=f"take at least {MINIMUM_STEPS}",
            )
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        problems.append(
            Problem(
                where="--output",
                found=str(output),
                why="it is there already, and a run overwrites nothing",
                remedy="name a folder that does not exist yet",
            )
        )
    if problems:
        raise ConfigError(problems, headline="the demo cannot run with these options")


if __name__ == "__main__":
    typer.run(main)
