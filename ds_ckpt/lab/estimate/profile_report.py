"""Tables and findings of a profile."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from ds_ckpt.activation.planning.budget import AUTO_SHARE
from ds_ckpt.lab.estimate.profile import BLOCK_PARTS, Profile
from ds_ckpt.lab.report.document import (
    Code,
    Document,
    Items,
    Paragraph,
    ReportBlock,
    ReportSection,
    Table,
)
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import count, size, times


def profile_document(profile: Profile) -> Document:
    """Write the tables, the findings with their configuration, and the notes."""
    first, states = profile.footprints[0], profile.states
    title = (
        f"{profile.model}: {profile.class_name}, {count(states.parameters_count)} "
        f"parameters, {profile.dtype}; batch {first.batch} of {first.tokens} tokens"
    )
    hosts = f" on {states.hosts} nodes" if states.hosts and states.hosts > 1 else ""
    assumed = ", assumed" if states.assumed else ""
    kept = f"One rank of {states.world}{hosts}, ZeRO stage {states.zero_stage}{assumed}"
    found: list[ReportBlock] = []
    for number, (text, config) in enumerate(findings(profile), 1):
        found += [Paragraph(f"{number}. {text}"), Code([json.dumps(config)[1:-1]])]
    found.append(Items([f"note: {text}" for text in profile.notes]))
    sections = [
        ReportSection(kept, [_states(profile)]),
        ReportSection("Saved activations without a policy", [_saved(profile)]),
        ReportSection("Memory and work of a step, by policy and batch", [_policies(profile)]),
        ReportSection("Findings", found),
    ]
    return Document(title, [], sections)


def _states(profile: Profile) -> Table:
    states = profile.states
    rows = [
        ("parameters", states.parameters_bytes),
        ("node's copy of the weights", states.host_copy_bytes),
        ("weights gathered at a time", states.gathered_bytes),
        ("gradients", states.gradients_bytes),
        (f"optimizer ({states.optimizer}, with 32-bit weights)", states.optimizer_bytes),
        ("gradients' residuals", states.residual_bytes),
        ("communication buffers", states.communication_bytes),
        ("NCCL's buffers, about", states.nccl_bytes),
        ("temporary, in the optimizer's step", states.temporary_bytes),
        ("in host memory", states.host_bytes),
    ]
    return Table(("kept", "bytes"), [(name, size(n)) for name, n in rows if n])


def _saved(profile: Profile) -> Table:
    first = profile.footprints[0]
    inside = [parts for name, parts in first.blocks.items() if name != OUTSIDE]
    rows = [(part, size(sum(parts[part] for parts in inside))) for part in BLOCK_PARTS]
    rows.append(("outside of blocks", size(sum(first.blocks[OUTSIDE].values()))))
    rows.append(("all", size(first.held_bytes)))
    return Table((f"in {len(inside)} blocks", "bytes"), rows)


def _policies(profile: Profile) -> Table:
    limit, rows = profile.usable_bytes, []
    hosts = any(one.host_bytes for one in profile.footprints)
    base = {f.batch: f.step for f in reversed(profile.footprints)}
    for one in profile.footprints:
        total, none = profile.total_bytes(one), base[one.batch]
        rows.append(
            [
                one.policy,
                f"{one.tokens} x {one.batch}",
                *[size(one.host_bytes)] * hosts,
                *(size(one.held_bytes), size(one.peak_bytes), size(total)),
                "-" if limit is None else _fits(total <= limit, one is profile.best),
                times(one.step.flops, none.flops),
                times(one.step.launches, none.launches),
            ]
        )
    if profile.is_planned:
        rows.insert(1, ["configured", *["-"] * (len(rows[0]) - 1)])
    memory = (*["on host"] * hosts, "saved", "peak", "with\nstates")
    return Table(("policy", "tokens\nx batch", *memory, "fits", "FLOPs", "launches"), rows)


def _fits(fits: bool, is_best: bool) -> str:
    return "best" if is_best else "yes" if fits else "no"


def findings(profile: Profile) -> Iterator[tuple[str, dict[str, Any]]]:
    """List facts, each with the configuration to merge into the DeepSpeed JSON file."""
    states, limit, best = profile.states, profile.usable_bytes, profile.best
    share = f"In {size(limit or 0)}, {AUTO_SHARE:.0%} of the memory,"
    if states.zero_stage == 3 and states.reduce_bucket_bytes > states.trainable_bytes > 0:
        elements = states.trainable_bytes // getattr(torch, profile.dtype).itemsize
        yield (
            f"DeepSpeed allocates its full reduce bucket: {size(states.reduce_bucket_bytes)} for "
            f"{size(states.trainable_bytes)} of gradients.",
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": elements}},
        )
    if best is not None and limit is not None:
        section = {"ds_ckpt": {"activation": best.section}} if best.section else {}
        yield (
            f"{share} the largest batch is {best.batch}, "
            f'with "{best.policy}": {size(profile.total_bytes(best))}.',
            {"train_micro_batch_size_per_gpu": best.batch, **section},
        )
    elif limit is not None:
        least = min(profile.footprints, key=profile.total_bytes)
        yield (
            f"{share} nothing fits: the least is {size(profile.total_bytes(least))} "
            f'(batch {least.batch}, "{least.policy}"), of which {size(states.resident_bytes)} are '
            "states. Use more ranks, or offload the optimizer:",
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        )
