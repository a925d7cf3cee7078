"""Fine-tuning on small data: a classifier, its examples, and how they are drawn.

Small data is where compression was reported to cost accuracy. Examples come in permutations, one
after the other, each a function of (seed, epoch); workers take turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.validation.run import Score, draw_alike, moved, score

_EVALUATION_BATCH = 100


@dataclass(frozen=True)
class ClassificationTask:
    """Sizes of the task: workers, examples of a worker's micro-batch, micro-batches in a step."""

    world: int = 2
    batch: int = 8
    accumulation: int = 1


@dataclass(frozen=True)
class Examples:
    """Labelled examples. Held-out ones that do not fill a batch of 100 are left out.

    Attributes:
        train, heldout: what the model is called with, all rows, `labels` among it.
        classes: their number.
        source: where they come from, in words.
    """

    train: dict[str, Tensor]
    heldout: dict[str, Tensor]
    classes: int
    source: str

    def __post_init__(self) -> None:
        assert "labels" in self.train
        assert self.train.keys() == self.heldout.keys()

    @property
    def sizes(self) -> tuple[int, int]:
        """Examples to train on and held out."""
        return len(self.train["labels"]), len(self.heldout["labels"])

    @property
    def sha256(self) -> str:
        """Digest over both sides: equal digests mean equal data."""
        digest = hashlib.sha256()
        for side in (self.train, self.heldout):
            for name, values in sorted(side.items()):
                digest.update(name.encode())
                digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()


class ClassificationRun:
    """The model and data, of one seed at a time; a `Run`.

    Args:
        build: makes the model of a seed; it answers with `loss` and `logits`.
        device: of the model; data is moved there.
    """

    def __init__(
        self,
        task: ClassificationTask,
        examples: Examples,
        build: Callable[[int], torch.nn.Module],
        *,
        device: str = "cpu",
    ) -> None:
        self.task, self._examples, self._build, self._device = task, examples, build, device
        self.model = self.initial(0).to(device)
        self.begin(0)

    def begin(self, seed: int) -> None:
        """The weights and the data of `seed`, from the start."""
        self.model.load_state_dict(self.initial(seed).state_dict())
        self._seed = seed
        self._orders: dict[int, np.ndarray[Any, Any]] = {}

    @property
    def held_out(self) -> int:
        """Held-out examples that are asked for."""
        count = self._examples.sizes[1]
        return count - count % min(_EVALUATION_BATCH, count)

    def initial(self, seed: int) -> torch.nn.Module:
        """A model with the weights of `seed`, in training mode."""
        return self._build(seed).train()

    def inputs(self, step: int, micro: int, worker: int) -> dict[str, Tensor]:
        """What the model is called with for a micro-batch of a worker; see `Run`."""
        draw_alike(self._seed, step, micro, worker)
        task = self.task
        first = ((step * task.accumulation + micro) * task.world + worker) * task.batch
        rows = torch.tensor([self._row(first + i) for i in range(task.batch)])
        return {name: values[rows] for name, values in self._examples.train.items()}

    def _row(self, place: int) -> int:
        count = self._examples.sizes[0]
        epoch, within = divmod(place, count)
        if epoch not in self._orders:
            random = np.random.default_rng([self._seed, epoch])
            self._orders[epoch] = random.permutation(count)
        return int(self._orders[epoch][within])

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """As `virtual_training.Loss`."""
        loss: Tensor = self.model(**moved(self.inputs(step, micro, worker), self._device)).loss
        return loss

    def evaluate(self, model: Callable[..., Any] | None = None) -> Score:
        """Loss and accuracy on the held-out examples; see `Run`."""
        if model is not None:
            return score(model, self._heldout(), answers=True)
        self.model.eval()
        try:
            return score(self.model, self._heldout(), answers=True)
        finally:
            self.model.train()

    def _heldout(self) -> Iterator[dict[str, Tensor]]:
        count = self._examples.sizes[1]
        size = min(_EVALUATION_BATCH, count)
        for first in range(0, count - size + 1, size):
            rows = slice(first, first + size)
            batch = {name: values[rows] for name, values in self._examples.heldout.items()}
            yield moved(batch, self._device)
