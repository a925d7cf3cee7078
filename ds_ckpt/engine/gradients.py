"""The compressed gradient exchange of one engine: step state, process groups, start-up text."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.config.compression import CompressionConfig, exchange_settings
from ds_ckpt.engine.refusals import refuse_model_parallel
from ds_ckpt.engine.step import GRADIENTS, StepState, make_step_state
from ds_ckpt.engine.tuner import Tuner
from ds_ckpt.exchange.assignment import UNCOMPRESSED, AssignedTensor, Assignment
from ds_ckpt.exchange.hierarchy import InHostSum, discard, make_groups
from ds_ckpt.exchange.rules import ExchangeSettings, MethodSettings, embeddings_of
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.exchange.transport import TorchTransport
from ds_ckpt.patch import Patches
from ds_ckpt.zero3.compatibility import ends_step
from ds_ckpt.zero3.momentum import correct_momentum, parameter_groups, why_not_corrected
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise


class Gradients:
    """Sets up `compression` with a method. Collective: every rank makes one.

    Attributes:
        step: reduces buckets; commits and rolls back.
        feedback: its residuals; None if nothing is left out or accumulated.
        groups: process groups of one or two levels.
        assignment: compressor and bytes of each parameter.

    Raises:
        UnsupportedError: the engine, the nodes or the model's parameters do not support the
            section.
    """

    def __init__(self, engine: Any, config: CompressionConfig) -> None:
        refuse_model_parallel(engine)
        self._engine, self._config = engine, config
        self._settings = settings = exchange_settings(config)
        self._shapes = shapes_of(engine)
        self._embeddings = embeddings_of(engine.module)
        settings.choose(self._embeddings).check((name, shape) for name, shape, _ in self._shapes)
        group = engine.optimizer.dp_process_group
        self.groups = groups = make_groups(group, settings.levels)
        choose = settings.choose(self._embeddings, groups.local)
        self.assignment = Assignment.of(choose, self._shapes, groups.world, groups.local)
        at_boundary = self._boundary()
        dp_rank = torch.distributed.get_rank(group)
        self.feedback: Feedback | None = settings.residuals(dp_rank, holds=at_boundary is not None)
        in_host = None
        if groups.inside is not None:
            in_host = InHostSum(_transport(groups.inside), groups.peers)
        self.step: StepState = make_step_state(
            settings,
            _transport(groups.between),
            _transport(group),
            self.feedback,
            current_step=lambda: int(engine.global_steps),
            at_boundary=at_boundary,
            in_host=in_host,
            embeddings=self._embeddings,
            tuner=self._tuner(at_boundary is not None),
        )
        try:
            run_on_all_or_raise(self._reserve, group, what="allocate its residuals")
        except BaseException:
            self.discard()
            raise

    def _boundary(self) -> Callable[[], bool] | None:
        """Return a test for the last micro-step; None if every micro-step is exchanged."""
        engine = self._engine
        managed = getattr(engine._config, "managed_gradient_accumulation", True)
        once = managed and self._settings.holds_back(engine.gradient_accumulation_steps())
        return partial(ends_step, engine.optimizer) if once else None

    def _tuner(self, once: bool) -> Tuner | None:
        if not self._settings.autotune or self._settings.lossless:
            return None
        group = self._engine.optimizer.dp_process_group
        return Tuner(
            ("compressed", "uncompressed" if once else "deepspeed"),
            lambda times: torch.distributed.all_reduce(times, group=group),
            world=torch.distributed.get_world_size(group),
            device=torch.device(self._engine.device),
            subject=GRADIENTS,
            is_logging_rank=torch.distributed.get_rank(group) == 0,
        )

    def _reserve(self) -> None:
        device = torch.empty(0, device=self._engine.device).device  # with its index
        self.step.reserve([(name, shape) for name, shape, _ in self._shapes], device)

    def dense(self) -> StepState:
        """Return an exchange that sends everything, to compare with DeepSpeed's reduction."""
        everyone = _transport(self._engine.optimizer.dp_process_group)
        settings = ExchangeSettings(MethodSettings("dense"), levels=1)
        return make_step_state(settings, everyone, everyone, None, current_step=lambda: 0)

    def resident_bytes(self) -> dict[str, int]:
        """Return bytes of the accelerator that the exchange takes beside the engine, by purpose.

        The buffers are the most that a bucket's packets and fp32 working tensors come to. With two
        levels the sum inside the node comes first: all of the bucket but what stays here goes out
        and comes in, in the gradients' own type, and its sum is fp32.
        """
        feedback, entries = self.feedback, int(self._engine.optimizer.reduce_bucket_size)
        largest = max((math.prod(t.shape) for t in self.assignment.tensors), default=0)
        entries, packets = max(entries, largest), 0.0
        left = entries
        for t in sorted(self.assignment.tensors, key=_density, reverse=True):
            taken = min(left, math.prod(t.shape))
            packets += taken * _density(t)
            left -= taken
        local = self.groups.local
        working = 4 * (entries - left) // local
        copied = feedback is None or feedback.dtype != "fp32" or feedback.on_host
        buffers = 2 * int(packets) // local + (1 + copied) * working
        if local > 1:
            itemsize = max((size for *_, size in self._shapes), default=0)
            crossing = itemsize * (entries - left) * (local - 1) // local
            buffers = max(buffers, 2 * crossing + working)
        found = {"exchange buffers, at most": buffers}
        if feedback is not None and not feedback.on_host:
            found["residuals"] = feedback.nbytes
        return found

    def discard(self) -> None:
        """Destroy the process groups that were made for the exchange."""
        for group in self.groups.made:
            discard(group)

    def correct_momentum(self, patches: Patches) -> None:
        """Patch the optimizer to step with the momentum correction of the settings."""
        optimizer, value = self._engine.optimizer, self._settings.momentum_correction
        if not value or why_not_corrected(optimizer) or self.step.exchange.world == 1:
            return
        groups = parameter_groups(optimizer, {p.ds_id: name for name, p in trained(self._engine)})
        delayed = {groups[t.name] for t in self.assignment.tensors if t.how != UNCOMPRESSED}

        def correction_of(group: int) -> float:
            return value if group in delayed and self.step.corrects_momentum else 0.0

        correct_momentum(optimizer, correction_of, patches)

    def describe(self) -> list[str]:
        """Return clauses for the line at the start."""
        settings, levels = self._settings, ""
        if self.groups.levels == 2:
            ranks = len(self.groups.peers)
            levels = f", between nodes; summed exactly among the {ranks} ranks of a node"
        if settings.lossless:
            clauses = [f"gradients uncompressed by all-to-all, summed at the owner{levels}"]
        else:
            by_compressor = self.assignment.by_compressor().items()
            how = ", ".join(f"{words} on {n}" for words, (n, _, _) in by_compressor)
            clauses = [
                f"gradients: {how} tensors, starting at step {settings.warmup_steps}: "
                f"{self.assignment.share:.2%} of the dense gradient bytes{levels}, error feedback "
                f"{'on' if settings.error_feedback else 'off: what is not sent is lost'}"
                f"{', if it shortens the step' if settings.autotune else ''}"
            ]
        if self._boundary() is not None:
            clauses.append("one exchange an accumulated step")
        if self.feedback and self.feedback.accumulates:
            clauses.append(self._describe_residuals(self.feedback))
        if value := settings.momentum_correction:
            why = why_not_corrected(self._engine.optimizer)
            clauses.append(
                f"no momentum correction: {why}" if why else f"momentum correction {value:g}"
            )
        return [*clauses, "gradients are about a third of ZeRO-3's traffic"]

    def _describe_residuals(self, feedback: Feedback) -> str:
        entry_bytes = feedback.entry_bytes / self.groups.local
        kept = f"residuals{'' if feedback.dtype == 'fp32' else f' as {feedback.dtype}'}"
        where = " of host memory" if feedback.on_host else ""
        tensors = [t for t in self.assignment.tensors if t.how != UNCOMPRESSED]
        what, of = kept, "compressed parameter"
        if not feedback.enabled:
            what, of = "earlier micro-steps, accumulated,", "parameter"
            tensors = list(self.assignment.tensors)
        total = entry_bytes * sum(math.prod(t.shape) for t in tensors)
        return f"{what} cost {entry_bytes:.3g} bytes{where} a {of} a rank, {total / 1e6:,.4g} MB"


def _transport(group: Any) -> TorchTransport:
    """DeepSpeed's collectives, which are counted."""
    from deepspeed import comm

    return TorchTransport(group, comm.all_to_all_single, comm.all_reduce)


def _density(tensor: AssignedTensor) -> float:
    """Return bytes an entry on the wire."""
    return tensor.sent_bytes / max(1, math.prod(tensor.shape))


def trained(engine: Any) -> list[tuple[str, Any]]:
    """Return name and parameter of all that DeepSpeed's optimizer steps, frozen now or not."""
    stepped = {p.ds_id for group in engine.optimizer.fp16_groups for p in group}
    return [(n, p) for n, p in engine.module.named_parameters() if p.ds_id in stepped]


def shapes_of(engine: Any) -> list[tuple[str, torch.Size, int]]:
    """Return name, full shape and bytes an element, as sent, of every trained parameter."""
    sent_as = engine.optimizer.get_param_comm_dtype  # communication_data_type, or autocast's
    return [(n, p.ds_shape, sent_as(p).itemsize) for n, p in trained(engine)]


def gradient_norm(engine: Any) -> float | None:
    """Return the norm of the last step's averaged gradient, as DeepSpeed's clipping computes it.

    None if it is 0, not finite, or not known yet.
    """
    norm = engine.get_global_grad_norm()
    known = norm is not None and math.isfinite(norm) and norm > 0
    return float(norm) if known else None


def residual_files(engine: Any, method: str, gradients: Gradients | None) -> ResidualFiles:
    """Return the state in checkpoints; without an exchange it only clears old files and warns."""
    group = engine.optimizer.dp_process_group
    return ResidualFiles(
        gradients.feedback if gradients else None,
        method=method,
        numels={n: shape.numel() for n, shape, _ in shapes_of(engine)},
        dp_rank=torch.distributed.get_rank(group),
        world=torch.distributed.get_world_size(group),
        peers=gradients.groups.peers if gradients else (),
        step=gradients.step if gradients else None,
    )
