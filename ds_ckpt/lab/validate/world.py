"""Optimizer steps of virtual workers in this process.

`InProcessWorld` computes the workers' gradients one after the other with the same weights, from
each worker's own micro-batches. `VirtualWorkers` averages them with the exchange, residuals,
warm-up and packets of a real run; only the transport differs (`virtual`). Then come the steps of
the ZeRO-3 optimizer: skip if the norm is not finite, clip, one AdamW step. `processes.Zero3World`
is the counterpart with real ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ds_ckpt.engine.step import make_step_state
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.metric import EVERY
from ds_ckpt.exchange.rules import ExchangeSettings, MethodSettings, embeddings_of
from ds_ckpt.lab.validate.virtual import VirtualTransport, VirtualWorld
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.zero3.momentum import corrected

DENSE_SETTINGS = ExchangeSettings(MethodSettings("dense"))
"""Settings of an uncompressed exchange."""

_TIMEOUT_S = 7 * 86_400.0
"""Longest wait of one worker for the others: a run may be stopped with SIGSTOP and go on later."""

Loss = Callable[[int, int, int], Tensor]
"""(step, micro-step, worker) -> the loss of that worker's micro-batch, with its graph."""


@dataclass(frozen=True)
class Recipe:
    """AdamW, a linear warm-up of the learning rate, a cosine decay, clipping by norm.

    Attributes:
        steps: length of the schedule.
        learning_rate: its maximum.
        warmup_ratio: share of the steps in which the learning rate rises.
        min_lr_ratio: last learning rate over the maximum; 1 and no warm-up is a constant rate.
        clip: largest norm of the averaged gradient; 0 disables clipping.
        lead: correction of AdamW's first moment (`zero3/momentum.py`); 0 disables it.
        lead_after: number of steps without it at the beginning.
        fused: use torch's fused kernel: three times as fast, and rounded differently from the loop
            that DeepSpeed's `torch_adam` runs.
    """

    steps: int
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_ratio: float = 0.1
    min_lr_ratio: float = 0.05
    clip: float = 1.0
    lead: float = 0.0
    lead_after: int = 0
    fused: bool = True

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = round(self.warmup_ratio * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class Step:
    """Result of an optimizer step.

    Attributes:
        losses: of every micro-step and worker, in the order of virtual workers.
        sent_bytes: gradient bytes that the busiest worker (or this rank) sent to the others.
        skipped: the gradient was not finite, and no weight changed.
        left: residual statistics; None unless the step was sampled and compressed.
        norm: of the averaged gradient before clipping; NaN if not measured.
    """

    losses: tuple[float, ...]
    sent_bytes: int
    skipped: bool
    left: ResidualStats | None = None
    norm: float = math.nan


class World(Protocol):
    """Something that takes optimizer steps: virtual workers or ZeRO-3 ranks."""

    @property
    def model(self) -> torch.nn.Module:
        """Return the model, or the engine, to evaluate."""

    @property
    def step(self) -> int:
        """Return the number of steps so far, skipped ones included."""

    def train_step(self) -> Step:
        """Take the next optimizer step."""

    def weights_digest(self) -> str:
        """Return a digest of all bits of the weights and buffers."""


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of all bits of the weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class VirtualWorkers:
    """The mean of W workers' gradients, exchanged as by ZeRO-3 ranks with these settings.

    All gradients form one bucket, in the reverse order of `names`. The number of buckets changes
    the number of headers, not the values.

    Args:
        settings: of the `compression` section, with one level.
        world: number of workers.
        names: of the parameters, in the model's order.
        accumulation: micro-steps of a step. With more than one, lossy methods with error feedback
            exchange at the boundary unless the settings differ.
        embeddings: names of embedding weights that no other layer shares, see `exchange.rules`.

    Attributes:
        step: optimizer steps so far; the warm-up is counted in these.
        at_boundary: the current micro-step is the last one of its step.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        world: int,
        names: Sequence[str],
        *,
        accumulation: int = 1,
        embeddings: frozenset[str] = frozenset(),
    ) -> None:
        self.step, self.at_boundary = 0, True
        self._settings = settings
        self._bucket = list(reversed(names))
        self._virtual = VirtualWorld(world, timeout_s=_TIMEOUT_S)
        holds = settings.holds_back(accumulation)
        self._workers = [
            _Worker(self, transport, settings, embeddings, holds)
            for transport in self._virtual.transports
        ]

    @torch.no_grad()
    def average(
        self, gradients: Sequence[Sequence[Tensor]], *, at_boundary: bool = True
    ) -> list[Tensor]:
        """Average the gradients and assemble the owners' shards.

        Args:
            gradients: of each worker, in the order of `names`; may be overwritten.
            at_boundary: this is the last micro-step of the step.

        Returns:
            Flat tensors in the order of `names`; zeros for micro-steps that are only accumulated.
        """
        self.at_boundary = at_boundary

        def work(rank: int) -> list[Tensor]:
            return self._workers[rank].reduce(self._bucket, list(reversed(gradients[rank])))

        shards = self._virtual.run(work)
        return [torch.cat(of_owners) for of_owners in zip(*shards, strict=True)][::-1]

    def step_ended(self, *, skipped: bool) -> None:
        """Commit the residuals, or roll them back if the step is skipped; count the step."""

        def end(rank: int) -> None:
            state = self._workers[rank].scheduled
            (state.rollback if skipped else state.commit)()

        self._virtual.run(end)
        self.step += 1

    @property
    def momentum_correction(self) -> float:
        """Return the momentum correction of the step whose gradients were exchanged last."""
        corrects = len(self._workers) > 1 and self._workers[0].scheduled.corrects_momentum
        return self._settings.momentum_correction if corrects else 0.0

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the busiest worker has sent to the others so far."""
        return max(t.sent_bytes for t in self._virtual.transports)

    def sample(self, wanted: bool) -> None:
        """Measure, or do not measure, the residuals of the next step."""
        for worker in self._workers:
            worker.scheduled.exchange.errors.sampling = wanted

    def take_energies(self) -> tuple[float, float]:
        """Return and reset the squared norms of gradients and residuals over all workers."""
        each = [worker.scheduled.exchange.errors.take_energies() for worker in self._workers]
        return sum(before for before, _ in each), sum(after for _, after in each)

    def residuals(self) -> list[dict[str, Tensor]]:
        """Return every worker's committed residuals: flat fp32 by parameter name."""
        return [w.feedback.state_dict() if w.feedback else {} for w in self._workers]


class _Worker:
    """Exchange and residuals of one virtual worker."""

    def __init__(
        self,
        workers: VirtualWorkers,
        transport: VirtualTransport,
        settings: ExchangeSettings,
        embeddings: frozenset[str],
        holds: bool,
    ) -> None:
        self.feedback = settings.residuals(transport.dp_rank, holds=holds)
        self.scheduled = make_step_state(
            settings,
            transport,
            transport,
            self.feedback,
            current_step=lambda: workers.step,
            at_boundary=(lambda: workers.at_boundary) if holds else None,
            embeddings=embeddings,
        )
        # replaces DeepSpeed's reduction during the warm-up
        self._warm_up = AllToAllExchange(transport, DENSE_SETTINGS.choose())

    def reduce(self, names: list[str], tensors: list[Tensor]) -> list[Tensor]:
        def warm_up(bucket: list[Tensor]) -> list[Tensor]:
            return self._warm_up.average(names, bucket)

        return self.scheduled.reduce(names, tensors, loss_scale=1.0, deepspeed_reduce=warm_up)


class InProcessWorld:
    """Virtual workers that train one model; a `World`.

    One model stands for the shards of the weights that real ranks have.

    Args:
        model: in training mode; trained in place.
        loss: see `Loss`; runs the model. It must reach every parameter that requires a gradient.
        recipe: of the optimizer.
        settings: of the `compression` section.
        workers: number of virtual workers.
        accumulation: micro-steps of a step.
        sample_every: steps between two measurements of the residuals; 0 disables them.
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
        self._sample_every, self._accumulation, self._world = sample_every, accumulation, workers
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in trainable]
        self._parameters = [p for _, p in trainable]
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=recipe.fused,
        )
        embeddings = embeddings_of(model)
        self.workers = VirtualWorkers(
            settings, workers, self._names, accumulation=accumulation, embeddings=embeddings
        )

    @property
    def step(self) -> int:
        """Implement `World`."""
        return self.workers.step

    def train_step(self) -> Step:
        """Implement `World`."""
        sent_before = self.workers.sent_bytes
        sampled = bool(self._sample_every) and (self.step + 1) % self._sample_every == 0
        self.workers.sample(sampled)
        losses: list[float] = []
        total: list[Tensor] = []
        for micro in range(self._accumulation):
            gradients = [self._gradients(micro, worker, losses) for worker in range(self._world)]
            mean = self.workers.average(gradients, at_boundary=micro + 1 == self._accumulation)
            del gradients
            total = [t.add_(m) for t, m in zip(total, mean, strict=True)] if total else mean
        norm = float(torch.stack([t.norm() for t in total]).norm())
        skipped = not math.isfinite(norm)
        step, correction = self.step, self.workers.momentum_correction
        self.workers.step_ended(skipped=skipped)  # before the optimizer, as in DeepSpeed
        if not skipped:
            self._update(step, total, norm, correction)
        left = None
        if sampled and not skipped:
            left = ResidualStats.of(*self.workers.take_energies(), norm)
        return Step(tuple(losses), self.workers.sent_bytes - sent_before, skipped, left, norm)

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
                        "the gradients of all parameters",
                        remedy="freeze it in the checkpoint, or train with --processes",
                    ),
                    headline="virtual workers cannot train the model",
                )
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def _update(self, step: int, mean: list[Tensor], norm: float, correction: float) -> None:
        """Clip, then take an AdamW step on the averaged gradients."""
        for parameter, gradient in zip(self._parameters, mean, strict=True):
            parameter.grad = gradient.view_as(parameter)
        if self._recipe.clip > 0:
            # DeepSpeed's formula: no gradient is ever made larger
            excess = max(1.0, (norm + 1e-6) / self._recipe.clip)
            if excess > 1:
                torch._foreach_mul_(mean, 1.0 / excess)
        for group in self._adamw.param_groups:
            group["lr"] = self._recipe.rate(step)
        if not correction and step >= self._recipe.lead_after:
            correction = self._recipe.lead
        with corrected(self._adamw, 0, self._parameters, correction):
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def weights_digest(self) -> str:
        """Implement `World`."""
        return digest_of(self.model)


def sixteen_bit_step_bytes(
    settings: ExchangeSettings,
    shapes: Sequence[tuple[str, torch.Size]],
    world: int,
    *,
    accumulation: int = 1,
    embeddings: frozenset[str] = frozenset(),
) -> float:
    """Return the bytes that the busiest worker sends in a compressed step with bf16 gradients.

    Two steps are counted, since a method may alternate, twice: the values that `exchange.metric`
    sends in the first step are sent in every `EVERY`-th.

    Args:
        settings: the warm-up is left out.
        shapes: names and shapes of the gradients.
        world: number of workers.
        accumulation: see `VirtualWorkers`.
        embeddings: see `VirtualWorkers`.
    """
    workers = VirtualWorkers(
        replace(settings, warmup_steps=0),
        world,
        [name for name, _ in shapes],
        accumulation=accumulation,
        embeddings=embeddings,
    )
    sent = [0]
    for micro in range(4 * accumulation):
        gradients = [
            [torch.randn(shape, dtype=torch.bfloat16) for _, shape in shapes] for _ in range(world)
        ]
        last = (micro + 1) % accumulation == 0
        workers.average(gradients, at_boundary=last)
        if last:
            workers.step_ended(skipped=False)
            sent.append(workers.sent_bytes)
    first, others = sent[2], sent[4] - sent[2]
    return (first + (EVERY // 2 - 1) * others) / EVERY
