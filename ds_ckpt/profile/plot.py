"""A profile as a picture: what each policy holds, by kind of layer, and what it costs.

Told apart by hatches and numbers, not by colour alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.profile.facts import part_bytes, tokens_per_s
from ds_ckpt.profile.policies import NONE
from ds_ckpt.profile.records import Footprint, Profile
from ds_ckpt.profile.words import size, times

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
        widths = [part_bytes(f, part) / 2**20 for f in shown]
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
        gib = [(profile.states.resident_bytes + f.peak.live_bytes) / 2**30 for f in found]
        axes.plot(
            [f.batch for f in found],
            gib,
            linestyle=line,
            marker=marker,
            label=policy,
            color=f"{0.55 * index / max(len(policies) - 1, 1):.2f}",
        )
        rate = tokens_per_s(found[-1])
        if rate:
            axes.annotate(
                f" {rate:.0f} tokens/s", (found[-1].batch, gib[-1]), fontsize=7, va="center"
            )
    if profile.limit_bytes is not None:
        axes.axhline(profile.limit_bytes / 2**30, color="#333", linewidth=1)
        axes.text(1, profile.limit_bytes / 2**30, " limit", fontsize=7, va="bottom")
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
