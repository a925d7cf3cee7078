"""Where optimizer steps are taken: by virtual workers in this process, or by ZeRO-3 processes.

A world takes the next step on its model and tells what came of it; `trainer` does the rest.
`InProcessWorld` is the virtual one: the workers' gradients are computed one after the other with
the same weights, from each worker's own micro-batches, then averaged by `virtual_workers`. What
follows is what ZeRO-3's optimizer does with its shards: skip the step where the norm is not finite,
clip, one AdamW step. The real world is in `train_processes`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import embeddings_of
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.virtual_workers import VirtualWorkers

Loss = Callable[[int, int, int], Tensor]
"""(step, micro-step, worker) -> the loss of that worker's micro-batch, with a graph behind it."""


@dataclass(frozen=True)
class Recipe:
    """AdamW, a linear warm-up of the learning rate, a cosine down, clipping by norm.

    Attributes:
        steps: length of the schedule.
        learning_rate: at the top.
        warmup_ratio: share of the steps that the learning rate's warm-up takes.
        min_lr_ratio: the last learning rate, as a share of the top; 1 and no warm-up is a constant.
        clip: largest norm of the averaged gradient; 0 for no clipping.
        fused: torch's fused kernel, three times as fast, which rounds otherwise than the loop that
            DeepSpeed's `torch_adam` runs.
    """

    steps: int
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_ratio: float = 0.1
    min_lr_ratio: float = 0.05
    clip: float = 1.0
    fused: bool = True

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        rising = round(self.warmup_ratio * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class Step:
    """What came of an optimizer step.

    Attributes:
        losses: of every micro-step and worker, in the order in which virtual workers compute them.
        sent_bytes: of gradients, that the busiest worker (or this process) sent to the others.
        skipped: the gradient was not finite, so no weight has moved.
        left: what compression left behind; None where the step was not sampled, was skipped, or
            compressed nothing.
        norm: of the averaged gradient, before clipping; NaN where the world does not tell.
        cpu_s, exchange_cpu_s: CPU seconds of the step, of the exchange alone, all workers together;
            0 in processes, whose times are measured by the clock.
    """

    losses: tuple[float, ...]
    sent_bytes: int
    skipped: bool
    left: ResidualStats | None = None
    norm: float = math.nan
    cpu_s: float = 0.0
    exchange_cpu_s: float = 0.0


class World(Protocol):
    """Who takes the steps."""

    @property
    def model(self) -> torch.nn.Module:
        """What is called to evaluate: a model, an engine."""

    @property
    def step(self) -> int:
        """Steps so far, skipped ones included."""

    def train_step(self) -> Step:
        """The next optimizer step: gradients, exchange, clipping, AdamW."""

    def residual_norm(self) -> float:
        """2-norm of what the weights are still owed: of the workers' residuals, added up."""

    def weights_digest(self) -> str:
        """Of all weights and buffers, bit for bit."""


def digest_of(model: torch.nn.Module) -> str:
    """Of all weights and buffers, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class WholeOptimizer:
    """What follows the exchange: DeepSpeed's ZeRO-3 step, on whole gradients."""

    def __init__(self, parameters: Sequence[Tensor], recipe: Recipe) -> None:
        self._parameters, self._recipe = parameters, recipe
        self.adamw = torch.optim.AdamW(
            parameters,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=recipe.fused,
        )

    def take(self, step: int, mean: list[Tensor]) -> float:
        """AdamW on the averaged gradients unless their norm is not finite; returns the norm.

        Args:
            mean: one for each parameter, of as many entries; overwritten.
        """
        norm = float(torch.stack([m.norm() for m in mean]).norm())
        if not math.isfinite(norm):
            return norm
        for parameter, gradient in zip(self._parameters, mean, strict=True):
            parameter.grad = gradient.view_as(parameter)
        if self._recipe.clip > 0:
            # as DeepSpeed writes it: no gradient is ever made larger
            excess = max(1.0, (norm + 1e-6) / self._recipe.clip)
            if excess > 1:
                torch._foreach_mul_(mean, 1.0 / excess)
        for group in self.adamw.param_groups:
            group["lr"] = self._recipe.rate(step)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return norm


class InProcessWorld:
    """Virtual workers that train one model; a `World`.

    Where a real run keeps a shard of the weights in each process, one model stands here for all.

    Args:
        model: in training mode; trained in place.
        loss: see `Loss`; runs the model. It must reach every parameter that requires a gradient.
        recipe: of the optimizer.
        settings: what the `compression` section says.
        workers: number of virtual workers.
        accumulation: micro-steps of a step.
        sample_every: steps from one look at what compression leaves behind to the next; 0: never.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        recipe: Recipe,
        settings: ExchangeSettings,
        *,
        workers: int,
        accumulation: int = 1,
        sample_every: int = 0,
    ) -> None:
        self.model, self._loss, self._recipe = model, loss, recipe
        self._sample_every, self._accumulation = sample_every, accumulation
        self._world = workers
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in trainable]
        self._parameters = [p for _, p in trainable]
        self._optimizer = WholeOptimizer(self._parameters, recipe)
        self.workers = VirtualWorkers(
            settings,
            workers,
            self._names,
            accumulation=accumulation,
            embeddings=embeddings_of(model),
        )

    @property
    def step(self) -> int:
        """See `World`."""
        return self.workers.step

    def train_step(self) -> Step:
        """See `World`."""
        started_s = time.process_time()
        sent_before = self.workers.sent_bytes
        sampled = bool(self._sample_every) and (self.step + 1) % self._sample_every == 0
        self.workers.sample(sampled)
        losses: list[float] = []
        exchange_cpu_s = 0.0
        total: list[Tensor] = []
        for micro in range(self._accumulation):
            gradients = [self._gradients(micro, worker, losses) for worker in range(self._world)]
            exchange_started_s = time.process_time()
            last = micro + 1 == self._accumulation
            mean = self.workers.average(gradients, at_boundary=last)
            exchange_cpu_s += time.process_time() - exchange_started_s
            del gradients
            total = [t.add_(m) for t, m in zip(total, mean, strict=True)] if total else mean
        norm = self._optimizer.take(self.step, total)
        skipped = not math.isfinite(norm)
        self.workers.step_ended(skipped=skipped)
        sent_bytes = self.workers.sent_bytes - sent_before
        left = (
            ResidualStats.of(*self.workers.take_energies(), norm)
            if sampled and not skipped
            else None
        )
        cpu_s = time.process_time() - started_s
        return Step(tuple(losses), sent_bytes, skipped, left, norm, cpu_s, exchange_cpu_s)

    def _gradients(self, micro: int, worker: int, losses: list[float]) -> list[Tensor]:
        loss = self._loss(self.step, micro, worker)
        if self._accumulation > 1:
            (loss / self._accumulation).backward()
        else:
            loss.backward()
        losses.append(loss.item())
        gradients = []
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is None:
                raise UnsupportedError(
                    Problem(
                        where=name,
                        found="no gradient",
                        why="the loss does not reach this parameter, and virtual workers exchange "
                        "those of all",
                        remedy="freeze it in the checkpoint, or train with --processes",
                    ),
                    headline="the model cannot be trained by virtual workers",
                )
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def residual_norm(self) -> float:
        """See `World`."""
        return self.workers.residual_norm()

    def weights_digest(self) -> str:
        """See `World`."""
        return digest_of(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, residuals and step. Weights and moments are the live tensors."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.adamw.state_dict(),
            "workers": self.workers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, bit for bit, where `state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self._optimizer.adamw.load_state_dict(state["optimizer"])
        self.workers.load_state_dict(state["workers"])
