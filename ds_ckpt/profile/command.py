"""`ds-ckpt profile`: what a model and a batch cost, and which setting changes it.

Heavy imports stay inside the command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help='"demo", a Hugging Face config.json, checkpoint directory or hub name (no weights '
            "are read), or module:function that returns (model, batch)."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON file; without it ZeRO stage 3 and AdamW are assumed."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each sequence; the default is the model's own.")
    ] = None,
    batches: Annotated[
        str, typer.Option(help="Also these batch sizes, for the table: 1,2,4,8.")
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Compared with no policy and with the file's.")
    ] = "block,attention,mlp,selective",
    modules: Annotated[
        str, typer.Option(help="Blocks of a plain model: class names or patterns.")
    ] = "",
    world: Annotated[int, typer.Option(min=1, help="Processes that share the states.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16; the default is the file's, then the model's.")
    ] = "",
    attention: Annotated[str, typer.Option(help="eager, sdpa: transformers' choice.")] = "",
    limit_gib: Annotated[
        float | None, typer.Option(min=0.001, help="Memory of the accelerator, for the best batch.")
    ] = None,
    real: Annotated[
        bool | None,
        typer.Option(
            "--real/--fake",
            help="Run steps on real tensors, or none. Default: where that is cheap.",
        ),
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="What torch.compile captures, and saves by itself.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Timed steps a policy.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw it: a .png or .svg file.")
    ] = None,
) -> None:
    """What a model and batch cost: memory, recompute, launches, and what changes it.

    Memory comes from a step on fake tensors, which allocates nothing; times from real steps. Each
    finding ends with the line of the DeepSpeed file that acts on it.
    """
    counts = _counts(batch, batches)
    from rich.console import Console

    from ds_ckpt.profile.report import document, picture
    from ds_ckpt.profile.run import Options, make_profile
    from ds_ckpt.profile.subject import Sizes
    from ds_ckpt.report import charts
    from ds_ckpt.telemetry.units import GIB

    with _errors_in_words():
        settings = _settings(config)
        if plot_file is not None:
            charts.check_file(plot_file)
        sizes = Sizes(tokens, _dtype(dtype), attention or None)
        options = Options(
            model,
            config=settings,
            source=str(config),
            batches=counts,
            sizes=sizes,
            world=world,
            policies=tuple(_split(policies)),
            modules=tuple(_split(modules)) or None,
            real=real,
            compile=compile_,
            limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
            repeats=repeats,
        )
        progress = Console(stderr=True)
        with progress.status("", spinner="line") as status:
            found = make_profile(options, lambda text: status.update(text))
    document(found).print(Console(soft_wrap=False))
    with _written(json_file):
        if json_file is not None:
            json_file.write_text(found.to_json(), encoding="utf-8")
    with _errors_in_words(), _written(plot_file):
        if plot_file is not None:
            charts.save(picture(found), plot_file)


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(batch: int, batches: str) -> tuple[int, ...]:
    """The batch first, then the others. Raises typer.BadParameter."""
    try:
        others = [int(word) for word in _split(batches)]
    except ValueError:
        raise typer.BadParameter(f"{batches!r}: write whole numbers: 1,2,4,8") from None
    if any(n < 1 for n in others):
        raise typer.BadParameter(f"{batches!r}: a batch has at least one sequence")
    if others and batch == 1:
        return tuple(dict.fromkeys(others))
    return tuple(dict.fromkeys([batch, *others]))


def _dtype(name: str) -> Any:
    if not name:
        return None
    if name not in _NAMES:
        raise typer.BadParameter(f"--dtype {name!r}: write fp32, bf16 or fp16")
    import torch

    return getattr(torch, _NAMES[name])


def _settings(config: Path | None) -> dict[str, Any] | None:
    if config is None:
        return None
    from ds_ckpt.config import load_file

    return load_file(config)


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        typer.echo(f"{path} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None
    if path is not None:
        typer.echo(f"wrote {path}")


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    from ds_ckpt.errors import DsCkptError

    try:
        yield
    except DsCkptError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
