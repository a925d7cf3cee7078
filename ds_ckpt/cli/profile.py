"""`ds-ckpt profile`: what a model and a batch cost, and which setting changes it.

Heavy imports stay inside the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_ckpt.cli.common import exit_on_error, given_options, progress, split_names, write_output


def profile(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help='"demo", a common model by name (llama-7b), a Hugging Face config.json, a '
            "checkpoint directory or hub name (no weights are read), or module:function that "
            "returns (model, batch)."
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
    hosts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hosts that they are on, for resident weights. Without it the file's "
            "zero_hpz_partition_size says how many processes a host has.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="The default is the file's, then the model's."),
    ] = None,
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
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Timed steps a policy.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
) -> None:
    """What a model and batch cost: memory, recompute, launches, and what changes it.

    Memory comes from a step on fake tensors, which allocates nothing; times from real steps. Each
    finding ends with the line of the DeepSpeed file that acts on it.
    """
    counts = _counts(batch if "batch" in given_options(context) else None, batches)
    import torch
    from rich.console import Console

    from ds_ckpt.config import load_file
    from ds_ckpt.lab.estimate.profile import Options, make_profile
    from ds_ckpt.lab.estimate.profile_report import document
    from ds_ckpt.lab.subject import Sizes
    from ds_ckpt.telemetry.units import GIB

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    with exit_on_error():
        settings = load_file(config) if config is not None else None
        options = Options(
            model,
            config=settings,
            source=str(config),
            batches=counts,
            sizes=Sizes(tokens, dtypes[dtype] if dtype else None, attention or None),
            world=world,
            hosts=hosts,
            policies=split_names(policies),
            modules=split_names(modules) or None,
            real=real,
            limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
            repeats=repeats,
        )
        each = 1 + (options.config is not None) + len(options.policies)
        with progress(len(options.batches) * each) as report:
            found = make_profile(options, report)
        document(found).print(Console(soft_wrap=False))
        write_output(json_file, lambda path: path.write_text(found.to_json(), encoding="utf-8"))


def _counts(batch: int | None, batches: str) -> tuple[int, ...]:
    """The batch that was asked for first, then the others. Raises typer.BadParameter."""
    try:
        others = [int(word) for word in split_names(batches)]
    except ValueError:
        raise typer.BadParameter(f"{batches!r}: write whole numbers: 1,2,4,8") from None
    if any(n < 1 for n in others):
        raise typer.BadParameter(f"{batches!r}: a batch has at least one sequence")
    first = [] if batch is None else [batch]
    return tuple(dict.fromkeys([*first, *others] or [1]))
