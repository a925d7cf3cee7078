"""A profile for people: tables in the terminal, eighty columns where they can, and a picture.

The picture tells policies apart by hatches and numbers, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.profile.policies import NONE
from ds_ckpt.profile.records import BlockCompiled, BlockHeld, Footprint, Profile
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import GIB, MIB, count, percent, seconds, size, times

_PARTS = ("attention", "mlp", "norm", "other", "boundary")


def print_profile(profile: Profile, console: Console) -> None:
    """All tables, the findings with their configuration, and what was not measured."""
    first = profile.footprints[0]
    console.print(
        escape(
            f"{profile.model}: {profile.class_name}, {count(profile.states.parameters_count)}"
            f" parameters, {profile.dtype}; batch {first.batch} of {first.tokens} tokens"
        ),
        style="bold",
        highlight=False,
    )
    tables = [_states(profile), _held(profile), _policies(profile), *_real(profile)]
    if len({f.batch for f in profile.footprints}) > 1 or profile.limit_bytes is not None:
        tables.append(_batches(profile))
    tables += _compiled(profile)
    for table in tables:
        console.print(table)
    _device(profile, console)
    for number, finding in enumerate(profile.findings, 1):
        console.print(escape(f"{number}. {finding.text}"), highlight=False)
        if finding.line is not None:
            console.print(escape(f"   {finding.line}"), style="cyan", highlight=False)
    for text in profile.not_measured:
        console.print(escape(f"not measured: {text}"), style="dim", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if index else "left"
        table.add_column(column, justify=justify, no_wrap=bool(index), overflow="fold")
    return table


def _states(profile: Profile) -> Table:
    states = profile.states
    assumed = ", assumed" if states.assumed else ""
    table = _table(
        f"A process of {states.world}, ZeRO stage {states.zero_stage}{assumed}", "kept", "bytes"
    )
    rows = (
        ("parameters", states.parameters_bytes),
        ("weights gathered at a time", states.gathered_bytes),
        ("gradients", states.gradients_bytes),
        (f"optimizer ({states.optimizer}, with 32-bit weights)", states.optimizer_bytes),
        ("communication buffers", states.communication_bytes),
        ("temporary, in the optimizer's step", states.temporary_bytes),
        ("in host memory", states.host_bytes),
    )
    for name, nbytes in rows:
        if nbytes or name != "in host memory":
            table.add_row(name, size(nbytes))
    return table


def _held(profile: Profile) -> Table:
    first = profile.footprint(NONE)
    table = _table("Held for backward without a policy, by block", "block", *_PARTS[:4], "all")
    blocks = [b for b in first.blocks if b.name != OUTSIDE]
    for name, held in _alike(blocks, _cells):
        table.add_row(escape(name), *_cells(held))
    table.add_section()
    outside = [b for b in first.blocks if b.name == OUTSIDE]
    for block in outside:
        table.add_row(escape(block.name), "", "", "", "", size(block.total_bytes))
    sums = [sum(getattr(b, f"{p}_bytes") for b in blocks) for p in _PARTS[:4]]
    table.add_row("all", *(size(n) for n in sums), size(first.held_bytes))
    return table


_Row = TypeVar("_Row", BlockHeld, BlockCompiled)


def _alike(
    blocks: Sequence[_Row], cells: Callable[[_Row], list[str]]
) -> Iterator[tuple[str, _Row]]:
    """Neighbours that say the same, in one line."""
    for _, neighbours in groupby(blocks, key=cells):
        group = list(neighbours)
        name = group[0].name
        if len(group) > 1:
            name += f" ... {group[-1].name.rpartition('.')[2]} (each of {len(group)})"
        yield name, group[0]


def _cells(block: BlockHeld) -> list[str]:
    parts = [size(getattr(block, f"{p}_bytes")) for p in _PARTS[:4]]
    return [*parts, size(block.total_bytes)]


def _policies(profile: Profile) -> Table:
    first = profile.footprints[0]
    tensors = "fake tensors" if first.fake else "real tensors"
    title = f"What a step keeps and costs ({tensors}; peak: of activations and temporaries)"
    columns = ("policy", "held", "peak", "FLOPs", "recompute", "launches", "back/fwd")
    table = _table(title, *columns)
    none = profile.footprint(NONE)
    peaks: dict[str, list[str]] = {}
    for footprint in profile.footprints:
        if footprint.batch != first.batch:
            continue
        backward = footprint.backward.flops + footprint.recompute.flops
        table.add_row(
            footprint.policy,
            size(footprint.held_bytes),
            size(footprint.peak.live_bytes),
            times(footprint.flops, none.flops),
            count(footprint.recompute.flops),
            f"{footprint.launches} {times(footprint.launches, none.launches)}",
            times(backward, footprint.forward.flops),
        )
        peaks.setdefault(footprint.peak.words(), []).append(footprint.policy)
    table.caption = "\n".join(
        escape(f"peak in the {place}: {', '.join(policies)}") for place, policies in peaks.items()
    )
    table.caption_justify = "left"
    return table


def _real(profile: Profile) -> list[Table]:
    """What real steps took, and how far fake and real bytes are apart."""
    found = [f for f in profile.footprints if f.times and f.batch == profile.footprints[0].batch]
    if not found or found[0].times is None:
        return []
    taken_s = found[0].times
    title = f"Real steps, ms: medians of {taken_s.repeats} ({taken_s.device})"
    columns = ("policy", "forward", "backward", "recompute", "step", "back/fwd", "peak")
    table = _table(title, *columns)
    for footprint in found:
        taken = footprint.times
        assert taken is not None
        table.add_row(
            footprint.policy,
            *(f"{1e3 * t:.1f}" for t in (taken.forward_s, taken.backward_s)),
            f"{1e3 * taken.recompute_s:.1f}" if footprint.recompute.launches else "-",
            f"{1e3 * taken.step_s:.1f}",
            times(taken.backward_s, taken.forward_s),
            size(footprint.real_peak_bytes or 0),
        )
    return [table]


def _batches(profile: Profile) -> Table:
    title = "Memory and time against the batch: states and the step's peak"
    limit, best = profile.limit_bytes, profile.best
    if limit is not None:
        title += f"; limit {size(limit)}"
    table = _table(title, "policy", "batch", "held", "all", "fits", "step", "tokens/s")
    for footprint in profile.footprints:
        whole = profile.states.resident_bytes + footprint.peak.live_bytes
        mine = (footprint.policy, footprint.batch)
        chosen = best is not None and (best.policy, best.batch) == mine
        rate = footprint.tokens_per_s
        table.add_row(
            footprint.policy + (" <- best" if chosen else ""),
            str(footprint.batch),
            size(footprint.held_bytes),
            size(whole),
            "-" if limit is None else "yes" if whole <= limit else "no",
            seconds(footprint.times.step_s) if footprint.times else "-",
            f"{rate:.0f}" if rate else "-",
        )
    return table


def _compiled(profile: Profile) -> list[Table]:
    report = profile.compiled
    if report is None:
        return []
    title = f"torch.compile: {report.graphs} graphs, {len(report.breaks)} breaks"
    columns = ("block", "captured", "held", "compiled", "checkpointed", "needs a policy")
    table = _table(title, *columns)
    for name, block in _alike(report.blocks, _compiled_cells):
        table.add_row(escape(name), *_compiled_cells(block))
    return [table]


def _compiled_cells(block: BlockCompiled) -> list[str]:
    return [
        percent(min(block.captured_operators, block.operators), block.operators),
        size(block.eager_bytes),
        size(block.compiled_bytes),
        size(block.boundary_bytes),
        "yes" if block.needs_policy else "no",
    ]


def _device(profile: Profile, console: Console) -> None:
    device = profile.device
    if device is None:
        return
    console.print(
        f"Recompute moves {size(device.recompute_moved_bytes)} in"
        f" {seconds(device.recompute_busy_s)} of kernels: {device.recompute_bandwidth_share:.0%}"
        f" of what a copy reaches ({size(device.copy_bandwidth_bytes_per_s)}/s)."
        f" {device.kernels} kernels; none runs in {percent(device.gaps_s, device.span_s)} of the"
        f" step ({seconds(device.gaps_s)}).",
        highlight=False,
    )


# The picture.

SUFFIXES = (".png", ".svg")
_KINDS = (
    ("attention", "attention", "#c9d6e6", ""),
    ("mlp", "MLP", "#8fa9c9", "//"),
    ("norm", "norm", "#5a7fae", ".."),
    ("other", "other", "#e0a27d", "xx"),
    ("boundary", "kept for recompute", "#b3541e", "\\\\"),
    ("outside", "outside the blocks", "#999999", "--"),
)
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("-", "x"), ("--", "v"), (":", "P"))


def check_target(path: Path) -> None:
    """Raises UnsupportedError for a suffix that is not drawn, or where matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise UnsupportedError(
            Problem(
                where="--plot",
                found=f'"{path.name}"',
                why="the suffix says what is drawn",
                remedy="end the name in .png or .svg",
            ),
            headline="the plot cannot be drawn",
        )
    _matplotlib()


def draw(profile: Profile, path: Path) -> None:
    """Write the picture. Raises UnsupportedError (see `check_target`) and OSError."""
    check_target(path)
    matplotlib, figure_class = _matplotlib()
    first = profile.footprints[0].batch
    shown = [f for f in profile.footprints if f.batch == first]
    swept = len({f.batch for f in profile.footprints}) > 1
    figure = figure_class(figsize=(8.4, 5.8 if swept else 3.4), layout="constrained")
    upper, *lower = figure.subplots(2 if swept else 1, 1, squeeze=False)[:, 0]
    _bars(upper, shown, profile)
    if lower:
        _sweep(lower[0], profile)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_ckpt"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150)


def _bars(axes: Any, shown: list[Footprint], profile: Profile) -> None:
    none = profile.footprint(NONE)
    names = [f.policy for f in shown]
    left = [0.0] * len(shown)
    for part, label, colour, hatch in _KINDS:
        widths = [f.part_bytes(part) / MIB for f in shown]
        if any(widths):
            axes.barh(
                names, widths, left=left, label=label, color=colour, hatch=hatch, edgecolor="#333"
            )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, footprint in enumerate(shown):
        text = (
            f" {size(footprint.held_bytes)}; {times(footprint.flops, none.flops)} FLOPs,"
            f" {times(footprint.launches, none.launches)} launches"
        )
        inside = left[index] > 0.55 * max(left)
        axes.text(
            left[index],
            index,
            text + " " * inside,
            va="center",
            ha="right" if inside else "left",
            fontsize=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
        )
    axes.invert_yaxis()
    axes.set_xlabel("MiB held for backward")
    title = f"{profile.model}, batch {none.batch} of {none.tokens} tokens, {profile.dtype}"
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _sweep(axes: Any, profile: Profile) -> None:
    """Memory against the batch; where steps were timed, tokens a second beside each mark."""
    policies = list(dict.fromkeys(f.policy for f in profile.footprints))
    for index, policy in enumerate(policies):
        found = [f for f in profile.footprints if f.policy == policy]
        line, marker = _STYLES[index % len(_STYLES)]
        gib = [(profile.states.resident_bytes + f.peak.live_bytes) / GIB for f in found]
        axes.plot(
            [f.batch for f in found],
            gib,
            linestyle=line,
            marker=marker,
            label=policy,
            color=f"{0.55 * index / max(len(policies) - 1, 1):.2f}",
        )
        rate = found[-1].tokens_per_s
        if rate:
            axes.annotate(
                f" {rate:.0f} tokens/s", (found[-1].batch, gib[-1]), fontsize=7, va="center"
            )
    if profile.limit_bytes is not None:
        axes.axhline(profile.limit_bytes / GIB, color="#333", linewidth=1)
        axes.text(1, profile.limit_bytes / GIB, " limit", fontsize=7, va="bottom")
    axes.set_xlabel("sequences in a batch")
    axes.set_ylabel("GiB a process")
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where="matplotlib",
                found="not installed",
                why="the plot is drawn with it",
                remedy="install the extra: pip install 'ds_ckpt[report]'",
            ),
            headline="the plot cannot be drawn",
        ) from error
    return matplotlib, Figure
