"""`ds-ckpt profile`: memory and work of a model and batch, by policy.

Heavy imports stay inside the command.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_ckpt.cli.common import Modules, Tokens, progress, split_names, write_output


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help='"demo", a common model by name (llama-7b), a Hugging Face config.json, '
            "checkpoint directory or hub name, or module:function. The function returns "
            "(model, batch); Hugging Face weights are not read."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON file; without it ZeRO stage 3 and AdamW are assumed."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Batch sizes in sequences: 1,2,4. [default: the file's, or 1]"),
    ] = None,
    tokens: Tokens = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to compare with none and with the file's; a setting may follow a colon: "
            "segments:2,segments:sqrt,every_n:4."
        ),
    ] = "block,attention,mlp,selective",
    modules: Modules = "",
    world: Annotated[int, typer.Option(min=1, help="Number of ranks that share the states.")] = 1,
    hosts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of nodes, for resident weights. [default: from the file's "
            "zero_hpz_partition_size]",
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Type of weights. [default: the file's, else the model's]"),
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Attention implementation in transformers: eager, sdpa.")
    ] = "",
    limit_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="Memory of the accelerator, in GiB; 90% may be filled."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file to write all results to.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Chrome trace file of one real step of two blocks, with recomputations marked. "
            "Counts its kernels, too."
        ),
    ] = None,
) -> None:
    """Count memory, recomputation and launches of a model under several policies.

    Steps run on fake tensors, which allocate nothing. Each finding ends with the line of the
    DeepSpeed file that acts on it.
    """
    words = split_names("1" if batches is None else batches)
    counts = tuple(map(int, words)) if all(map(str.isdecimal, words)) else ()
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{batches!r}: write whole numbers of at least 1: 1,2,4,8")
    import torch
    from rich.console import Console

    from ds_ckpt.config import load_file
    from ds_ckpt.lab.estimate.profile import Options, make_profile, trace_step
    from ds_ckpt.lab.estimate.profile_report import profile_document
    from ds_ckpt.lab.subject import Sizes
    from ds_ckpt.telemetry.units import GIB

    file = load_file(config) if config is not None else None
    number = (file or {}).get("train_micro_batch_size_per_gpu")
    if batches is None and type(number) is int and number > 0:
        counts = (number,)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    options = Options(
        model,
        config=file,
        source=str(config),
        batches=counts,
        sizes=Sizes(tokens, dtypes[dtype] if dtype else None, attention or None),
        world=world,
        hosts=hosts,
        policies=split_names(policies),
        modules=split_names(modules) or None,
        limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
    )
    each = 1 + (options.config is not None) + len(options.policies)
    with progress(len(counts) * each) as report:
        found = make_profile(options, report)
    profile_document(found).print(Console(soft_wrap=False))
    write_output(trace, lambda path: typer.echo(trace_step(options, path)))
    write_output(json_file, lambda path: path.write_text(found.to_json(), encoding="utf-8"))
