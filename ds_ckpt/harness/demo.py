"""The demo: `python -m ds_ckpt.harness.demo`.

Prepares a run folder (text, one JSON file a cell), has `deepspeed` launch the training once for
all cells, follows it, then prints the table with its meaning and writes `results.json` and
`report.html`. Measures nothing itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.markup import escape

from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.harness import cells, corpus, cpu_op
from ds_ckpt.harness.follow import follow
from ds_ckpt.harness.launch import check_running, deepspeed_command, free_port, launched
from ds_ckpt.harness.report import terminal_table, write_html
from ds_ckpt.harness.results import Machine, Measurements, Results, RunInfo
from ds_ckpt.harness.words import findings

DEFAULT_STEPS = 64
MINIMUM_STEPS = 6
_LOOPBACK = Path("/sys/class/net/lo")


def run(
    *, steps: int, output: Path, seed: int, text: Path | None, time_limit_s: float, console: Console
) -> Results:
    """Run the demo into the folder `output`, which it makes. Prints progress, returns the results.

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

    accelerator, environment = _accelerator(console)
    if accelerator == "cpu":
        _announce_compilation(environment, console)
    log = output / "training.log"
    arguments = ["--run-dir", str(output), "--steps", str(steps), "--seed", str(seed)]
    port = free_port()
    command = deepspeed_command(
        "ds_ckpt.harness.train_cells",
        arguments,
        processes=cells.PROCESSES,
        master_port=port,
    )
    with (
        cpu_op.shared_buffers_removed(port),
        cpu_op.lock_cleared_on_failure(environment),
        launched(command, environment=environment, log=log) as process,
    ):
        follow(
            output / "events.jsonl",
            steps=steps,
            console=console,
            running=lambda: check_running(
                process, started=started, time_limit_s=time_limit_s, log=log
            ),
        )
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
        sequences_per_process=cells.SEQUENCES_PER_PROCESS,
        sequence_length=cells.SEQUENCE_LENGTH,
        parameters=measured.parameters,
        text=data.source,
        train_bytes=len(data.train),
        heldout_bytes=len(data.heldout),
        corpus_sha256=data.sha256,
        versions=_versions(),
        machine=_machine(accelerator),
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
) -> None:
    """Train a small Llama under ZeRO-3 in four cells: checkpointing off and on, dense and Top-K.

    Two processes on this machine, started by deepspeed. Prints one table and what it means, and
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


def _accelerator(console: Console) -> tuple[str, dict[str, str]]:
    """Which accelerator to train on, and the environment of the launched processes."""
    import torch

    environment = dict(os.environ)
    # DeepSpeed compiles with the ninja of its own environment, activated or not.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["HF_HUB_OFFLINE"] = "1"
    wanted = environment.get("DS_ACCELERATOR")
    gpus = torch.cuda.device_count() if wanted in (None, "cuda") else 0
    if gpus >= cells.PROCESSES:
        console.print(f"Training on {cells.PROCESSES} of {gpus} GPUs.")
        return torch.cuda.get_device_name(0), environment
    if gpus:
        console.print(
            f"Found {gpus} GPU, and the demo needs {cells.PROCESSES}: training on the CPU instead."
        )
    environment["DS_ACCELERATOR"] = "cpu"
    cores = os.cpu_count() or cells.PROCESSES
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // cells.PROCESSES)))
    if _LOOPBACK.exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
    return "cpu", environment


def _announce_compilation(environment: dict[str, str], console: Console) -> None:
    if cpu_op.is_compiled(environment):
        console.print("Starting deepspeed (about 10 s) ...")
    elif locks := cpu_op.locks(environment):
        console.print(
            "DeepSpeed's CPU operator is being compiled by another process, or its compilation was"
            f" interrupted. If nothing happens for some minutes: stop, delete {min(locks)}, again.",
        )
    else:
        console.print(
            "Starting deepspeed. This first time on this machine it compiles a CPU operator, which"
            " takes about a minute ..."
        )


def _versions() -> dict[str, str]:
    names = ("ds_ckpt", "deepspeed", "torch", "transformers", "numpy")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def _machine(accelerator: str) -> Machine:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return Machine(
        cpu_model=model,
        cpu_cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        accelerator=accelerator,
        system=f"{platform.system()} {platform.machine()}",
    )


if __name__ == "__main__":
    typer.run(main)
