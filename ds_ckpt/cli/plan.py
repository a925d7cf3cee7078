"""`ds-ckpt plan`: the settings that train a model fastest on a cluster.

Heavy imports stay inside the command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ds_ckpt.cli.common import exit_on_error, file_option, progress, split_names, write_output

DEFAULT_TOKENS = 1 << 20
"""Of a step: what is tried where nobody says how large a batch may be."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="As of `ds-ckpt profile`, or a common model by name: llama-1b, llama-7b, "
            "llama-13b, llama-65b, llama-70b, mixtral-8x7b, qwen2.5-7b."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(help='"4 nodes x 8 A100 80 GB, 100 Gbit/s"; a latency may follow: ", 50 us".'),
    ] = None,
    hostfile: Annotated[
        Path | None, file_option("In the place of --cluster; with --device and --links.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="The hostfile's accelerators: A100.")] = None,
    links: Annotated[
        Path | None, file_option("Rate and latency from a file of `ds-ckpt probe`, measured.")
    ] = None,
    hardware: Annotated[
        Path | None, file_option("Figures; a copy of hardware.json to edit.")
    ] = None,
    loss: Annotated[
        str,
        typer.Option(help="What verdicts must say of compressed gradients: equal, 0.5%, or any."),
    ] = "equal",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences in a step, all processes. [default: about 1 M tokens]"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each sequence; the default is the model's own.")
    ] = None,
    modules: Annotated[
        str, typer.Option(help="Blocks of a plain model: class names or patterns.")
    ] = "",
    dtype: Annotated[
        Literal["bf16", "fp16"], typer.Option(help="fp16 on GPUs without bf16, such as V100.")
    ] = "bf16",
    host_gib: Annotated[
        float, typer.Option(min=0, help="Host memory of a node for what is offloaded: a guess.")
    ] = 512.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the best as DeepSpeed JSON file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with all figures, instead of text.")
    ] = False,
) -> None:
    """Find the settings that train a model fastest on a cluster, within memory and loss.

    Simulates steps: nothing is run, and no GPU is needed. Says what each figure stands on.
    """
    import torch
    from rich.console import Console

    from ds_ckpt.config.verdicts import Loss
    from ds_ckpt.lab.estimate.model import Model
    from ds_ckpt.lab.estimate.plan_report import content, show
    from ds_ckpt.lab.estimate.search import NEEDED, Question, Search
    from ds_ckpt.lab.hosts.hardware import Hardware
    from ds_ckpt.lab.subject import Sizes
    from ds_ckpt.telemetry.units import GIB

    allowed: Loss = _loss(loss)  # type: ignore[assignment]
    with exit_on_error():
        known = Hardware.load(hardware, "--cluster")
        if (cluster is None) == (hostfile is None):
            why = "one of the two says what the model is to be trained on"
            example = '--cluster "4 nodes x 8 A100, 100 Gbit/s"'
            found = "neither" if cluster is None else "both"
            known.wrong("--cluster, --hostfile", found, why, f"write {example}")
            known.done()
        if hostfile is not None:
            cluster = _of_hostfile(known, hostfile, device, links)
        elif device is not None:
            remedy = "leave it out, or write --hostfile in the place of --cluster"
            known.wrong("--device", device, "--cluster says which accelerators there are", remedy)
        assert cluster is not None
        named = known.cluster(cluster, NEEDED, links)
        inside = known.entry("links", "inside a node", ("latency_s",))
        known.done()
        assert named is not None
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        with Console(stderr=True).status("surveying the model", spinner="line"):
            made = Model(model, Sizes(tokens, types[dtype]), split_names(modules) or None)
        each = made.rows
        if made.tokens > 1:
            each *= max(1, round(DEFAULT_TOKENS / made.tokens / made.rows / named.devices))
        elif made.sized and batch is None:
            why = "the model's batch has no token ids, so nobody can tell how many are usual"
            known.wrong("--batch", "nothing", why, f"write --batch {8 * named.devices}")
            known.done("this cannot be planned")
        question = Question(
            made,
            named,
            inside["latency_s"],
            sequences=batch or each * named.devices,
            loss=allowed,
            dtype=dtype,
            host_bytes=host_gib * GIB,
        )
        search = Search(question)
        with progress(len(search.micro_batches())) as search.report:
            best = search.best()
        answer = content(search, best)
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
        else:
            show(answer, Console(soft_wrap=True, highlight=False))
        text = json.dumps(answer["deepspeed"], indent=2) + "\n"
        write_output(output, lambda path: path.write_text(text, encoding="utf-8"))


def _loss(text: str) -> str | float:
    if text in ("equal", "any"):
        return text
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise typer.BadParameter(f"{text!r}: write equal, any, or a share with its sign: 0.5%")
    return share


def _of_hostfile(known: Any, hostfile: Path, device: str | None, links: Path | None) -> str:
    """The cluster's text. Problems are collected in `known`, and raised."""
    from ds_ckpt.lab.hosts.backends import read_hostfile

    slots = [*read_hostfile(hostfile).values()]  # all the same
    if device is None:
        why = "a hostfile does not say which accelerators its hosts have"
        known.wrong("--device", "nothing", why, "write --device A100")
    if links is None and len(slots) > 1:
        why = "a hostfile does not say how fast its hosts' links are"
        known.wrong("--links", "nothing", why, "make it: ds-ckpt probe --output links.json")
    known.done("this cannot be planned")
    return f"{len(slots)} nodes x {slots[0]} {device}"
