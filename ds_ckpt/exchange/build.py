"""From settings to a working exchange: rules, groups, residuals, schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.compression.base import Compressor
from ds_ckpt.compression.error_feedback import Feedback, ResidualDevice
from ds_ckpt.compression.quantize import Quantize
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.exchange.autotune import Autotuner
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.hierarchy import Groups, InHostSum, Levels, make_groups
from ds_ckpt.exchange.layout import Order, ascending, ring_pieces
from ds_ckpt.exchange.metric import StepMetric
from ds_ckpt.exchange.momentum import Choice, FirstMoments
from ds_ckpt.exchange.plan import Plan
from ds_ckpt.exchange.rules import Choose, MethodSettings, Rule, Rules
from ds_ckpt.exchange.schedule import ScheduledExchange
from ds_ckpt.exchange.transport import TorchTransport, Transport

WarmupBits = Literal[8, 4, 3]
When = Literal["auto", "micro_step", "accumulation_boundary"]


@dataclass(frozen=True)
class ExchangeSettings:
    """What the configuration's `compression` section says, in plain values.

    Attributes:
        warmup_bits: of the values in which tensors travel during the warm-up that are compressed
            after it; None: it is DeepSpeed's own reduction.
        when: see `holds_back`; of an engine the session asks whether it can be done, too.
    """

    default: MethodSettings
    rules: tuple[Rule, ...] = ()
    error_feedback: bool = True
    residual_dtype: ResidualDtype = "fp32"
    residual_device: ResidualDevice = "accelerator"
    warmup_steps: int = 0
    min_numel: int = 4096
    levels: Levels = "auto"
    autotune: bool = True
    when: When = "auto"
    momentum: Choice = "none"
    warmup_bits: WarmupBits | None = None

    @property
    def lossless(self) -> bool:
        """Whether everything is sent: no residuals then."""
        return all(s.kind.lossless for s in (self.default, *(r.settings for r in self.rules)))

    def holds_back(self, accumulation: int) -> bool:
        """Whether a step's earlier micro-steps wait for its boundary: in the residuals, and where
        there are none only if that is asked for, because it takes memory of their size."""
        if accumulation == 1 or self.when == "micro_step":
            return False
        return self.when == "accumulation_boundary" or (self.error_feedback and not self.lossless)

    def choose(self, embeddings: frozenset[str] = frozenset(), local: int = 1) -> Rules:
        """How each parameter travels; arguments as of `Rules`."""
        return Rules(self.default, self.min_numel, self.rules, embeddings, local)

    def warm_up(self, choose: Choose) -> Choose | None:
        """How each parameter travels in the warm-up.

        Args:
            choose: after it.
        """
        if self.warmup_bits is None or not self.warmup_steps or self.lossless:
            return None
        values = Quantize(bits=self.warmup_bits)

        def in_few_bits(name: str, shape: torch.Size) -> Compressor | None:
            return None if choose(name, shape) is None else values

        return in_few_bits

    def residuals(self, dp_rank: int, *, holds: bool = False) -> Feedback | None:
        """Empty residuals of one process; None where nothing is left behind or held back.

        Args:
            holds: whether micro-steps wait in them.
        """
        if self.lossless and not holds:
            return None
        return Feedback(
            enabled=self.error_feedback and not self.lossless,
            accumulates=holds,
            dtype=self.residual_dtype,
            device=self.residual_device,
            seed=dp_rank,
        )

    def moments(
        self, groups: Mapping[str, int], add_up: Callable[[Tensor], None]
    ) -> FirstMoments | None:
        """First moments that are matched to what is left behind; None where nothing is carried over
        or the optimizer is to be left alone. Arguments as of `FirstMoments`."""
        if self.momentum == "none" or self.lossless or not self.error_feedback:
            return None
        return FirstMoments(self.momentum, groups, add_up)

    def metric(self, add_up: Callable[[Tensor], None]) -> StepMetric | None:
        """For codecs that want it; None: none does. Argument as of `StepMetric`."""
        every = (s.compressor() for s in (self.default, *(r.settings for r in self.rules)))
        wanted = any(
            c is not None and c.codec is not None and c.codec.uses_preconditioner for c in every
        )
        return StepMetric(add_up) if wanted else None


@dataclass
class Built:
    """An exchange and what belongs to it.

    Attributes:
        feedback: its residuals; None where nothing is left behind or held back.
        groups: who exchanges with whom.
    """

    exchange: ScheduledExchange
    feedback: Feedback | None
    groups: Groups


def schedule(
    settings: ExchangeSettings,
    between: Transport,
    everyone: Transport,
    feedback: Feedback | None,
    *,
    order: Order,
    current_step: Callable[[], int],
    at_boundary: Callable[[], bool] | None = None,
    in_host: InHostSum | None = None,
    embeddings: frozenset[str] = frozenset(),
    parameter_groups: Mapping[str, int] | None = None,
    autotuner: Autotuner | None = None,
) -> ScheduledExchange:
    """One process's end of what the settings ask for, real or virtual.

    Args:
        between, feedback, order, in_host: see `AllToAllExchange`.
        everyone: sums over all processes.
        current_step, at_boundary, autotuner: see `ScheduledExchange`.
        embeddings: see `Rules`.
        parameter_groups: see `FirstMoments`; None: the optimizer is left alone.
    """
    choose = settings.choose(embeddings, 1 if in_host is None else in_host.processes)
    exchange = AllToAllExchange(
        between,
        choose,
        feedback,
        order=order,
        holds=at_boundary is not None,
        in_host=in_host,
        metric=settings.metric(everyone.all_reduce),
    )
    moments = None
    if parameter_groups is not None:
        moments = settings.moments(parameter_groups, everyone.all_reduce)
    return ScheduledExchange(
        exchange,
        warmup_steps=0 if settings.lossless else settings.warmup_steps,
        warm_up=settings.warm_up(choose),
        current_step=current_step,
        at_boundary=at_boundary,
        autotuner=autotuner,
        moments=moments,
    )


def build_exchange(
    settings: ExchangeSettings,
    *,
    group: Any,
    all_to_all_single: Callable[..., Any],
    all_reduce: Callable[..., Any],
    current_step: Callable[[], int],
    at_boundary: Callable[[], bool] | None = None,
    embeddings: frozenset[str] = frozenset(),
    parameter_groups: Mapping[str, int] | None = None,
) -> Built:
    """The exchange for one data-parallel group. Collective: all its processes call it.

    Args:
        group: the process group whose mean is taken.
        all_to_all_single: `torch.distributed`'s function or one that counts around it.
        all_reduce: likewise.
        current_step, at_boundary, embeddings, parameter_groups: see `schedule`.

    Raises:
        UnsupportedError: the hosts do not allow the levels that are asked for.
    """
    groups = make_groups(group, settings.levels)
    between, everyone = (
        TorchTransport(of, all_to_all_single, all_reduce) for of in (groups.between, group)
    )
    in_host = None
    if groups.inside is not None:
        inside = TorchTransport(groups.inside, all_to_all_single, all_reduce)
        in_host = InHostSum(inside, groups.peers)
    autotuner = None
    speaks = everyone.dp_rank == 0
    if settings.autotune and not settings.lossless:
        autotuner = Autotuner(
            everyone.all_reduce,
            world=everyone.world,
            layout=(between.world, everyone.world),
            other="uncompressed" if at_boundary is not None else "deepspeed",
            speaks=speaks,
        )
    feedback = settings.residuals(everyone.dp_rank, holds=at_boundary is not None)
    exchange = schedule(
        settings,
        between,
        everyone,
        feedback,
        # DeepSpeed's reduction on gloo adds in its ring's order; so `dense` is bit-equal to it
        order=ring_pieces if torch_dist.get_backend(group) == "gloo" else ascending,
        current_step=current_step,
        at_boundary=at_boundary,
        in_host=in_host,
        embeddings=embeddings,
        parameter_groups=parameter_groups,
        autotuner=autotuner,
    )
    exchange.fallback.speaks = speaks
    return Built(exchange, feedback, groups)


def describe(settings: ExchangeSettings, plan: Plan, groups: Groups) -> str:
    """One clause on what travels how, from codecs' own sizes."""
    levels = ""
    if groups.levels == 2:
        levels = f", between hosts; summed exactly among the {len(groups.peers)} of a host"
    if settings.lossless:
        return f"gradients uncompressed by all-to-all, summed at the owner{levels}"
    how = ", ".join(f"{words} on {n}" for words, (n, _, _) in plan.by_compressor().items())
    feedback = "on" if settings.error_feedback else "off: what is not sent is lost"
    return (
        f"gradients: {how} tensors from step {settings.warmup_steps}: "
        f"{plan.share:.2%} of the dense gradient bytes{levels}, error feedback {feedback}"
        f"{', where that makes steps shorter' if settings.autotune else ''}"
    )
