"""Documents: links, the site's list of pages, generated pages. Their code: `test_docs_code.py`."""

from __future__ import annotations

import importlib
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


@pytest.mark.slow
def test_figures_are_what_the_results_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tomllib")  # Python 3.11
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("figures")
    written = {path.name: path.read_text() for path in figures.FIGURES.glob("*.svg")}
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    figures.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn.keys() == written.keys()
    for name, text in drawn.items():
        assert text == written[name], f"draw {name} again: python benchmarks/figures.py"


def test_reference_pages_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    reference = importlib.import_module("reference")
    for name, made in (("keys.md", reference.keys()), ("commands.md", reference.commands())):
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert made == written, "write it again: python scripts/reference.py"
