"""Why a lead helps: learning rates that a delayed gradient bears, in theory and in training.

    nice -n 19 python benchmarks/stability.py      (benchmarks/results/stability.json; minutes)

Theory: on a quadratic of curvature h a gradient g that arrives as d, through a pole at c, as error
feedback makes it, and then through a first moment m of b1 with a lead a, moves weights by

    d = (1 - c) g + c d      m = b1 m + (1 - b1) d      w = w - lr p ((1 - a) m + a d)

which is stable while the spectral radius of that map of (w, d, m) is at most 1; p is Adam's
preconditioner, so that lr p h counts (without pole and lead: (2 + 2 b1) / (1 - b1), Cohen et al.,
arXiv 2207.14484).

Measured: the small Llama of `validate-accuracy` after 100 steps goes on for 80 of a constant lr
with Adam, its gradients clipped, then through a pole. The second moment is made as large as without
it if gradients are noise, as that of compressed ones is (`second_moment.py`). Written is the mean
training loss of the last 25 steps, by lr; every run has the same data.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.exchange.momentum import matched
from ds_ckpt.lab.validate.task import make_spec, open_task
from ds_ckpt.lab.validate.world import WholeOptimizer, norm_of

RESULTS = Path(__file__).parent / "results" / "stability.json"
POLES = (0.0, 0.2, 0.5, 0.7, 0.9)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
BEFORE, STEPS = 100, 80


def zero_at_the_pole(b1: float, c: float) -> float:
    """The lead whose zero cancels the pole: L (1 - b1) / b1, where L = c / (1 - c)."""
    return min(1.0, c / (1 - c) * (1 - b1) / b1)


def radius(k: float, b1: float, c: float, a: float) -> float:
    """Of the map of (w, d, m), `k` being lr p h."""
    d = np.array([1 - c, c, 0])
    m = (1 - b1) * d + np.array([0, 0, b1])
    w = np.array([1, 0, 0]) - k * ((1 - a) * m + a * d)
    return float(np.abs(np.linalg.eigvals(np.stack([w, d, m]))).max())


def in_theory(b1: float, c: float, a: float) -> float:
    """The largest lr p h up to which all are stable, to a thousandth."""
    low, high = 1e-3, 2e-3
    while radius(high, b1, c, a) <= 1 + 1e-9:
        low, high = high, 2 * high
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if radius(middle, b1, c, a) <= 1 + 1e-9 else (low, middle)
    return low


class Trained:
    """A model in the midst of its training.

    Attributes:
        first, second: Adam's moments there, without bias, by parameter.
    """

    def __init__(self) -> None:
        task = open_task(make_spec("language", world=1), Path(tempfile.gettempdir()))
        task.learner.begin(0)
        self._learner, recipe = task.learner, task.spec.recipe()
        self.parameters = [p for p in task.learner.model.parameters() if p.requires_grad]
        optimizer = WholeOptimizer(self.parameters, recipe)
        for step in range(BEFORE):
            _, gradients = self.gradients(step)
            optimizer.take(step, gradients, norm_of(gradients))
        self._begun = [p.detach().clone() for p in self.parameters]
        states = [optimizer.adamw.state[p] for p in self.parameters]
        self.first = [s["exp_avg"] / (1 - recipe.betas[0] ** BEFORE) for s in states]
        self.second = [s["exp_avg_sq"] / (1 - recipe.betas[1] ** BEFORE) for s in states]

    def gradients(self, step: int) -> tuple[float, list[Tensor]]:
        """The loss of a step's batch, and gradients clipped to 1."""
        loss = self._learner.loss(step, 0, 0)
        gradients = list(torch.autograd.grad(loss, self.parameters))
        torch._foreach_mul_(gradients, 1 / max(1.0, norm_of(gradients)))
        return float(loss.detach()), gradients

    @torch.no_grad()
    def restart(self) -> None:
        """Back to where the weights were."""
        for p, begun in zip(self.parameters, self._begun, strict=True):
            p.copy_(begun)

    def loss_after(self, rate: float, b1: float, c: float, a: float) -> float:
        """Of the last 25 of `STEPS` steps in the mean; infinite where it is far above any."""
        self.restart()
        delayed, first, second = (
            [t.clone() for t in of] for of in (self.first, self.first, self.second)
        )
        losses = []
        for step in range(BEFORE, BEFORE + STEPS):
            loss, gradients = self.gradients(step)
            if not loss < 12:
                return math.inf
            losses.append(loss)
            with torch.no_grad():
                for p, d, m, v, g in zip(
                    self.parameters, delayed, first, second, gradients, strict=True
                ):
                    d.lerp_(g, 1 - c)
                    m.lerp_(d, 1 - b1)
                    v.lerp_(d.square() * ((1 + c) / (1 - c)), 0.05)
                    p.addcdiv_(m.lerp(d, a), v.sqrt() + 1e-8, value=-rate)
        return statistics.fmean(losses[-25:])


def main() -> None:
    """Measure everything, and write it."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    trained = Trained()
    points: list[dict[str, Any]] = []
    for b1 in (0.9, 0.7):
        for c in POLES:
            for a in dict.fromkeys((0.0, zero_at_the_pole(b1, c), matched(c))):
                theory = in_theory(b1, c, a)
                losses = {rate: trained.loss_after(rate, b1, c, a) for rate in RATES}
                points.append({"b1": b1, "c": c, "a": a, "theory": theory, "loss": losses})
                print(points[-1], file=sys.stderr, flush=True)
    RESULTS.write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
