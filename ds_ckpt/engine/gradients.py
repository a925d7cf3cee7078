"""The compressed reduction of one engine: its exchange, process groups, state and words."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.config.compression import CompressionConfig, exchange_settings
from ds_ckpt.engine.refusals import refuse_model_parallel
from ds_ckpt.exchange.build import Built, ExchangeSettings, build_exchange, describe
from ds_ckpt.exchange.hierarchy import discard
from ds_ckpt.exchange.plan import UNCOMPRESSED, Plan, PlannedTensor
from ds_ckpt.exchange.rules import MethodSettings, embeddings_of
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry.steps import ExchangeProbe
from ds_ckpt.zero3.compatibility import ends_step
from ds_ckpt.zero3.gradient import BucketExchange
from ds_ckpt.zero3.momentum import lead, parameter_groups, why_no_lead
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise


class Gradients:
    """What `compression` with a method sets up. Collective: every process makes one.

    Args:

    Attributes:
        built: the exchange with its parts.
        plan: which parameter travels how and in how many bytes.

    Raises:
        UnsupportedError: the engine, the hosts or the model's parameters do not allow what the
            section asks for.
    """

    def __init__(self, engine: Any, config: CompressionConfig) -> None:
        refuse_model_parallel(engine)
        self._engine = engine
        self._config = config
        self._settings = exchange_settings(config)
        self._shapes = shapes_of(engine)
        self._embeddings = embeddings_of(engine.module)
        self._settings.choose(self._embeddings).check(
            (name, shape) for name, shape, _ in self._shapes
        )
        group = engine.optimizer.dp_process_group
        self.built: Built = self._build(self._settings, self._boundary(), _parameter_groups(engine))
        groups = self.built.groups
        choose = self._settings.choose(self._embeddings, groups.local)
        self.plan = Plan.of(choose, self._shapes, groups.world, groups.local)
        try:
            run_on_all_or_raise(self._reserve, group, what="allocate its residuals")
        except BaseException:
            self.discard()
            raise

    def _reserve(self) -> None:
        device = torch.empty(0, device=self._engine.device).device  # with its index
        shapes = [(name, shape) for name, shape, _ in self._shapes]
        self.built.exchange.reserve(shapes, device)

    def resident_bytes(self) -> dict[str, int]:
        """What the exchange takes of the accelerator beside the engine, by what it is.

        Residuals as they are; of a bucket's buffers the most that its packets and what is worked on
        in fp32 come to. With two levels the sum inside the host comes first: all of the bucket but
        what stays here goes out and comes in, in the gradients' own type, and its sum is fp32.
        """
        feedback, entries = self.built.feedback, int(self._engine.optimizer.reduce_bucket_size)
        largest = max((math.prod(t.shape) for t in self.plan.tensors), default=0)
        entries, packets = max(entries, largest), 0.0
        left = entries
        for t in sorted(self.plan.tensors, key=_density, reverse=True):
            taken = min(left, math.prod(t.shape))
            packets += taken * _density(t)
            left -= taken
        local = self.built.groups.local
        worked_on = 4 * (entries - left) // local
        copied = feedback is None or feedback.dtype != "fp32" or feedback.on_host
        buffers = 2 * int(packets) // local + (1 + copied) * worked_on
        if local > 1:
            itemsize = max((size for *_, size in self._shapes), default=0)
            crossing = itemsize * (entries - left) * (local - 1) // local
            buffers = max(buffers, 2 * crossing + worked_on)
        found = {"exchange buffers, at most": buffers}
        if feedback is not None and not feedback.on_host:
            found["residuals"] = feedback.nbytes
        return found

    @property
    def groups(self) -> list[Any]:
        """Of the exchange: made for it, or DeepSpeed's."""
        made = (self.built.groups.between, self.built.groups.inside)
        return [group for group in made if group is not None]

    def discard(self) -> None:
        """Destroy the process groups that were made for the exchange."""
        for group in self.built.groups.made:
            discard(group)

    def dense(self) -> BucketExchange:
        """An exchange that sends everything, to hold DeepSpeed's own reduction against."""
        return self._build(ExchangeSettings(MethodSettings("dense"), levels=1)).exchange

    def _boundary(self) -> Callable[[], bool] | None:
        """Tells the last micro-step of a step; None where every micro-step is exchanged."""
        engine = self._engine
        managed = getattr(engine._config, "managed_gradient_accumulation", True)
        held_back = managed and self._settings.holds_back(engine.gradient_accumulation_steps())
        return partial(ends_step, engine.optimizer) if held_back else None

    def _build(
        self,
        settings: ExchangeSettings,
        at_boundary: Callable[[], bool] | None = None,
        parameter_groups: dict[str, int] | None = None,
    ) -> Built:
        from deepspeed import comm

        engine = self._engine
        return build_exchange(
            settings,
            group=engine.optimizer.dp_process_group,
            all_to_all_single=comm.all_to_all_single,
            all_reduce=comm.all_reduce,
            current_step=lambda: int(engine.global_steps),
            at_boundary=at_boundary,
            embeddings=self._embeddings,
            parameter_groups=parameter_groups,
        )

    def lead(self, patches: Patches) -> None:
        """Have the optimizer step with the lead that fits; `patches` takes it back."""
        if (moments := self.built.exchange.moments) is not None:
            lead(self._engine.optimizer, moments, patches)

    def probe(self) -> ExchangeProbe:
        """For the step log."""
        exchange = self.built.exchange
        return ExchangeProbe(
            exchange.all_to_all.timings,
            exchange.all_to_all.errors,
            lambda: exchange.compresses,
            lambda: gradient_norm(self._engine),
            self.plan.records(),
        )

    def describe(self) -> list[str]:
        """Clauses for the line at the start."""
        groups = self.built.groups
        clauses = [describe(self._settings, self.plan, groups)]
        if self._boundary() is not None:
            clauses.append("one exchange an accumulated step")
        if self.built.feedback and self.built.feedback.accumulates:
            clauses.append(self._residual_words(self.built.feedback))
        if (moments := self.built.exchange.moments) is not None:
            clauses.append(moments.describe())
        elif self._config.error_feedback.momentum != "none":
            why = why_no_lead(self._engine.optimizer)
            clauses.append(f"first moments stay as they are: {why}")
        clauses.append("gradients are about a third of ZeRO-3's traffic")
        return clauses

    def _residual_words(self, feedback: Feedback) -> str:
        entry_bytes = feedback.entry_bytes / (len(self.built.groups.peers) or 1)
        kept = "" if feedback.dtype == "fp32" else f" as {feedback.dtype}"
        cost = f"{entry_bytes:.3g} bytes{' of host memory' if feedback.on_host else ''}"
        if not feedback.enabled:
            what, of = "earlier micro-steps, held until then,", "parameter"
            tensors = self.plan.tensors
        else:
            what, of = f"residuals{kept}", "compressed parameter"
            tensors = tuple(t for t in self.plan.tensors if t.how != UNCOMPRESSED)
        total = entry_bytes * sum(math.prod(t.shape) for t in tensors)
        in_all = f"{total / 1e6:.4g} MB" if total < 1e9 else f"{total / 1e9:,.1f} GB"
        return f"{what} cost {cost} a {of} a process, {in_all}"


def _density(tensor: PlannedTensor) -> float:
    """Bytes an entry on the wire."""
    return tensor.sent_bytes / max(1, math.prod(tensor.shape))


def trained(engine: Any) -> list[tuple[str, Any]]:
    """Name and parameter of all that DeepSpeed's optimizer steps, frozen for now or not."""
    stepped = {p.ds_id for group in engine.optimizer.fp16_groups for p in group}
    return [(n, p) for n, p in engine.module.named_parameters() if p.ds_id in stepped]


def shapes_of(engine: Any) -> list[tuple[str, torch.Size, int]]:
    """Name, full shape and bytes an element of every trained parameter."""
    travels = engine.optimizer.get_param_comm_dtype  # communication_data_type, or autocast's
    return [(n, p.ds_shape, travels(p).itemsize) for n, p in trained(engine)]


def _parameter_groups(engine: Any) -> dict[str, int] | None:
    """Number of the optimizer's group by parameter name; None where it is left alone."""
    if why_no_lead(engine.optimizer):
        return None
    return parameter_groups(engine.optimizer, {p.ds_id: name for name, p in trained(engine)})


def gradient_norm(engine: Any) -> float | None:
    """Of the last step's averaged gradient, as DeepSpeed's clipping knows it; None where it is 0,
    not finite, or not known yet."""
    norm = engine.get_global_grad_norm()
    known = norm is not None and math.isfinite(norm) and norm > 0
    return float(norm) if known else None


def residual_files(engine: Any, method: str, built: Built | None) -> ResidualFiles:
    """What travels with the engine's checkpoints; without an exchange it only clears and warns."""
    group = engine.optimizer.dp_process_group
    dp_rank = torch.distributed.get_rank(group)
    peers = built.groups.peers if built else ()
    return ResidualFiles(
        built.feedback if built else None,
        method=method,
        numels={n: shape.numel() for n, shape, _ in shapes_of(engine)},
        dp_rank=dp_rank,
        world=torch.distributed.get_world_size(group),
        members=next((at for at in peers if dp_rank in at), None),
        parts=built.exchange.parts() if built else None,
    )
