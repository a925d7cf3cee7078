"""`ds-ckpt validate-accuracy`: dense training against compression, judged by statistics.

Heavy imports stay inside the command.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated

import typer

FAILED = 3
"""Exit code where there is no verdict because the command could not run."""


def validate_accuracy(
    files: Annotated[
        list[Path] | None, typer.Argument(help="DeepSpeed JSON files.", metavar="CONFIG...")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Some of language, topics, digits, labelled, with commas. "
            "[default: language,topics,digits; with --data language, or labelled]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Pairs of runs.")] = 5,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=5, help="Percent of the dense loss that do not count. [default: 0.5]"
        ),
    ] = None,
    accuracy_margin: Annotated[
        float | None,
        typer.Option(min=0.01, max=50, help="Points of accuracy that do not count. [default: 1.0]"),
    ] = None,
    virtual_workers: Annotated[
        int | None, typer.Option(min=2, help="Workers in this process. [default: 4]")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=2, help="Real ZeRO-3 processes instead, through deepspeed.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text file, JSON lines ('text', 'label'), or a HF data set's name."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A HF checkpoint's folder or name. [default: small, new]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=8, help="Of each run.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-9, help="At the schedule's top.")
    ] = None,
    betas: Annotated[
        str | None, typer.Option(help="AdamW's, in every run. [default: 0.9,0.95]")
    ] = None,
    dense_betas: Annotated[
        str | None,
        typer.Option(help="AdamW's in dense runs alone: those that serve dense training best."),
    ] = None,
    dense_lead: Annotated[
        float | None,
        typer.Option(
            help="Of AdamW's first moment, in dense runs, from a quarter of each on: 0.3, say."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a micro-batch.")] = None,
    length: Annotated[int | None, typer.Option(min=4, help="Tokens of a text's row.")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Micro-batches a step.")] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=8, help="Of the built-in language model.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of the built-in language model.")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Of the built-in language model: eager or sdpa. [default: eager]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where virtual workers compute. [default: cpu]")
    ] = None,
    self_check: Annotated[
        int | None,
        typer.Option(min=4, help="Judge so many dense runs against each other: false alarms."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of results and report; goes on with what is there.")
    ] = Path("runs/accuracy"),
    record: Annotated[
        Path | None, typer.Option(help="Add the verdicts to this file too (verdicts.json).")
    ] = None,
) -> None:
    """Is compression safe? Train dense and compressed in pairs, and judge the difference.

    Exit 0: every file is equivalent to dense training within the margin (or identical, or better).
    1: one is worse. 2: one is inconclusive; the table says how many more --seeds it needs. 3: the
    command could not run. Finished runs are kept in the output folder and not repeated.
    """
    given = {**locals(), "files": tuple(files or ())}
    from rich.console import Console

    from ds_ckpt.errors import DsCkptError

    try:
        from ds_ckpt.lab.validate.validate import Arguments, run
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
        typer.echo("stopped; the same command goes on with the runs that are finished", err=True)
        raise typer.Exit(130) from None
    except Exception:  # whatever it is, it is no verdict: 1 would say "worse"
        traceback.print_exc()
        raise typer.Exit(FAILED) from None
    raise typer.Exit(code)
