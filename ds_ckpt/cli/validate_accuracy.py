"""`ds-ckpt validate-accuracy`: dense training against compression, judged by statistics."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

FAILED = 3
"""Exit code without a verdict."""


def validate_accuracy(
    files: Annotated[list[Path], Argument(help="DeepSpeed JSON files.", metavar="CONFIG...")],
    seeds: Annotated[int, Option(min=2, help="Number of paired runs.")] = 5,
    margin: Annotated[
        float | None,
        Option(min=0.01, max=50, help="Margin, in percent of loss or points. [default: 0.5 or 1]"),
    ] = None,
    virtual_workers: Annotated[
        int | None, Option(min=2, help="Workers in this process. [default: 4]")
    ] = None,
    processes: Annotated[
        int | None, Option(min=2, help="Train on this many ZeRO-3 ranks instead.")
    ] = None,
    data: Annotated[
        str | None,
        Option(help="Text, or JSON lines with `text` and `label`. [default: Python's docs]"),
    ] = None,
    model: Annotated[
        str | None, Option(help="Hugging Face checkpoint. [default: a small new model]")
    ] = None,
    steps: Annotated[int | None, Option(min=8, help="Steps of each run.")] = None,
    learning_rate: Annotated[float | None, Option(min=1e-9, help="Maximum learning rate.")] = None,
    betas: Annotated[str | None, Option(help="AdamW's betas. [default: 0.9,0.95]")] = None,
    batch: Annotated[int | None, Option(min=1, help="Rows of a micro-batch.")] = None,
    length: Annotated[int | None, Option(min=4, help="Sequence length, in tokens.")] = None,
    accumulation: Annotated[int | None, Option(min=1, help="Micro-batches per step.")] = None,
    hidden_size: Annotated[int | None, Option(min=8, help="Hidden size of the new model.")] = None,
    layers: Annotated[int | None, Option(min=1, help="Layers of the new model.")] = None,
    attention: Annotated[
        str | None, Option(help="Attention of the new model: eager or sdpa. [default: eager]")
    ] = None,
    device: Annotated[str | None, Option(help="Device of virtual workers. [default: cpu]")] = None,
    output: Annotated[Path, Option(help="Folder of results; finished runs are reused.")] = Path(
        "runs/accuracy"
    ),
    record: Annotated[
        Path | None, Option(help="File to add the verdicts to (verdicts.json).")
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

        raise typer.Exit(run(Arguments(**given), Console(stderr=True)))
    except typer.Exit:
        raise
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is missing: pip install 'ds_ckpt[validation]'", err=True)
    except DsCkptError as error:
        typer.echo(str(error), err=True)
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    except Exception:  # exit code 1 would be read as a verdict
        traceback.print_exc()
    raise typer.Exit(FAILED)
