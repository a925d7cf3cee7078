"""The compressed gradient exchange of one engine: step state, process groups, start-up text."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_ckpt.compression.base import on_host
from ds_ckpt.config.compression import CompressionConfig, exchange_settings
from ds_ckpt.engine.guard import ErrorSampler, Guard, gradient_norm
from ds_ckpt.engine.step import StepState, make_step_state
from ds_ckpt.engine.tuner import Tuner
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.assignment import BY_DEEPSPEED, NO_COMPRESSOR, Assignment
from ds_ckpt.exchange.hierarchy import discard, make_groups
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings, embeddings_of
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.exchange.transport import InHostSum, TorchTransport, gather_objects
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.telemetry.memory import measure_non_torch_bytes
from ds_ckpt.telemetry.steps import ExchangeSample
from ds_ckpt.telemetry.units import MB, number
from ds_ckpt.zero3 import parameters
from ds_ckpt.zero3.compatibility import ends_step
from ds_ckpt.zero3.momentum import correct_momentum, parameter_groups, why_not_corrected
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise


class Gradients:
    """Sets up `compression` with a method. Collective: every rank makes one.

    `step` reduces buckets, commits and rolls back. `feedback` has its residuals; it is None if
    nothing is left out or accumulated. `assignment` has compressor and bytes of each parameter.
    `guard` is None if off. `nccl_bytes` are NCCL's buffers. Raises UnsupportedError if engine,
    nodes or parameters do not support the section.
    """

    def __init__(self, engine: Any, config: CompressionConfig) -> None:
        self._engine = engine
        self._settings = settings = exchange_settings(config)
        shapes, embeddings = parameters.shapes_of(engine), embeddings_of(engine.module)
        sizes = [(name, shape) for name, shape, _ in shapes]
        run_on_all_or_raise(lambda: settings.choose(embeddings).check(sizes), what="use its rules")
        if not sizes:
            found = "parameters that other process groups than the optimizer's shard"
            why = "residuals belong to one group, and nothing is left to compress"
            remedy = (
                'build the model without zero.Init, or set $.ds_ckpt.compression.method to "none"'
            )
            raise UnsupportedError(Problem("engine.optimizer", found, why, remedy))
        group = parameters.own_group(engine)
        self.groups = groups = make_groups(group, settings.levels)
        choose = settings.choose(embeddings, groups.local)
        names, trained = {name for name, _ in sizes}, parameters.trained(engine)
        others = parameters.shapes_of(engine, [(n, p) for n, p in trained if n not in names])
        self.assignment = Assignment.of(choose, shapes, groups.world, groups.local, others)
        micro_steps = engine.gradient_accumulation_steps()
        managed = parameters.configuration(engine).get("managed_gradient_accumulation", True)
        self._exchanges_once = managed and settings.defers_exchange(micro_steps)
        rank, defers = dist.get_rank(group), self._exchanges_once
        entries = sum(self.assignment.residual_numels(defers=defers)) // groups.local
        self.feedback = settings.residuals(rank, defers=defers, entries=entries)
        inside = groups.inside
        tuner, device = None, torch.empty(0, device=engine.device).device  # with its index
        if settings.autotune and not settings.lossless:
            other = "uncompressed" if self._exchanges_once else "deepspeed"
            tuner = Tuner("gradients", ("compressed", other), device)
        self.step: StepState = make_step_state(
            settings,
            _transport(groups.between),
            _transport(group),
            self.feedback,
            current_step=lambda: int(engine.global_steps),
            at_boundary=partial(ends_step, engine.optimizer) if self._exchanges_once else None,
            in_host=None if inside is None else InHostSum(_transport(inside), groups.peers),
            embeddings=embeddings,
            tuner=tuner,
        )
        self.nccl_bytes = 0
        reserve = partial(self.step.reserve, sizes, device)
        try:
            run_on_all_or_raise(reserve, what="allocate its residuals")
            if not on_host(device):
                self._preallocate(device)
        except BaseException:
            self.discard()
            raise
        self.sampler = ErrorSampler(engine, self.step.exchange.errors)
        self.guard: Guard | None = None
        if config.guard.active:
            acts, logs = config.guard.action == "dense", dist.get_rank() == 0
            self.guard = Guard(self.step, config.guard.limits(), acts=acts, logs=logs)
            self.sampler.observe(config.guard.every_n_steps, self.guard.check)

    def _preallocate(self, device: torch.device) -> None:
        """Exchange the largest bucket without sending it; if no rank has failed, send it.

        On DeepSpeed's stream for reductions: torch keeps freed memory for the stream that used it.
        """
        bucket, module = parameters.largest_bucket(self._engine), torch.get_device_module(device)
        stream = parameters.reduction_stream(self._engine)

        def preallocate(sends: bool) -> None:
            with module.stream(stream) if stream is not None else nullcontext():
                self.step.preallocate(bucket, device, sends=sends)
            module.synchronize(device)  # a kernel's failure is raised here

        run_on_all_or_raise(partial(preallocate, False), what="run the compression kernels")
        self.nccl_bytes = measure_non_torch_bytes(device, partial(preallocate, True))

    def sample(self) -> ExchangeSample:
        """Return the errors of the last step, and the bytes that compression saves."""
        exchanges = 1 if self._exchanges_once else self._engine.gradient_accumulation_steps()
        sent_share = exchanges * (self.groups.world - 1) / self.groups.world / self.groups.local
        saved_bytes = sent_share * (self.assignment.dense_bytes - self.assignment.sent_bytes)
        norm = gradient_norm(self._engine)
        return ExchangeSample(self.sampler.latest, norm, self.step.is_compressing, saved_bytes)

    def dense(self) -> StepState:
        """Return an exchange that sends everything, to compare with DeepSpeed's reduction."""
        everyone = _transport(parameters.own_group(self._engine))
        settings = ExchangeSettings(MethodSettings("dense"), levels=1)
        return make_step_state(settings, everyone, everyone, None, current_step=lambda: 0)

    def resident_bytes(self) -> dict[str, int]:
        """Return about how many bytes of the accelerator the exchange takes, by purpose."""
        size, groups = int(self._engine.zero_reduce_bucket_size()), self.groups
        in_place = self.feedback is not None and self.feedback.adds_in_place
        buffers = self.assignment.buffer_bytes(size, groups.world, groups.local, in_place=in_place)
        found = {"exchange buffers": buffers}
        if self.feedback is not None and not self.feedback.on_host:
            found["residuals"] = self.feedback.nbytes
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
        groups = parameter_groups(self._engine)
        tensors = [t for t in self.assignment.tensors if t.how not in (NO_COMPRESSOR, BY_DEEPSPEED)]
        # slices may differ
        delayed = set[int]().union(*gather_objects({groups[t.name] for t in tensors}))

        def correction_of(group: int) -> float:
            return value if group in delayed and self.step.corrects_momentum else 0.0

        correct_momentum(optimizer, correction_of, patches)

    def describe(self) -> list[str]:
        """Return clauses for the line at the start."""
        assignment, feedback = self.assignment, self.feedback
        where = "between ranks" if self.groups.inside is None else "between nodes"
        counts = Counter(t.how for t in assignment.tensors)
        how = ", ".join(f"{compressor} on {n}" for compressor, n in counts.items())
        facts = [f"{how} tensors: {assignment.share:.2%} of uncompressed gradient bytes {where}"]
        if not self._settings.lossless and assignment.share >= 1:
            facts.append("nothing is saved: these settings leave all tensors uncompressed")
        if self._exchanges_once:
            facts.append("one exchange per accumulated step")
        if feedback is not None:
            memory = "host memory" if feedback.on_host else "memory"
            size = f"{feedback.nbytes / 1e6:,.4g} MB"
            facts.append(f"{feedback.dtype} residuals take {size} of {memory}")
        if self.nccl_bytes:
            facts.append(
                f"NCCL's buffers for it take {self.nccl_bytes / 1e6:,.4g} MB of GPU memory"
            )
        why = why_not_corrected(self._engine.optimizer)
        if self._settings.momentum_correction and why:
            facts.append(f"no momentum correction: {why}")
        return facts


class SentBytes:
    """Counts the gradient bytes that this rank sends, by mode of the step."""

    def __init__(self, counters: Counters, gradients: Gradients) -> None:
        self._counters, self._gradients = counters, gradients
        self._seen = counters.bytes_sent[Purpose.REDUCE]
        self._bytes, self._steps = Counter[str](), Counter[str]()

    def step_ended(self, step: int) -> None:
        """Count a step."""
        mode, before = self._gradients.step.latest_mode, self._seen
        self._seen = self._counters.bytes_sent[Purpose.REDUCE]
        self._bytes[mode] += self._seen - before
        self._steps[mode] += 1

    def describe(self) -> str:
        """Return the mean of a step by mode; without a step to compare with, a computed one."""
        mean = {mode: self._bytes[mode] / n / MB for mode, n in sorted(self._steps.items())}
        facts = [f"{m} {number(mb)} MB (steps: {self._steps[m]})" for m, mb in mean.items()]
        if [*mean] == ["compressed"]:
            without = mean["compressed"] + self._gradients.sample().saved_bytes / MB
            facts.append(f"in the gradients' own dtype {number(without)} MB (computed)")
        return f"gradients sent per rank and step: {', '.join(facts) or 'none yet'}"


def _transport(group: Any) -> TorchTransport:
    """Return DeepSpeed's collectives, which are counted."""
    from deepspeed import comm

    return TorchTransport(group, comm.all_to_all_single, comm.all_reduce)


def residual_files(engine: Any, method: str, gradients: Gradients | None) -> ResidualFiles:
    """Return the state in checkpoints; without an exchange it only clears old files and warns."""
    group, shapes = parameters.own_group(engine), parameters.shapes_of(engine) if gradients else ()
    return ResidualFiles(
        gradients.feedback if gradients else None,
        method=method,
        numels={name: shape.numel() for name, shape, _ in shapes},
        dp_rank=dist.get_rank(group),
        world=dist.get_world_size(group),
        peers=gradients.groups.peers if gradients else (),
        step=gradients.step if gradients else None,
        model_slice=parameters.model_slice(engine),
    )
