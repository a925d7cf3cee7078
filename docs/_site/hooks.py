"""What the site does to pages that are also read in the repository.

Links to files outside of docs/ become their names: the site does not have those files, and a name
that is not there is a warning, which ends the build. A figure is a link to itself, which a
telephone shows as large as one likes. JSON paths in the navigation break after a point. Cells of a
table have their column's name: site.css stacks them on a narrow screen.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FIGURE = re.compile(r"(!\[[^\]]*\]\((figures/[^)]+)\))")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")
_HEADER = re.compile(r"<th[^>]*>(.*?)</th>", re.S)
_ROW = re.compile(r"<tr>\s*<td.*?</tr>", re.S)
_TAG = re.compile(r"<[^>]+>")
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs calls it with each page's text."""

    def named(found: re.Match[str]) -> str:
        words, path = found[1], found[2]
        if not (ROOT / path).exists():
            log.warning("%s: there is no %s", page.file.src_uri, path)
        return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"

    return _FIGURE.sub(r"[\1](\2)", _OUTSIDE.sub(named, markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """mkdocs calls it with each page's HTML."""
    for one in page.toc:
        for entry in (one, *one.children):
            entry.title = re.sub(r"(?<=\w)\.(?=\w)", ".<wbr>", entry.title)

    def labelled(table: re.Match[str]) -> str:
        names = [
            _TAG.sub("", name).strip().replace('"', "&quot;") for name in _HEADER.findall(table[0])
        ]

        def cells(row: re.Match[str]) -> str:
            left = iter(names)
            return re.sub(r"<td", lambda _: f'<td data-label="{next(left, "")}"', row[0])

        return _ROW.sub(cells, table[0])

    return re.sub(r"<table>.*?</table>", labelled, html, flags=re.S)
