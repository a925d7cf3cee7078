"""Optimizer steps of virtual workers in this process.

`VirtualWorkers` averages gradients with the exchange, residuals, warm-up and packets of a real run;
only the transport differs. `InProcessWorld` computes the gradients of all workers with the same
weights. It takes the steps of the ZeRO-3 optimizer: skip if the norm is not finite, clip, AdamW.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ds_ckpt.engine.step import make_step_state
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings, embeddings_of
from ds_ckpt.exchange.metric import EVERY
from ds_ckpt.lab.validate.virtual import VirtualWorld
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.zero3.momentum import corrected

DENSE_SETTINGS = ExchangeSettings(MethodSettings("dense"))
_TIMEOUT_S = 7 * 86_400.0
"""Longest wait of one worker for the others: a run may be stopped with SIGSTOP and go on later."""
Loss = Callable[[int, int, int], Tensor]
"""(step, micro-step, worker) -> the loss of that worker's micro-batch, with its graph."""


@dataclass(frozen=True)
class Recipe:
    """AdamW, a linear warm-up of the learning rate, a cosine decay, clipping by norm (0: none).

    `momentum_correction` of the first moment is for uncompressed steps (`zero3/momentum.py`), from
    step `correction_start` on.
    """

    steps: int
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    momentum_correction: float = 0.0
    correction_start: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: it rises in a tenth of the steps."""
        rising = round(0.1 * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = min(1.0, (step - rising) / max(1, self.steps - rising))
        return self.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step.

    `losses` are of every micro-step and worker, in the order of virtual workers. `residual_stats`
    is None unless the step was sampled and compressed. A skipped step changes no weight.
    """

    losses: tuple[float, ...]
    skipped: bool
    residual_stats: ResidualStats | None = None


@dataclass(eq=False)
class VirtualWorkers:
    """The mean of W workers' gradients, exchanged as by ZeRO-3 ranks with these settings.

    All gradients form one bucket: the number of buckets changes the headers, not the values.
    """

    settings: ExchangeSettings
    world: int
    names: Sequence[str]
    accumulation: int = 1
    embeddings: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.step, self.at_boundary, settings = 0, True, self.settings
        self._virtual = VirtualWorld(self.world, timeout_s=_TIMEOUT_S)
        transports = self._virtual.transports
        defers = settings.defers_exchange(self.accumulation)
        self.feedbacks = [settings.residuals(t.dp_rank, defers=defers) for t in transports]
        self.states = [
            make_step_state(
                settings,
                transport,
                transport,
                feedback,
                current_step=lambda: self.step,
                at_boundary=(lambda: self.at_boundary) if defers else None,
                embeddings=self.embeddings,
            )
            for transport, feedback in zip(transports, self.feedbacks, strict=True)
        ]
        # replaces DeepSpeed's reduction during the warm-up
        self._dense = [AllToAllExchange(t, DENSE_SETTINGS.choose()) for t in transports]

    @torch.no_grad()
    def average(
        self, gradients: Sequence[Sequence[Tensor]], *, at_boundary: bool = True
    ) -> list[Tensor]:
        """Average the gradients and assemble the owners' shards.

        `gradients` are those of each worker, in the order of `names`; they may be overwritten. The
        result has flat tensors in the same order; zeros for micro-steps that are only accumulated.
        """
        self.at_boundary = at_boundary

        def work(rank: int) -> list[Tensor]:
            reduce = self.states[rank].choose_reduction(self.names, loss_scale=1.0)
            reduce = reduce or partial(self._dense[rank].average, self.names)
            return reduce(list(gradients[rank]))

        return [torch.cat(shards) for shards in zip(*self._virtual.run(work), strict=True)]

    def step_ended(self, *, skipped: bool) -> None:
        """Commit the residuals, or roll them back if the step is skipped; count the step."""

        def end(rank: int) -> None:
            state = self.states[rank]
            (state.rollback if skipped else state.commit)()

        self._virtual.run(end)
        self.step += 1

    @property
    def momentum_correction(self) -> float:
        """Return the momentum correction of the step whose gradients were exchanged last."""
        corrects = len(self.states) > 1 and self.states[0].corrects_momentum
        return self.settings.momentum_correction if corrects else 0.0

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the busiest worker has sent to the others so far."""
        return max(t.sent_bytes for t in self._virtual.transports)

    def sample(self, wanted: bool) -> None:
        """Measure, or do not measure, the residuals of the next step."""
        for state in self.states:
            state.exchange.errors.sampling = wanted

    def take_energies(self) -> tuple[float, float]:
        """Return and reset the squared norms of gradients and residuals over all workers."""
        taken = [state.exchange.errors.take_sums().values() for state in self.states]
        sums = [pair for each in taken for pair in each]
        return sum(before for before, _ in sums), sum(after for _, after in sums)


class InProcessWorld:
    """Virtual workers that train one model in place.

    The residuals are measured in every `sample_every`-th step; 0 disables it.
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
        self._parameters = [p for _, p in trainable]
        self._adamw = torch.optim.AdamW(
            self._parameters, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        self.workers = VirtualWorkers(
            settings,
            workers,
            [n for n, _ in trainable],
            accumulation=accumulation,
            embeddings=embeddings_of(model),
        )

    def train_step(self) -> StepResult:
        """Take the next optimizer step."""
        step = self.workers.step
        sampled = bool(self._sample_every) and (step + 1) % self._sample_every == 0
        self.workers.sample(sampled)
        losses: list[float] = []
        total: list[Tensor] = []
        for micro in range(self._accumulation):
            gradients = []
            for worker in range(self._world):
                loss = self._loss(step, micro, worker)
                losses.append(loss.item())
                share = loss / self._accumulation
                gradients.append(
                    torch.autograd.grad(share, self._parameters, materialize_grads=True)
                )
            mean = self.workers.average(gradients, at_boundary=micro + 1 == self._accumulation)
            total = [t.add_(m) for t, m in zip(total, mean, strict=True)] if total else mean
        norm = float(torch.stack([t.norm() for t in total]).norm())
        skipped = not math.isfinite(norm)
        correction = self.workers.momentum_correction
        self.workers.step_ended(skipped=skipped)  # before the optimizer, as in DeepSpeed
        stats = None
        if not skipped:
            self._update(step, total, norm, correction)
            stats = ResidualStats.of(*self.workers.take_energies(), norm) if sampled else None
        return StepResult(tuple(losses), skipped, stats)

    def _update(self, step: int, mean: list[Tensor], norm: float, correction: float) -> None:
        """Clip, then take an AdamW step on the averaged gradients."""
        for parameter, gradient in zip(self._parameters, mean, strict=True):
            parameter.grad = gradient.view_as(parameter)
        if 0 < self._recipe.clip < norm + 1e-6:  # DeepSpeed's formula
            torch._foreach_mul_(mean, self._recipe.clip / (norm + 1e-6))
        self._adamw.param_groups[0]["lr"] = self._recipe.rate(step)
        if not correction and step >= self._recipe.correction_start:
            correction = self._recipe.momentum_correction
        with corrected(self._adamw, 0, self._parameters, correction):
            self._adamw.step()
        self._adamw.zero_grad()


def sixteen_bit_step_bytes(
    settings: ExchangeSettings,
    shapes: Sequence[tuple[str, torch.Size]],
    world: int,
    *,
    accumulation: int = 1,
    embeddings: frozenset[str] = frozenset(),
) -> float:
    """Return the bytes that the busiest worker sends in a compressed step with bf16 gradients.

    The warm-up is left out. The all-reduce of `exchange.metric`, in every `EVERY`-th step, is in
    the first of two.
    """
    workers = VirtualWorkers(
        replace(settings, warmup_steps=0),
        world,
        [name for name, _ in shapes],
        accumulation=accumulation,
        embeddings=embeddings,
    )
    sent = [0]
    for _ in range(2):
        for micro in range(accumulation):
            gradients = [
                [torch.randn(shape, dtype=torch.bfloat16) for _, shape in shapes]
                for _ in range(world)
            ]
            workers.average(gradients, at_boundary=micro + 1 == accumulation)
        workers.step_ended(skipped=False)
        sent.append(workers.sent_bytes)
    first, other = sent[1], sent[2] - sent[1]
    return (first + (EVERY - 1) * other) / EVERY
