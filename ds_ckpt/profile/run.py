"""A whole profile: which steps are run, on what tensors, and what is put together of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import nn

from ds_ckpt.activation import Block
from ds_ckpt.config import parse
from ds_ckpt.config.paths import lookup
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.profile.compiled import compile_report
from ds_ckpt.profile.device import real_bytes, watch_device
from ds_ckpt.profile.facts import Facts, best_of
from ds_ckpt.profile.fakes import built_fake
from ds_ckpt.profile.findings import findings_of
from ds_ckpt.profile.measure import (
    built_real,
    fake_footprints,
    out_of_memory,
    real_footprints,
    too_big,
)
from ds_ckpt.profile.plans import not_counted, with_plan
from ds_ckpt.profile.policies import Choice, blocks_of, choices
from ds_ckpt.profile.records import Compiled, Device, Footprint, Profile
from ds_ckpt.profile.states import Parameters, estimate
from ds_ckpt.profile.subject import Sizes, Subject, find_subject
from ds_ckpt.profile.timing import times_of

_MOST_FLOPS = {"cpu": 2e12, "cuda": 2e16}
"""Of all timed steps together, where nobody asked for them: under a minute."""
_SHARE_OF_MEMORY = 0.5
Told = Callable[[str], object]


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
    configured = plugin = None
    modules: Sequence[str] | None = options.modules
    if options.config is not None:
        plugin = parse(options.config, source=options.source)
        section = lookup(options.config, ("ds_ckpt", "activation"))
        if plugin.activation.active:
            configured = dict(section) if section else {"policy": plugin.activation.policy}
        modules = modules or plugin.activation.modules
    sizes = options.sizes
    if sizes.dtype is None:
        sizes = replace(sizes, dtype=dtype_in(options.config))
    notes = not_counted(plugin.activation) if plugin is not None else []
    subject = find_subject(options.model, sizes)
    device = _device(options.device)
    told("building the model")
    made = _Made(subject, options, modules, device, told)
    states, said = estimate(made.parameters, options.config, options.world)
    wanted = [
        replace(c, resident_bytes=states.resident_bytes, limit_bytes=options.limit_bytes)
        for c in choices(options.policies, made.modules, configured)
    ]
    footprints = made.footprints(wanted)
    footprints = made.with_real(footprints, wanted)
    facts = Facts(
        states=states,
        footprints=tuple(footprints),
        sections={c.name: c.section for c in wanted},
        limit_bytes=options.limit_bytes,
        compiled=made.compile_report(footprints) if options.compile else None,
        sdpa=made.with_sdpa(footprints),
        trainable_count=sum(made.parameters.trainable),
        modules=made.modules,
    )
    accelerator = made.device_report(facts)
    return Profile(
        model=subject.name,
        class_name=made.class_name,
        dtype=str(made.dtype).removeprefix("torch."),
        attention=facts.attention,
        states=states,
        footprints=facts.footprints,
        findings=tuple(findings_of(facts)),
        not_measured=(*said, *notes, *made.not_measured),
        limit_bytes=options.limit_bytes,
        best=best_of(facts),
        compiled=facts.compiled,
        device=accelerator,
    )


class _Made:
    """What is built once, and what could not be measured with it."""

    def __init__(
        self,
        subject: Subject,
        options: Options,
        modules: Sequence[str] | None,
        device: torch.device,
        told: Told,
    ) -> None:
        self._subject, self._options, self._device, self._told = subject, options, device, told
        self.not_measured: list[str] = []
        self._fake = True
        model: nn.Module
        try:
            model = built_fake(subject, options.batches[0]).model
        except UnsupportedError:
            if options.real is not True:
                raise
            self._fake = False
            model, _ = built_real(subject, options.batches[0], device)
        blocks, self.modules = blocks_of(model, modules)
        if not blocks:
            self.not_measured.append(
                "blocks: the model has no layers with Hugging Face's hook and no class that is "
                'repeated; name them with --modules "layers.*"'
            )
        self.parameters = Parameters.of(model, blocks)
        self.class_name = type(model).__name__
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def footprints(self, wanted: Sequence[Choice]) -> list[Footprint]:
        """Of every policy at every batch: by fake tensors, or by real ones where those fail."""
        found: list[Footprint] = []
        for count in self._batches():
            if self._fake:
                try:
                    found += fake_footprints(self._subject, count, wanted, self.modules, self._told)
                    continue
                except UnsupportedError as error:
                    values = any("fake tensors" in p.why for p in error.problems)
                    if self._options.real is not True or not values:
                        raise
                    self._fake = False
                    self.not_measured.append(f"by fake tensors: {error.problems[0].found}")
            found += real_footprints(
                self._subject, count, wanted, self.modules, self._device, self._told
            )
        return found

    def _batches(self) -> tuple[int, ...]:
        batches = tuple(dict.fromkeys(self._options.batches))
        if len(batches) > 1 and not self._subject.sized:
            self.not_measured.append(
                f"other batches: {self._subject.name} takes no argument named batch"
            )
            return batches[:1]
        return batches

    def with_real(self, found: list[Footprint], wanted: Sequence[Choice]) -> list[Footprint]:
        """Bytes and times of real steps, where they were asked for or are cheap."""
        if self._options.real is False:
            self.not_measured.append("times: --fake runs no step on real tensors")
            return found
        forced = self._options.real is True
        result = []
        for count in dict.fromkeys(f.batch for f in found):
            mine = [f for f in found if f.batch == count]
            needed = self._needed_bytes(mine)
            free = _free_bytes(self._device)
            work = sum(f.flops for f in mine) * (self._options.repeats + 3)
            share = 1.0 if forced else _SHARE_OF_MEMORY
            if needed > share * free:
                text = f"{needed / 2**30:.2f} GiB where {free / 2**30:.2f} GiB are free"
                if forced:
                    raise too_big(count, text)
                self.not_measured.append(f"times at batch {count}: {text}")
            elif not forced and work > _MOST_FLOPS.get(self._device.type, 2e12):
                self.not_measured.append(
                    f"times at batch {count}: {work:.1e} FLOPs are too many to run unasked; "
                    "ask with --real"
                )
            else:
                mine = self._run(count, mine, wanted)
            result += mine
        return result

    def _needed_bytes(self, found: Sequence[Footprint]) -> int:
        weights = sum(self.parameters.counts) * self.parameters.itemsize
        return 2 * weights + max(f.peak.live_bytes for f in found)

    def _run(
        self, count: int, found: Sequence[Footprint], wanted: Sequence[Choice]
    ) -> list[Footprint]:
        with out_of_memory(count):
            model, batch = built_real(self._subject, count, self._device)
            wanted = [with_plan(choice, model, batch, self._device) for choice in wanted]
            result = []
            for footprint, choice in zip(found, wanted, strict=True):
                self._told(f"{choice.name}, batch {count}, real bytes")
                held, peak = real_bytes(model, batch, choice, self._device)
                result.append(replace(footprint, real_held_bytes=held, real_peak_bytes=peak))
            times = times_of(model, batch, wanted, self._device, self._options.repeats, self._told)
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
        kept = self._boundaries(blocks, found)
        return compile_report(made, blocks, kept)

    def _boundaries(self, blocks: Sequence[Block], found: Sequence[Footprint]) -> Footprint:
        for footprint in found:
            if footprint.policy == "block":
                return footprint
        if not blocks:
            return found[0]
        wanted = choices(("block",), self.modules, None)[1:]
        return fake_footprints(self._subject, found[0].batch, wanted, self.modules)[0]

    def with_sdpa(self, found: Sequence[Footprint]) -> Footprint | None:
        """The model's step with "sdpa", where its attention stores weights and could do without."""
        first = found[0]
        options = self._options
        if not first.score_bytes or not self._subject.can_sdpa or not self._fake:
            return None
        sizes = replace(options.sizes, dtype=self.dtype, attention="sdpa")
        try:
            other = find_subject(options.model, sizes)
            wanted = choices((), self.modules, None)
            (footprint,) = fake_footprints(other, first.batch, wanted, self.modules)
        except UnsupportedError:
            return None
        return footprint if footprint.score_bytes < first.score_bytes else None

    def device_report(self, facts: Facts) -> Device | None:
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
            section = facts.sections[first.policy]
            bare = Choice(
                first.policy,
                None if section is None else dict(section),
                resident_bytes=facts.states.resident_bytes,
                limit_bytes=facts.limit_bytes,
            )
            choice = with_plan(bare, model, batch, self._device)
            moved = first.recompute.moved_bytes
            return watch_device(model, batch, choice, moved, self._device)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
