"""A profile for people: tables in the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from ds_ckpt.profile.policies import NONE
from ds_ckpt.profile.records import BlockCompiled, BlockHeld, Profile
from ds_ckpt.report.charts import Band, Line, Lines, Panel, Rows
from ds_ckpt.report.document import Block, Code, Document, Items, Paragraph, Section, Table
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import GIB, MIB, count, percent, seconds, size, times

_KINDS = {
    "attention": "attention",
    "mlp": "MLP",
    "norm": "norm",
    "other": "other",
    "boundary": "kept for recompute",
    "outside": "outside the blocks",
}
_PARTS = tuple(_KINDS)[:4]


def document(profile: Profile) -> Document:
    """All tables, the findings with their configuration, and what was not measured."""
    first = profile.footprints[0]
    title = (
        f"{profile.model}: {profile.class_name}, {count(profile.states.parameters_count)} "
        f"parameters, {profile.dtype}; batch {first.batch} of {first.tokens} tokens"
    )
    sections = [_states(profile), _held(profile), _policies(profile), *_real(profile)]
    if len({f.batch for f in profile.footprints}) > 1 or profile.limit_bytes is not None:
        sections.append(_batches(profile))
    sections += _compiled(profile)
    sections.append(Section("Recompute on the accelerator", _device(profile)))
    found: list[Block] = []
    for number, finding in enumerate(profile.findings, 1):
        found.append(Paragraph(f"{number}. {finding.text}"))
        if finding.line is not None:
            found.append(Code([finding.line]))
    found.append(Items([f"not measured: {text}" for text in profile.not_measured]))
    return Document(title, [], [*sections, Section("What changes it", found)])


def picture(profile: Profile) -> list[Panel]:
    """What every policy holds; below it, where batches were swept, memory against the batch."""
    none = profile.footprint(NONE)
    shown = [f for f in profile.footprints if f.batch == profile.footprints[0].batch]
    bars = Rows(
        [f.policy for f in shown],
        "MiB held for backward",
        [Band(label, [f.part_bytes(k) / MIB for f in shown]) for k, label in _KINDS.items()],
        notes=[
            f"{size(f.held_bytes)}; {times(f.flops, none.flops)} FLOPs, "
            f"{times(f.launches, none.launches)} launches"
            for f in shown
        ],
        title=f"{profile.model}, batch {none.batch} of {none.tokens} tokens, {profile.dtype}",
    )
    return [bars, _sweep(profile)] if len({f.batch for f in profile.footprints}) > 1 else [bars]


def _sweep(profile: Profile) -> Lines:
    """Memory against the batch; where steps were timed, tokens a second beside each line's end."""
    lines, notes = [], []
    for policy in dict.fromkeys(f.policy for f in profile.footprints):
        found = [f for f in profile.footprints if f.policy == policy]
        resident = profile.states.resident_bytes
        points = [(float(f.batch), (resident + f.peak.live_bytes) / GIB) for f in found]
        lines.append(Line(policy, points))
        if rate := found[-1].tokens_per_s:
            notes.append((*points[-1], f"{rate:.0f} tokens/s"))
    limit = profile.limit_bytes
    levels = [] if limit is None else [(limit / GIB, "limit")]
    return Lines(lines, "sequences in a batch", "GiB a process", levels=levels, notes=notes)


def _states(profile: Profile) -> Section:
    states = profile.states
    assumed = ", assumed" if states.assumed else ""
    rows = [
        ("parameters", states.parameters_bytes),
        ("weights gathered at a time", states.gathered_bytes),
        ("gradients", states.gradients_bytes),
        (f"optimizer ({states.optimizer}, with 32-bit weights)", states.optimizer_bytes),
        ("communication buffers", states.communication_bytes),
        ("temporary, in the optimizer's step", states.temporary_bytes),
    ]
    if states.host_bytes:
        rows.append(("in host memory", states.host_bytes))
    title = f"A process of {states.world}, ZeRO stage {states.zero_stage}{assumed}"
    shown = [(name, size(nbytes)) for name, nbytes in rows]
    return Section(title, [Table(("kept", "bytes"), shown)])


def _held(profile: Profile) -> Section:
    first = profile.footprint(NONE)
    blocks = [b for b in first.blocks if b.name != OUTSIDE]
    rows = _alike(blocks, _held_cells)
    outside = [b for b in first.blocks if b.name == OUTSIDE]
    rows += [[b.name, *[""] * len(_PARTS), size(b.total_bytes)] for b in outside]
    sums = (sum(getattr(b, f"{part}_bytes") for b in blocks) for part in _PARTS)
    rows.append(["all", *map(size, sums), size(first.held_bytes)])
    title = "Held for backward without a policy, by block"
    return Section(title, [Table(("block", *_PARTS, "all"), rows)])


def _held_cells(block: BlockHeld) -> list[str]:
    return [*(size(getattr(block, f"{p}_bytes")) for p in _PARTS), size(block.total_bytes)]


_Row = TypeVar("_Row", BlockHeld, BlockCompiled)


def _alike(blocks: Sequence[_Row], cells: Callable[[_Row], list[str]]) -> list[list[str]]:
    """Rows, with neighbours that say the same in one."""
    rows = []
    for _, neighbours in groupby(blocks, key=cells):
        group: list[_Row] = list(neighbours)
        last = f" ... {group[-1].name.rpartition('.')[2]} (each of {len(group)})"
        rows.append([group[0].name + (last if len(group) > 1 else ""), *cells(group[0])])
    return rows


def _policies(profile: Profile) -> Section:
    first, none = profile.footprints[0], profile.footprint(NONE)
    rows = []
    peaks: dict[str, list[str]] = {}
    for footprint in (f for f in profile.footprints if f.batch == first.batch):
        backward = footprint.backward.flops + footprint.recompute.flops
        rows.append(
            [
                footprint.policy,
                size(footprint.held_bytes),
                size(footprint.peak.live_bytes),
                times(footprint.flops, none.flops),
                count(footprint.recompute.flops),
                f"{footprint.launches} {times(footprint.launches, none.launches)}",
                times(backward, footprint.forward.flops),
            ]
        )
        peaks.setdefault(footprint.peak.words(), []).append(footprint.policy)
    tensors = "fake tensors" if first.fake else "real tensors"
    title = f"What a step keeps and costs ({tensors}; peak: of activations and temporaries)"
    heads = ("policy", "held", "peak", "FLOPs", "recompute", "launches", "back/fwd")
    said = [f"peak in the {place}: {', '.join(policies)}" for place, policies in peaks.items()]
    return Section(title, [Table(heads, rows), Items(said)])


def _real(profile: Profile) -> list[Section]:
    """What real steps took, and how far fake and real bytes are apart."""
    rows, title = [], ""
    for footprint in profile.footprints:
        taken = footprint.times
        if taken is not None and footprint.batch == profile.footprints[0].batch:
            title = title or f"Real steps, ms: medians of {taken.repeats} ({taken.device})"
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
    return [Section(title, [Table(heads, rows)])] if rows else []


def _batches(profile: Profile) -> Section:
    limit, best = profile.limit_bytes, profile.best
    rows = []
    for footprint in profile.footprints:
        whole = profile.states.resident_bytes + footprint.peak.live_bytes
        mine = (footprint.policy, footprint.batch)
        chosen = best is not None and (best.policy, best.batch) == mine
        rate = footprint.tokens_per_s
        rows.append(
            [
                footprint.policy + (" <- best" if chosen else ""),
                str(footprint.batch),
                size(footprint.held_bytes),
                size(whole),
                "-" if limit is None else "yes" if whole <= limit else "no",
                seconds(footprint.times.step_s) if footprint.times else "-",
                f"{rate:.0f}" if rate else "-",
            ]
        )
    limited = "" if limit is None else f"; limit {size(limit)}"
    title = f"Memory and time against the batch: states and the step's peak{limited}"
    heads = ("policy", "batch", "held", "all", "fits", "step", "tokens/s")
    return Section(title, [Table(heads, rows)])


def _compiled(profile: Profile) -> list[Section]:
    report = profile.compiled
    if report is None:
        return []
    title = f"torch.compile: {report.graphs} graphs, {len(report.breaks)} breaks"
    heads = ("block", "captured", "held", "compiled", "checkpointed", "needs a policy")
    return [Section(title, [Table(heads, _alike(report.blocks, _compiled_cells))])]


def _compiled_cells(block: BlockCompiled) -> list[str]:
    return [
        percent(min(block.captured_operators, block.operators), block.operators),
        size(block.eager_bytes),
        size(block.compiled_bytes),
        size(block.boundary_bytes),
        "yes" if block.needs_policy else "no",
    ]


def _device(profile: Profile) -> list[Block]:
    device = profile.device
    if device is None:
        return []
    return [
        Paragraph(
            f"Recompute moves {size(device.recompute_moved_bytes)} in "
            f"{seconds(device.recompute_busy_s)} of kernels: {device.recompute_bandwidth_share:.0%}"
            f" of what a copy reaches ({size(device.copy_bandwidth_bytes_per_s)}/s). "
            f"{device.kernels} kernels; none runs in {percent(device.gaps_s, device.span_s)} of "
            f"the step ({seconds(device.gaps_s)})."
        )
    ]
