"""Memory and work of a model under several policies, from one traced step on fake tensors each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_ckpt.activation import find_blocks
from ds_ckpt.activation.blocks import Block, repeated_classes
from ds_ckpt.activation.planning.budget import AUTO_SHARE, Allowance, plan_within
from ds_ckpt.activation.planning.costs import measured_rates
from ds_ckpt.activation.planning.fake import FakeModel
from ds_ckpt.activation.planning.trace import StepTrace, Work
from ds_ckpt.activation.policies import Unit, make_plan, policies, policy_named
from ds_ckpt.config import parse
from ds_ckpt.config.activation import ActivationConfig, activation_policy
from ds_ckpt.config.paths import lookup, precision
from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.lab.estimate.memory import Parameters, States, estimate
from ds_ckpt.lab.subject import Sizes, Subject, arguments_of, find_subject, run_forward, tokens_of
from ds_ckpt.telemetry.memory import OUTSIDE, Phase, tensors_in
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import HOST_COPY, OPTIONAL

NONE = "none"
"""Name of the step without a policy."""
PARTS = ("attention", "mlp", "norm", "other")
Report = Callable[[str], object]
_COMPARED: dict[str, dict[str, Any]] = {
    " ".join([policy.name, *map(str, options.values())]): {"policy": policy.name, **options}
    for policy in policies()
    for options in policy.compared
}


@dataclass(frozen=True)
class Options:
    """Options of the command. `source`: name of the DeepSpeed file, for messages."""

    model: str
    config: Mapping[str, Any] | None = None
    source: str = "config"
    batches: tuple[int, ...] = (1,)
    sizes: Sizes = field(default_factory=Sizes)
    world: int = 1
    hosts: int | None = None
    policies: tuple[str, ...] = ("block", "attention", "mlp", "selective")
    modules: tuple[str, ...] | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Footprint:
    """One policy at one batch size: one forward and backward.

    Attributes:
        section: the activation section; None: no policy.
        tokens: of one sequence; 1 if inputs are no sequences of tokens.
        blocks: saved bytes by block and part. A storage belongs to the module that saved it first;
            the part "checkpointed" is kept for a recompute.
    """

    policy: str
    section: Mapping[str, Any] | None
    batch: int
    tokens: int
    held_bytes: int
    blocks: Mapping[str, Mapping[str, int]]
    peak_bytes: int
    peak_phase: Phase
    peak_block: str
    forward: Work
    recompute: Work
    backward: Work

    @property
    def step(self) -> Work:
        """Add up the phases."""
        return self.forward + self.recompute + self.backward

    def part_bytes(self, part: str) -> int:
        """Add up one part over all blocks."""
        return sum(parts[part] for name, parts in self.blocks.items() if name != OUTSIDE)


@dataclass(frozen=True)
class Profile:
    """All results of the command.

    Attributes:
        states: memory of ZeRO's states.
        footprints: every policy at every batch size; no policy comes first.
        notes: assumptions, and gaps.
        schema: changes when a field is renamed or removed.
    """

    model: str
    class_name: str
    dtype: str
    states: States
    footprints: tuple[Footprint, ...]
    notes: tuple[str, ...]
    limit_bytes: int | None = None
    schema: int = 4

    @property
    def at_first(self) -> list[Footprint]:
        """Every policy at the first batch."""
        return [f for f in self.footprints if f.batch == self.footprints[0].batch]

    def total_bytes(self, footprint: Footprint) -> int:
        """Peak of a rank: states and activations in the passes, or the optimizer's step."""
        in_passes = self.states.resident_bytes + footprint.peak_bytes
        return max(in_passes, self.states.step_bytes)

    @property
    def best(self) -> Footprint | None:
        """The largest batch under the limit, with the policy that computes least."""
        limit = self.limit_bytes
        fits = [f for f in self.footprints if limit is not None and self.total_bytes(f) <= limit]
        return max(fits, key=lambda f: (f.batch, -f.step.flops), default=None)

    def to_json(self) -> str:
        """Write all fields as JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


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

    def units(self, model: nn.Module, batch: Any) -> list[Unit] | None:
        """Return the recomputes on this model; None: no checkpointing.

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
        plan = plan_within(
            self._allowance(config),
            model,
            args,
            kwargs,
            rates=measured_rates(torch.device("cpu"), dtype),
            tokens=max((t.numel() for t in tensors_in(batch)), default=0),
            modules=config.modules,
        )
        return plan.units(model)

    def _allowance(self, config: ActivationConfig) -> Allowance:
        limit = self.limit_bytes if config.budget_gib is None else int(config.budget_gib * GIB)
        if limit is None:
            why = 'policy "auto" without budget_gib uses the memory of the accelerator'
            remedy = "write --limit-gib, for example 80"
            raise ConfigError(Problem("--limit-gib", "nothing", why, remedy))
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
        names: of registered policies; "none" is always included.
        modules: of a plain model's blocks. Policies of parts are then left out.
        configured: the activation section of the user's file.
    """
    if unknown := [name for name in names if name not in (NONE, *_COMPARED)]:
        why = "no policy has this name here"
        remedy = f"write names of: {', '.join(_COMPARED)}; others go into --config"
        problem = Problem("--policies", ", ".join(unknown), why, remedy)
        raise ConfigError(problem, headline="the policies cannot be compared")
    found = [ComparedPolicy(NONE, None)]
    if configured is not None:
        found.append(ComparedPolicy("configured", configured))
    for name in names:
        if name == NONE or _COMPARED[name] == configured:
            continue
        section = dict(_COMPARED[name])
        if modules is not None:
            policy = policy_named(section["policy"])
            if policy is not None and policy.of_parts:
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


def built_fake(subject: Subject, count: int) -> FakeModel:
    """Build without memory; UnsupportedError if that is impossible."""
    return FakeModel.build(subject.name, lambda: subject.build(count))


def footprints(
    subject: Subject,
    count: int,
    wanted: Sequence[ComparedPolicy],
    modules: Sequence[str] | None,
    *,
    report: Report = lambda text: None,
) -> list[Footprint]:
    """Trace one step of each policy on fake tensors.

    Args:
        subject: the model.
        count: sequences of the batch.
        wanted: the policies.
        modules: of the model's blocks.
        report: called before each.

    Raises:
        UnsupportedError: the model reads a value that fake tensors lack.
    """
    found = []
    made = built_fake(subject, count)
    model, batch = made.model, made.batch
    blocks = blocks_of(model, modules)[0]
    for policy in wanted:
        report(f"{policy.name}, batch {count}")
        units = policy.units(model, made.known_batch())
        with made.entered():
            trace = StepTrace(model, blocks)
            trace.run(lambda: run_forward(model, batch), units)
        for leaf in tensors_in(batch):
            leaf.grad = None
        held, place = trace.held_by(), trace.peak_place
        names = (*(b.name for b in blocks), OUTSIDE)
        footprint = Footprint(
            policy=policy.name,
            section=policy.section,
            batch=count,
            tokens=tokens_of(batch),
            held_bytes=trace.held_bytes,
            blocks={n: {p: held[n, p] for p in (*PARTS, "checkpointed")} for n in names},
            peak_bytes=trace.peak_bytes,
            peak_phase=place.phase if place else "forward",
            peak_block=place.block if place else OUTSIDE,
            forward=trace.total("forward"),
            recompute=trace.total("recompute"),
            backward=trace.total("backward"),
        )
        found.append(footprint)
    return found


def make_profile(options: Options, report: Report = lambda text: None) -> Profile:
    """Trace all policies and batches. Raises ConfigError and UnsupportedError, with remedies."""
    options, configured, notes = _with_file(options)
    subject = find_subject(options.model, options.sizes)
    batches = tuple(dict.fromkeys(options.batches))
    if len(batches) > 1 and not subject.sized:
        notes.append(f"other batches: {subject.name} takes no argument named batch")
        batches = batches[:1]
    model = built_fake(subject, batches[0]).model
    blocks, modules = blocks_of(model, options.modules)
    if not blocks:
        notes.append('blocks: none were found; name them with --modules "layers.*"')
    parameters = Parameters.of(model, blocks)
    states, assumptions = estimate(parameters, options.config, options.world, options.hosts)
    beside = {"ZeRO's states": states.resident_bytes - states.host_copy_bytes}
    if states.host_copy_bytes:
        beside[HOST_COPY] = states.host_copy_bytes
    wanted = [
        replace(policy, resident=beside, limit_bytes=options.limit_bytes)
        for policy in compared(options.policies, modules, configured)
    ]
    found = [footprints(subject, count, wanted, modules, report=report) for count in batches]
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return Profile(
        model=options.model,
        class_name=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        states=states,
        footprints=tuple(itertools.chain(*found)),
        notes=(*assumptions, *notes),
        limit_bytes=options.limit_bytes,
    )


def _with_file(options: Options) -> tuple[Options, dict[str, Any] | None, list[str]]:
    """Options that the DeepSpeed file completes, its activation section, and gaps."""
    configured, notes = None, list[str]()
    if options.config is not None:
        activation = parse(options.config, source=options.source).activation
        section = lookup(options.config, ("ds_ckpt", "activation"))
        if activation.active:
            configured = dict(section) if section else {"policy": activation.policy}
        notes = [
            f"{key}: its tensors count in full, in one rank"
            for key in ("offload", "partition")
            if getattr(activation, key)
        ]
        options = replace(options, modules=options.modules or activation.modules)
    enabled = precision(options.config)
    if options.sizes.dtype is None and enabled == "auto":
        notes.append('precision: "auto" is counted as the model\'s own type; set it with --dtype')
    elif options.sizes.dtype is None and enabled is not None:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled]
        options = replace(options, sizes=replace(options.sizes, dtype=dtype))
    return options, configured, notes
