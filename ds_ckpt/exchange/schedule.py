"""What reduces a step's buckets: DeepSpeed in the warm-up, then what the autotuner says.

With gradient accumulation the exchange runs once, at the boundary; earlier micro-steps only add to
the residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.autotune import Autotuner, Way
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.momentum import FirstMoments
from ds_ckpt.exchange.rules import Choose
from ds_ckpt.exchange.state import Stateful

log = logging.getLogger("ds_ckpt")
Reduce = Callable[[list[Tensor]], list[Tensor]]
"""A bucket's full gradients to this process's shards."""


def _uncompressed(name: str, shape: torch.Size) -> None:
    """A `Choose`."""


@dataclass
class Fallback:
    """Whether compression is over for this run. Set between steps, on every process alike; saved
    with a checkpoint.

    Attributes:
        uncompressed: every bucket goes so, with what is owed to it.
        speaks: whether this process tells of it in the log where a checkpoint brings it.
    """

    uncompressed: bool = False
    speaks: bool = False

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"whole": self.uncompressed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a checkpoint does not tell: compression goes on."""
        self.uncompressed = bool(state.get("whole", False))
        if self.uncompressed and self.speaks:
            log.warning(
                "ds_ckpt: the checkpoint is of a run that a guard made fall back: gradients go "
                "uncompressed, now too"
            )


class ScheduledExchange:
    """The `ds_ckpt.zero3.gradient.BucketExchange` of a method.

    Args:
        all_to_all: what runs after the warm-up; its residuals and factors are committed or rolled
            back with the step.
        warmup_steps: optimizer steps that are plain DeepSpeed, or travel as `warm_up` says.
        warm_up: how tensors travel in these; None: by DeepSpeed's own reduction.
        current_step: DeepSpeed's count of optimizer steps so far.
        at_boundary: whether this micro-step ends an accumulated step; the others' gradients are
            held back until then. None: every micro-step is exchanged.
        autotuner: None: gradients are always compressed.
        moments: measured from the end of the warm-up; None: the optimizer's stay as they are.

    Attributes:
        all_to_all, autotuner, moments: as given.
        fallback: see `Fallback`.
    """

    def __init__(
        self,
        all_to_all: AllToAllExchange,
        *,
        warmup_steps: int,
        warm_up: Choose | None = None,
        current_step: Callable[[], int],
        at_boundary: Callable[[], bool] | None = None,
        autotuner: Autotuner | None = None,
        moments: FirstMoments | None = None,
    ) -> None:
        self.all_to_all = all_to_all
        self.moments = moments
        if moments is not None:
            all_to_all.errors.listeners.append(moments.errors)
        self._warmup_steps = warmup_steps
        self._warm_up = warm_up
        self._current_step = current_step
        self._at_boundary = at_boundary
        self.autotuner = autotuner
        self._nonfinite_before = 0
        self._goes_on = False
        """The latest micro-step was not said to end its step."""
        self.fallback = Fallback()

    def _way(self, names: Sequence[str] = ()) -> Way:
        """How a bucket of this step travels."""
        if self._warming_up and self._warm_up is None:
            return "deepspeed"
        if self.fallback.uncompressed:
            return "uncompressed"
        if self._warming_up:
            return "compressed"
        return self.autotuner.way_of(names) if self.autotuner is not None else "compressed"

    @property
    def _warming_up(self) -> bool:
        return self._current_step() < self._warmup_steps

    @property
    def compresses(self) -> bool:
        """Whether the step's gradients go compressed."""
        return self._way() == "compressed"

    def reserve(self, shapes: Iterable[tuple[str, torch.Size]], device: torch.device) -> None:
        """See `AllToAllExchange.reserve`."""
        others = () if self._warm_up is None else (self._warm_up,)
        self.all_to_all.reserve(shapes, device, *others)

    def inline(self, names: Sequence[str]) -> bool:
        """Where DeepSpeed reduces; see `ds_ckpt.zero3.gradient.BucketExchange`."""
        return self._way(names) == "deepspeed"

    def reduce(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        *,
        loss_scale: float,
        deepspeed_reduce: Reduce,
    ) -> list[Tensor]:
        """One bucket; see `ds_ckpt.zero3.gradient.BucketExchange`."""
        if self._warming_up and self.moments is not None:
            self.moments.kept = {}  # from a checkpoint of a run with a shorter warm-up
        self._goes_on = self._at_boundary is not None and not self._at_boundary()
        if self._warming_up and self._warm_up is None:
            return deepspeed_reduce(tensors)
        way = self._way(names)
        choose = _uncompressed if way == "uncompressed" else None
        after_warm_up = self._current_step() - self._warmup_steps
        if self.all_to_all.metric is not None and not self._warming_up:
            self.all_to_all.metric.exchanging(after_warm_up)
        if self._goes_on:
            return self.all_to_all.hold(names, tensors, loss_scale, choose=choose)
        if self._warming_up and way == "compressed":
            if self.autotuner is not None:
                self.autotuner.warmed_up(names)
            return self.all_to_all.average(names, tensors, loss_scale, choose=self._warm_up)
        if self.moments is not None and tensors:
            self.moments.exchanging(after_warm_up, names, tensors[0].device)
        if self.autotuner is not None and tensors and not self.fallback.uncompressed:
            self.autotuner.exchanged(names, tensors[0].device)
        if way == "deepspeed":
            return deepspeed_reduce(tensors)
        return self.all_to_all.average(names, tensors, loss_scale, choose=choose)

    def step_ended(self, *, skipped: bool) -> None:
        """A skipped step leaves every residual and factor bit-equal to before (law 4).

        So does a step with a non-finite bucket that DeepSpeed did not skip: every process that this
        one exchanges with was told of it, and a NaN must not live on in a residual.

        Raises:
            UnsupportedError: on every process, all of the step's gradients have been held back: the
                program told of the boundary after the last backward. It is as a skipped step. Also
                in the warm-up, where nothing is: the first step says what later ones cannot do.
        """
        never_ended, self._goes_on = self._goes_on and not skipped, False
        skipped = skipped or never_ended
        nonfinite = self.all_to_all.nonfinite_buckets > self._nonfinite_before
        self._nonfinite_before = self.all_to_all.nonfinite_buckets
        self.all_to_all.step_ended()
        for state in (self.all_to_all.feedback, self.all_to_all.factors):
            if skipped or nonfinite:
                state.rollback()
            else:
                state.commit()
        # what all processes know alike
        if self.all_to_all.metric is not None:
            self.all_to_all.metric.step_ended(skipped=skipped)
        if self.moments is not None:
            self.moments.step_ended(skipped=skipped)
        if self.autotuner is not None:
            self.autotuner.step_ended(skipped=skipped)
        if never_ended:
            raise UnsupportedError(
                Problem(
                    where="engine.set_gradient_accumulation_boundary",
                    found="a step that ends before any of its backwards was told to be the last",
                    why="gradients are held back until the step's last backward, which sends them",
                    remedy="call set_gradient_accumulation_boundary(True) before the last "
                    'backward, or set $.ds_ckpt.compression.exchange.when to "micro_step"',
                ),
                headline="ds_ckpt cannot take this step",
            )

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint keeps beside the residuals."""
        parts: dict[str, Stateful | None] = {
            "factors": self.all_to_all.factors,
            "fallback": self.fallback,
            "autotune": self.autotuner,
            "momentum": self.moments,
            "metric": self.all_to_all.metric,
        }
        return {name: part for name, part in parts.items() if part is not None}


class NoCommunication:
    """The no-communication bound: it sends nothing, so no compression can gain more.

    For measuring only; see `Session.measure_with`. Every process trains its shards on its own
    gradients, as if all the others' were the same; weights go on being gathered, so what a step
    takes then is what is left when gradients travel in no time and in no bytes.

    Args:
        world: number of processes in the data-parallel group.
        dp_rank: this process's index in it.
    """

    def __init__(self, world: int, dp_rank: int) -> None:
        assert 0 <= dp_rank < world
        self._world = world
        self._dp_rank = dp_rank

    def inline(self, names: Sequence[str]) -> bool:
        """False: DeepSpeed's own reduction is never asked."""
        return False

    def reduce(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        *,
        loss_scale: float,
        deepspeed_reduce: Reduce,
    ) -> list[Tensor]:
        """This process's own gradients, flat views of its shards of `tensors`."""
        shards = [ShardLayout(t.numel(), self._world).shard(self._dp_rank) for t in tensors]
        return [t.reshape(-1)[shard] for t, shard in zip(tensors, shards, strict=True)]

    def step_ended(self, *, skipped: bool) -> None:
        """Nothing is kept from step to step."""
