"""A profile for people: tables in the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from ds_ckpt.lab.estimate.profiles import PARTS, Profile
from ds_ckpt.lab.report.charts import Band, Line, Lines, Panel, Rows
from ds_ckpt.lab.report.document import Block, Code, Document, Items, Paragraph, Section, Table
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import GIB, MIB, count, percent, seconds, size, times

_KINDS = {
    "attention": "attention",
    "mlp": "MLP",
    "norm": "norm",
    "other": "other",
    "checkpointed": "kept for recompute",
    "outside": "outside the blocks",
}


def document(profile: Profile) -> Document:
    """All tables, the findings with their configuration, and what was not measured."""
    first = profile.first
    title = (
        f"{profile.model}: {profile.class_name}, {count(profile.states.parameters_count)} "
        f"parameters, {profile.dtype}; batch {first.batch} of {first.tokens} tokens"
    )
    found: list[Block] = []
    for number, finding in enumerate(profile.findings, 1):
        found.append(Paragraph(f"{number}. {finding.text}"))
        if finding.line is not None:
            found.append(Code([finding.line]))
    found.append(Items([f"not measured: {text}" for text in profile.not_measured]))
    tables = [_states, _saved, _policies, _real, _batches, _compiled]
    sections = [section for table in tables for section in table(profile)]
    return Document(title, [], [*sections, Section("What changes it", found)])


def picture(profile: Profile) -> list[Panel]:
    """What every policy holds; below it, where batches were swept, memory against the batch."""
    none, shown = profile.first, list(profile.at_first.values())
    bars = Rows(
        [f.policy for f in shown],
        "MiB saved for backward",
        [Band(label, [f.part_bytes(k) / MIB for f in shown]) for k, label in _KINDS.items()],
        notes=[
            f"{size(f.held_bytes)}; {times(f.flops, none.flops)} FLOPs, "
            f"{times(f.launches, none.launches)} launches"
            for f in shown
        ],
        title=f"{profile.model}, batch {none.batch} of {none.tokens} tokens, {profile.dtype}",
    )
    return [bars, _sweep(profile)] if len(profile.footprints) > len(shown) else [bars]


def _sweep(profile: Profile) -> Lines:
    """Memory against the batch; where steps were timed, tokens a second beside each line's end."""
    lines, notes = [], []
    for policy in profile.at_first:
        found = [f for f in profile.footprints if f.policy == policy]
        points = [(float(f.batch), profile.total_bytes(f) / GIB) for f in found]
        lines.append(Line(policy, points))
        if rate := found[-1].tokens_per_s:
            notes.append((*points[-1], f"{rate:.0f} tokens/s"))
    limit = profile.limit_bytes
    levels = [] if limit is None else [(limit / GIB, "limit")]
    return Lines(lines, "sequences in a batch", "GiB a process", levels=levels, notes=notes)


def _states(profile: Profile) -> Iterator[Section]:
    states = profile.states
    copied = states.host_copy_bytes
    copy = [("host's copy of the weights", copied)] if copied else []
    owed = states.residual_bytes
    residuals = [("gradients' residuals", owed)] if owed else []
    rows = [
        ("parameters", states.parameters_bytes),
        *copy,
        ("weights gathered at a time", states.gathered_bytes),
        ("gradients", states.gradients_bytes),
        (f"optimizer ({states.optimizer}, with 32-bit weights)", states.optimizer_bytes),
        *residuals,
        ("communication buffers", states.communication_bytes),
        ("temporary, in the optimizer's step", states.temporary_bytes),
    ]
    if states.host_bytes:
        rows.append(("in host memory", states.host_bytes))
    assumed = ", assumed" if states.assumed else ""
    hosts = f" on {states.hosts} hosts" if states.hosts and states.hosts > 1 else ""
    title = f"A process of {states.world}{hosts}, ZeRO stage {states.zero_stage}{assumed}"
    yield Section(title, [Table(("kept", "bytes"), [(name, size(n)) for name, n in rows])])


def _saved(profile: Profile) -> Iterator[Section]:
    first = profile.first
    rows = _alike(
        (b.name, [*(size(b.part_bytes(p)) for p in PARTS), size(b.total_bytes)])
        for b in first.blocks
        if b.name != OUTSIDE
    )
    rows.append([OUTSIDE, *[""] * len(PARTS), size(first.part_bytes("outside"))])
    rows.append(["all", *(size(first.part_bytes(p)) for p in PARTS), size(first.held_bytes)])
    title = "Saved activations without a policy, by block"
    yield Section(title, [Table(("block", *PARTS, "all"), rows)])


def _alike(rows: Iterable[tuple[str, list[str]]]) -> list[list[str]]:
    """Names and cells, with neighbours that say the same in one row."""
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
    for footprint in profile.at_first.values():
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
    tensors = "fake tensors" if none.fake else "real tensors"
    title = f"What a step saves and costs ({tensors}; peak: of activations and temporaries)"
    heads = ("policy", "saved", "peak", "FLOPs", "recompute", "launches", "back/fwd")
    said = [f"peak in the {place}: {', '.join(policies)}" for place, policies in peaks.items()]
    yield Section(title, [Table(heads, rows), Items(said)])


def _real(profile: Profile) -> Iterator[Section]:
    """What real steps took, and the allocator's peak."""
    rows, title = [], ""
    for footprint in profile.at_first.values():
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
        whole = profile.total_bytes(footprint)
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
    heads = ("policy", "batch", "saved", "all", "fits", "step", "tokens/s")
    yield Section(title, [Table(heads, rows)])


def _compiled(profile: Profile) -> Iterator[Section]:
    report = profile.compiled
    if report is None:
        return
    rows = _alike(
        (
            block.name,
            [
                percent(min(block.captured_operators, block.operators), block.operators),
                size(block.eager_bytes),
                size(block.compiled_bytes),
                size(block.checkpointed_bytes),
                "yes" if block.needs_policy else "no",
            ],
        )
        for block in report.blocks
    )
    title = f"torch.compile: {report.graphs} graphs, {len(report.breaks)} breaks"
    heads = ("block", "captured", "saved", "compiled", "checkpointed", "needs a policy")
    yield Section(title, [Table(heads, rows)])
