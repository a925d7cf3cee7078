"""Documents: sections of text, tables and charts, as HTML, Markdown and terminal output.

The HTML page loads nothing. Markdown and terminal leave the charts out, so they need no package for
drawing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ds_ckpt.lab.report.charts import Panel, missing_package_error, svg


@dataclass(frozen=True)
class ReportBlock:
    """Part of a section; the template selects it by its kind."""

    kind: ClassVar[str]

    def markdown(self) -> Iterator[str]:
        """Yield lines of Markdown."""
        yield from ()

    def terminal(self) -> Iterator[RenderableType]:
        """Yield terminal output: by default the Markdown as plain text."""
        yield from map(Text, self.markdown())


@dataclass(frozen=True)
class Paragraph(ReportBlock):
    """Running text."""

    kind = "paragraph"
    mark: ClassVar[str] = ""
    text: str

    def markdown(self) -> Iterator[str]:
        """Yield the text."""
        yield f"{self.mark}{self.text}"


@dataclass(frozen=True)
class Heading(Paragraph):
    """Heading within a section."""

    kind = "heading"
    mark = "### "


@dataclass(frozen=True)
class Items(ReportBlock):
    """Bulleted sentences."""

    kind = "items"
    texts: Sequence[str]

    def markdown(self) -> Iterator[str]:
        """Yield the bullets."""
        yield from (f"- {text}" for text in self.texts)


@dataclass(frozen=True)
class Code(ReportBlock):
    """Lines to copy."""

    kind = "code"
    lines: Sequence[str]

    def markdown(self) -> Iterator[str]:
        """Yield the fenced lines."""
        yield from ("```", *self.lines, "```")

    def terminal(self) -> Iterator[RenderableType]:
        """Yield the lines, coloured."""
        yield from (Text(f"   {line}", "cyan") for line in self.lines)


@dataclass(frozen=True)
class Table(ReportBlock):
    """Heads and rows of text: words with `prose`, else numbers, which are aligned to the right."""

    kind = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        yield f"| {' | '.join(self.heads)} |"
        yield "|" + "---|" * len(self.heads)
        yield from (f"| {' | '.join(row)} |" for row in self.rows)

    def terminal(self) -> Iterator[RenderableType]:
        """Yield the table; cells are folded where the terminal is narrow."""
        found = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for place, head in enumerate(self.heads):
            justify: Literal["left", "right"] = "right" if place and not self.prose else "left"
            found.add_column(Text(head.replace(", ", "\n")), justify=justify, overflow="fold")
        # other cells are folded before names are
        found.columns[0].no_wrap = all(len(row[0]) < 30 for row in self.rows)
        for row in self.rows:
            found.add_row(*map(Text, row))
        yield found


@dataclass(frozen=True)
class Plot(ReportBlock):
    """Panels above each other; on the page only."""

    kind = "plot"
    name: str
    panels: Sequence[Panel]
    caption: str

    def svg(self) -> str:
        """Draw it; UnsupportedError without matplotlib."""
        return svg(self.panels)


@dataclass(frozen=True)
class ReportSection:
    """Title and blocks."""

    title: str
    blocks: Sequence[ReportBlock]


@dataclass(frozen=True)
class Document:
    """Title, opening paragraphs and sections; sections without blocks are left out.

    `about` names the page in a browser's tab, if the title is a sentence.
    """

    title: str
    opening: Sequence[str]
    sections: Sequence[ReportSection]
    about: str = ""

    def html(self) -> str:
        """Return one page; UnsupportedError without matplotlib or Jinja2."""
        try:
            import jinja2
        except ImportError as error:
            raise missing_package_error("jinja2") from error
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
        """Return the Markdown."""
        lines = [f"# {self.title}", "", *(f"{text}\n" for text in self.opening)]
        for section in self.sections:
            found = [[*block.markdown()] for block in section.blocks]
            if any(found):
                lines += [f"## {section.title}", ""] if section.title else []
                lines += [line for block in found if block for line in (*block, "")]
        return "\n".join(lines)

    def print(self, console: Console) -> None:
        """Print it."""
        console.print(Text(self.title, "bold"))
        for text in self.opening:
            console.print(Text(text))
        for section in self.sections:
            parts = [(block, part) for block in section.blocks for part in block.terminal()]
            if parts and section.title:
                console.print(Text(f"\n{section.title}", "italic"))
            for block, part in parts:
                console.print(part, soft_wrap=isinstance(block, Code))

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `report.md` and `report.html`; UnsupportedError without the page's packages."""
        page, text = folder / "report.html", folder / "report.md"
        text.write_text(self.markdown(), encoding="utf-8")
        page.write_text(self.html(), encoding="utf-8")
        return page, text
