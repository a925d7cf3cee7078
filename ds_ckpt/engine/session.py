"""Assembly of the plugin on one engine. Entry points are in `entry.py`."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.inputs import CheckpointedInputs, build_inputs
from ds_ckpt.activation.planning.budget import ActivationPlan
from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.activation.planning.trace import describe_kept
from ds_ckpt.activation.policies import Unit, make_units
from ds_ckpt.config import PluginConfig
from ds_ckpt.config.activation import activation_policy
from ds_ckpt.deprecation import FormerAttribute
from ds_ckpt.engine.first_batch import NCCL_BUFFERS, FirstBatchPlanning
from ds_ckpt.engine.gradients import Gradients, SentBytes, residual_files
from ds_ckpt.engine.resident_weights import ResidentWeights, make_resident
from ds_ckpt.engine.step import NoCommunication
from ds_ckpt.engine.tensor_parallel import TensorParallelGroup, find_group
from ds_ckpt.errors import Problem, UnsupportedError, log
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.counters import OffloadCounters, PartitionCounters
from ds_ckpt.telemetry.steps import ExchangeSample, StepLog
from ds_ckpt.telemetry.timings import EventSpans, ResidualStats, Spans
from ds_ckpt.telemetry.units import size
from ds_ckpt.zero3 import collectives, compatibility, parameters
from ds_ckpt.zero3.engine_hook import stop_training, wrap_checkpoints, wrap_engine
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.gradient_hook import GradientHook

ATTRIBUTE = "_ds_ckpt_session"
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Attached sessions. DeepSpeed destroys an engine that is collected, which detaches its session."""


class Session:
    """The plugin on one DeepSpeed engine, until `detach()`.

    Attributes:
        counters: Bytes sent by purpose, and gathers, since attach.
        summary: One line: active parts and their cost.
        exchange: The gradient exchange, its residuals and groups; None without compression.
    """

    plan = FormerAttribute("exchange.assignment")
    residual_bytes = FormerAttribute("exchange.feedback.nbytes", default=0)
    guard = FormerAttribute("exchange.guard")
    land = FormerAttribute("drain")

    def __init__(self, engine: Any, config: PluginConfig, mpu: Any = None) -> None:
        self.engine, self.config, self.counters = engine, config, Counters()
        self.exchange: Gradients | None = None
        self._blocks: CheckpointedBlocks | None = None
        self._inputs: CheckpointedInputs | None = None
        self._gather: GatherHook | None = None
        self._gradient: GradientHook | None = None
        self._resident: ResidentWeights | None = None
        self._group: TensorParallelGroup | None = None
        self._planning: FirstBatchPlanning | None = None
        self._is_offload_checked = False
        self._steps: StepLog | None = None
        self._sent: SentBytes | None = None
        self._patches = Patches()
        self._detach = ExitStack()
        """Detaches each part, the last one first; all of them, even if one raises."""
        self._after_step: list[Callable[[int], None]] = []
        """Called with the number of each optimizer step that has ended."""
        try:
            self._attach_parts(mpu)
        except BaseException:
            self.detach()
            raise
        _sessions.add(self)
        self.summary = self._describe()
        if dist.get_rank() == 0:
            ensure_log_handler()
            log.info(self.summary)

    def _attach_parts(self, mpu: Any) -> None:
        engine, config = self.engine, self.config
        refuse_unsupported(engine)
        compatibility.require_torch()
        collectives.listen(self.counters)
        self._detach.callback(collectives.unlisten, self.counters)
        if engine.zero_optimization_stage() == 3:
            self._attach_hooks()
        if config.activation.partition:
            required = "partition" in config.activation.model_fields_set
            self._group = find_group(engine, mpu, self.counters, required=required)
            split = config.activation.model_copy(update={"partition": self._group is not None})
            self.config = config = config.model_copy(update={"activation": split})
        if config.activation.planned:
            self._detach.callback(CheckpointedBlocks(engine.module, units=[]).remove)
            held = self._exchange_memory
            self._planning = FirstBatchPlanning(engine, config.activation, self._install_plan, held)
            self._detach.callback(self._planning.stop)
        elif config.activation.active:
            self._install_units(make_units(engine.module, activation_policy(config.activation)))
        if config.telemetry.enabled:
            self._attach_telemetry()
        in_forward = functools.partial(self.counters.span, "forward")
        wrap_engine(engine, self._patches, in_forward, self._after_step, self.detach)
        self._patches.set(engine, ATTRIBUTE, self)

    def _attach_hooks(self) -> None:
        """Attach what acts on ZeRO-3: gathers, gradients, resident weights, checkpoints."""
        engine, config = self.engine, self.config
        changed = compatibility.require()
        for finding in changed:
            log.warning("ds_ckpt: %s: %s", finding.symbol, finding.detail)
        share = config.activation.active and config.activation.share_gather
        gather = GatherHook(engine.optimizer, self.counters, share=share)
        self._gather = gather
        self._detach.callback(lambda: gather.detach())
        step = verify = None
        if config.compression.method != "none" or config.weights.resident:
            compatibility.use_shard_group(engine, self._patches)
        if config.compression.method != "none":
            self.exchange = Gradients(engine, config.compression)
            self._detach.callback(self.exchange.discard)
            step = self.exchange.step
            verify = self.exchange.dense() if changed else None
            self.exchange.correct_momentum(self._patches)
            self._sent = SentBytes(self.counters, self.exchange)
            self._after_step += [self.exchange.sampler.step_ended, self._sent.step_ended]
        names = parameters.names_by_id(parameters.exchanged(engine))
        gradient = GradientHook(engine.optimizer, names, step, self.counters, verify=verify)
        self._gradient = gradient
        self._detach.callback(lambda: gradient.detach())
        if config.weights.resident:
            self._resident = make_resident(engine, config.weights, self.counters, gather, gradient)
        if self._resident is not None:
            self._detach.callback(self._resident.detach)
            self._after_step.append(self._place_weights)
        wrap_checkpoints(
            engine,
            residual_files(engine, config.compression.method, self.exchange),
            self._patches,
            drop_step=gradient.drop_step,
            loading=self._resident.loading if self._resident else nullcontext,
        )

    def _exchange_memory(self) -> dict[str, int]:
        """Return accelerator bytes of the exchange of gradients and weights, by purpose."""
        found = self.exchange.resident_bytes() if self.exchange else {}
        return {
            **found,
            NCCL_BUFFERS: sum(p.nccl_bytes for p in (self.exchange, self._resident) if p),
        }

    def _place_weights(self, step: int) -> None:
        gradients = self.exchange.step if self.exchange else None
        tuner = gradients.tuner if gradients is not None and not gradients.is_disabled else None
        if self._resident is not None:
            self._resident.step_ended(is_busy=tuner is not None and tuner.is_comparing)

    def _install_units(self, units: Sequence[Unit]) -> None:
        model, activation = self.engine.module, self.config.activation
        device = torch.device(self.engine.device)
        self._inputs = build_inputs(activation, model, units, device, self._group)
        recompute = functools.partial(self.counters.span, "recompute")
        self._blocks = blocks = CheckpointedBlocks(
            model,
            scopes=[self._gather.recompute if self._gather else recompute],
            policy=activation_policy(activation),
            units=units,
            around=self._inputs.around if self._inputs else None,
            trackers=compatibility.rng_trackers(),
        )
        self._detach.callback(lambda: blocks.remove())
        if activation.offload or any(unit.offloads for unit in units):
            self._after_step.append(self._warn_nothing_moved)

    def _warn_nothing_moved(self, step: int) -> None:
        """Warn after the first step if all tensors stayed on the device."""
        first, self._is_offload_checked = not self._is_offload_checked, True
        if first and dist.get_rank() == 0 and self.offload is not None and not self.offload.out:
            smallest = self.config.activation.offload_min_bytes
            log.warning(
                "ds_ckpt: nothing went to host memory in the first step: no tensor but the last "
                "block's has %s or more (offload_min_bytes, %d). Write a smaller number, or leave "
                "offload out",
                size(smallest),
                smallest,
            )

    def _install_plan(self, plan: ActivationPlan) -> None:
        self._install_units(plan.units(self.engine.module))
        if self._steps is not None:
            self._steps.note({"activation_plan": asdict(plan)})
        if dist.get_rank() == 0:
            log.info("ds_ckpt: %s", plan.line())

    def _attach_telemetry(self) -> None:
        telemetry, exchange = self.config.telemetry, self.exchange
        device = torch.device(self.engine.device)
        self.counters.spans = spans = Spans() if device.type == "cpu" else EventSpans(device)
        if exchange is not None:
            exchange.step.exchange.spans = spans
        monitor = getattr(self.engine, "monitor", None)
        has_monitor = dist.get_rank() == 0 and monitor is not None and monitor.enabled
        self._steps = StepLog(
            self.counters,
            every_n_steps=telemetry.every_n_steps,
            path=telemetry.path,
            rank=dist.get_rank(),
            sample=exchange.sample if exchange else ExchangeSample,
            monitor=monitor.write_events if monitor is not None and has_monitor else None,
            spans=spans,
            is_compressing=lambda: exchange is not None and exchange.step.is_compressing,
        )
        if exchange is not None:
            exchange.sampler.observe(telemetry.every_n_steps)
            self._steps.note({"plan": asdict(exchange.assignment)["tensors"]})
        self._after_step.append(self._steps.step_ended)

    def detach(self) -> None:
        """Restore DeepSpeed, the engine and the model, also if one part raises; drop residuals."""
        _sessions.discard(self)
        self._detach.callback(self._patches.undo)
        try:
            self._detach.close()
        finally:
            self._blocks = self._inputs = self._gather = self._gradient = self._resident = None
            self.exchange = None

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
    def residuals(self) -> dict[str, torch.Tensor]:
        """Committed residuals by parameter name: flat fp32, in units of the averaged gradient."""
        feedback = self.exchange.feedback if self.exchange else None
        return feedback.state_dict() if feedback else {}

    def observe(self, every_n_steps: int, act: Callable[[int, ResidualStats], None]) -> None:
        """Call `act` with compression errors every so many steps; see `ErrorSampler`."""
        if self.exchange is not None:
            self.exchange.sampler.observe(every_n_steps, act)

    def report(self, *args: Any, **kwargs: Any) -> str:
        """Return lines on activations, gradient bytes and autotune, with the plugin and without.

        Pass a batch as to the model. Its activations are traced on fake tensors, in seconds.
        """
        facts = [self._sent.describe()] if self._sent else []
        if self._blocks is not None:
            forward = Forward(self.engine.module, args, kwargs, torch.device(self.engine.device))
            facts.insert(0, describe_kept(forward, self._blocks.units, self.config.activation))
        for part in (self.exchange and self.exchange.step, self._resident):
            facts += [part.tuner.describe()] if part and part.tuner else []
        return "\n".join(f"ds_ckpt: {fact}" for fact in facts)

    def drain(self) -> None:
        """Wait for weight changes in flight, as the next forward does. Collective."""
        if self._resident is not None:
            self._resident.hook.drain()

    def send_no_gradients(self) -> None:
        """Replace the exchange by `NoCommunication`, to measure; ZeRO-3 only."""
        assert self._gradient is not None, "stage 3, and attached"
        group = parameters.own_group(self.engine)
        self._gradient.exchange = NoCommunication(dist.get_world_size(group), dist.get_rank(group))

    def _describe(self) -> str:
        unplaced = "weights not resident: all ranks share one node" if self._gather else ""
        weights = self._resident.describe() if self._resident else unplaced
        blocks = f" on {self._blocks.describe()}" if self._blocks else ""
        facts = [self.config.summary(blocks, weights)]
        if self._planning:
            facts.append("planned at the first training batch")
        if self.exchange:
            facts += self.exchange.describe()
        return "ds_ckpt: " + "; ".join(facts)


def has_optimizer(engine: Any) -> bool:
    """Return whether the engine trains; transformers builds engines without one for evaluation."""
    optimizer = engine.optimizer
    return hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")


def refuse_unsupported(engine: Any) -> None:
    """Refuse pipeline engines, and stage-3 engines without DeepSpeed's ZeRO-3 optimizer."""
    kind = type(engine)
    if any(base.__name__ == "PipelineEngine" for base in kind.__mro__):
        why = "a pipeline checkpoints its own layers (activation_checkpoint_interval)"
        remedy = "use a model that is not a PipelineModule"
        raise UnsupportedError(Problem("engine", kind.__name__, why, remedy))
    is_stage3 = engine.zero_optimization_stage() == 3
    if is_stage3 and not (has_optimizer(engine) and parameters.has_zero3_optimizer(engine)):
        why = "the hooks patch DeepSpeed's ZeRO-3 optimizer"
        remedy = "pass an optimizer to ds_ckpt.initialize, or name one in the JSON file"
        found = type(engine.optimizer).__name__
        raise UnsupportedError(Problem("engine.optimizer", found, why, remedy))


def end_earlier_sessions(engine: Any) -> None:
    """Detach the sessions of other engines that train parameters of this engine's model.

    A second training on one model builds a second engine, often without destroying the first. Both
    sessions would checkpoint the same blocks.
    """
    params = set(engine.module.parameters())
    for session in list(_sessions):
        if session.engine is engine or params.isdisjoint(session.engine.module.parameters()):
            continue
        session.detach()
        stop_training(session.engine, _refuse_to_train)
        if dist.get_rank() == 0:
            log.info(
                "ds_ckpt: a new engine trains this model: the session of the earlier engine has "
                "ended, and that engine refuses to train on"
            )


def _refuse_to_train(*_: Any, **__: Any) -> None:
    found = "an engine whose parameters a later engine trains"
    why = "its optimizer has copies of the weights from before the later engine was built"
    remedy = "train with the later engine, or build another one on this model"
    raise UnsupportedError(Problem("engine", found, why, remedy))


def ensure_log_handler() -> None:
    """Print log lines if the program has not configured logging."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
