"""A whole profile: which steps are run, on what tensors, and what is put together of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import nn

from ds_ckpt.config import parse
from ds_ckpt.config.paths import lookup
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.profile.compiled import compile_report
from ds_ckpt.profile.device import real_bytes, times_of, watch_device
from ds_ckpt.profile.findings import Facts, findings_of
from ds_ckpt.profile.measure import (
    Told,
    built_fake,
    built_real,
    fake_footprints,
    out_of_memory,
    real_footprints,
    too_big,
)
from ds_ckpt.profile.policies import ComparedPolicy, blocks_of, compared, not_counted, with_plan
from ds_ckpt.profile.records import Compiled, Device, Footprint, Profile
from ds_ckpt.profile.states import Parameters, estimate
from ds_ckpt.profile.subject import Sizes, Subject, find_subject
from ds_ckpt.telemetry.units import GIB

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
    policies: tuple[str, ...] = ("block", "attention", "mlp", "selective")
    modules: tuple[str, ...] | None = None
    real: bool | None = None
    compile: bool = False
    limit_bytes: int | None = None
    repeats: int = 5
    device: str = "auto"


def dtype_in(config: Mapping[str, Any] | None) -> torch.dtype | None:
    """What DeepSpeed would train in; None where the file says nothing."""
    if lookup(config, ("bf16", "enabled")) is True:
        return torch.bfloat16
    return torch.float16 if lookup(config, ("fp16", "enabled")) is True else None


def make_profile(options: Options, told: Told = lambda text: None) -> Profile:
    """Raises ConfigError and UnsupportedError, with remedies."""
    configured, not_measured = None, list[str]()
    modules: Sequence[str] | None = options.modules
    sizes = options.sizes
    if options.config is not None:
        activation = parse(options.config, source=options.source).activation
        section = lookup(options.config, ("ds_ckpt", "activation"))
        if activation.active:
            configured = dict(section) if section else {"policy": activation.policy}
        modules = modules or activation.modules
        not_measured = not_counted(activation)
    if sizes.dtype is None:
        sizes = replace(sizes, dtype=dtype_in(options.config))
    subject = find_subject(options.model, sizes)
    told("building the model")
    run = _Run(subject, options, modules, told)
    states, assumptions = estimate(run.parameters, options.config, options.world)
    policies = [
        replace(p, resident_bytes=states.resident_bytes, limit_bytes=options.limit_bytes)
        for p in compared(options.policies, run.modules, configured)
    ]
    footprints = run.with_real_steps(run.footprints(policies), policies)
    facts = Facts(
        states=states,
        footprints=tuple(footprints),
        sections={p.name: p.section for p in policies},
        limit_bytes=options.limit_bytes,
        compiled=run.compile_report(footprints) if options.compile else None,
        sdpa=run.with_sdpa(footprints),
        trainable_count=sum(run.parameters.trainable),
        modules=run.modules,
    )
    accelerator = run.device_report(facts, policies)
    return Profile(
        model=subject.name,
        class_name=run.class_name,
        dtype=str(run.dtype).removeprefix("torch."),
        attention=facts.attention,
        states=states,
        footprints=facts.footprints,
        findings=tuple(findings_of(facts)),
        not_measured=(*assumptions, *not_measured, *run.not_measured),
        limit_bytes=options.limit_bytes,
        best=facts.best,
        compiled=facts.compiled,
        device=accelerator,
    )


class _Run:
    """One model's steps, on fake tensors where it runs on them, and what could not be measured."""

    def __init__(
        self, subject: Subject, options: Options, modules: Sequence[str] | None, told: Told
    ) -> None:
        self._subject, self._options, self._told = subject, options, told
        name = options.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(name)
        self.not_measured: list[str] = []
        self._fake = True
        model: nn.Module
        try:
            model = built_fake(subject, options.batches[0]).model
        except UnsupportedError:
            if options.real is not True:
                raise
            self._fake = False
            model, _ = built_real(subject, options.batches[0], self._device)
        blocks, self.modules = blocks_of(model, modules)
        if not blocks:
            self.not_measured.append(
                "blocks: the model has no layers with Hugging Face's hook and no class that is "
                'repeated; name them with --modules "layers.*"'
            )
        self.parameters = Parameters.of(model, blocks)
        self.class_name = type(model).__name__
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def footprints(self, policies: Sequence[ComparedPolicy]) -> list[Footprint]:
        """Of every policy at every batch: by fake tensors, or by real ones where those fail."""
        batches = tuple(dict.fromkeys(self._options.batches))
        if len(batches) > 1 and not self._subject.sized:
            name = self._subject.name
            self.not_measured.append(f"other batches: {name} takes no argument named batch")
            batches = batches[:1]
        found: list[Footprint] = []
        for count in batches:
            where = (self._subject, count, policies, self.modules)
            if self._fake:
                try:
                    found += fake_footprints(*where, self._told)
                    continue
                except UnsupportedError as error:
                    values = any("fake tensors" in p.why for p in error.problems)
                    if self._options.real is not True or not values:
                        raise
                    self._fake = False
                    self.not_measured.append(f"by fake tensors: {error.problems[0].found}")
            found += real_footprints(*where, self._device, self._told)
        return found

    def with_real_steps(
        self, found: list[Footprint], policies: Sequence[ComparedPolicy]
    ) -> list[Footprint]:
        """Bytes and times of real steps, where they were asked for or are cheap."""
        if self._options.real is False:
            self.not_measured.append("times: --fake runs no step on real tensors")
            return found
        forced, weights = self._options.real is True, self.parameters
        result = []
        for count in dict.fromkeys(f.batch for f in found):
            mine = [f for f in found if f.batch == count]
            needed = 2 * sum(weights.counts) * weights.itemsize
            needed += max(f.peak.live_bytes for f in mine)
            free = _free_bytes(self._device)
            flops = sum(f.flops for f in mine) * (self._options.repeats + 3)
            if needed > (1.0 if forced else _SHARE_OF_MEMORY) * free:
                text = f"{needed / GIB:.2f} GiB where {free / GIB:.2f} GiB are free"
                if forced:
                    raise too_big(count, text)
                self.not_measured.append(f"times at batch {count}: {text}")
            elif not forced and flops > _MOST_FLOPS.get(self._device.type, 2e12):
                self.not_measured.append(
                    f"times at batch {count}: {flops:.1e} FLOPs are too many to run unasked; "
                    "ask with --real"
                )
            else:
                mine = self._real_steps(count, mine, policies)
            result += mine
        return result

    def _real_steps(
        self, count: int, found: Sequence[Footprint], policies: Sequence[ComparedPolicy]
    ) -> list[Footprint]:
        device = self._device
        with out_of_memory(count):
            model, batch = built_real(self._subject, count, device)
            policies = [with_plan(policy, model, batch, device) for policy in policies]
            result = []
            for footprint, policy in zip(found, policies, strict=True):
                self._told(f"{policy.name}, batch {count}, real bytes")
                held, peak = real_bytes(model, batch, policy, device)
                result.append(replace(footprint, real_held_bytes=held, real_peak_bytes=peak))
            times = times_of(model, batch, policies, device, self._options.repeats, self._told)
        return [replace(f, times=times[f.policy]) for f in result]

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
            (kept,) = fake_footprints(self._subject, count, policies, self.modules)
        return compile_report(made, blocks, kept)

    def with_sdpa(self, found: Sequence[Footprint]) -> Footprint | None:
        """The model's step with "sdpa", where its attention stores weights and could do without."""
        first = found[0]
        if not first.score_bytes or not self._subject.can_sdpa or not self._fake:
            return None
        sizes = replace(self._options.sizes, dtype=self.dtype, attention="sdpa")
        try:
            other = find_subject(self._options.model, sizes)
            policies = compared((), self.modules, None)
            (footprint,) = fake_footprints(other, first.batch, policies, self.modules)
        except UnsupportedError:
            return None
        return footprint if footprint.score_bytes < first.score_bytes else None

    def device_report(self, facts: Facts, policies: Sequence[ComparedPolicy]) -> Device | None:
        """Of the first policy that recomputes, on CUDA."""
        if self._device.type != "cuda":
            self.not_measured.append(
                "memory bandwidth in recompute, gaps between launches: no accelerator"
            )
            return None
        timed = [f for f in facts.footprints if f.times and f.recompute.launches]
        if not timed:
            self.not_measured.append("gaps between launches: no step was run (--real)")
            return None
        first = timed[0]
        self._told(f"{first.policy}: kernels")
        with out_of_memory(first.batch):
            model, batch = built_real(self._subject, first.batch, self._device)
            unplanned = next(p for p in policies if p.name == first.policy)
            policy = with_plan(unplanned, model, batch, self._device)
            return watch_device(model, batch, policy, first.recompute.moved_bytes, self._device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
