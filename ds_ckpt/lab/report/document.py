"""A report before it has a form: sections of text, tables and charts.

One document gives an HTML page that loads nothing, Markdown, and lines for a terminal of 80
columns; the last two leave the charts out. Charts are drawn when the page is made, so that text and
data need no package for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from ds_ckpt.lab.report.charts import Panel, missing, svg

_NAME = 20
"""Characters of names, in the first column, that a terminal has room for beside numbers."""


@dataclass(frozen=True)
class Block:
    """A part of a section; the template knows it by its kind."""

    kind: ClassVar[str]

    def markdown(self) -> Iterator[str]:
        """Its lines, if it has a form in Markdown."""
        yield from ()

    def terminal(self) -> Iterator[RenderableType]:
        """As a terminal shows it, where that is not its Markdown; words are no markup of rich's."""
        yield from map(Text, self.markdown())


@dataclass(frozen=True)
class Heading(Block):
    """Of a part of a section."""

    kind = "heading"
    text: str

    def markdown(self) -> Iterator[str]:
        yield f"### {self.text}"


@dataclass(frozen=True)
class Paragraph(Block):
    kind = "paragraph"
    text: str

    def markdown(self) -> Iterator[str]:
        yield self.text


@dataclass(frozen=True)
class Items(Block):
    """Sentences that stand on their own."""

    kind = "items"
    texts: Sequence[str]

    def markdown(self) -> Iterator[str]:
        yield from (f"- {text}" for text in self.texts)


@dataclass(frozen=True)
class Terms(Block):
    """Terms with what is said of each."""

    kind = "terms"
    pairs: Sequence[tuple[str, str]]

    def markdown(self) -> Iterator[str]:
        yield from (f"- **{name}**: {text}" for name, text in self.pairs)


@dataclass(frozen=True)
class Code(Block):
    """Lines to copy."""

    kind = "code"
    lines: Sequence[str]

    def markdown(self) -> Iterator[str]:
        yield from ("```", *self.lines, "```")

    def terminal(self) -> Iterator[RenderableType]:
        yield from (Text(f"   {line}", "cyan") for line in self.lines)


@dataclass(frozen=True)
class Table(Block):
    """Heads and rows of text.

    Attributes:
        prose: cells hold words, not numbers.
        meanings: what the page says under each head.
        tones: of each row, for its second cell: "good", "bad" or "".
        page_only: heads of columns that a terminal has no room for.
    """

    kind = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False
    meanings: Sequence[str] = ()
    tones: Sequence[str] = ()
    page_only: Sequence[str] = ()

    def markdown(self) -> Iterator[str]:
        yield f"| {' | '.join(self.heads)} |"
        yield "|" + "---|" * len(self.heads)
        yield from (f"| {' | '.join(row)} |" for row in self.rows)

    def terminal(self) -> Iterator[RenderableType]:
        """As narrow as its words allow; what is too wide is folded, not cut."""
        found = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        shown = [i for i, head in enumerate(self.heads) if head not in self.page_only]
        if self.prose:
            heads = [self.heads[i] for i in shown]
            yield _Words(heads, [[row[i] for i in shown] for row in self.rows])
            return
        for i in shown:
            side: Literal["left", "right"] = "right" if i else "left"
            head = Text(self.heads[i].replace(", ", "\n"))
            # a short name in two lines is no name
            whole = i == 0 and all(len(row[0]) <= _NAME for row in self.rows)
            found.add_column(head, justify=side, overflow="fold", no_wrap=whole)
        for row in self.rows:
            found.add_row(*(Text(row[i]) for i in shown))
        yield found


@dataclass(frozen=True)
class _Words:
    """A table of words, none of them broken: where they have no room side by side, its rows stand
    one under the other, each cell beside its head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [*zip(self.heads, *self.rows, strict=True)]
        whole = [max(map(len, column)) for column in columns]
        widths = [max(len(w) for cell in column for w in [*cell.split(), ""]) for column in columns]
        gaps = 3 * len(columns)
        if sum(widths) + gaps > options.max_width:
            yield from self._under_one_another()
            return
        while sum(widths) + gaps < options.max_width and widths != whole:
            neediest = max(range(len(widths)), key=lambda i: whole[i] / max(1, widths[i]))
            widths[neediest] += 1
        found = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for head, width in zip(self.heads, widths, strict=True):
            found.add_column(Text(head), width=width)
        for row in self.rows:
            found.add_row(*map(Text, row))
        yield found

    def _under_one_another(self) -> Iterator[RenderableType]:
        for name, *cells in self.rows:
            yield Text(name, "bold")
            grid = RichTable.grid(padding=(0, 2))
            for head, cell in zip(self.heads[1:], cells, strict=True):
                if cell:
                    grid.add_row(Text(f"  {head}"), Text(cell, overflow="fold"))
            yield grid


@dataclass(frozen=True)
class Plot(Block):
    """Panels above one another, on the page alone."""

    kind = "plot"
    name: str
    panels: Sequence[Panel]
    caption: str

    def svg(self) -> str:
        """Raises UnsupportedError where matplotlib is missing."""
        return svg(self.panels)


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """What a report says, in order; sections without blocks are left out."""

    title: str
    opening: Sequence[str]
    sections: Sequence[Section]

    def html(self) -> str:
        """One file. Raises UnsupportedError where matplotlib or Jinja2 is missing."""
        try:
            import jinja2
        except ImportError as error:
            raise missing("jinja2") from error
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("ds_ckpt", "lab/report"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        page: str = environment.get_template("report.html.j2").render(document=self)
        return page

    def markdown(self) -> str:
        """Without the charts."""
        lines = [f"# {self.title}", "", *(f"{text}\n" for text in self.opening)]
        for section in self.sections:
            found = [[*block.markdown()] for block in section.blocks]
            if any(found):
                lines += [f"## {section.title}", ""]
                lines += [line for block in found if block for line in (*block, "")]
        return "\n".join(lines)

    def print(self, console: Console) -> None:
        """Without the charts."""
        console.print(Text(self.title, "bold"))
        for text in self.opening:
            console.print(Text(text))
        for section in self.sections:
            parts = [(block, part) for block in section.blocks for part in block.terminal()]
            if parts and section.title:
                console.print(Text(f"\n{section.title}", "italic"))
            for block, part in parts:
                # what is to be copied gets no line ends
                console.print(part, soft_wrap=isinstance(block, Code))

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `report.html` and `report.md` into the folder; their paths.

        Raises UnsupportedError where the page's packages are missing; the Markdown is there then.
        """
        page, text = folder / "report.html", folder / "report.md"
        text.write_text(self.markdown(), encoding="utf-8")
        page.write_text(self.html(), encoding="utf-8")
        return page, text
