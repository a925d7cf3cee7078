"""`ds-ckpt validate-accuracy`: uncompressed against compressed training, judged by statistics."""

import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ds_ckpt.cli.common import error_text

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
        int | None, Option(min=2, help="Number of workers in one process. [default: 4]")
    ] = None,
    processes: Annotated[
        int | None, Option(min=2, help="Number of ZeRO-3 ranks, in place of virtual workers.")
    ] = None,
    data: Annotated[
        Path | None,
        Option(
            exists=True, help="Text, or JSON lines with `text` and `label`. [default: built in]"
        ),
    ] = None,
    model: Annotated[
        str | None, Option(help="Hugging Face checkpoint. [default: a small new model]")
    ] = None,
    steps: Annotated[int | None, Option(min=8, help="Steps of each run.")] = None,
    learning_rate: Annotated[float | None, Option(min=1e-9, help="Maximum learning rate.")] = None,
    betas: Annotated[
        tuple[float, float] | None, Option(help="AdamW's betas. [default: 0.9 0.95]")
    ] = None,
    dense_correction: Annotated[
        float | None,
        Option(min=0, max=0.99, help="Momentum correction in the last 75% of uncompressed runs."),
    ] = None,
    batch: Annotated[int | None, Option(min=1, help="Micro-batch size, in sequences.")] = None,
    length: Annotated[int | None, Option(min=4, help="Sequence length, in tokens.")] = None,
    accumulation: Annotated[int | None, Option(min=1, help="Gradient accumulation steps.")] = None,
    device: Annotated[str | None, Option(help="Device of virtual workers. [default: cpu]")] = None,
    output: Annotated[
        Path, Option(file_okay=False, help="Folder of results; finished runs are reused.")
    ] = Path("runs/accuracy"),
) -> None:
    """Train uncompressed and compressed in pairs, and judge the difference.

    Exit 0: every file is equivalent to uncompressed training within the margin (or identical, or
    better). 1: one is worse. 2: one is inconclusive; the table has the --seeds to add. 3: the
    command could not run. Finished runs are kept in the output folder and not repeated.
    """
    given = dict(locals())
    from rich.console import Console

    try:
        from ds_ckpt.lab.validate.command import run

        raise typer.Exit(run(**given, console=Console(stderr=True)))
    except typer.Exit:
        raise
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is missing: pip install 'ds_ckpt[validation]'", err=True)
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    except Exception as error:  # exit code 1 would be read as a verdict
        typer.echo(error_text(error) or traceback.format_exc(), err=True)
    raise typer.Exit(FAILED)
