"""Documents in their three forms, and charts, of made-up content; numbers as people read them."""

import io
import math
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ds_ckpt.lab.report import charts, document
from ds_ckpt.lab.report.charts import Band, Line, Lines, Rows
from ds_ckpt.telemetry import units

ROWS = Rows(
    ["first", "second"],
    "widths",
    [Band("wide", [3.0, 1.0]), Band("nothing", [0.0, 0.0]), Band("narrow", [0.5, 0.25])],
    spans=[(1.0, 2.0, 3.0), None],
    notes=["a word", ""],
)
LINES = Lines(
    [
        Line("one", [(1, 1.0), (10, 2.0)], [(0.5, 1.0, 1.5), (2.0, 2.0, 2.0)]),
        Line("none", []),
        Line("dots", [(1, 3.0), (10, 4.0)], shown="marks"),
    ],
    "steps",
    "heights",
    logarithmic="xy",
    levels=[(2.5, "so high")],
)
WHOLE = document.Document(
    "A title <b>",
    ["Opening [bold]words[/bold]."],
    [
        document.ReportSection(
            "All kinds",
            [
                document.Heading("A heading"),
                document.Paragraph("A paragraph & more."),
                document.Items(["an item"]),
                document.Code(['{"key": ' + "1" * 90 + "}"]),
                document.Table(
                    ["name", "value, s", "remark"],
                    [["a", "1.5", "said"], ["b", "2.5", "unsaid"]],
                ),
                document.Table(["first", "second", "third"], [[letter * 50 for letter in "abc"]]),
                document.Plot("plot", [ROWS, LINES], "A caption."),
            ],
        ),
        document.ReportSection(
            "A chart alone", [document.Plot("alone", [LINES], "Another caption.")]
        ),
        document.ReportSection("Empty", []),
    ],
)


def _words(svg: str) -> str:
    return " ".join(e.text for e in ElementTree.fromstring(svg).iter() if e.text)


@pytest.mark.usefixtures("undrawn")
def test_its_three_forms_are_the_golden_ones(is_golden: Callable[[str, str], bool]) -> None:
    """Words are no markup, tables fold and cut nothing, code can be copied."""
    target = io.StringIO()
    WHOLE.print(Console(file=target, width=80))
    shown = "\n".join(line.rstrip() for line in target.getvalue().splitlines())
    assert is_golden("document.html", WHOLE.html())
    assert is_golden("document.md", WHOLE.markdown())
    assert is_golden("document.txt", shown)


def test_a_chart_has_all_that_it_was_given_and_is_the_same_again() -> None:
    svg = charts.svg([ROWS, LINES])
    words = _words(svg)
    for text in ("first", "second", "widths", "wide", "narrow", "a word"):
        assert text in words, text
    for text in ("one", "dots", "steps", "heights", "so high"):
        assert text in words, text
    assert "nothing" not in words  # a band without width
    assert "none" not in words  # a line without points
    assert svg == charts.svg([ROWS, LINES])


def test_nothing_is_distinguished_by_colour_alone() -> None:
    assert len({charts.look(place) for place in range(52)}) == 52
    bands = [Band(str(i), [1.0 + i]) for i in range(len(charts._FILLS))]
    assert len({charts._fill(place)["hatch"] for place in range(len(bands))}) == len(bands)
    svg = charts.svg([Rows(["row"], "x", bands)])
    assert svg.count("<pattern") == len(bands) - 1  # the last is plain


def test_three_digits_and_a_unit() -> None:
    numbers = {0.01234: "0.0123", 0.00001234: "0.0000", 0.0999999999: "0.100", math.inf: "-"}
    sizes = {0: "0", 1536: "1.50 KiB", 0.512 * units.MIB: "0.512 MiB"}
    sizes |= {23.94 * units.GIB: "23.9 GiB", -200 * units.GIB: "-200 GiB"}
    counts = {999: "999", 8.8e9: "8.80 G", 1.3e15: "1.30 P"}
    for text, rows in ((units.number, numbers), (units.size, sizes), (units.count, counts)):
        assert {value: text(value) for value in rows} == rows
    assert units.number(math.nan) == units.times(5, 0) == "-"
    assert units.times(5, 4) == "1.25x"
