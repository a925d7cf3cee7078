"""`ds-ckpt plan`: the settings that train a model fastest on a cluster.

Heavy imports stay inside the command.
"""

import contextlib
import functools
import gc
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_ckpt.cli.common import Modules, Tokens, file_option, progress, split_names, write_output


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Model as in `ds-ckpt profile`, or a common one by name: llama-1b, llama-7b, "
            "llama-13b, llama-65b, llama-70b, mixtral-8x7b, qwen2.5-7b."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(help='"4 nodes x 8 A100 80 GB, 100 Gbit/s"; a latency may follow: ", 50 us".'),
    ],
    links: Annotated[
        Path | None, file_option("JSON file of `ds-ckpt probe`: measured rate and latency.")
    ] = None,
    hardware: Annotated[
        Path | None, file_option("Data of accelerators: an edited copy of hardware.json.")
    ] = None,
    loss: Annotated[
        Literal["equal", "any"],
        typer.Option(help="Allowed methods. equal: validated as equivalent. any: all."),
    ] = "equal",
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences per step, all GPUs. [default: about 16 k tokens per GPU]"
        ),
    ] = None,
    tokens: Tokens = None,
    modules: Modules = "",
    dtype: Annotated[
        Literal["bf16", "fp16"], typer.Option(help="Type of weights; fp16 on GPUs such as V100.")
    ] = "bf16",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="DeepSpeed JSON file to write: the chosen settings."),
    ] = None,
    other_output: Annotated[
        Path | None,
        typer.Option(
            help="DeepSpeed JSON file to write: the best plan without ds_ckpt, or with it if "
            "the chosen plan has none of it."
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print costs, alternatives, and sources of figures.")
    ] = False,
) -> None:
    """Find the settings that train a model fastest on a cluster, within memory and loss.

    Compares DeepSpeed alone with this plugin. Simulates steps: nothing is run, no GPU is needed.
    """
    with contextlib.ExitStack() as stack:
        gc.disable()  # imports and fake tensors make many objects that stay
        stack.callback(gc.enable)
        import torch
        from rich.console import Console

        from ds_ckpt.lab.estimate.model import Model
        from ds_ckpt.lab.estimate.plan_report import KINDS, print_plan
        from ds_ckpt.lab.estimate.search import (
            NEEDED,
            OWN,
            Question,
            Search,
            deepspeed_file,
            default_batch,
        )
        from ds_ckpt.lab.hosts.hardware import Hardware
        from ds_ckpt.lab.subject import Sizes

        known = Hardware.load(hardware, "--cluster")
        named = known.cluster(cluster, NEEDED, links)
        inside = known.entry("links", "inside a node", ("latency_s",))
        known.raise_problems()
        assert named is not None
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        with Console(stderr=True).status("surveying the model", spinner="line"):
            made = Model(model, Sizes(tokens, types[dtype]), split_names(modules) or None)
        sequences = batch or default_batch(made, named.devices)
        question = Question(made, named, inside["latency_s"], sequences, loss, dtype)
        search = Search(question)
        with progress(len(search.micro_batches())) as search.report:
            best = search.best()
        console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
        print_plan(search, best, console, details=details, is_assumed=batch is None)
        kinds = KINDS if best.setting.sections else KINDS[::-1]
        pairs = (output, best, kinds[0]), (other_output, search.other(best), kinds[1])
        for path, one, kind in pairs:
            if path is None:
                continue
            if one is None:
                typer.echo(f"{path} is not written: {kind}, no plan fits in memory", err=True)
                continue
            file = deepspeed_file(question, one.setting, one.plan)
            text = json.dumps(file, indent=2) + "\n"
            write_output(path, functools.partial(Path.write_text, data=text, encoding="utf-8"))
            typer.echo(
                f"{path}: {kind}; {one.setting.describe()}; sequences of {made.tokens} tokens. "
                "Write your own optimizer values",
                err=True,
            )
            if one.setting.policy == OWN:
                words = "call model.gradient_checkpointing_enable() in your script, too"
                typer.echo(f"{path}: {words}: no file switches that on", err=True)
