"""Memory and work of a model under several policies, from one traced step on fake tensors each.

`trace_step` runs a step on real tensors.
"""

import errno
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_ckpt.activation import CheckpointedBlocks, find_blocks
from ds_ckpt.activation.blocks import Block, repeated_classes
from ds_ckpt.activation.planning.budget import AUTO_SHARE
from ds_ckpt.activation.planning.fake import FakeModel
from ds_ckpt.activation.planning.trace import StepTrace, Work
from ds_ckpt.activation.policies import POLICIES, Unit, make_units, policy_names
from ds_ckpt.config import parse
from ds_ckpt.config.activation import ActivationConfig, activation_policy
from ds_ckpt.config.paths import lookup, precision
from ds_ckpt.errors import ConfigError, DsCkptError, Problem, UnsupportedError
from ds_ckpt.lab.estimate.memory_model import Parameters, States, estimate
from ds_ckpt.lab.subject import Sizes, Subject, find_subject, run_forward, sequence_length
from ds_ckpt.telemetry.memory import OUTSIDE, free_on, tensors_in
from ds_ckpt.telemetry.timings import profiler_range
from ds_ckpt.telemetry.units import size, times

NONE = "none"
"""Name of the step without a policy."""
BLOCK_PARTS = ("attention", "mlp", "norm", "other")
TRACED_BLOCKS = 2
"""Blocks of the model of a real step, if all of its blocks are equal."""
TextProgress = Callable[[str], object]


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
    """One policy (activation section, or None) at one batch size: one forward and backward.

    `tokens` are of one sequence, 1 if there are none; `blocks` are saved bytes by block and part.
    `host_bytes` are in host memory between forward and backward, and not part of `held_bytes`.
    """

    policy: str
    section: Mapping[str, Any] | None
    batch: int
    tokens: int
    held_bytes: int
    blocks: Mapping[str, Mapping[str, int]]
    peak_bytes: int
    forward: Work
    recompute: Work
    backward: Work
    host_bytes: int = 0

    @property
    def step(self) -> Work:
        """Add up the phases."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True)
class Profile:
    """All results of the command; `schema` changes when a field is renamed or removed.

    `is_planned`: the file's policy is not in `footprints`, as training plans it.
    """

    model: str
    class_name: str
    dtype: str
    states: States
    footprints: tuple[Footprint, ...]
    notes: tuple[str, ...]
    limit_bytes: int | None = None
    is_planned: bool = False
    schema: int = 5

    def total_bytes(self, footprint: Footprint) -> int:
        """Peak of a rank: states and activations in the passes, or the optimizer's step."""
        in_passes = self.states.resident_bytes + footprint.peak_bytes
        return max(in_passes, self.states.step_bytes)

    @property
    def usable_bytes(self) -> int | None:
        """Part of the limit that is used, as by `ds-ckpt plan`; None without a limit."""
        return None if self.limit_bytes is None else int(AUTO_SHARE * self.limit_bytes)

    @property
    def best(self) -> Footprint | None:
        """The largest batch that fits, with the policy that computes least."""
        limit = self.usable_bytes
        fits = [f for f in self.footprints if limit is not None and self.total_bytes(f) <= limit]
        return max(fits, key=lambda f: (f.batch, -f.step.flops), default=None)

    def to_json(self) -> str:
        """Write all fields as JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


Sections = dict[str, dict[str, Any] | None]
"""Activation sections by the policy's name; None: no policy."""


def settings_of(name: str, section: dict[str, Any] | None) -> ActivationConfig:
    """Return the settings of a policy; None: no checkpointing."""
    file = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": section}}
    return parse(file, source=name).activation


def units_of(name: str, section: dict[str, Any] | None, model: nn.Module) -> list[Unit] | None:
    """Return the units of a policy on this model; None: no checkpointing."""
    if section is None:
        return None
    return make_units(model, activation_policy(settings_of(name, section)))


def _section(name: str) -> dict[str, Any]:
    """Return the section of `policy` or `policy:setting`, a value of the policy's first key."""
    policy, _, value = name.replace(" ", ":").partition(":")
    known = POLICIES.get(policy)
    if known is None or (value and not known.model_fields):
        why = "no policy has this name" if known is None else f"{policy} has no setting"
        names = ", ".join(policy_names(planned=False))
        remedy = f"write names of: {names}; a setting may follow: segments:2, every_n:4"
        problem = Problem("--policies", name, why, remedy)
        raise ConfigError(problem, headline="the policies cannot be compared")
    key = next(iter(known.model_fields), "")
    number = int(value) if value.isdecimal() else value
    return {"policy": policy, **({key: number} if value else {})}


def compared(
    names: Sequence[str], modules: Sequence[str] | None, configured: dict[str, Any] | None
) -> Sections:
    """List no policy first, then the configured section, then the named policies.

    With `modules` of a plain model, policies of parts are left out.
    """
    found: Sections = {NONE: None}
    if configured is not None:
        found["configured"] = configured
    for name in names:
        section = _section(name)
        if name == NONE or section == configured:
            continue
        if modules is not None:
            if POLICIES[section["policy"]].of_parts:
                continue
            section["modules"] = list(modules)
        found[name] = section
    return found


def blocks_of(
    model: nn.Module, modules: Sequence[str] | None
) -> tuple[list[Block], Sequence[str] | None]:
    """Find the blocks, in a plain model of the repeated class, and the patterns to configure."""
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
    wanted: Sections,
    modules: Sequence[str] | None,
    *,
    report: TextProgress = lambda text: None,
) -> list[Footprint]:
    """Trace one step of each policy on fake tensors; UnsupportedError if it reads a value."""
    found = []
    made = built_fake(subject, count)
    model, batch = made.model, made.batch
    blocks = blocks_of(model, modules)[0]
    for policy, section in wanted.items():
        report(f"{policy}, batch {count}")
        units, settings = units_of(policy, section, model), settings_of(policy, section)
        with made.entered():
            trace = StepTrace(model, blocks)
            trace.run(lambda: run_forward(model, batch), units, settings)
        for leaf in tensors_in(batch):
            leaf.grad = None
        held = trace.held_by()
        names = (*(b.name for b in blocks), OUTSIDE)
        footprint = Footprint(
            policy=policy,
            section=section,
            batch=count,
            tokens=sequence_length(batch),
            held_bytes=trace.saved.bytes,
            blocks={n: {p: held[n, p] for p in BLOCK_PARTS} for n in names},
            peak_bytes=trace.peak_bytes,
            forward=trace.work["forward"],
            recompute=trace.work["recompute"],
            backward=trace.work["backward"],
            host_bytes=trace.offloaded_bytes,
        )
        found.append(footprint)
    return found


def make_profile(options: Options, report: TextProgress = lambda text: None) -> Profile:
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
    wanted = compared(options.policies, modules, configured)
    found = [footprints(subject, count, wanted, modules, report=report) for count in batches]
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    file = parse(options.config, source=options.source) if options.config is not None else None
    return Profile(
        model=options.model,
        class_name=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        states=states,
        footprints=tuple(itertools.chain(*found)),
        notes=(*assumptions, *notes),
        limit_bytes=options.limit_bytes,
        is_planned=file is not None and file.activation.planned,
    )


def trace_step(options: Options, path: Path) -> str:
    """Run a step without and one with the first policy, and write that one's chrome trace.

    The model has `TRACED_BLOCKS` blocks, on the GPU if there is one. Returns counts of kernels, or
    of a CPU's operators. Raises UnsupportedError if the step needs more memory than is free.
    """
    options, configured, _ = _with_file(options)
    layers = find_subject(options.model, options.sizes).layers and TRACED_BLOCKS
    subject = find_subject(options.model, replace(options.sizes, layers=layers))
    count, device = options.batches[0], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fake = built_fake(subject, count).model
    modules = blocks_of(fake, options.modules)[1]
    (plain,) = footprints(subject, count, {NONE: None}, modules)
    needed = plain.peak_bytes + 2 * sum(p.nbytes for p in fake.parameters())
    if needed > free_on(device):
        found, why = f"a step of {size(needed)}", f"{size(free_on(device))} are free on {device}"
        raise UnsupportedError(Problem("--trace", found, why, "use fewer --tokens"))
    path.touch()  # before a step that takes long
    model, batch = subject.build(count)
    batch = tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), batch)
    launches, scopes = dict[str, int](), [partial(profiler_range, "recompute")]
    for policy, section in [*compared(options.policies, modules, configured).items()][:2]:
        units = units_of(policy, section, model.to(device)) or ()
        blocks = CheckpointedBlocks(model, units=units, scopes=scopes)
        for _ in range(2):  # libraries are loaded in the first step
            with torch.profiler.profile() as profiler:
                with profiler_range("forward"):
                    loss = run_forward(model, batch)
                with profiler_range("backward"):
                    loss.backward()
            model.zero_grad()
        blocks.remove()
        launches[policy] = sum(map(_kernels, profiler.events()))
    profiler.export_chrome_trace(str(path))
    if path.suffix != ".gz" and path.read_bytes().rstrip()[-1:] != b"}":  # full disks raise nothing
        raise OSError(errno.ENOSPC, "a file that was not written to its end")
    unit, none = "kernels" if device.type == "cuda" else "operators", launches[NONE]
    words = ", ".join(f"{policy} {n} ({times(n, none)})" for policy, n in launches.items())
    return f"{path}: a step of {policy} on {device}; {unit}: {words}"


def _kernels(event: Any) -> int:
    """Return the number of kernels of an operator; on a CPU 1 for an operator of the model."""
    if torch.cuda.is_available():
        return len(event.kernels)
    is_inside = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
    return int(event.name.startswith("aten::") and not is_inside)


def _with_file(options: Options) -> tuple[Options, dict[str, Any] | None, list[str]]:
    """Options that the DeepSpeed file completes, its activation section, and gaps."""
    configured, notes = None, list[str]()
    if options.config is not None:
        activation = parse(options.config, source=options.source).activation
        section = lookup(options.config, ("ds_ckpt", "activation"))
        if activation.planned:
            why = f'policy "{activation.policy}" is planned at the first batch of training'
            notes.append(f"configured: not computed here, {why} (ds-ckpt plan computes it)")
        elif activation.active:
            configured = dict(section) if section else {"policy": activation.policy}
        if activation.partition:
            notes.append("partition: its tensors count in full, in one rank")
        options = replace(options, modules=options.modules or activation.modules)
    enabled = precision(options.config)
    if options.sizes.dtype is None and enabled == "auto":
        notes.append('precision: "auto" is counted as the model\'s own type; set it with --dtype')
    elif options.sizes.dtype is None and enabled is not None:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled]
        options = replace(options, sizes=replace(options.sizes, dtype=dtype))
    return options, configured, notes
