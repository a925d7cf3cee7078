"""What is trained: a model with its data, begun anew for every seed. What training must know of it.

Runs of one seed share weights, data and their order, whoever trains them: virtual workers or
ZeRO-3 processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """What a model is worth on held-out data.

    Attributes:
        loss: mean, in nats, of a token or of an example.
        accuracy: share of right answers, 0 to 1; None for tasks without.
    """

    loss: float
    accuracy: float | None = None


class Sizes(Protocol):
    """What a trainer must know of a task."""

    @property
    def world(self) -> int:
        """Workers."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of a worker in a step."""


class Run(Protocol):
    """A model and its data, of one seed at a time."""

    @property
    def task(self) -> Sizes:
        """See `Sizes`."""

    @property
    def model(self) -> torch.nn.Module:
        """Trained in place by virtual workers."""

    @property
    def held_out(self) -> int:
        """How many answers an accuracy is the share of; 0 for tasks without."""

    def initial(self, seed: int) -> torch.nn.Module:
        """A model with the weights of `seed`, in training mode."""

    def begin(self, seed: int) -> None:
        """The weights and the data of `seed`, from the start."""

    def inputs(self, step: int, micro: int, worker: int) -> dict[str, Tensor]:
        """What the model is called with for a micro-batch of a worker, on the CPU; torch's random
        numbers begin anew with it."""

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """As `virtual_training.Loss`."""

    def evaluate(self, model: Callable[..., Any] | None = None) -> Score:
        """On the held-out data, the same part every time.

        Args:
            model: called in the place of this run's own, an engine for instance; in whatever mode
                it is in.
        """


def draw_alike(seed: int, step: int, micro: int, worker: int) -> None:
    """Begin torch's random numbers anew for a micro-batch, so that runs of one seed drop out the
    same entries, resumed or not."""
    (number,) = np.random.SeedSequence([seed, step, micro, worker]).generate_state(1)
    torch.manual_seed(int(number))


def moved(inputs: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The same on the device."""
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@torch.no_grad()
def score(
    model: Callable[..., Any], batches: Iterable[Mapping[str, Tensor]], *, answers: bool
) -> Score:
    """Mean over the batches of the loss that the model tells; batches of one size.

    Args:
        batches: each with `labels`, on the model's device.
        answers: labels are one a row, and the largest logit is the answer.
    """
    losses, right, rows = [], 0, 0
    for inputs in batches:
        output = model(**inputs)
        losses.append(output.loss.double())
        if answers:
            right += int((output.logits.argmax(-1) == inputs["labels"]).sum())
            rows += len(inputs["labels"])
    mean = float(torch.stack(losses).mean())
    return Score(mean, right / rows if answers else None)
