"""The demo's results for people: a table in the terminal and one self-contained HTML page.

The page loads nothing: plots are inline SVG and styles stand in it. Plots are told apart by line
style, marker and hatching, not by colour alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ds_ckpt.harness.results import CellResult, Results
from ds_ckpt.harness.svg import figure, missing, svg
from ds_ckpt.harness.words import caveats, findings, megabytes

COLUMNS = (
    ("Cell", "how it trains"),
    ("Step, s", "median of the timed steps"),
    ("Held, MB", "activations that autograd holds after the forward"),
    ("Gradients, MB", "sent by a process in a step"),
    ("Weights, MB", "sent in a step: forward + recompute + backward gathers"),
    ("Wire, MB", "the interface's own count, a process and step"),
    ("Loss", "held-out, at the end, natural logarithm, a byte"),
)

# Style, marker and hatching of each cell: the plots can be read in grey.
_STYLES: dict[str, dict[str, Any]] = {
    "dense": {"color": "#1b4f8a", "linestyle": "-", "linewidth": 1.8},
    "dense-checkpointing": {"color": "#1b4f8a", "linestyle": "", "marker": "o"},
    "topk": {"color": "#b3541e", "linestyle": "--", "linewidth": 1.8},
    "topk-checkpointing": {"color": "#b3541e", "linestyle": "", "marker": "x"},
}


def rows(results: Results) -> list[tuple[str, ...]]:
    """The table's cells as text, one row a cell, in the order of COLUMNS."""
    return [_row(cell) for cell in results.cells]


def terminal_table(results: Results) -> Table:
    """The table for the terminal."""
    table = Table(
        title=f"ZeRO-3 on {results.run.processes} processes; MB are of one process and one step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    # Eighty columns hold all but the wire's own count, which the findings give.
    shown = [index for index, (name, _) in enumerate(COLUMNS) if name != "Wire, MB"]
    for index in shown:
        name = COLUMNS[index][0].replace(", ", "\n")
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for cell, row in zip(results.cells, rows(results), strict=True):
        table.add_row(*(row[i] for i in shown), style="dim" if cell.reference else None)
    return table


def write_html(results: Results, path: Path) -> None:
    """Write the page. Raises UnsupportedError if matplotlib or Jinja2 is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise missing("jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_ckpt", "harness"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        results=results,
        run=results.run,
        columns=COLUMNS,
        rows=list(zip(results.cells, rows(results), strict=True)),
        findings=[_headed(text) for text in findings(results)],
        caveats=caveats(results),
        loss_svg=loss_svg(results),
        traffic_svg=traffic_svg(results),
    )
    path.write_text(page, encoding="utf-8")


def loss_svg(results: Results) -> str:
    """Training loss over steps of the cells that train to the end, as an `<svg>` element."""
    drawing, axes = figure(height_inches=3.6)
    for cell in results.cells:
        if cell.reference:
            continue
        style = dict(_STYLES[cell.name])
        if "marker" in style:
            # Sparse: the marks lie on the line that they repeat.
            style.update(markersize=6, markevery=max(1, cell.steps // 14), fillstyle="none")
        axes.plot(range(cell.steps), cell.train_losses, label=cell.title, **style)
    start = results.run.topk_start_step
    axes.axvline(start, color="#555555", linestyle=":", linewidth=1)
    axes.annotate(
        "Top-K starts",
        (start, axes.get_ylim()[1]),
        xytext=(4, -10),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, fontsize=8)
    return svg(drawing)


def traffic_svg(results: Results) -> str:
    """Bytes sent a step by purpose, one bar a cell, as an `<svg>` element."""
    drawing, axes = figure(height_inches=2.9)
    titles = [cell.title for cell in results.cells]
    parts = (
        ("weights, forward", "gather_forward_bytes", "#c9d6e6", ""),
        ("weights, recompute", "gather_recompute_bytes", "#8fa9c9", ".."),
        ("weights, backward", "gather_backward_bytes", "#5a7fae", "//"),
        ("gradients", "reduce_bytes", "#e0a27d", "xx"),
        ("other", "other_bytes", "#777777", ""),
    )
    left = [0.0] * len(titles)
    for label, name, colour, hatch in parts:
        widths = [getattr(cell.traffic, name) / 1e6 for cell in results.cells]
        axes.barh(
            titles, widths, left=left, label=label, color=colour, hatch=hatch, edgecolor="#333333"
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MB sent by a process in a step")
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper left", bbox_to_anchor=(-0.2, 1.18))
    return svg(drawing)


def _row(cell: CellResult) -> tuple[str, ...]:
    traffic = cell.traffic
    gathers = (
        traffic.gather_forward_bytes,
        traffic.gather_recompute_bytes,
        traffic.gather_backward_bytes,
    )
    return (
        f"{cell.title} *" if cell.reference else cell.title,
        f"{cell.step_time_median_s:.3f}",
        megabytes(cell.held_activation_bytes),
        megabytes(traffic.gradient_bytes),
        " + ".join(megabytes(one) for one in gathers),
        "-" if cell.interface_bytes is None else megabytes(cell.interface_bytes),
        "-" if cell.heldout_loss is None else f"{cell.heldout_loss:.4f}",
    )


def _headed(text: str) -> tuple[str, str]:
    head, _, rest = text.partition(": ")
    return head, rest[:1].upper() + rest[1:]
