"""Simulated speed of plain DeepSpeed and of this plugin's best plan, on clusters by size and link.

    python benchmarks/plan_tables.py -o docs/plan_tables.md

Simulated steps, nothing measured: `ds-ckpt plan`'s search on the figures of `hardware.json`, once
for each model, number of nodes and batch, then with each rate and latency of the links. All columns
train the same batch, and each has the micro-batch and recompute that suit it.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ds_ckpt.errors import UnsupportedError
from ds_ckpt.lab.estimate.model import Model
from ds_ckpt.lab.estimate.search import (
    BASELINE_TIE,
    HPZ,
    NEEDED,
    TIE,
    ZERO_KINDS,
    PlanOption,
    Question,
    Search,
    best_of,
    default_batch,
)
from ds_ckpt.lab.estimate.simulate import Link
from ds_ckpt.lab.hosts.hardware import Hardware
from ds_ckpt.lab.subject import Sizes

CLUSTERS: dict[str, tuple[list[str], list[str], list[float], list[float]]] = {
    "Nodes of eight A100 80 GB": (
        ["llama-7b", "llama-70b"],
        [f"{n} nodes x 8 A100 80 GB" for n in (2, 4, 16)],
        [10, 25, 100, 400],
        [],
    ),
    "One RTX 4090 per node, over the internet": (
        ["llama-1b", "llama-7b"],
        [f"{n} nodes x 1 RTX 4090" for n in (2, 4, 8)],
        [0.1, 1, 10],
        [20, 100],
    ),
}
"""Models, clusters, rates of a node's link in Gbit/s, latencies in ms; none: the file's own."""


def alone(search: Search, weights: str) -> list[PlanOption]:
    """Return candidates of DeepSpeed alone with these weights."""
    found = [one for one in search.all if one.setting.weights == weights]
    return [one for one in found if not one.setting.sections]


def zeropp(one: PlanOption) -> PlanOption:
    """With weights in 8 bits, gathered as hpZ does, and gradients in 4."""
    machine, few = one.machine, one.strategy.itemsize / 4
    gradients = replace(
        one.strategy.gradients,
        link_bytes=few * (machine.hosts - 1) / machine.hosts,
        inside_bytes=few * (machine.local - 1) / machine.local,
        hops=1,
        ring=False,
    )
    return replace(one, strategy=replace(one.strategy, itemsize=1, hpz=True, gradients=gradients))


def fastest(
    candidates: Sequence[PlanOption],
    network: Link,
    change: Callable[[PlanOption], PlanOption] = lambda one: one,
    tie: float = BASELINE_TIE,
) -> PlanOption | None:
    if not candidates:
        return None
    machine = replace(candidates[0].machine, network=network)
    return best_of([change(replace(one, machine=machine)) for one in candidates], tie)


def rows(search: Search, rates: list[float], latencies: list[float]) -> Iterator[str]:
    """Yield the rows of one model on one cluster, by rate and latency."""
    question = search.question
    if not search.all:
        search.best()  # says why
    ours = [one for one in search.all if one.setting.sections]
    named = question.machine.network.latency_s
    for latency_s in [ms / 1e3 for ms in latencies] or [named]:
        for rate in rates:
            link = Link(rate * 1e9 / 8, latency_s)
            found = [
                *(fastest(alone(search, weights), link) for weights in ZERO_KINDS),
                fastest(alone(search, HPZ), link, zeropp),
                fastest(ours, link, tie=TIE),
            ]
            cells = [f"{question.tokens / f.step.seconds:,.0f}" if f else "-" for f in found]
            *rivals, _, best = found
            assert best is not None
            seconds = min((r.step.seconds for r in rivals if r), default=math.inf)
            times = seconds / best.step.seconds
            pays = f"{times:.2f}" if times > 1 + TIE else f"{times:.2f}: no"
            pays = pays if times < math.inf else "only it fits"
            how = best.setting.describe()
            ms = f" {1e3 * latency_s:g} ms |" if latencies else ""
            yield f"| {question.sequences} | {rate:g} |{ms} {' | '.join(cells)} | {pays} | {how} |"


def sections() -> Iterator[str]:
    known = Hardware.load(None, "--cluster")
    inside = known.entry("links", "inside a node", ("latency_s",))
    last = None
    for title, (models, clusters, rates, latencies) in CLUSTERS.items():
        yield f"## {title}"
        for name in models:
            model = Model(name, Sizes(None, torch.bfloat16))
            for cluster in clusters:
                found = known.cluster(f"{cluster}, 1 Gbit/s", NEEDED)
                known.raise_problems()
                assert found is not None
                batches = sorted({default_batch(model, found.devices), (1 << 20) // model.tokens})
                yield f"### {name}, {cluster}\nSequences of {model.tokens} tokens.\n"
                table = list[str]()
                try:
                    for n in batches:
                        last = Question(model, found, inside["latency_s"], n, "equal")
                        table += rows(Search(last), rates, latencies)
                except UnsupportedError as error:
                    (problem,) = error.problems
                    yield f"Nothing fits: {problem.why}. What would: {problem.remedy}."
                    continue
                ms = (" latency |", "---|") if latencies else ("", "")
                yield "\n".join(
                    [
                        f"| batch | Gbit/s |{ms[0]} {' | '.join(ZERO_KINDS)} | ZeRO++ | ds_ckpt "
                        "| pays | its plan |",
                        f"|---|---|{ms[1]}---|---|---|---|---|---|---|---|",
                        *table,
                    ]
                )
        assert last is not None
        yield "Figures of this section:\n"
        listed = sorted(last.cluster.device.figures(), key=lambda figure: figure.kind)
        yield "\n".join(f"- {f.kind}: {f.what} {f.value:.4g} ({f.source})" for f in listed)


HEAD = """# Simulated plans for larger clusters
Made by `python benchmarks/plan_tables.py -o docs/plan_tables.md`. Every figure is simulated; none
was measured. [plan.md](plan.md) compares simulated with measured steps, which ran on CPUs with gloo
alone.

Assumptions:

- Columns have tokens per second. Rows have the batch that `ds-ckpt plan` assumes, 16 k tokens per
  GPU, and one of a million tokens, which hides slow links.
- All train in bf16 with AdamW in fp32, on 90% of an accelerator's memory and 512 GiB of a node's.
  Only compression methods are used that validation found as good as uncompressed training (`--loss
  equal`). Each column has its best micro-batch, recomputation and buckets.
  Verdicts on `1bit` are for AdamW with b1 0.7 and a momentum correction of 0.3.
- *hpZ* gathers between nodes only in a step's first forward. *ZeRO++* is hpZ with weights in 8
  and gradients in 4 bits, with the volumes that its authors publish (arXiv 2306.10209; DeepSpeed's
  blog on ZeRO++). The time of its kernels and its cost in loss are not counted. DeepSpeed has
  neither on nodes of one GPU.
- *ZeRO-1* needs memory for all weights and gradients on every rank. It sends the same bytes for any
  number of micro-steps: gradients by all-reduce, weights once after the optimizer. *ZeRO-2* shards
  gradients and sends them in every micro-step. If ZeRO-1 fits, try it, above all on slow links.
  "-": it does not fit.
- A gather between nodes is a ring with one latency per hop and module. Over the internet this is
  most of a ZeRO-3 step. Optimizer states are not offloaded.
- Links reach the named rate in both directions at once, without congestion, protocols and lost
  packets. Packing costs memory traffic, and its kernels delay computing.
- *ZeRO-1*, *ZeRO-2*, *ZeRO-3* and *hpZ* are DeepSpeed alone: no checkpointing, or the model's own
  of every block. *ds_ckpt* has at least one of the plugin's features: its checkpointing (with any
  of these), compressed gradients, resident weights.
- *pays*: tokens of the plugin's best plan over those of the fastest of DeepSpeed alone. Within the
  simulator's error of 6% it does not pay. The plugin's plan is the one closest to plain DeepSpeed
  within this error of its fastest, those of DeepSpeed alone within 1%.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", "-o", type=Path)
    options = parser.parse_args()
    text = "\n".join([HEAD, *sections()]) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
