"""Assembly: configuration, parts, engine. Entry points are in `entry.py`."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.inputs import CheckpointedInputs, build_inputs
from ds_ckpt.activation.inputs import describe as describe_keeping
from ds_ckpt.activation.planning.budget import ActivationPlan
from ds_ckpt.activation.policies import Unit, make_plan
from ds_ckpt.config import PluginConfig
from ds_ckpt.config.activation import activation_policy
from ds_ckpt.config.verdicts import limits
from ds_ckpt.engine.gradients import Gradients, gradient_norm, residual_files, trained
from ds_ckpt.engine.guard import ErrorSampler, Guard
from ds_ckpt.engine.planning import Planning
from ds_ckpt.engine.refusals import (
    nothing_to_replace,
    refuse_no_zero3_optimizer,
    refuse_pipeline,
)
from ds_ckpt.engine.tensor_parallel import TensorParallelGroup, find_group
from ds_ckpt.engine.weights import ResidentWeights, make_resident
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.counters import OffloadCounters, PartitionCounters
from ds_ckpt.telemetry.steps import Event, ExchangeProbe, StepLog
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.zero3 import collectives, compatibility
from ds_ckpt.zero3.checkpoints import wrap_checkpoints
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.gradient import BucketExchange, GradientHook

log = logging.getLogger("ds_ckpt")
ATTRIBUTE = "_ds_ckpt_session"


class Session:
    """The plugin on one DeepSpeed engine, until `detach()`.

    Attributes:
        engine: DeepSpeed's engine.
        config: The validated configuration.
        counters: Bytes sent by purpose, and gathers, since attach.
        summary: One line: active parts and their cost.
        guard: Compares compression errors with validated limits; None if off.
    """

    def __init__(self, engine: Any, config: PluginConfig, mpu: Any = None) -> None:
        self.engine = engine
        self.config = config
        self.counters = Counters()
        self.guard: Guard | None = None
        self._mpu = mpu
        self._group: TensorParallelGroup | None = None
        self._planning: Planning | None = None
        self._steps: StepLog | None = None
        self._sampler: ErrorSampler | None = None
        self._forget_parts()
        self._patches = Patches()
        self._undo: list[Callable[[], object]] = []
        """Detach each part, in the order of attaching."""
        self._after_step: list[Callable[[int], None]] = []
        """Called with the number of each optimizer step that has ended."""
        try:
            self._assemble()
        except BaseException:
            self.detach()
            raise
        self._patches.set(engine, ATTRIBUTE, self)
        self.summary = self._describe()
        if torch.distributed.get_rank() == 0:
            ensure_log_handler()
            log.info(self.summary)
            if self.plan is not None and self.plan.compressed:
                log.info("ds_ckpt: compressor and bytes per step\n%s", self.plan.table())

    def _forget_parts(self) -> None:
        self._blocks: CheckpointedBlocks | None = None
        self._inputs: CheckpointedInputs | None = None
        self._gather: GatherHook | None = None
        self._gradient: GradientHook | None = None
        self._gradients: Gradients | None = None
        self._resident: ResidentWeights | None = None

    def _assemble(self) -> None:
        engine, config = self.engine, self.config
        refuse_pipeline(engine)
        compatibility.require_torch()
        collectives.listen(self.counters)
        self._undo.append(lambda: collectives.unlisten(self.counters))
        if engine.zero_optimization_stage() == 3:
            self._attach_hooks()
        if config.activation.active:
            self._attach_checkpointing()
        if config.telemetry.enabled:
            self._attach_telemetry()
        if self._gradients is not None and config.compression.guard.active:
            self._attach_guard(self._gradients)
        step, destroy = engine.step, engine.destroy

        @functools.wraps(step)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            before = int(engine.global_steps)
            result = step(*args, **kwargs)
            if int(engine.global_steps) > before:
                for act in self._after_step:
                    act(int(engine.global_steps))
            return result

        @functools.wraps(destroy)
        def detach_and_destroy() -> None:
            try:
                self.detach()
            finally:
                destroy()

        self._patches.set(engine, "step", counted_step)
        self._patches.set(engine, "destroy", detach_and_destroy)

    def _attach_hooks(self) -> None:
        """Attach what acts on ZeRO-3: gathers, gradients, resident weights, checkpoints."""
        engine, config = self.engine, self.config
        changed = compatibility.require()
        refuse_no_zero3_optimizer(engine)
        for finding in changed:
            log.warning("ds_ckpt: %s: %s", finding.symbol, finding.detail)
        optimizer = engine.optimizer
        share = config.activation.active and config.activation.share_gather
        self._gather = gather = GatherHook(optimizer, self.counters, share=share)
        self._undo.append(lambda: gather.detach())
        step = verify = None
        if config.compression.method != "none":
            self._gradients = gradients = Gradients(engine, config.compression)
            self._undo.append(gradients.discard)
            step = gradients.step
            verify = gradients.dense() if changed else None
            gradients.correct_momentum(self._patches)
            self._sampler = ErrorSampler(engine, step.exchange.errors)
            self._after_step.append(self._sampler.step_ended)
        names = {p.ds_id: n for n, p in trained(engine)}
        gradient = GradientHook(optimizer, names, step, self.counters, verify=verify)
        self._gradient = gradient
        self._undo.append(lambda: gradient.detach())
        if config.weights.resident:
            self._resident = make_resident(engine, config.weights, self.counters, gather, gradient)
        if self._resident is not None:
            self._undo.append(self._resident.detach)
            self._after_step.append(self._place_weights)
        wrap_checkpoints(
            engine,
            residual_files(engine, config.compression.method, self._gradients),
            self._patches,
            drop_step=gradient.drop_step,
            loading=self._resident.loading if self._resident else nullcontext,
        )

    def _place_weights(self, step: int) -> None:
        gradients = self._gradients.step if self._gradients else None
        tuner = gradients.tuner if gradients is not None and not gradients.is_disabled else None
        if self._resident is not None:
            self._resident.step_ended(is_busy=tuner is not None and tuner.is_comparing)

    def _attach_checkpointing(self) -> None:
        activation = self.config.activation
        if activation.partition:
            self._group = find_group(self.engine, self._mpu, self.counters)
            self._after_step.append(self._report_partition)
        if activation.planned:
            self._planning = Planning(
                self.engine,
                activation,
                install=self._install_units,
                report=self._report_plan,
                beside=self._gradients.resident_bytes if self._gradients else dict,
            )
            self._undo.append(self._planning.stop)
        else:
            units = make_plan(self.engine.module, activation_policy(activation))
            self._install_units(units)

    def _install_units(self, units: Sequence[Unit]) -> None:
        """Checkpoint the model's blocks."""
        model = self.engine.module
        activation, device = self.config.activation, torch.device(self.engine.device)
        self._inputs = build_inputs(activation, model, units, device, self._group)
        self._blocks = blocks = CheckpointedBlocks(
            model,
            scopes=[self._gather.recompute] if self._gather else [],
            policy=activation_policy(activation),
            units=units,
            around=self._inputs.around if self._inputs else None,
            trackers=_random_trackers(),
        )
        self._undo.append(lambda: blocks.remove())

    def _attach_guard(self, gradients: Gradients) -> None:
        config = self.config.compression
        known, action = limits(config), config.guard.action
        assert known is not None, "the configuration is refused without"
        assert action != "off"
        is_logging_rank = torch.distributed.get_rank() == 0
        self.guard = Guard(gradients.step, known, action, is_logging_rank=is_logging_rank)
        self.observe(config.guard.every_n_steps, self.guard.check)

    def _attach_telemetry(self) -> None:
        telemetry = self.config.telemetry
        self._steps = StepLog(
            self.counters,
            every_n_steps=telemetry.every_n_steps,
            path=telemetry.path,
            process=torch.distributed.get_rank(),
            exchange=self._probe(telemetry.every_n_steps),
            monitor=self._monitor(),
        )
        self._after_step.append(self._steps.step_ended)

    def _monitor(self) -> Callable[[list[Event]], None] | None:
        """Return DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet), if any is enabled."""
        monitor = getattr(self.engine, "monitor", None)
        if torch.distributed.get_rank() or monitor is None or not monitor.enabled:
            return None
        write: Callable[[list[Event]], None] = monitor.write_events
        return write

    def _probe(self, every_n_steps: int) -> ExchangeProbe | None:
        gradients, sampler = self._gradients, self._sampler
        if gradients is None or sampler is None:
            return None
        sampler.subscribe(every_n_steps)
        return ExchangeProbe(
            gradients.step.exchange.timings,
            lambda: sampler.latest,
            lambda: gradients.step.is_compressing,
            lambda: gradient_norm(self.engine),
            gradients.assignment.records(),
        )

    def _report_plan(self, plan: ActivationPlan) -> None:
        if self._steps is not None:
            self._steps.note({"activation_plan": asdict(plan)})
        if torch.distributed.get_rank() == 0:
            ensure_log_handler()
            log.info("ds_ckpt: %s", plan.line())
            log.info("ds_ckpt: activation plan by block\n%s", plan.table())

    def _report_partition(self, step: int) -> None:
        """Log once, after the first step that gathered."""
        counters = self.partition
        if counters is None or not counters.gathers:
            return
        self._after_step = [act for act in self._after_step if act != self._report_partition]
        if torch.distributed.get_rank() == 0:
            log.info("ds_ckpt: step %d, %s", step, counters.line())

    @property
    def activation_plan(self) -> ActivationPlan | None:
        """Plan of policy "budget" or "auto"; None before the first batch."""
        return self._planning.plan if self._planning else None

    @property
    def offload(self) -> OffloadCounters | None:
        """Bytes offloaded and fetched, by block; None without offload."""
        store = self._inputs.store if self._inputs else None
        return store.counters if store else None

    @property
    def partition(self) -> PartitionCounters | None:
        """Bytes split over the tensor-parallel group, and gathered; None without partition."""
        partition = self._inputs.partition if self._inputs else None
        return partition.counters if partition else None

    @property
    def plan(self) -> Assignment | None:
        """Compressor and bytes of each parameter; None without compression."""
        return self._gradients.assignment if self._gradients else None

    @property
    def exchange(self) -> Gradients | None:
        """The exchange with its residuals and groups; None without compression."""
        return self._gradients

    @property
    def residual_bytes(self) -> int:
        """Bytes of residuals on this rank."""
        feedback = self._gradients.feedback if self._gradients else None
        return feedback.nbytes if feedback else 0

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """Committed residuals by parameter name: flat fp32, in units of the averaged gradient."""
        feedback = self._gradients.feedback if self._gradients else None
        return feedback.state_dict() if feedback else {}

    def observe(self, every_n_steps: int, act: Callable[[int, ResidualStats], None]) -> None:
        """Call `act` with compression errors, every so many optimizer steps.

        Collective: every rank observes the same. Never called without compression.
        """
        if self._sampler is not None:
            self._sampler.observe(every_n_steps, act)

    def drain(self) -> None:
        """Wait for weight changes in flight, as the next forward does. Collective."""
        if self._resident is not None:
            self._resident.hook.drain()

    def measure_with(self, exchange: BucketExchange) -> None:
        """Reduce gradients by another exchange, between steps; for measurements only.

        `NoCommunication` gives the upper bound of compression; its training is meaningless.

        Raises:
            UnsupportedError: There is no ZeRO-3 reduction to replace.
        """
        if self._gradient is None:
            raise nothing_to_replace(self.engine.zero_optimization_stage())
        self._gradient.replace_exchange(exchange)

    def _describe(self) -> str:
        parts = []
        if self._planning:
            words = self.config.activation.summary()
            parts.append(f"{words}, planned at the first training batch")
        if self._blocks:
            parts.append(self._describe_checkpointing(self._blocks))
        if self._gradients:
            parts += self._gradients.describe()
        if self._resident:
            parts.append(self._resident.summary)
        elif self.config.weights.resident and self._gather:
            parts.append("weights not resident: all ranks share one node")
        if self.guard:
            parts.append(self.guard.describe())
        if self.config.telemetry.enabled:
            parts.append("telemetry on")
        return "ds_ckpt: " + ("; ".join(parts) if parts else "nothing is switched on")

    def _describe_checkpointing(self, blocks: CheckpointedBlocks) -> str:
        activation = self.config.activation
        policy: str = activation.policy
        if activation.rules:
            policy = "rules" if policy == "none" else f"{policy} and rules"
        words = f"{policy} checkpointing on {blocks.describe()}"
        if activation.policy == "block" and not activation.rules:
            words += ": about one more forward a step"
        if self._gather is not None:
            shared = activation.share_gather
            words += ", no extra weight gathers" if shared else ", weights gathered once more"
        if activation.check_every:
            words += ", every recompute's values checked"
            if activation.check_every > 1:
                words += f" in one forward of {activation.check_every}"
        device = torch.device(self.engine.device)
        return words + describe_keeping(activation, len(blocks.units), device, self._group)

    def detach(self) -> None:
        """Restore DeepSpeed, the engine and the model. Residuals are dropped.

        If a part raises, for example while it waits for a rank that has gone, the others are
        restored all the same.
        """
        undo, self._undo = self._undo, []
        with ExitStack() as last_first:
            for detach in undo:
                last_first.callback(detach)
            last_first.callback(self._patches.undo)
        self._forget_parts()


def _random_trackers() -> list[Any]:
    """Return the random states of tensor-parallel code: DeepSpeed's and Megatron's."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    trackers = [get_cuda_rng_tracker()]
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None:
        trackers.append(megatron.get_cuda_rng_tracker())
    return trackers


def ensure_log_handler() -> None:
    """Print log lines if the program has not configured logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
