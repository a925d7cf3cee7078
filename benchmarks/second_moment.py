"""Why AdamW suffers from compression: the first moment, or the second?

    nice -n 19 python benchmarks/second_moment.py [--steps 200] [--seeds 0 1]
    python benchmarks/second_moment.py --table

Trains what `frontier.py` trains, shorter, with an AdamW whose two moments can be fed with different
gradients: `arrived` is what the exchange delivers, `exact` the mean of the workers' gradients,
which no owner has in a compressed run (a what-if). Of each method: held-out loss against dense
training in pairs, and the energy that arrives over that of the exact gradients (`energy`), which is
what the second moment sees.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from frontier import SIZES, append, begin, is_done, one_thread
from torch import Tensor

from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import MethodSettings
from ds_ckpt.lab.validate.task import Learner
from ds_ckpt.lab.validate.world import Recipe, VirtualWorkers
from ds_ckpt.lab.workload import embedded_corpus

RESULTS = Path(__file__).parent / "results" / "second_moment.jsonl"
START = 40
METHODS = {
    "dense": ExchangeSettings(MethodSettings("dense")),
    "2 bits": ExchangeSettings(MethodSettings("quantize", bits=2), warmup_steps=START),
    "2 bits, no feedback": ExchangeSettings(
        MethodSettings("quantize", bits=2), warmup_steps=START, error_feedback=False
    ),
    "rank 4": ExchangeSettings(MethodSettings("powersgd", rank=4), warmup_steps=START),
    "Top-K 1.2%": ExchangeSettings(MethodSettings("topk", density=0.012), warmup_steps=START),
}
ARMS = (("arrived", "arrived"), ("arrived", "exact"), ("exact", "arrived"))
"""What the first and the second moment are fed with."""


@dataclass(frozen=True)
class Gradients:
    """Of one step, each a list of flat tensors in the order of the parameters."""

    arrived: list[Tensor]
    exact: list[Tensor]


class TwoFeeds:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) with a gradient for each moment.

    Both are clipped as one: by the norm of the first moment's.
    """

    def __init__(self, parameters: list[Tensor], recipe: Recipe, feeds: tuple[str, str]) -> None:
        self._parameters, self._recipe, self._feeds = parameters, recipe, feeds
        self._first = [torch.zeros(p.numel()) for p in parameters]
        self._second = [torch.zeros(p.numel()) for p in parameters]

    @torch.no_grad()
    def take(self, step: int, gradients: Gradients) -> None:
        recipe, (one, two) = self._recipe, self._recipe.betas
        first, second = (getattr(gradients, feed) for feed in self._feeds)
        norm = float(torch.stack([g.norm() for g in first]).norm())
        scale = 1 / max(1.0, norm / recipe.clip)
        rate = recipe.rate(step)
        for p, m, v, g, h in zip(
            self._parameters, self._first, self._second, first, second, strict=True
        ):
            m.lerp_(g * scale, 1 - one)
            v.lerp_((h * scale).square(), 1 - two)
            spread = (v / (1 - two ** (step + 1))).sqrt_().add_(1e-8)
            p.mul_(1 - rate * recipe.weight_decay)
            p.view(-1).addcdiv_(m, spread, value=-rate / (1 - one ** (step + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--table", action="store_true", help="print what the results say and stop")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.table:
        lines = map(json.loads, arguments.results.read_text(encoding="utf-8").splitlines())
        print(table([line for line in lines if line["steps"] == arguments.steps]))
        return
    one_thread()
    run = begin(embedded_corpus(), compiled=True)
    for seed, method, feeds in itertools.product(arguments.seeds, METHODS, ARMS):
        key = {"method": method, "feeds": list(feeds), "seed": seed, "steps": arguments.steps}
        told_apart = method != "dense" or feeds == ARMS[0]
        if told_apart and not is_done(arguments.results, key):
            run.begin(seed)
            line = key | train(run, METHODS[method], feeds, arguments.steps)
            append(arguments.results, line)
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def train(
    run: Learner, settings: ExchangeSettings, feeds: tuple[str, str], steps: int
) -> dict[str, Any]:
    """Held-out loss at the end; median over compressed steps of the arrived energy's excess."""
    names, parameters = zip(*run.model.named_parameters(), strict=True)
    workers = VirtualWorkers(settings, SIZES["world"], names)
    optimizer = TwoFeeds(list(parameters), Recipe(steps=steps), feeds)
    energies = []
    for step in range(steps):
        local = [_gradients(run, parameters, step, w) for w in range(SIZES["world"])]
        exact = [torch.stack(of).mean(0).view(-1) for of in zip(*local, strict=True)]
        arrived = workers.average(local)
        workers.step_ended(skipped=False)
        if step >= START:
            energies.append(_energy(arrived) / _energy(exact))
        optimizer.take(step, Gradients(arrived, exact))
    return {"heldout": run.evaluate().loss, "energy": statistics.median(energies)}


def _gradients(run: Learner, parameters: Any, step: int, worker: int) -> list[Tensor]:
    run.loss(step, 0, worker).backward()
    taken = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _energy(gradients: list[Tensor]) -> float:
    return float(sum(g.square().sum() for g in gradients))


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row a method, a column for what the moments were fed with."""
    losses: dict[tuple[str, ...], dict[int, float]] = {}
    energies: dict[str, list[float]] = {}
    for line in lines:
        losses.setdefault((line["method"], *line["feeds"]), {})[line["seed"]] = line["heldout"]
        if line["feeds"] == ["arrived", "arrived"]:
            energies.setdefault(line["method"], []).append(line["energy"])
    dense = losses[("dense", *ARMS[0])]

    def gap(method: str, feeds: tuple[str, str]) -> str:
        ours = losses.get((method, *feeds), {})
        pairs = [loss / dense[seed] - 1 for seed, loss in ours.items() if seed in dense]
        each = f" ({', '.join(f'{g:+.2%}' for g in pairs)})" if len(pairs) > 1 else ""
        return f"{statistics.fmean(pairs):+.2%}{each}" if pairs else ""

    heads = [f"m {m}, v {v}" for m, v in ARMS]
    rows = [f"| method | energy | {' | '.join(heads)} |", "|---|---|" + "---|" * len(ARMS)]
    for method, energy in energies.items():
        cells = " | ".join(gap(method, feeds) for feeds in ARMS)
        rows.append(f"| {method} | {statistics.fmean(energy):.2f} | {cells} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
