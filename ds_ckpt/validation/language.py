"""The task that the default validation trains: a Llama on bytes of text, for W virtual workers.

Weights, data and their order are functions of the seed alone, so runs of one seed make pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.harness import models
from ds_ckpt.harness.corpus import Batches, Corpus, evaluation_batches

_EVALUATION_SEQUENCES = 8


@dataclass(frozen=True)
class LanguageTask:
    """Sizes of the task.

    Attributes:
        world: virtual workers.
        sequences: of a worker's micro-batch.
        sequence_length: bytes of a sequence.
        accumulation: micro-batches of a worker in a step.
        evaluation_batches: of 8 sequences each, spread evenly over the held-out text.
        hidden_size, layers, intermediate_size, heads: of the Llama.
    """

    world: int = 2
    sequences: int = 4
    sequence_length: int = 128
    accumulation: int = 1
    evaluation_batches: int = 32
    hidden_size: int = 256
    layers: int = 6
    intermediate_size: int = 688
    heads: int = 8


class LanguageRun:
    """The model and data, of one seed at a time.

    Attention is computed without torch's fused kernel: on CPU its backward takes longer than all
    matrix products together at these lengths.

    Args:
        compiled: run the training forward and backward through `torch.compile`: a quarter faster
            after a minute, on machines with a C++ compiler.

    Attributes:
        forward: what training calls in the model's place.
    """

    def __init__(self, task: LanguageTask, text: Corpus, *, compiled: bool = False) -> None:
        self.task, self._text = task, text
        self.model = self._initial(0)
        self.model.set_attn_implementation("eager")  # type: ignore[operator]
        self.model.train()
        self.forward: Callable[..., Any] = self.model
        if compiled:
            self.forward = torch.compile(self.model)
        self.begin(0)

    def begin(self, seed: int) -> None:
        """The weights and the data of `seed`, from the start."""
        self.model.load_state_dict(self._initial(seed).state_dict())
        self._batches = [
            Batches(
                self._text.train,
                sequences=self.task.sequences,
                sequence_length=self.task.sequence_length,
                seed=seed,
                process=worker,
            )
            for worker in range(self.task.world)
        ]

    def _initial(self, seed: int) -> torch.nn.Module:
        task = self.task
        return models.llama(
            seed=seed,
            hidden_size=task.hidden_size,
            layers=task.layers,
            intermediate_size=task.intermediate_size,
            heads=task.heads,
            max_positions=task.sequence_length,
        )

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """As `virtual_training.Loss`."""
        ids = self._batches[worker].batch(step * self.task.accumulation + micro)
        loss: Tensor = self.forward(input_ids=ids, labels=ids).loss
        return loss

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean loss of a byte (nats) over fixed windows of the held-out text."""
        self.model.eval()
        losses = []
        for ids in evaluation_batches(
            self._text.heldout,
            sequences=_EVALUATION_SEQUENCES,
            sequence_length=self.task.sequence_length,
            batches=self.task.evaluation_batches,
            process=0,
            processes=1,
        ):
            losses.append(self.model(input_ids=ids, labels=ids).loss.double())
        self.model.train()
        return float(torch.stack(losses).mean())
