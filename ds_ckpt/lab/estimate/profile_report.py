"""Tables and findings of a profile. Nothing here measures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ds_ckpt.lab.estimate.profile import PARTS, Footprint, Profile
from ds_ckpt.lab.report.document import Block, Code, Document, Items, Paragraph, Section, Table
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import GIB, count, seconds, size, times

_OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
_NO_HOST_COPY = {
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1},
    "ds_ckpt": {"weights": {"resident": False}},
}


def document(profile: Profile) -> Document:
    """Put all tables, the findings with their configuration, and the gaps into one document."""
    first = profile.first
    title = (
        f"{profile.model}: {profile.class_name}, {count(profile.states.parameters_count)} "
        f"parameters, {profile.dtype}; batch {first.batch} of {first.tokens} tokens"
    )
    found: list[Block] = []
    for number, finding in enumerate(findings(profile), 1):
        found.append(Paragraph(f"{number}. {finding.text}"))
        if finding.config is not None:
            found.append(Code([json.dumps(finding.config)[1:-1]]))
    found.append(Items([f"not measured: {text}" for text in profile.not_measured]))
    tables = [_states, _saved, _policies, _real, _batches]
    sections = [section for table in tables for section in table(profile)]
    return Document(title, [], [*sections, Section("Findings", found)])


def _states(profile: Profile) -> Iterator[Section]:
    states = profile.states
    rows = [
        ("parameters", states.parameters_bytes),
        ("host's copy of the weights", states.host_copy_bytes),
        ("weights gathered at a time", states.gathered_bytes),
        ("gradients", states.gradients_bytes),
        (f"optimizer ({states.optimizer}, with 32-bit weights)", states.optimizer_bytes),
        ("gradients' residuals", states.residual_bytes),
        ("communication buffers", states.communication_bytes),
        ("temporary, in the optimizer's step", states.temporary_bytes),
        ("in host memory", states.host_bytes),
    ]
    assumed = ", assumed" if states.assumed else ""
    hosts = f" on {states.hosts} hosts" if states.hosts and states.hosts > 1 else ""
    title = f"One rank of {states.world}{hosts}, ZeRO stage {states.zero_stage}{assumed}"
    yield Section(title, [Table(("kept", "bytes"), [(name, size(n)) for name, n in rows if n])])


def _saved(profile: Profile) -> Iterator[Section]:
    first = profile.first
    rows = _grouped(
        (b.name, [*(size(b.parts.get(p, 0)) for p in PARTS), size(b.total_bytes)])
        for b in first.blocks
        if b.name != OUTSIDE
    )
    rows.append([OUTSIDE, *[""] * len(PARTS), size(first.part_bytes("outside"))])
    rows.append(["all", *(size(first.part_bytes(p)) for p in PARTS), size(first.held_bytes)])
    title = "Saved activations without a policy, by block"
    yield Section(title, [Table(("block", *PARTS, "all"), rows)])


def _grouped(rows: Iterable[tuple[str, list[str]]]) -> list[list[str]]:
    """Names and cells, with equal neighbours in one row."""
    found = []
    for cells, neighbours in groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in neighbours]
        last = f" ... {names[-1].rpartition('.')[2]} (each of {len(names)})"
        found.append([names[0] + (last if len(names) > 1 else ""), *cells])
    return found


def _policies(profile: Profile) -> Iterator[Section]:
    none = profile.first
    rows = []
    peaks: dict[str, list[str]] = {}
    for footprint in profile.at_first:
        backward = footprint.backward.flops + footprint.recompute.flops
        launches = footprint.step.launches
        rows.append(
            [
                footprint.policy,
                size(footprint.held_bytes),
                size(footprint.peak_bytes),
                times(footprint.step.flops, none.step.flops),
                count(footprint.recompute.flops),
                f"{launches} {times(launches, none.step.launches)}",
                times(backward, footprint.forward.flops),
            ]
        )
        peaks.setdefault(footprint.peak_in, []).append(footprint.policy)
    tensors = "fake tensors" if none.fake else "real tensors"
    title = f"Memory and work of a step ({tensors}; peak: activations and temporaries)"
    heads = ("policy", "saved", "peak", "FLOPs", "recompute", "launches", "back/fwd")
    places = [f"peak in the {place}: {', '.join(policies)}" for place, policies in peaks.items()]
    yield Section(title, [Table(heads, rows), Items(places)])


def _real(profile: Profile) -> Iterator[Section]:
    rows, title = [], ""
    for footprint in profile.at_first:
        taken = footprint.times
        if taken is not None:
            title = f"Real steps, ms: medians of {taken.repeats} ({taken.device})"
            recompute = f"{1e3 * taken.recompute_s:.1f}" if footprint.recompute.launches else "-"
            rows.append(
                [
                    footprint.policy,
                    *(f"{1e3 * t:.1f}" for t in (taken.forward_s, taken.backward_s)),
                    recompute,
                    f"{1e3 * taken.step_s:.1f}",
                    times(taken.backward_s, taken.forward_s),
                    size(footprint.real_peak_bytes or 0),
                ]
            )
    heads = ("policy", "forward", "backward", "recompute", "step", "back/fwd", "peak")
    if rows:
        yield Section(title, [Table(heads, rows)])


def _batches(profile: Profile) -> Iterator[Section]:
    limit, best = profile.limit_bytes, profile.best
    if limit is None and len(profile.footprints) == len(profile.at_first):
        return
    rows = []
    for footprint in profile.footprints:
        total = profile.total_bytes(footprint)
        rate = footprint.tokens_per_s
        rows.append(
            [
                footprint.policy + (" <- best" if footprint is best else ""),
                str(footprint.batch),
                size(footprint.held_bytes),
                size(total),
                "-" if limit is None else "yes" if total <= limit else "no",
                seconds(footprint.times.step_s) if footprint.times else "-",
                f"{rate:.0f}" if rate else "-",
            ]
        )
    limited = "" if limit is None else f"; limit {size(limit)}"
    title = f"Memory and time by batch: states and the step's peak{limited}"
    heads = ("policy", "batch", "saved", "all", "fits", "step", "tokens/s")
    yield Section(title, [Table(heads, rows)])


@dataclass(frozen=True)
class Finding:
    """One fact, and the configuration to merge into the DeepSpeed JSON file."""

    text: str
    config: dict[str, Any] | None = None


def findings(profile: Profile) -> list[Finding]:
    """List the facts with a setting that acts on them."""
    parts = (_smallest, _bucket, _limit)
    return [finding for find in parts for finding in find(profile)]


def _of(footprint: Footprint) -> dict[str, Any] | None:
    section = footprint.section
    return None if section is None else {"ds_ckpt": {"activation": dict(section)}}


def _section(profile: Profile, **keys: Any) -> dict[str, Any]:
    modules = {"modules": list(profile.modules)} if profile.modules else {}
    return {"ds_ckpt": {"activation": {**keys, **modules}}}


def _smallest(profile: Profile) -> Iterator[Finding]:
    first = profile.first
    found = [f for f in profile.at_first if f.recompute.launches]
    if found:
        small = min(found, key=lambda f: f.held_bytes)
        yield Finding(
            f'"{small.policy}" saves least: {size(small.held_bytes)} instead of '
            f"{size(first.held_bytes)}, for {times(small.step.flops, first.step.flops)} the FLOPs "
            f"and {times(small.step.launches, first.step.launches)} the operator launches.",
            _of(small),
        )


def _bucket(profile: Profile) -> Iterator[Finding]:
    states = profile.states
    if states.zero_stage == 3 and states.reduce_bucket_bytes > states.trainable_bytes > 0:
        elements = states.trainable_bytes // getattr(torch, profile.dtype).itemsize
        yield Finding(
            f"DeepSpeed allocates its full reduce bucket: {size(states.reduce_bucket_bytes)} for "
            f"{size(states.trainable_bytes)} of gradients.",
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": elements}},
        )


def _limit(profile: Profile) -> Iterator[Finding]:
    """The best that fits, or what would; if a policy fits and none does not, a budget."""
    limit, best, states = profile.limit_bytes, profile.best, profile.states
    if limit is None:
        return
    stage3 = states.zero_stage == 3
    if best is None:
        least = min(profile.footprints, key=profile.total_bytes)
        needed, copy = profile.total_bytes(least), states.host_copy_bytes
        text = (
            f"Nothing fits into {size(limit)}: the least is {size(needed)} (batch {least.batch}, "
            f'"{least.policy}"), of which {size(states.resident_bytes)} are states.'
        )
        if copy and needed - copy <= limit:
            text += f" Without the host's copy of the weights {size(needed - copy)} fit:"
            yield Finding(text, _NO_HOST_COPY)
        else:
            yield Finding(f"{text} Use more ranks, or offload the optimizer:", _OFFLOADED)
        return
    rate = f"{best.tokens_per_s:.0f} tokens/s" if best.tokens_per_s else "not timed"
    yield Finding(
        f'Under {size(limit)} the best is batch {best.batch} with "{best.policy}": '
        f"{size(profile.total_bytes(best))}, {rate}.",
        {"train_micro_batch_size_per_gpu": best.batch, **(_of(best) or {})},
    )
    needed = profile.total_bytes(profile.first)
    least = min(profile.at_first, key=profile.total_bytes)
    # only of ZeRO-3 a plan knows how much is resident
    left = limit if stage3 else limit - states.resident_bytes
    budget_gib = math.floor(left / GIB * 1000) / 1000
    if needed > limit >= profile.total_bytes(least) and budget_gib:
        yield Finding(
            f"Without a policy batch {profile.first.batch} needs {size(needed)}. A budget "
            f'recomputes only as much as it takes to fit, less than "{least.policy}".',
            _section(
                profile,
                policy="budget",
                budget_gib=budget_gib,
                budget_of="accelerator" if stage3 else "activations",
            ),
        )
