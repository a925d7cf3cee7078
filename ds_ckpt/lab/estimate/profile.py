"""A whole profile: which steps are run, on what tensors, and what is put together of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_ckpt.config import parse
from ds_ckpt.config.paths import lookup, precision
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.estimate.compiled import compile_report
from ds_ckpt.lab.estimate.findings import Settings, attention_of, best_of, findings_of
from ds_ckpt.lab.estimate.observe import (
    Told,
    built_fake,
    built_real,
    footprints,
    out_of_memory,
    real_bytes,
    times_of,
    too_big,
)
from ds_ckpt.lab.estimate.policies import (
    ComparedPolicy,
    blocks_of,
    compared,
    not_counted,
    with_plan,
)
from ds_ckpt.lab.estimate.profiles import Compiled, Footprint, Profile, States
from ds_ckpt.lab.estimate.states import Parameters, accumulation_of, estimate, keeps_resident
from ds_ckpt.lab.subject import Sizes, find_subject
from ds_ckpt.telemetry.device import free_on
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import HOST_COPY, host_copy_bytes

_MOST_FLOPS = {"cpu": 2e12, "cuda": 2e16}
"""Of all timed steps together, where nobody asked for them: under a minute."""
_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True)
class Options:
    """Of the command line. `real` None: real steps too where they are cheap."""

    model: str
    config: Mapping[str, Any] | None = None
    source: str = "config"
    batches: tuple[int, ...] = (1,)
    sizes: Sizes = field(default_factory=Sizes)
    world: int = 1
    hosts: int | None = None
    policies: tuple[str, ...] = ("block", "attention", "mlp", "selective")
    modules: tuple[str, ...] | None = None
    real: bool | None = None
    compile: bool = False
    limit_bytes: int | None = None
    repeats: int = 5


def make_profile(options: Options, told: Told = lambda text: None) -> Profile:
    """Raises ConfigError and UnsupportedError, with remedies."""
    configured, missing = None, list[str]()
    if options.config is not None:
        activation = parse(options.config, source=options.source).activation
        section = lookup(options.config, ("ds_ckpt", "activation"))
        if activation.active:
            configured = dict(section) if section else {"policy": activation.policy}
        missing = not_counted(activation)
        options = replace(options, modules=options.modules or activation.modules)
    enabled = precision(options.config)
    if options.sizes.dtype is None and enabled == "auto":
        missing.append('weights in 16 bits, where "auto" comes to that: name them with --dtype')
    elif options.sizes.dtype is None and enabled is not None:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled]
        options = replace(options, sizes=replace(options.sizes, dtype=dtype))
    told("building the model")
    run = _Run(options, told)
    states, assumptions = estimate(run.parameters, options.config, options.world, options.hosts)
    beside = {"what ZeRO keeps": states.resident_bytes - states.host_copy_bytes}
    if states.host_copy_bytes:
        beside[HOST_COPY] = states.host_copy_bytes
    policies = [
        replace(p, resident=beside, limit_bytes=options.limit_bytes)
        for p in compared(options.policies, run.modules, configured)
    ]
    found = tuple(run.footprints(policies))
    profile = Profile(
        model=options.model,
        class_name=run.class_name,
        dtype=str(run.dtype).removeprefix("torch."),
        attention=attention_of(found[0]),
        states=states,
        footprints=found,
        findings=(),
        not_measured=(),
        limit_bytes=options.limit_bytes,
        compiled=run.compile_report(found) if options.compile else None,
    )
    settings = Settings(
        sections={p.name: p.section for p in policies},
        sdpa=run.with_sdpa(found[0]),
        trainable_count=sum(run.parameters.trainable),
        modules=run.modules,
        accumulation=accumulation_of(options.config),
        resident=keeps_resident(options.config),
        resident_bytes=_resident_bytes(run.parameters, states, options.config),
    )
    return replace(
        profile,
        findings=tuple(findings_of(profile, settings)),
        not_measured=(*assumptions, *missing, *run.not_measured),
        best=best_of(profile),
    )


def _resident_bytes(
    parameters: Parameters, states: States, config: Mapping[str, Any] | None
) -> int | None:
    """What resident weights take of a process, beside what hpZ takes already.

    None where there is one host, or nobody knows how many, or `config` is refused with them.
    """
    world, hosts = states.world, states.hosts
    if keeps_resident(config) and hosts != 1:
        return states.host_copy_bytes
    if hosts is None or hosts == 1 or states.zero_stage != 3:
        return None
    ours = {**(lookup(config, ("ds_ckpt",)) or {}), "weights": {"resident": True}}
    try:
        parse({"zero_optimization": {"stage": 3}, **(config or {}), "ds_ckpt": ours})
    except ConfigError:
        return None
    needed = host_copy_bytes(parameters.counts, world, world // hosts, parameters.itemsize)
    return max(0, needed - states.host_copy_bytes)


class _Run:
    """One model's steps, on fake tensors where it runs on them, and what could not be measured."""

    def __init__(self, options: Options, told: Told) -> None:
        self._options, self._told = options, told
        self._subject = find_subject(options.model, options.sizes)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.not_measured: list[str] = []
        self._fake = True
        model: nn.Module
        try:
            model = built_fake(self._subject, options.batches[0]).model
        except UnsupportedError:
            if options.real is not True:
                raise
            self._fake = False
            model, _ = built_real(self._subject, options.batches[0], self._device)
        blocks, self.modules = blocks_of(model, options.modules)
        if not blocks:
            self.not_measured.append(
                "blocks: the model has no layers with Hugging Face's hook and no class that is "
                'repeated; name them with --modules "layers.*"'
            )
        self.parameters = Parameters.of(model, blocks)
        self.class_name = type(model).__name__
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def footprints(self, policies: Sequence[ComparedPolicy]) -> Iterator[Footprint]:
        """Of every policy at every batch, with the bytes and times of real steps where they were
        asked for or are cheap."""
        batches = tuple(dict.fromkeys(self._options.batches))
        if len(batches) > 1 and not self._subject.sized:
            name = self._subject.name
            self.not_measured.append(f"other batches: {name} takes no argument named batch")
            batches = batches[:1]
        if self._options.real is False:
            self.not_measured.append("times: --fake runs no step on real tensors")
        for count in batches:
            found = self._observed(count, policies)
            real = self._options.real is not False and self._can_run(found)
            yield from self._real_steps(count, found, policies) if real else found

    def _observed(self, count: int, policies: Sequence[ComparedPolicy]) -> list[Footprint]:
        """By fake tensors, or by real ones where those fail."""
        where = (self._subject, count, policies, self.modules)
        if self._fake:
            try:
                return footprints(*where, told=self._told)
            except UnsupportedError as error:
                values = any("fake tensors" in p.why for p in error.problems)
                if self._options.real is not True or not values:
                    raise
                self._fake = False
                self.not_measured.append(f"by fake tensors: {error.problems[0].found}")
        return footprints(*where, self._device, self._told)

    def _can_run(self, found: Sequence[Footprint]) -> bool:
        """Whether real steps are run at this batch; UnsupportedError where they cannot be."""
        forced, weights, count = self._options.real is True, self.parameters, found[0].batch
        needed = 2 * sum(weights.counts) * weights.itemsize
        needed += max(f.peak.live_bytes for f in found)
        free = free_on(self._device)
        flops = sum(f.flops for f in found) * (self._options.repeats + 3)
        why = ""
        if needed > (1.0 if forced else _SHARE_OF_MEMORY) * free:
            why = f"{needed / GIB:.2f} GiB where {free / GIB:.2f} GiB are free"
            if forced:
                raise too_big(count, why)
        elif not forced and flops > _MOST_FLOPS[self._device.type]:
            why = f"{flops:.1e} FLOPs are too many to run unasked; ask with --real"
        if why:
            self.not_measured.append(f"times at batch {count}: {why}")
        return not why

    def _real_steps(
        self, count: int, found: Sequence[Footprint], policies: Sequence[ComparedPolicy]
    ) -> Iterator[Footprint]:
        device = self._device
        with out_of_memory(count):
            model, batch = built_real(self._subject, count, device)
            policies = [with_plan(policy, model, batch, device) for policy in policies]
            self._told(f"batch {count}, real bytes")
            real = [real_bytes(model, batch, policy, device) for policy in policies]
            times = times_of(model, batch, policies, device, self._options.repeats, self._told)
        for footprint, (held, peak) in zip(found, real, strict=True):
            times_s = times[footprint.policy]
            yield replace(footprint, real_held_bytes=held, real_peak_bytes=peak, times=times_s)

    def compile_report(self, found: Sequence[Footprint]) -> Compiled | None:
        """By fake tensors; None, with a word why, where the model has none."""
        if not self._fake:
            self.not_measured.append("torch.compile: the model does not run on fake tensors")
            return None
        self._told("torch.compile: capturing, cutting")
        count = found[0].batch
        made = built_fake(self._subject, count)
        blocks, _ = blocks_of(made.model, self.modules)
        kept = next((f for f in found if f.policy == "block"), found[0])
        if blocks and kept.policy != "block":
            policies = compared(("block",), self.modules, None)[1:]
            (kept,) = footprints(self._subject, count, policies, self.modules)
        return compile_report(made, blocks, kept)

    def with_sdpa(self, first: Footprint) -> Footprint | None:
        """The model's step with "sdpa", where its attention stores weights and could do without."""
        if not first.score_bytes or not self._subject.can_sdpa or not self._fake:
            return None
        sizes = replace(self._options.sizes, dtype=self.dtype, attention="sdpa")
        try:
            other = find_subject(self._options.model, sizes)
            policies = compared((), self.modules, None)
            (footprint,) = footprints(other, first.batch, policies, self.modules)
        except UnsupportedError:
            return None
        return footprint if footprint.score_bytes < first.score_bytes else None
