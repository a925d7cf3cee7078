"""Documents: links, the site's list of pages, generated pages. Their code: `test_docs_code.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r"[\w]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in PAGES)


def test_reference_pages_are_what_the_code_says() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import reference
    finally:
        sys.path.pop(0)
    for name, made in (("keys.md", reference.keys()), ("commands.md", reference.commands())):
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert made == written, "write it again: python scripts/reference.py"
