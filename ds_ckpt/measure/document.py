"""A report before it has a form: sections of text, tables and plots, as HTML and as Markdown.

The page loads nothing: its plots are inline SVG, its style stands in it. Plots are drawn when the
page is made, so that text and data need no package for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ds_ckpt.harness.svg import missing


@dataclass(frozen=True)
class Heading:
    """Of a part of a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Items:
    """Sentences that stand on their own."""

    kind: ClassVar[str] = "items"
    texts: Sequence[str]


@dataclass(frozen=True)
class Terms:
    """Terms with what is said of each."""

    kind: ClassVar[str] = "terms"
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Heads and rows of text; `prose` has sentences in its cells instead of numbers."""

    kind: ClassVar[str] = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False


@dataclass(frozen=True)
class Plot:
    """`draw` gives an `<svg>` element; Markdown leaves it out."""

    kind: ClassVar[str] = "plot"
    name: str
    draw: Callable[[], str]
    caption: str


Block = Heading | Paragraph | Items | Terms | Table | Plot


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """What a report says, in order."""

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
            loader=jinja2.PackageLoader("ds_ckpt", "measure"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        page: str = environment.get_template("report.html.j2").render(document=self)
        return page

    def markdown(self) -> str:
        """Without the plots."""
        lines = [f"# {self.title}", "", *(f"{text}\n" for text in self.opening)]
        for section in self.sections:
            if all(isinstance(block, Plot) for block in section.blocks):
                continue
            lines += [f"## {section.title}", ""]
            for block in section.blocks:
                lines += _markdown(block)
        return "\n".join(lines)


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"### {block.text}"
    elif isinstance(block, Paragraph):
        yield block.text
    elif isinstance(block, Items):
        yield from (f"- {text}" for text in block.texts)
    elif isinstance(block, Terms):
        yield from (f"- **{name}**: {text}" for name, text in block.pairs)
    elif isinstance(block, Table):
        yield f"| {' | '.join(block.heads)} |"
        yield "|" + "---|" * len(block.heads)
        yield from (f"| {' | '.join(row)} |" for row in block.rows)
    else:
        return
    yield ""


def terminal_table(table: Table, title: str) -> Any:
    """The table for a terminal, as narrow as its words allow."""
    from rich import box
    from rich.table import Table as Terminal

    found = Terminal(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(table.heads):
        justify: Any = "right" if place else "left"
        found.add_column("\n".join(head.split(", ")), justify=justify)
    for row in table.rows:
        found.add_row(*row)
    return found
