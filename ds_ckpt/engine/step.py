"""The state of one optimizer step of the gradient exchange: how it is sent, commit and rollback.

With gradient accumulation the exchange runs once, at the boundary; earlier micro-steps only add to
the residuals. Residuals, factors and the metric's sums are committed or rolled back together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.engine.tuner import Tuner
from ds_ckpt.errors import Problem, UnsupportedError, log
from ds_ckpt.exchange.exchange import AllToAllExchange, Bucket
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.method_rules import Choose, ExchangeSettings
from ds_ckpt.exchange.transport import InHostSum, Transport
from ds_ckpt.zero3.compatibility import Reduce

ReductionMode = Literal["compressed", "uncompressed", "deepspeed"]


def _uncompressed(name: str, shape: torch.Size) -> None:
    """Choose no compressor."""


@dataclass(eq=False)
class StepState:
    """Chooses how a step's buckets are reduced, and ends the step.

    A `ds_ckpt.zero3.gradient_hook.BucketExchange`: no gradient passes it.

    Without `warm_up` (compressors) DeepSpeed reduces in the warm-up. Without `at_boundary` every
    micro-step is exchanged. Without `tuner` gradients are always compressed.

    Attributes:
        is_disabled: every bucket is sent uncompressed, with its residual. Set between steps, on
            every rank alike; saved with a checkpoint.
        latest_mode: mode of the latest bucket.
    """

    exchange: AllToAllExchange
    warmup_steps: int
    current_step: Callable[[], int]
    warm_up: Choose | None = None
    at_boundary: Callable[[], bool] | None = None
    tuner: Tuner | None = None
    is_disabled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._nonfinite_before = 0
        self.latest_mode: ReductionMode = "deepspeed"
        self._metric_start: int | None = self.warmup_steps
        """Step at which the metric is measured first; None: the next one."""
        self._expects_more = False
        """The latest micro-step did not end its step."""
        self._sent: dict[str, ReductionMode] = {}
        """Modes of this step's buckets, by parameter."""
        self._drained: set[str] = set()
        """Parameters sent uncompressed since they were compressed: no rank has a residual."""

    @property
    def _is_warming_up(self) -> bool:
        return self.current_step() < self.warmup_steps

    def mode(self, names: Sequence[str] = ()) -> ReductionMode:
        """Return how the bucket of these parameters is reduced. Constant within a step.

        A compressed parameter is sent uncompressed once before DeepSpeed reduces it.
        """
        if self._is_warming_up and self.warm_up is None:
            return "deepspeed"
        if self.is_disabled:
            return "uncompressed"
        if self._is_warming_up or self.tuner is None or self.tuner.current == "compressed":
            return "compressed"
        if self.tuner.current == "deepspeed" and self._drained.issuperset(names):
            return "deepspeed"
        return "uncompressed"

    @property
    def is_compressing(self) -> bool:
        """Return whether the step's gradients are sent compressed."""
        return self.mode() == "compressed"

    @property
    def corrects_momentum(self) -> bool:
        """Return whether residuals delay this step's gradients."""
        return not self._is_warming_up and self.is_compressing

    @property
    def _warm_ups(self) -> tuple[Choose, ...]:
        return () if self.warm_up is None else (self.warm_up,)

    def reserve(self, shapes: Iterable[tuple[str, torch.Size]], device: torch.device) -> None:
        """See `AllToAllExchange.reserve`."""
        self.exchange.reserve(shapes, device, *self._warm_ups)

    def preallocate(self, bucket: Bucket, device: torch.device, *, sends: bool) -> None:
        """Preallocate for all exchanges of a bucket; see `AllToAllExchange.preallocate`."""
        others = *self._warm_ups, _uncompressed
        self.exchange.preallocate(bucket, device, *others, sends=sends)

    def choose_reduction(self, names: Sequence[str], loss_scale: float) -> Reduce | None:
        """Begin a bucket; see `ds_ckpt.zero3.gradient_hook.BucketExchange`."""
        self._expects_more = self.at_boundary is not None and not self.at_boundary()
        mode, is_warming_up = self.mode(names), self._is_warming_up
        self.latest_mode = mode
        if is_warming_up and mode == "deepspeed":
            return None
        if not is_warming_up and self.exchange.metric is not None:
            if self._metric_start is None:
                self._metric_start = self.current_step()
            self.exchange.metric.begin_step(self.current_step() - self._metric_start)
        reduce = self.exchange.average
        choose: Choose | None = _uncompressed if mode == "uncompressed" else None
        if self._expects_more:
            reduce = self.exchange.accumulate
        elif is_warming_up and mode == "compressed":
            self._drained.difference_update(names)
            choose = self.warm_up
        else:
            if not self.is_disabled:
                self._sent.update(dict.fromkeys(names, mode))
            if mode == "deepspeed":
                return None
        return partial(reduce, names, loss_scale=loss_scale, choose=choose)

    def commit(self) -> None:
        """End a step that was taken; with a non-finite bucket its residuals are rolled back.

        If the boundary was set after the last backward, gradients were only accumulated. The step
        is then rolled back, and every rank raises UnsupportedError.
        """
        if self._expects_more:
            self.rollback()
            found = "a step that ends before any of its backwards was marked as the last"
            why = "the step's last backward sends its accumulated gradients"
            remedy = "call it with True before the last backward"
            where = "engine.set_gradient_accumulation_boundary"
            raise UnsupportedError(Problem(where, found, why, remedy))
        self._end(is_skipped=False)

    def rollback(self) -> None:
        """End a step that was skipped: everything is bit-equal to before it (law 4)."""
        self._expects_more = False
        self._end(is_skipped=True)

    def _end(self, *, is_skipped: bool) -> None:
        exchange = self.exchange
        nonfinite, before = exchange.nonfinite_buckets, self._nonfinite_before
        self._nonfinite_before = nonfinite
        exchange.reset_step()
        for part in (exchange.feedback, exchange.factors):
            if is_skipped or nonfinite > before:
                part.rollback()
            else:
                part.commit()
        if exchange.metric is not None:
            exchange.metric.end_step(skipped=is_skipped)
        sent, self._sent = self._sent, {}
        if not sent:
            return
        if not is_skipped:
            self._drained.update(name for name, mode in sent.items() if mode != "compressed")
            self._drained.difference_update(n for n, mode in sent.items() if mode == "compressed")
        if self.tuner is not None:
            self.tuner.step_ended(is_counted=not is_skipped)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Return the state of checkpoints beside residuals, by part and key."""
        factors = self.exchange.factors.state_dict()
        return {"factors": factors, "fallback": {"whole": self.is_disabled}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the state; missing parts start anew, and the tuner compares anew."""
        self.exchange.factors.load_state_dict(state.get("factors", {}))
        self.is_disabled = bool(state.get("fallback", {}).get("whole", False))
        self._sent, self._drained = {}, set()
        if self.exchange.metric is not None:
            self.exchange.metric.reset()
            self._metric_start = None
        if self.tuner is not None:
            self.tuner.restart()
        if self.is_disabled and (not dist.is_initialized() or dist.get_rank() == 0):
            log.warning("ds_ckpt: the checkpoint's guard disabled compression; it stays disabled")


@dataclass
class NoCommunication:
    """Sends no gradients, to measure: no compression makes a shorter step.

    Every rank trains its shards on its own gradients. `world` and `dp_rank` are those of the
    process group that shards the parameters.
    """

    world: int
    dp_rank: int

    def choose_reduction(self, names: Sequence[str], loss_scale: float) -> Reduce:
        """Return a function that keeps this rank's own gradients."""
        return self._own_shards

    def _own_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        shards = [ShardLayout(t.numel(), self.world).shard(self.dp_rank) for t in tensors]
        return [t.reshape(-1)[shard] for t, shard in zip(tensors, shards, strict=True)]

    def commit(self) -> None:
        """Keep nothing."""

    rollback = commit


def make_step_state(
    settings: ExchangeSettings,
    between: Transport,
    everyone: Transport,
    feedback: Feedback | None,
    *,
    current_step: Callable[[], int],
    at_boundary: Callable[[], bool] | None = None,
    in_host: InHostSum | None = None,
    embeddings: frozenset[str] = frozenset(),
    tuner: Tuner | None = None,
) -> StepState:
    """Make one rank's end of the exchange, real or virtual; `everyone` sums over all ranks."""
    choose = settings.choose(embeddings, 1 if in_host is None else in_host.processes)
    metric, accumulates = settings.metric(everyone.all_reduce), at_boundary is not None
    kept = feedback or Feedback(enabled=False)
    exchange = AllToAllExchange(
        between, choose, kept, accumulates=accumulates, in_host=in_host, metric=metric
    )
    return StepState(
        exchange,
        warmup_steps=0 if settings.lossless else settings.warmup_steps,
        warm_up=settings.warm_up(choose),
        current_step=current_step,
        at_boundary=at_boundary,
        tuner=tuner,
    )
