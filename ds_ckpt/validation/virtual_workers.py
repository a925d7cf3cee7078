"""W data-parallel processes' exchange of gradients inside one process, for any model.

The exchange, the residuals, the warm-up and the packets are those of a real run; only the
transport is another (`exchange.virtual`). Nothing here trains, and nothing here tells about speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.compression.storage import Stored
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.layout import ring_pieces
from ds_ckpt.exchange.rules import MethodSettings
from ds_ckpt.exchange.schedule import ScheduledExchange
from ds_ckpt.exchange.virtual import VirtualTransport, VirtualWorld

DENSE_SETTINGS = ExchangeSettings(MethodSettings("dense"))
"""Everything is sent whole."""

_TIMEOUT_S = 7 * 86_400.0
"""One worker waits for the others so long: a run may be stopped with SIGSTOP and go on later."""


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
        self.step = 0
        self._bucket = list(reversed(names))
        self._at_boundary = True
        self._virtual = VirtualWorld(world, timeout_s=_TIMEOUT_S)
        self._holds = settings.holds_back(accumulation)
        self._workers = [
            self._put_together(transport, settings, embeddings)
            for transport in self._virtual.transports
        ]

    def _put_together(
        self, transport: VirtualTransport, settings: ExchangeSettings, embeddings: frozenset[str]
    ) -> _Worker:
        feedback = settings.residuals(transport.dp_rank, holds=self._holds)
        factors = Factors()
        exchange = AllToAllExchange(
            transport,
            settings.choose(embeddings),
            feedback,
            factors,
            order=ring_pieces,
            holds=self._holds,
        )
        scheduled = ScheduledExchange(
            exchange,
            warmup_steps=0 if settings.lossless else settings.warmup_steps,
            current_step=lambda: self.step,
            at_boundary=(lambda: self._at_boundary) if self._holds else None,
        )
        # in place of DeepSpeed's reduction during the warm-up, to which it is bit-equal on gloo
        warm_up = AllToAllExchange(transport, DENSE_SETTINGS.choose(), order=ring_pieces)
        return _Worker(exchange, scheduled, feedback, factors, warm_up)

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
        self._at_boundary = at_boundary

        def work(process: int) -> list[Tensor]:
            return self._workers[process].reduce(self._bucket, list(reversed(gradients[process])))

        shards = self._virtual.run(work)
        return [torch.cat(of_owners) for of_owners in zip(*shards, strict=True)][::-1]

    def step_ended(self, *, skipped: bool) -> None:
        """The step's overflow decision: residuals are committed or rolled back. Counts the step."""
        for worker in self._workers:
            worker.scheduled.step_ended(skipped=skipped)
        self.step += 1

    @property
    def sent_bytes(self) -> int:
        """What the busiest worker has sent to the others so far."""
        return max(t.sent_bytes for t in self._virtual.transports)

    def sample(self, wanted: bool) -> None:
        """Whether the next step measures what compression leaves behind."""
        for worker in self._workers:
            worker.exchange.errors.sampling = wanted

    def take_energies(self) -> tuple[float, float]:
        """Squared norms of what there was to send and of what was left, all workers together, in
        the steps that were sampled; starts anew."""
        each = [worker.exchange.errors.take_energies() for worker in self._workers]
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

    def state_dict(self) -> dict[str, Any]:
        """Step, residuals and factors of every worker. Live tensors: write them at once."""
        return {"step": self.step, "workers": [w.state_dict() for w in self._workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, bit for bit, where `state_dict` was taken with the same settings.

        The state of a dense run is the start of any other.
        """
        self.step = int(state["step"])
        for worker, saved in zip(self._workers, state["workers"], strict=True):
            worker.load_state_dict(saved)


@dataclass(frozen=True)
class _Worker:
    """One virtual process's end of everything."""

    exchange: AllToAllExchange
    scheduled: ScheduledExchange
    feedback: Feedback | None
    factors: Factors
    warm_up: AllToAllExchange

    def reduce(self, names: list[str], tensors: list[Tensor]) -> list[Tensor]:
        def warm_up(bucket: list[Tensor]) -> list[Tensor]:
            return self.warm_up.average(names, bucket)

        return self.scheduled.reduce(names, tensors, loss_scale=1.0, deepspeed_reduce=warm_up)

    def state_dict(self) -> dict[str, Any]:
        stored = self.feedback.stored() if self.feedback else {}
        return {
            "residuals": {name: list(one.tensors) for name, one in stored.items()},
            "residual_steps": self.feedback.steps if self.feedback else 0,
            "factors": self.factors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.feedback is not None and state["residuals"]:
            stored = {name: Stored(*tensors) for name, tensors in state["residuals"].items()}
            self.feedback.load_stored(stored, state["residual_steps"])
        self.factors.load_state_dict(state["factors"])


def sixteen_bit_step_bytes(
    settings: ExchangeSettings,
    shapes: Sequence[tuple[str, torch.Size]],
    world: int,
    *,
    accumulation: int = 1,
    embeddings: frozenset[str] = frozenset(),
) -> float:
    """Bytes that the busiest of `world` workers sends in a step where gradients are bfloat16.

    Counted on two steps, since a method may alternate. What travels whole then takes 16 bits.

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
    for micro in range(2 * accumulation):
        gradients = [
            [torch.randn(shape, dtype=torch.bfloat16) for _, shape in shapes] for _ in range(world)
        ]
        last = (micro + 1) % accumulation == 0
        workers.average(gradients, at_boundary=last)
        if last:
            workers.step_ended(skipped=False)
    return workers.sent_bytes / 2
