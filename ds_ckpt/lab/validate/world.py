"""Where optimizer steps are taken: by virtual workers in this process, or by ZeRO-3 processes.

A world takes the next step on its model and tells what came of it; `trainer` does the rest.
`InProcessWorld` is the virtual one: the workers' gradients are computed one after the other with
the same weights, from each worker's own micro-batches, then averaged by `VirtualWorkers`, whose
exchange, residuals, warm-up and packets are those of a real run; only the transport is another
(`exchange.virtual`). What follows is what ZeRO-3's optimizer does with its shards: skip the step
where the norm is not finite, clip, one AdamW step. The real world is in `processes`.
"""

from __future__ import annotations

import hashlib
import math
import time
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
from ds_ckpt.exchange.virtual import VirtualTransport, VirtualWorld
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.weights.tracked import Tracked
from ds_ckpt.zero3.momentum import corrected

DENSE_SETTINGS = ExchangeSettings(MethodSettings("dense"))
"""Everything is sent whole."""

_TIMEOUT_S = 7 * 86_400.0
"""One worker waits for the others so long: a run may be stopped with SIGSTOP and go on later."""

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
        lead: of AdamW's first moment (`zero3/momentum.py`); 0: none.
        lead_after: steps without it at the beginning.
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
    lead: float = 0.0
    lead_after: int = 0
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


class VirtualWorkers:
    """The mean of W workers' gradients as ZeRO-3 processes with these settings would get it.

    All gradients go as one bucket, in the order of `names` reversed, about that of backward. What
    buckets hold makes no difference to the numbers, only to how many headers there are.

    Args:
        settings: what the `compression` section says; one level, whatever they say of levels.
        world: number of virtual processes.
        names: of the parameters whose gradients will come, in the model's order.
        accumulation: micro-steps of a step; with more than one, lossy methods with error feedback
            exchange at the boundary alone, unless the settings say otherwise.
        embeddings: names of embedding weights that no other layer shares, see `exchange.rules`.

    Attributes:
        step: optimizer steps so far; the warm-up is counted in these.
        at_boundary: whether this is the last micro-step of its step.
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
            _Worker(self, transport, settings, names, embeddings, holds)
            for transport in self._virtual.transports
        ]

    @torch.no_grad()
    def average(
        self, gradients: Sequence[Sequence[Tensor]], *, at_boundary: bool = True
    ) -> list[Tensor]:
        """The averaged gradients, put together from every owner's shard.

        Args:
            gradients: of each worker, in the order of `names`; may be overwritten.
            at_boundary: this is the last micro-step of the step.

        Returns:
            Flat tensors in the order of `names`; zeros where micro-steps are held back.
        """
        self.at_boundary = at_boundary

        def work(process: int) -> list[Tensor]:
            return self._workers[process].reduce(self._bucket, list(reversed(gradients[process])))

        shards = self._virtual.run(work)
        return [torch.cat(of_owners) for of_owners in zip(*shards, strict=True)][::-1]

    def step_ended(self, *, skipped: bool) -> None:
        """The step's overflow decision: residuals are committed or rolled back. Counts the step."""

        def end(worker: int) -> None:
            state = self._workers[worker].scheduled
            (state.rollback if skipped else state.commit)()

        self._virtual.run(end)
        self.step += 1

    @property
    def momentum_correction(self) -> float:
        """The correction of the step that has just been exchanged."""
        corrects = len(self._workers) > 1 and self._workers[0].scheduled.corrects_momentum
        return self._settings.momentum_correction if corrects else 0.0

    @property
    def sent_bytes(self) -> int:
        """What the busiest worker has sent to the others so far."""
        return max(t.sent_bytes for t in self._virtual.transports)

    def sample(self, wanted: bool) -> None:
        """Whether the next step measures what compression leaves behind."""
        for worker in self._workers:
            worker.scheduled.exchange.errors.sampling = wanted

    def take_energies(self) -> tuple[float, float]:
        """Squared norms of what there was to send and of what was left, all workers together, in
        the steps that were sampled; starts anew."""
        each = [worker.scheduled.exchange.errors.take_energies() for worker in self._workers]
        return sum(before for before, _ in each), sum(after for _, after in each)

    def residuals(self) -> list[dict[str, Tensor]]:
        """Committed residuals of every worker: flat fp32 by parameter name; empty without."""
        return [w.feedback.state_dict(copy=False) if w.feedback else {} for w in self._workers]

    def residual_norm(self) -> float:
        """2-norm of what the weights are still owed: of the workers' residuals, added up."""
        states = self.residuals()
        total = 0.0
        for name, first in states[0].items():
            owed = first.clone()
            for state in states[1:]:
                owed.add_(state[name])
            total += float(owed.square().sum())
        return math.sqrt(total)


class _Worker:
    """One virtual process's end of everything."""

    def __init__(
        self,
        workers: VirtualWorkers,
        transport: VirtualTransport,
        settings: ExchangeSettings,
        names: Sequence[str],
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
        # in place of DeepSpeed's reduction during the warm-up, which it equals within rounding
        self._warm_up = AllToAllExchange(transport, DENSE_SETTINGS.choose())

    def reduce(self, names: list[str], tensors: list[Tensor]) -> list[Tensor]:
        def warm_up(bucket: list[Tensor]) -> list[Tensor]:
            return self._warm_up.average(names, bucket)

        return self.scheduled.reduce(names, tensors, loss_scale=1.0, deepspeed_reduce=warm_up)


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

    def take(
        self, step: int, mean: list[Tensor], norm: float, correction: float | None = None
    ) -> None:
        """AdamW on the averaged gradients.

        Args:
            mean: one for each parameter, of as many entries; overwritten.
            norm: of all of them, finite.
            correction: of the first moment; None: the recipe's.
        """
        for parameter, gradient in zip(self._parameters, mean, strict=True):
            parameter.grad = gradient.view_as(parameter)
        if self._recipe.clip > 0:
            # as DeepSpeed writes it: no gradient is ever made larger
            excess = max(1.0, (norm + 1e-6) / self._recipe.clip)
            if excess > 1:
                torch._foreach_mul_(mean, 1.0 / excess)
        for group in self.adamw.param_groups:
            group["lr"] = self._recipe.rate(step)
        if correction is None:
            correction = self._recipe.lead if step >= self._recipe.lead_after else 0.0
        with corrected(self.adamw, 0, self._parameters, correction):
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)


def norm_of(mean: Sequence[Tensor]) -> float:
    """2-norm of all of them together."""
    return float(torch.stack([m.norm() for m in mean]).norm())


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
        weight_bits: the model's weights are what hosts of one worker each hold of the optimizer's,
            as `weights.deltas` in so many bits has it; None: they are the optimizer's.

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
        weight_bits: int | None = None,
    ) -> None:
        self.model, self._loss, self._recipe = model, loss, recipe
        self._sample_every, self._accumulation = sample_every, accumulation
        self._world = workers
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in trainable]
        self._parameters = [p for _, p in trainable]
        self._tracked = Tracked(weight_bits) if weight_bits else None
        self._masters: list[Tensor] = [
            p.detach().clone() if self._tracked else p for p in self._parameters
        ]
        self._optimizer = WholeOptimizer(self._masters, recipe)
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
        norm = norm_of(total)
        skipped = not math.isfinite(norm)
        step = self.step
        correction = self.workers.momentum_correction
        self.workers.step_ended(skipped=skipped)  # the verdict comes first, as DeepSpeed has it
        if not skipped:
            self._optimizer.take(step, total, norm, correction)
        if self._tracked is not None and not skipped:
            self._send_weights(self._tracked)
        sent_bytes = self.workers.sent_bytes - sent_before
        left = (
            ResidualStats.of(*self.workers.take_energies(), norm)
            if sampled and not skipped
            else None
        )
        cpu_s = time.process_time() - started_s
        return Step(tuple(losses), sent_bytes, skipped, left, norm, cpu_s, exchange_cpu_s)

    @torch.no_grad()
    def _send_weights(self, tracked: Tracked) -> None:
        """Move the model's weights towards the optimizer's, as owners do: each has its shards."""
        held = torch.cat([p.view(-1) for p in self._parameters])
        master = torch.cat([m.view(-1) for m in self._masters])
        sizes = []
        for parameter in self._parameters:
            shard = -(-parameter.numel() // self._world)
            sizes += [part.numel() for part in parameter.view(-1).split(shard)]
        tracked.encode(held, master, sizes)
        after = held.split([p.numel() for p in self._parameters])
        for parameter, weights in zip(self._parameters, after, strict=True):
            parameter.view(-1).copy_(weights)

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


def sixteen_bit_step_bytes(
    settings: ExchangeSettings,
    shapes: Sequence[tuple[str, torch.Size]],
    world: int,
    *,
    accumulation: int = 1,
    embeddings: frozenset[str] = frozenset(),
) -> float:
    """Bytes that the busiest of `world` workers sends in a step where gradients are bfloat16.

    Counted on two steps, since a method may alternate, twice: what `exchange.metric` takes in the
    first, it takes in every `EVERY`-th. What travels whole then takes 16 bits.

    Args:
        accumulation, embeddings: as `VirtualWorkers`.
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
