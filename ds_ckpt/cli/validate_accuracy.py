"""`ds-ckpt validate-accuracy`: dense training against compression, judged by statistics."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated

import typer

FAILED = 3
"""Exit code without a verdict."""


def validate_accuracy(
    files: Annotated[list[Path], typer.Argument(help="DeepSpeed JSON files.", metavar="CONFIG...")],
    seeds: Annotated[int, typer.Option(min=2, help="Number of paired runs.")] = 5,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=50,
            help="Equivalence margin, in percent of the dense loss, or in points of accuracy for "
            "labelled data. [default: 0.5, or 1.0]",
        ),
    ] = None,
    virtual_workers: Annotated[
        int | None, typer.Option(min=2, help="Number of workers in this process. [default: 4]")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=2, help="Number of real ZeRO-3 ranks, launched by deepspeed, instead."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text file, or JSON lines with `text`, and `label` to train a classifier. "
            "[default: the documentation of Python]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face checkpoint, folder or name. [default: a small new model]"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=8, help="Number of steps of each run.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-9, help="Maximum learning rate of the schedule.")
    ] = None,
    betas: Annotated[
        str | None, typer.Option(help="AdamW's betas, in every run. [default: 0.9,0.95]")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a micro-batch.")] = None,
    length: Annotated[int | None, typer.Option(min=4, help="Sequence length, in tokens.")] = None,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="Number of micro-batches of a step.")
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=8, help="Hidden size of the new language model.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers of the new language model.")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Attention of the new language model: eager or sdpa. [default: eager]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of virtual workers. [default: cpu]")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of results and report; finished runs are reused.")
    ] = Path("runs/accuracy"),
    record: Annotated[
        Path | None, typer.Option(help="File to add the verdicts to (verdicts.json).")
    ] = None,
) -> None:
    """Train dense and compressed in pairs, and judge the difference.

    Exit 0: every file is equivalent to dense training within the margin (or identical, or better).
    1: one is worse. 2: one is inconclusive; the table has the number of --seeds to add. 3: the
    command could not run. Finished runs are kept in the output folder and not repeated.
    """
    given = {**locals(), "files": tuple(files)}
    from rich.console import Console

    from ds_ckpt.errors import DsCkptError

    try:
        from ds_ckpt.lab.validate.command import Arguments, run
    except ModuleNotFoundError as error:
        remedy = "pip install 'ds_ckpt[validation]'"
        typer.echo(f"validate-accuracy needs {error.name}, which is missing: {remedy}", err=True)
        raise typer.Exit(FAILED) from None
    try:
        code = run(Arguments(**given), Console(stderr=True))
    except DsCkptError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    except Exception:  # exit code 1 would be read as a verdict
        traceback.print_exc()
        raise typer.Exit(FAILED) from None
    raise typer.Exit(code)
