"""DeMo and Dion: optimizers whose one buffer is momentum and residual, beside dense AdamW.

    nice -n 19 python benchmarks/one_buffer.py --data FILE [--seeds 0 1] [--only 'DeMo*']
    python benchmarks/one_buffer.py --table

Error feedback in front of AdamW is two averages in a row (docs/compression.md). These two take what
is sent out of the momentum itself, so there is one. They stand in AdamW's place, so they are no
compressors of gradients, and are here to be compared: `momentum.py` trains the same model on the
same data in the same order with AdamW, whose best dense run the table is against.

- DeMo (Peng et al. 2024, arXiv 2411.19870): every worker's momentum is moved into the cosine domain
  in tiles of at most 64 by 64, the largest coefficients of each are sent (bf16 and 12 bits for the
  place) and taken out of the momentum; weights move by the sign of their mean.
- Dion (Ahn et al. 2025, arXiv 2504.05295): of every matrix's momentum one step of power iteration,
  `rank * (rows + columns)` numbers in bf16; what the factors carry is taken out of the momentum but
  for a share of 0.95; weights move by the orthonormal factors. What is no matrix, and embeddings
  and the head, as there, go by dense AdamW.

The learning rate's shape, clipping (in Dion's AdamW alone), weight decay and batch are the task's;
the rate is the best of those tried. Both compress from step 0, or take over after 75 of the 300
steps from dense AdamW, as methods do in `momentum.py` (`, after AdamW`). Every worker's own share
is compressed. Resumable.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from momentum import WARM_UP, finished, keep
from torch import Tensor

from ds_ckpt.lab.validate.task import Task, make_spec, open_task
from ds_ckpt.lab.validate.trainer import train
from ds_ckpt.lab.validate.world import DENSE_SETTINGS, InProcessWorld, Step, WholeOptimizer, norm_of

HERE = Path(__file__).parent / "results"
RESULTS = HERE / "one_buffer.jsonl"
ADAMW = HERE / "entropy_coded.jsonl"
BEST_DENSE = {"method": "dense", "b1": 0.7, "how": "lead 0.3"}
TILE = 64


class Update(Protocol):
    """What a parameter of an optimizer with one buffer moves by.

    Attributes:
        bits: that a worker has for this parameter, a step.
    """

    bits: float

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        """Of all workers' gradients of one parameter, in its shape; to be scaled by the rate."""


@cache
def cosines(n: int) -> Tensor:
    """The orthonormal DCT-II as a matrix: rows are frequencies."""
    k, i = torch.arange(n).unsqueeze(1), torch.arange(n)
    basis = torch.cos(math.pi / n * (i + 0.5) * k) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


class DeMo:
    """See the module; `kept` coefficients a whole tile, decay of the momentum 0.999."""

    def __init__(self, shape: torch.Size, workers: int, kept: int) -> None:
        rows, columns = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1:].numel())
        self._matrix = rows, columns
        self._tile = _divisor(rows), _divisor(columns)
        entries = self._tile[0] * self._tile[1]
        self._kept = max(1, round(kept * entries / TILE**2))
        self._momenta = torch.zeros(workers, rows, columns)
        self.bits = rows * columns / entries * self._kept * (16 + 12)

    def _tiles(self, x: Tensor) -> Tensor:
        (rows, columns), (a, b) = self._matrix, self._tile
        return x.view(rows // a, a, columns // b, b).transpose(1, 2)

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        a, b = (cosines(n) for n in self._tile)
        total = torch.zeros(self._matrix)
        for momentum, gradient in zip(self._momenta, gradients, strict=True):
            momentum.mul_(0.999).add_(gradient.view(self._matrix))
            spectrum = a @ self._tiles(momentum) @ b.T
            flat = spectrum.reshape(*spectrum.shape[:2], -1)
            places = flat.abs().topk(self._kept).indices
            sent = torch.zeros_like(flat).scatter_(
                -1, places, flat.gather(-1, places).bfloat16().float()
            )
            back = (a.T @ sent.view_as(spectrum) @ b).transpose(1, 2).reshape(self._matrix)
            momentum -= back
            total += back
        return total.sign().view_as(gradients[0])


def _divisor(n: int) -> int:
    """The largest side of a tile that divides n."""
    return next(size for size in range(min(n, TILE), 0, -1) if n % size == 0)


class Dion:
    """See the module; `rank` of the factors, share of the momentum that stays 0.95."""

    def __init__(self, shape: torch.Size, workers: int, rank: int) -> None:
        self._momenta = torch.zeros(workers, *shape)
        self._right = torch.randn(shape[1], rank, generator=torch.Generator().manual_seed(0))
        self.bits = 16.0 * rank * (shape[0] + shape[1])

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        self._momenta += torch.stack(gradients)
        left = torch.linalg.qr((self._momenta @ self._right).bfloat16().float().mean(0)).Q
        rights = (self._momenta.mT @ left).bfloat16().float()
        self._momenta -= 0.05 * left @ rights.mT
        mean = rights.mean(0)
        self._right = mean / (mean.norm(dim=0) + 1e-8)
        return left @ self._right.T * math.sqrt(left.shape[0] / self._right.shape[0])


class OneBufferWorld(InProcessWorld):
    """Virtual workers whose parameters move by `updates`, the others by dense AdamW.

    Args:
        updates: makes one for a parameter by its name and shape; None: AdamW.
        rate: learning rate of the updates at the top; AdamW's is the task's.
        warm_up: steps before which AdamW has all parameters.
    """

    def __init__(
        self,
        task: Task,
        updates: Callable[[str, torch.Size], Update | None],
        rate: float,
        warm_up: int,
    ) -> None:
        recipe = replace(task.spec.recipe(), betas=(0.7, 0.95), lead=0.3)
        super().__init__(
            task.learner.model, task.learner.loss, recipe, DENSE_SETTINGS, workers=task.spec.world
        )
        self._rate, self._warm_up, self._taken = replace(recipe, learning_rate=rate), warm_up, 0
        self._updates = [
            updates(n, p.shape) for n, p in zip(self._names, self._parameters, strict=True)
        ]
        self._rest = [p for p, u in zip(self._parameters, self._updates, strict=True) if u is None]
        self._adamw = WholeOptimizer(self._rest, recipe) if self._rest else None

    @property
    def step(self) -> int:
        """See `World`."""
        return self._taken

    @property
    def bits(self) -> float:
        """A worker's, for an entry of the model, in a step after the warm-up."""
        numels = [p.numel() for p in self._parameters]
        whole = [
            16.0 * n if u is None else u.bits for n, u in zip(numels, self._updates, strict=True)
        ]
        return sum(whole) / sum(numels)

    def train_step(self) -> Step:
        """See `World`."""
        losses: list[float] = []
        gradients = [self._gradients(0, worker, losses) for worker in range(self._world)]
        step, self._taken = self.step, self.step + 1
        by_parameter: list[Sequence[Tensor]] = list(zip(*gradients, strict=True))
        with torch.no_grad():
            if step < self._warm_up:
                mean = [torch.stack(list(g)).mean(0).view(-1) for g in by_parameter]
                self._optimizer.take(step, mean, norm_of(mean))
                return Step(tuple(losses), 0, skipped=False)
            rest = []
            for parameter, update, own in zip(
                self._parameters, self._updates, by_parameter, strict=True
            ):
                if update is None:
                    rest.append(torch.stack(list(own)).mean(0).view(-1))
                    continue
                rate = self._rate.rate(step)
                moved = update(list(own))
                parameter.mul_(1 - rate * self._recipe.weight_decay).sub_(moved, alpha=rate)
            if self._adamw is not None:
                self._adamw.take(step, rest, norm_of(rest))
        return Step(tuple(losses), 0, skipped=False)


def demo(kept: int, workers: int) -> Callable[[str, torch.Size], Update | None]:
    """For every parameter."""
    return lambda name, shape: DeMo(shape, workers, kept)


def dion(rank: int, workers: int) -> Callable[[str, torch.Size], Update | None]:
    """For matrices between embeddings and head."""

    def update(name: str, shape: torch.Size) -> Update | None:
        ends = "embed" in name or "lm_head" in name
        return None if ends or len(shape) != 2 else Dion(shape, workers, rank)

    return update


ARMS: dict[str, tuple[Callable[..., Any], int, Sequence[float]]] = {
    "DeMo, 146 of 4096": (demo, 146, (3e-4, 6e-4, 1.2e-3)),
    "DeMo, 32 of 4096": (demo, 32, (3e-4, 6e-4, 1.2e-3)),
    "Dion, rank 4": (dion, 4, (5e-3, 1e-2, 2e-2)),
    "Dion, rank 16": (dion, 16, (5e-3, 1e-2, 2e-2)),
}


def run(task: Task, method: str, rate: float, seed: int) -> dict[str, Any]:
    """One arm of one seed."""
    kind, number, _ = ARMS[method.removesuffix(", after AdamW")]
    task.learner.begin(seed)
    warm_up = WARM_UP if method.endswith("AdamW") else 0
    world = OneBufferWorld(task, kind(number, task.spec.world), rate, warm_up)
    outcome = train(task.learner, world, task.spec.steps, evaluate_every=task.spec.steps)
    return {"loss": outcome.final("loss"), "diverged": outcome.diverged, "bits": world.bits}


def table(lines: list[dict[str, Any]], dense: dict[int, float]) -> str:
    """Markdown: for each arm the best rate, against the best dense AdamW of the same seeds."""
    rows = ["| | bits an entry | rate | held-out loss | against the best dense AdamW | seeds |"]
    rows.append("|---|---|---|---|---|---|")
    for method in dict.fromkeys(line["method"] for line in lines):
        mine = [line for line in lines if line["method"] == method and line["seed"] in dense]
        rates: dict[float, list[float]] = {}
        for line in mine:
            gap = math.inf if line["diverged"] else line["loss"] / dense[line["seed"]] - 1
            rates.setdefault(line["rate"], []).append(gap)
        best = min(rates, key=lambda rate: sum(rates[rate]) / len(rates[rate]))
        losses = [line["loss"] for line in mine if line["rate"] == best]
        gaps = ", ".join(f"{100 * gap:+.2f}%" for gap in rates[best])
        cells = [
            method,
            f"{mine[0]['bits']:.2f}",
            f"{best:g} of {', '.join(f'{r:g}' for r in sorted(rates))}",
        ]
        cells += [f"{sum(losses) / len(losses):.4f}", gaps, str(len(losses))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="text file; default: the embedded corpus")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", default="*", help='shell pattern over "METHOD RATE"')
    parser.add_argument("--rates", type=float, nargs="+", help="others than the arms' own")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.table:
        lines = finished(given.results)
        for data in dict.fromkeys(line["data"] for line in lines):
            best = {"data": data} | BEST_DENSE
            dense = {x["seed"]: x["loss"] for x in finished(ADAMW) if x.items() >= best.items()}
            print(f"{data}\n\n{table([x for x in lines if x['data'] == data], dense)}\n")
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    task = open_task(make_spec("language", data=given.data, world=4), given.results.parent)
    for seed in given.seeds:
        for method in [*ARMS, *(f"{arm}, after AdamW" for arm in ARMS)]:
            for rate in given.rates or ARMS[method.removesuffix(", after AdamW")][2]:
                key = {"data": task.source, "method": method, "rate": rate, "seed": seed}
                done = any(line.items() >= key.items() for line in finished(given.results))
                if done or not fnmatch(f"{method} {rate:g}", given.only):
                    continue
                keep(given.results, key | run(task, method, rate, seed))


if __name__ == "__main__":
    main()
