"""The task that the default validation trains: a Llama on bytes of text, for W virtual workers.

Weights, data and their order are functions of the seed alone, so runs of one seed make pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.harness import models
from ds_ckpt.harness.corpus import Batches, Corpus, evaluation_batches
from ds_ckpt.validation.run import Score, draw_alike, moved, score

_EVALUATION_SEQUENCES = 8


@dataclass(frozen=True)
class Tokens:
    """A text as another model's tokens: two vectors of ids, int64."""

    train: Tensor
    heldout: Tensor

    @property
    def sha256(self) -> str:
        """Digest over both: equal digests mean equal data."""
        train, heldout = (ids.numpy().tobytes() for ids in (self.train, self.heldout))
        return Corpus("tokens", train, heldout).sha256


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
    """The model and data, of one seed at a time; a `Run`.

    Attention is computed without torch's fused kernel unless asked for: on CPU its backward takes
    longer than all matrix products together at these lengths.

    Args:
        text: as bytes, or as the tokens of another model.
        build: makes the model of a seed, in the place of the task's Llama.
        compiled: run the training forward and backward through `torch.compile`: a quarter faster
            after a minute, on machines with a C++ compiler.
        attention: transformers' name of the task's Llama's attention.
        device: of the model; data is moved there.

    Raises:
        ConfigError: the text is too short for the sequences.

    Attributes:
        forward: what training calls in the model's place.
    """

    def __init__(
        self,
        task: LanguageTask,
        text: Corpus | Tokens,
        *,
        build: Callable[[int], torch.nn.Module] | None = None,
        compiled: bool = False,
        attention: str = "eager",
        device: str = "cpu",
    ) -> None:
        if len(text.heldout) <= task.sequence_length:
            raise ConfigError(
                Problem(
                    where="--data",
                    found=f"{len(text.heldout)} held-out tokens, a tenth of the text",
                    why=f"a sequence takes {task.sequence_length} of them",
                    remedy="give more text or a shorter --length",
                ),
                headline="the data cannot be used",
            )
        self._attention = attention
        self.task, self._text, self._build, self._device = task, text, build, device
        self.model = self.initial(0).to(device)
        self.forward: Callable[..., Any] = self.model
        if compiled:
            self.forward = torch.compile(self.model)
        self.begin(0)

    def begin(self, seed: int) -> None:
        """The weights and the data of `seed`, from the start."""
        self.model.load_state_dict(self.initial(seed).state_dict())
        self._seed = seed
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

    @property
    def held_out(self) -> int:
        """0: no answers are counted."""
        return 0

    def initial(self, seed: int) -> torch.nn.Module:
        """A model with the weights of `seed`, in training mode."""
        task = self.task
        if self._build is not None:
            return self._build(seed).train()
        model = models.llama(
            seed=seed,
            hidden_size=task.hidden_size,
            layers=task.layers,
            intermediate_size=task.intermediate_size,
            heads=task.heads,
            max_positions=task.sequence_length,
        )
        model.set_attn_implementation(self._attention)  # type: ignore[operator]
        return model.train()

    def inputs(self, step: int, micro: int, worker: int) -> dict[str, Tensor]:
        """What the model is called with for a micro-batch of a worker; see `Run`."""
        draw_alike(self._seed, step, micro, worker)
        ids = self._batches[worker].batch(step * self.task.accumulation + micro)
        return {"input_ids": ids, "labels": ids}

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """As `virtual_training.Loss`."""
        loss: Tensor = self.forward(**moved(self.inputs(step, micro, worker), self._device)).loss
        return loss

    def evaluate(self, model: Callable[..., Any] | None = None) -> Score:
        """Mean loss of a token (nats) over fixed windows of the held-out text; see `Run`."""
        windows = evaluation_batches(
            self._text.heldout,
            sequences=_EVALUATION_SEQUENCES,
            sequence_length=self.task.sequence_length,
            batches=self.task.evaluation_batches,
            process=0,
            processes=1,
        )
        batches = (moved({"input_ids": ids, "labels": ids}, self._device) for ids in windows)
        if model is not None:
            return score(model, batches, answers=False)
        self.model.eval()
        try:
            return score(self.model, batches, answers=False)
        finally:
            self.model.train()
