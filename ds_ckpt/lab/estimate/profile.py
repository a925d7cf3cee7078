"""Costs of a model and a batch under several policies.

Memory, operators and FLOPs come from one traced step on fake tensors (`activation/planning`), times
and the allocator's peak from steps on real ones. In timed steps nothing is traced, and policies
take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_map

from ds_ckpt.activation import CheckpointedBlocks, find_blocks
from ds_ckpt.activation.blocks import Block, repeated_classes
from ds_ckpt.activation.planning.budget import AUTO_SHARE, Allowance, plan_within
from ds_ckpt.activation.planning.costs import measured_rates
from ds_ckpt.activation.planning.fake import FakeModel
from ds_ckpt.activation.planning.trace import StepTrace, Work, gradients_dropped
from ds_ckpt.activation.policies import Unit, make_plan, policies, policy_named
from ds_ckpt.config import parse
from ds_ckpt.config.activation import ActivationConfig, activation_policy
from ds_ckpt.config.paths import lookup, precision
from ds_ckpt.errors import ConfigError, DsCkptError, Problem, UnsupportedError
from ds_ckpt.lab.estimate.memory import Parameters, States, estimate
from ds_ckpt.lab.subject import Sizes, Subject, arguments_of, find_subject, run_forward, tokens_of
from ds_ckpt.telemetry.memory import OUTSIDE, Phase, tensors_in
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import HOST_COPY, OPTIONAL

NONE = "none"
"""Name of the step without a policy."""
PARTS = ("attention", "mlp", "norm", "other")
Report = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """Options of the command. `real`: trace and time steps on real tensors."""

    model: str
    config: Mapping[str, Any] | None = None
    source: str = "config"
    batches: tuple[int, ...] = (1,)
    sizes: Sizes = field(default_factory=Sizes)
    world: int = 1
    hosts: int | None = None
    policies: tuple[str, ...] = ("block", "attention", "mlp", "selective")
    modules: tuple[str, ...] | None = None
    real: bool = False
    limit_bytes: int | None = None
    repeats: int = 5


@dataclass(frozen=True)
class BlockBytes:
    """Saved activations of one block, by part.

    A storage belongs to the module that saved it first. "checkpointed" is kept for a recompute.
    """

    name: str
    class_name: str
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Add up the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Times:
    """Medians of interleaved real steps: no optimizer, no communication."""

    device: str
    repeats: int
    forward_s: float
    backward_s: float
    """Recompute included."""
    recompute_s: float

    @property
    def step_s(self) -> float:
        """Add forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Footprint:
    """One policy at one batch size: one forward and backward.

    Attributes:
        section: the activation section; None: no policy.
        tokens: of one sequence; 1 if inputs are no sequences of tokens.
        fake: the bytes come from fake tensors.
        real_peak_bytes: the allocator's, of a real step.
    """

    policy: str
    section: Mapping[str, Any] | None
    batch: int
    tokens: int
    fake: bool
    held_bytes: int
    blocks: tuple[BlockBytes, ...]
    peak_bytes: int
    peak_phase: Phase
    peak_block: str
    forward: Work
    recompute: Work
    backward: Work
    times: Times | None = None
    real_peak_bytes: int | None = None

    @property
    def step(self) -> Work:
        """Add up the phases."""
        return self.forward + self.recompute + self.backward

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None if no step was timed."""
        return None if self.times is None else self.batch * self.tokens / self.times.step_s

    @property
    def peak_in(self) -> str:
        """Describe the moment of the peak."""
        if self.peak_block == OUTSIDE:
            return f"{self.peak_phase} outside the blocks"
        return f"{self.peak_phase} of {self.peak_block}"

    def part_bytes(self, part: str) -> int:
        """Add up one part over all blocks; "outside" is what lies beside them."""
        if part == "outside":
            return sum(b.total_bytes for b in self.blocks if b.name == OUTSIDE)
        return sum(b.parts.get(part, 0) for b in self.blocks if b.name != OUTSIDE)


@dataclass(frozen=True)
class Profile:
    """All results of the command.

    Attributes:
        states: what ZeRO keeps.
        footprints: every policy at every batch size.
        not_measured: assumptions, and what could not be measured.
        modules: class names or patterns of the blocks, if the configuration must name them.
        schema: changes when a field is renamed or removed.
    """

    model: str
    class_name: str
    dtype: str
    states: States
    footprints: tuple[Footprint, ...]
    not_measured: tuple[str, ...]
    modules: tuple[str, ...] | None = None
    limit_bytes: int | None = None
    schema: int = 3

    @property
    def first(self) -> Footprint:
        """The step without a policy, at the first batch."""
        return next(found for found in self.footprints if found.policy == NONE)

    @property
    def at_first(self) -> list[Footprint]:
        """Every policy at the first batch."""
        return [f for f in self.footprints if f.batch == self.first.batch]

    def total_bytes(self, footprint: Footprint) -> int:
        """Peak of a rank: states and activations in the passes, or the optimizer's step."""
        in_passes = self.states.resident_bytes + footprint.peak_bytes
        return max(in_passes, self.states.step_bytes)

    @property
    def best(self) -> Footprint | None:
        """The most tokens a second under the limit; if nothing was timed, the largest batch."""
        limit = self.limit_bytes
        fits = [f for f in self.footprints if limit is None or self.total_bytes(f) <= limit]
        if timed := [f for f in fits if f.times is not None]:
            return max(timed, key=lambda f: f.tokens_per_s or 0.0)
        if limit is None or not fits:
            return None
        return max(fits, key=lambda f: (f.batch, -f.step.flops))

    def to_json(self) -> str:
        """Write all fields as JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


# The policies that are compared.

_COMPARED: dict[str, dict[str, Any]] = {
    " ".join([policy.name, *map(str, options.values())]): {"policy": policy.name, **options}
    for policy in policies()
    for options in policy.compared
}


@dataclass(frozen=True)
class ComparedPolicy:
    """A policy under a name.

    Attributes:
        section: the activation section that asks for it; None: no policy.
        resident: bytes beside activations by what they are, for budgets of the accelerator.
        limit_bytes: memory of the accelerator, if known.
    """

    name: str
    section: dict[str, Any] | None
    resident: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int | None = None

    def units(self, model: nn.Module, batch: Any, device: torch.device) -> list[Unit] | None:
        """Return the recomputes on this model; None: no checkpointing.

        Args:
            model: real, or fake.
            batch: likewise, with the values that are known.
            device: for the rates that a budget weighs products against memory with.

        Raises:
            ConfigError: as in training, or "auto" has no limit here.
            UnsupportedError: no plan fits, or the model cannot be measured.
        """
        if self.section is None:
            return None
        file = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": self.section}}
        config = parse(file, source=self.name).activation
        if not config.planned:
            return make_plan(model, activation_policy(config))
        args, kwargs = arguments_of(batch)
        dtype = next((p.dtype for p in model.parameters() if p.numel()), torch.float32)
        tokens = max((t.numel() for t in tensors_in(batch)), default=0)
        plan = plan_within(
            self._allowance(config),
            model,
            args,
            kwargs,
            rates=measured_rates(device, dtype),
            tokens=tokens,
            modules=config.modules,
        )
        return plan.units(model)

    def _allowance(self, config: ActivationConfig) -> Allowance:
        limit = self.limit_bytes if config.budget_gib is None else int(config.budget_gib * GIB)
        if limit is None:
            raise ConfigError(
                Problem(
                    where="--limit-gib",
                    found="nothing",
                    why='policy "auto" without budget_gib takes the memory of the accelerator, '
                    "which a profile does not know",
                    remedy="write --limit-gib, for example 80",
                )
            )
        return Allowance(
            limit,
            config.budget_is_of,
            self.resident if config.budget_is_of == "accelerator" else {},
            config.offload,
            config.offload_prefetch,
            config.offload_min_bytes,
            optional=OPTIONAL,
            aim=AUTO_SHARE if config.policy == "auto" else 1.0,
        )


def compared(
    names: Sequence[str], modules: Sequence[str] | None, configured: dict[str, Any] | None
) -> list[ComparedPolicy]:
    """List no policy first, then the configured one, then the named ones.

    Args:
        names: "none", which is always in it, and names of registered policies.
        modules: of a plain model's blocks; they go into every section but those of parts.
        configured: the activation section of the user's file.
    """
    known = (NONE, *_COMPARED)
    if unknown := [n for n in names if n not in known]:
        raise ConfigError(
            Problem(
                where="--policies",
                found=", ".join(f'"{n}"' for n in unknown),
                why="no policy has this name here",
                remedy="write names of: " + ", ".join(known) + "; others go into --config",
            ),
            headline="the policies cannot be compared",
        )
    found = [ComparedPolicy(NONE, None)]
    if configured is not None:
        found.append(ComparedPolicy("configured", configured))
    for name in names:
        if name == NONE or _COMPARED[name] == configured:
            continue
        section = dict(_COMPARED[name])
        if modules is not None:
            policy = policy_named(section["policy"])
            if policy is not None and policy.of_parts:  # its modules are the parts themselves
                continue
            section["modules"] = list(modules)
        found.append(ComparedPolicy(name, section))
    return found


def blocks_of(
    model: nn.Module, modules: Sequence[str] | None
) -> tuple[list[Block], Sequence[str] | None]:
    """Find the blocks, and the patterns that a configuration must name.

    Blocks of a plain model are of the class that is repeated; a model may have none.
    """
    if modules is not None:
        return find_blocks(model, modules), modules
    try:
        return find_blocks(model, None), None
    except DsCkptError:
        likely = repeated_classes(model)[:1]
        return (find_blocks(model, likely), likely) if likely else ([], None)


# Traced steps and real steps.


def built_fake(subject: Subject, count: int) -> FakeModel:
    """Build without memory; UnsupportedError if that is impossible."""
    return FakeModel.build(subject.name, lambda: subject.build(count))


def built_real(subject: Subject, count: int, device: torch.device) -> tuple[nn.Module, Any]:
    """Build on the device; the same weights and inputs every time."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)
        model, batch = subject.build(count)
    return model.to(device), tree_map(lambda t: t.to(device) if hasattr(t, "to") else t, batch)


def footprints(
    subject: Subject,
    count: int,
    wanted: Sequence[ComparedPolicy],
    modules: Sequence[str] | None,
    device: torch.device | None = None,
    *,
    repeats: int = 0,
    report: Report = lambda text: None,
) -> list[Footprint]:
    """Trace one step of each policy at a batch of `count`.

    Args:
        subject: the model.
        count: sequences.
        wanted: the policies.
        modules: of the model's blocks.
        device: of real tensors; None: fake ones.
        repeats: timed steps of each policy on real tensors.
        report: called before each.

    Raises:
        UnsupportedError: real tensors do not fit, or fake ones lack a value.
    """
    found = []
    entered: Callable[[], Any] = nullcontext
    with _out_of_memory(count):
        if device is None:
            made = built_fake(subject, count)
            model, batch, known, entered = made.model, made.batch, made.known_batch(), made.entered
        else:
            model, batch = built_real(subject, count, device)
            known = batch
        blocks = blocks_of(model, modules)[0]
        units: dict[str, list[Unit] | None] = {}
        for policy in wanted:
            report(f"{policy.name}, batch {count}")
            units[policy.name] = policy.units(model, known, device or torch.device("cpu"))
            with entered():
                trace = StepTrace(model, blocks)
                trace.run(lambda: run_forward(model, batch), units[policy.name])
            _drop_gradients(batch)
            found.append(_footprint(trace, policy, batch, count, blocks, fake=device is None))
        if device is not None and repeats:
            steps = _real_steps(model, batch, units, device, repeats, report)
            found = [
                replace(f, real_peak_bytes=steps[f.policy][0], times=steps[f.policy][1])
                for f in found
            ]
    return found


def _footprint(
    trace: StepTrace,
    policy: ComparedPolicy,
    batch: Any,
    count: int,
    blocks: Sequence[Block],
    *,
    fake: bool,
) -> Footprint:
    held = trace.held_by()
    place = trace.peak_place
    names = {b.name: type(b.module).__name__ for b in blocks}
    return Footprint(
        policy=policy.name,
        section=policy.section,
        batch=count,
        tokens=tokens_of(batch),
        fake=fake,
        held_bytes=trace.held_bytes,
        blocks=tuple(
            BlockBytes(name, kind, {p: held[name, p] for p in (*PARTS, "checkpointed")})
            for name, kind in {**names, OUTSIDE: ""}.items()
        ),
        peak_bytes=trace.peak_bytes,
        peak_phase=place.phase if place else "forward",
        peak_block=place.block if place else OUTSIDE,
        forward=trace.total("forward"),
        recompute=trace.total("recompute"),
        backward=trace.total("backward"),
    )


def _drop_gradients(batch: Any) -> None:
    for leaf in tensors_in(batch):
        leaf.grad = None


def _real_steps(
    model: nn.Module,
    batch: Any,
    wanted: Mapping[str, Sequence[Unit] | None],
    device: torch.device,
    repeats: int,
    report: Report,
) -> dict[str, tuple[int, Times]]:
    """Return the allocator's peak of a step, and median times, by policy."""
    taken: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    peaks = {}
    for policy, units in wanted.items():
        report(f"real bytes, {policy}")
        peaks[policy] = _allocated(model, batch, units, device)
    for repeat in range(repeats):
        report(f"timed steps, {repeat + 1} of {repeats}")
        for policy, units in wanted.items():
            taken[policy].append(_timed_step(model, batch, units, device))
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = str(torch.cuda.get_device_name(device))
    medians = {p: map(statistics.median, zip(*steps, strict=True)) for p, steps in taken.items()}
    return {policy: (peaks[policy], Times(name, repeats, *medians[policy])) for policy in wanted}


@contextmanager
def _checkpointed(
    model: nn.Module, batch: Any, units: Sequence[Unit] | None, scope: Callable[[], Any]
) -> Iterator[None]:
    put = None if units is None else CheckpointedBlocks(model, scopes=(scope,), units=units)
    try:
        with gradients_dropped(model):
            yield
    finally:
        if put is not None:
            put.remove()
        _drop_gradients(batch)


def _allocated(
    model: nn.Module, batch: Any, units: Sequence[Unit] | None, device: torch.device
) -> int:
    """Peak of the allocator above the memory that was allocated before the step."""
    with _checkpointed(model, batch, units, nullcontext):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            run_forward(model, batch).backward()
            torch.cuda.synchronize(device)
            return int(torch.cuda.max_memory_allocated(device)) - before
        cpu = [ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
            run_forward(model, batch).backward()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0)))


def _timed_step(
    model: nn.Module, batch: Any, units: Sequence[Unit] | None, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of the forward, of the backward, and of the recomputes in it."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    recompute_s = 0.0

    @contextmanager
    def recomputing() -> Iterator[None]:
        nonlocal recompute_s
        start_s = now()
        try:
            yield
        finally:
            recompute_s += now() - start_s

    with _checkpointed(model, batch, units, recomputing):
        start_s = now()
        loss = run_forward(model, batch)
        middle_s = now()
        loss.backward()
        end_s = now()
    return middle_s - start_s, end_s - middle_s, recompute_s


@contextmanager
def _out_of_memory(count: int) -> Iterator[None]:
    """Turn the allocator's error into one with a remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not exhausted and "not enough memory" not in text:
            raise
        remedy = "write a smaller batch or fewer --tokens, or use --fake, which allocates none"
        raise UnsupportedError(
            Problem(f"--batches {count}", text, "a step needs more memory than there is", remedy),
            headline="the batch is too big for this machine",
        ) from error


# The whole profile.


def make_profile(options: Options, report: Report = lambda text: None) -> Profile:
    """Raises ConfigError and UnsupportedError, with remedies."""
    configured, missing = None, list[str]()
    if options.config is not None:
        activation = parse(options.config, source=options.source).activation
        section = lookup(options.config, ("ds_ckpt", "activation"))
        if activation.active:
            configured = dict(section) if section else {"policy": activation.policy}
        missing = [
            f"{key}: its tensors count as saved whole, in one rank"
            for key in ("offload", "partition")
            if getattr(activation, key)
        ]
        options = replace(options, modules=options.modules or activation.modules)
    enabled = precision(options.config)
    if options.sizes.dtype is None and enabled == "auto":
        missing.append('weights in 16 bits, if "auto" comes to that: name them with --dtype')
    elif options.sizes.dtype is None and enabled is not None:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled]
        options = replace(options, sizes=replace(options.sizes, dtype=dtype))
    report("building the model")
    subject = find_subject(options.model, options.sizes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if options.real else None
    if device is None:
        missing.append("times: --real runs steps on real tensors")
    batches = tuple(dict.fromkeys(options.batches))
    if len(batches) > 1 and not subject.sized:
        missing.append(f"other batches: {subject.name} takes no argument named batch")
        batches = batches[:1]
    with _out_of_memory(batches[0]):
        if device is None:
            model = built_fake(subject, batches[0]).model
        else:
            model = built_real(subject, batches[0], device)[0]
    blocks, modules = blocks_of(model, options.modules)
    if not blocks:
        missing.append(
            "blocks: the model has no layers with Hugging Face's hook and no class that is "
            'repeated; name them with --modules "layers.*"'
        )
    parameters = Parameters.of(model, blocks)
    states, assumptions = estimate(parameters, options.config, options.world, options.hosts)
    beside = {"what ZeRO keeps": states.resident_bytes - states.host_copy_bytes}
    if states.host_copy_bytes:
        beside[HOST_COPY] = states.host_copy_bytes
    wanted = [
        replace(p, resident=beside, limit_bytes=options.limit_bytes)
        for p in compared(options.policies, modules, configured)
    ]
    where = (wanted, modules, device)
    found = [
        footprints(subject, count, *where, repeats=options.repeats, report=report)
        for count in batches
    ]
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return Profile(
        model=options.model,
        class_name=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        states=states,
        footprints=tuple(itertools.chain(*found)),
        not_measured=(*assumptions, *missing),
        modules=tuple(modules) if modules else None,
        limit_bytes=options.limit_bytes,
    )
