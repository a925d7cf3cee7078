"""Where everything is put together: configuration, parts, engine.

The ways in are in `entry.py`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from ds_ckpt.engine.patience import AsPatientAsTheWorld
from ds_ckpt.engine.planning import Planning
from ds_ckpt.engine.refusals import (
    nothing_to_replace,
    refuse_no_zero3_optimizer,
    refuse_pipeline,
)
from ds_ckpt.engine.residence import ResidencyTuner
from ds_ckpt.engine.tensor_parallel import TensorParallelGroup, find_group
from ds_ckpt.engine.weights import HeldFiles, Resident, keep_resident
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.counters import OffloadCounters, PartitionCounters
from ds_ckpt.telemetry.steps import Event, ExchangeProbe, StepLog
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.zero3 import collectives, compatibility
from ds_ckpt.zero3.checkpoints import StateFiles, wrap_checkpoints
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.gradient import BucketExchange, GradientHook

log = logging.getLogger("ds_ckpt")
ATTRIBUTE = "_ds_ckpt_session"


class Session:
    """The plugin on one DeepSpeed engine, until `detach()`.

    Attributes:
        engine: DeepSpeed's engine.
        config: the checked configuration.
        counters: bytes sent by purpose and gathers, from the moment of attaching.
        summary: the line that says what is active and what it costs.
        guard: what watches compression; None where nothing does.
    """

    def __init__(self, engine: Any, config: PluginConfig, mpu: Any = None) -> None:
        self.engine = engine
        self.config = config
        self.counters = Counters()
        self._mpu = mpu
        self._group: TensorParallelGroup | None = None
        self._partition_told = False
        self._planning: Planning | None = None
        self._steps: StepLog | None = None
        self._blocks: CheckpointedBlocks | None = None
        self._inputs: CheckpointedInputs | None = None
        self._gather: GatherHook | None = None
        self._gradient: GradientHook | None = None
        self._gradients: Gradients | None = None
        self._sampler: ErrorSampler | None = None
        self._resident: Resident | None = None
        self._residence: ResidencyTuner | None = None
        self._patience: AsPatientAsTheWorld | None = None
        self.guard: Guard | None = None
        self._patches = Patches()
        try:
            self._put_together()
        except BaseException:
            self.detach()
            raise
        self._patches.set(engine, ATTRIBUTE, self)
        self.summary = self._describe()
        if torch.distributed.get_rank() == 0:
            make_heard()
            log.info(self.summary)
            if self.plan is not None and self.plan.compressed:
                log.info("ds_ckpt: what travels how, bytes a step\n%s", self.plan.table())

    def _put_together(self) -> None:
        engine, config = self.engine, self.config
        refuse_pipeline(engine)
        compatibility.require_torch()
        stage3 = engine.zero_optimization_stage() == 3
        changed = compatibility.require() if stage3 else []
        collectives.listen(self.counters)
        states: list[StateFiles] = [self._attach_hooks(changed)] if stage3 else []
        if config.weights.resident:
            states += self._keep_weights()
        if states:
            self._travel_with_checkpoints(states)
        ours = [*self._gradients.groups.made] if self._gradients else []
        ours += self._resident.groups if self._resident else ()
        if ours:
            self._patience = AsPatientAsTheWorld([engine.optimizer.dp_process_group, *ours])
        if config.activation.active:
            self._checkpoint()
        if config.telemetry.enabled:
            self._attach_telemetry()
        if self.exchange is not None and config.compression.guard.active:
            self.guard = self._guarded(self.exchange)
        destroy = engine.destroy

        @functools.wraps(destroy)
        def detach_and_destroy() -> None:
            try:
                self.detach()
            finally:
                destroy()

        self._patches.set(engine, "destroy", detach_and_destroy)

    def _keep_weights(self) -> list[HeldFiles]:
        engine = self.engine
        self._resident = keep_resident(engine, self.config.weights, self.counters)
        if (hook := self._resident.hook) is None:
            return []
        group = engine.optimizer.dp_process_group
        rank = torch.distributed.get_rank(group)
        residence = None
        if self.config.weights.resident == "auto":
            make_room, is_busy = self._resident.make_room, self._compares_gradients
            residence = ResidencyTuner(engine, hook, make_room, is_busy)
            self._after_steps(residence.step_ended)
        self._residence = residence
        return [HeldFiles(hook, rank, torch.distributed.get_world_size(group))]

    def _travel_with_checkpoints(self, states: Sequence[StateFiles]) -> None:
        engine, gradient = self.engine, self._gradient
        assert gradient is not None
        dp_rank = torch.distributed.get_rank(engine.optimizer.dp_process_group)
        wrap_checkpoints(
            engine, states, self._patches, drop_step=gradient.drop_step, begins=dp_rank == 0
        )
        hook = self._resident.hook if self._resident else None
        if hook is None:
            return
        residence, load_checkpoint = self._residence, engine.load_checkpoint

        @functools.wraps(load_checkpoint)
        def load_and_gather(*args: Any, **kwargs: Any) -> Any:
            with hook.loading():
                result = load_checkpoint(*args, **kwargs)
            if residence is not None:
                residence.loaded()
            return result

        self._patches.set(engine, "load_checkpoint", load_and_gather)

    def _compares_gradients(self) -> bool:
        """Whether steps are timed with gradients one way and the other."""
        step = self._gradients.step if self._gradients else None
        if step is None or step.tuner is None:
            return False
        return step.tuner.is_comparing and not step.is_disabled

    def _checkpoint(self) -> None:
        activation = self.config.activation
        if activation.partition:
            self._group = find_group(self.engine, self._mpu, self.counters)
            self._after_steps(self._tell_partition)
        if activation.planned:
            self._planning = Planning(
                self.engine,
                activation,
                install=self._install_units,
                report=self._report_plan,
                beside=self._gradients.resident_bytes if self._gradients else dict,
            )
        else:
            units = make_plan(self.engine.module, activation_policy(activation))
            self._install_units(units)

    def _install_units(self, units: Sequence[Unit]) -> None:
        """Put checkpointing on the model."""
        model = self.engine.module
        activation, device = self.config.activation, torch.device(self.engine.device)
        policy = activation_policy(activation)
        self._inputs = build_inputs(activation, model, units, device, self._group)
        self._blocks = CheckpointedBlocks(
            model,
            scopes=[self._gather.recompute] if self._gather else [],
            policy=policy,
            units=units,
            around=self._inputs.around if self._inputs else None,
            trackers=_random_trackers(),
        )

    def _report_plan(self, plan: ActivationPlan) -> None:
        if self._steps is not None:
            self._steps.note({"activation_plan": asdict(plan)})
        if torch.distributed.get_rank() == 0:
            make_heard()
            log.info("ds_ckpt: %s", plan.line())
            log.info("ds_ckpt: activation plan by block\n%s", plan.table())

    @property
    def activation_plan(self) -> ActivationPlan | None:
        """What each block does under policy "budget" or "auto"; None before the first batch."""
        return self._planning.plan if self._planning else None

    def _tell_partition(self, step: int) -> None:
        """Once, after the first step that gathered."""
        counters = self.partition
        if counters is not None and counters.gathers and not self._partition_told:
            self._partition_told = True
            if torch.distributed.get_rank() == 0:
                log.info("ds_ckpt: step %d, %s", step, counters.line())

    def _after_steps(self, act: Callable[[int], None]) -> None:
        """Have `act` called with the number of every optimizer step that has ended."""
        engine = self.engine
        step = engine.step

        @functools.wraps(step)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            before = int(engine.global_steps)
            result = step(*args, **kwargs)
            if int(engine.global_steps) > before:
                act(int(engine.global_steps))
            return result

        self._patches.set(engine, "step", counted_step)

    @property
    def offload(self) -> OffloadCounters | None:
        """What left the device and came back, by block; None where nothing is moved."""
        store = self._inputs.store if self._inputs else None
        return store.counters if store else None

    @property
    def partition(self) -> PartitionCounters | None:
        """What was split over the tensor-parallel group, and gathered; None where nothing is."""
        partition = self._inputs.partition if self._inputs else None
        return partition.counters if partition else None

    def _attach_hooks(self, changed: list[compatibility.Finding]) -> ResidualFiles:
        engine, config = self.engine, self.config
        refuse_no_zero3_optimizer(engine)
        optimizer = engine.optimizer
        names = {p.ds_id: n for n, p in trained(engine)}
        share = config.activation.active and config.activation.share_gather
        self._gather = GatherHook(optimizer, self.counters, share=share)
        for finding in changed:
            log.warning("ds_ckpt: %s: %s", finding.symbol, finding.detail)
        step = verify = None
        if config.compression.method != "none":
            self._gradients = Gradients(engine, config.compression)
            step = self._gradients.step
            verify = self._gradients.dense() if changed else None
            self._gradients.correct_momentum(self._patches)
            self._sampler = ErrorSampler(engine, step.exchange.errors)
            self._after_steps(self._sampler.step_ended)
        self._gradient = GradientHook(optimizer, names, step, self.counters, verify=verify)
        return residual_files(engine, config.compression.method, self._gradients)

    @property
    def plan(self) -> Assignment | None:
        """Which parameter travels how and in how many bytes; None without compression."""
        return self._gradients.assignment if self._gradients else None

    @property
    def exchange(self) -> Gradients | None:
        """The exchange with its residuals and groups; None without compression."""
        return self._gradients

    def _guarded(self, gradients: Gradients) -> Guard:
        config = self.config.compression
        known, action = limits(config), config.guard.action
        assert known is not None, "the configuration is refused without"
        assert action != "off"
        is_logging_rank = torch.distributed.get_rank() == 0
        guard = Guard(gradients.step, known, action, is_logging_rank=is_logging_rank)
        self.observe(config.guard.every_n_steps, guard.check)
        return guard

    def observe(self, every_n_steps: int, tell: Callable[[int, ResidualStats], None]) -> None:
        """Have `tell` called with what compression leaves behind, every so many optimizer steps.

        Collective: every process asks for the same. Nothing is told without compression.
        """
        if self._sampler is not None:
            self._sampler.observe(every_n_steps, tell)

    def _monitor(self) -> Callable[[list[Event]], None] | None:
        """DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet), where the JSON file has one on."""
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

    def _attach_telemetry(self) -> None:
        telemetry = self.config.telemetry
        steps = StepLog(
            self.counters,
            every_n_steps=telemetry.every_n_steps,
            path=telemetry.path,
            process=torch.distributed.get_rank(),
            exchange=self._probe(telemetry.every_n_steps),
            monitor=self._monitor(),
            held_weights=self._resident.error if self._resident else dict,
        )
        self._steps = steps
        self._after_steps(steps.step_ended)

    def land(self) -> None:
        """Wait for changes of weights that are under way, as the next forward does. Collective."""
        if self._resident is not None and self._resident.hook is not None:
            self._resident.hook.land()

    @property
    def residual_bytes(self) -> int:
        """Bytes that error feedback holds on this process now."""
        feedback = self.exchange.feedback if self.exchange else None
        return feedback.nbytes if feedback else 0

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """Committed residual by parameter name: flat fp32, in units of the averaged gradient."""
        feedback = self.exchange.feedback if self.exchange else None
        return feedback.state_dict() if feedback else {}

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

    def measure_with(self, exchange: BucketExchange) -> None:
        """Have `exchange` reduce gradients in the place of what the configuration names.

        For measuring only, and between steps: `NoCommunication` shows the ceiling of compression,
        with training that means nothing. Residuals of the configured method stay where they are.
        Raises UnsupportedError where there is no ZeRO-3 reduction to replace.
        """
        if self._gradient is None:
            raise nothing_to_replace(self.engine.zero_optimization_stage())
        self._gradient.replace_exchange(exchange)

    def detach(self) -> None:
        """Leave DeepSpeed, the engine and the model as they were found. Residuals are dropped.

        Raises:
            Exception: what one part raised, such as waiting for a process that has gone. The others
                are left all the same.
        """
        with ExitStack() as last_first:
            last_first.callback(collectives.unlisten, self.counters)
            if self._patience is not None:
                last_first.callback(self._patience.undo)
            if self._gradients is not None:
                last_first.callback(self._gradients.discard)
            for part in (self._gather, self._gradient):
                if part is not None:
                    last_first.callback(part.detach)
            if self._resident is not None:
                last_first.callback(self._resident.detach)
            if self._blocks is not None:
                last_first.callback(self._blocks.remove)
            if self._planning is not None:
                last_first.callback(self._planning.stop)
            last_first.callback(self._patches.undo)
        self._blocks = self._inputs = self._gradient = self._gather = self._gradients = None
        self._resident = self._residence = None


def _random_trackers() -> list[Any]:
    """Where tensor-parallel code keeps random states of its own: DeepSpeed's and Megatron's."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    trackers = [get_cuda_rng_tracker()]
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None:
        trackers.append(megatron.get_cuda_rng_tracker())
    return trackers


def make_heard() -> None:
    """Let our one line through where the program has not set up logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
