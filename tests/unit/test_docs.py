"""Documents: links, the site's list of pages, generated pages. Their code: `test_docs_code.py`."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
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


@pytest.mark.timeout(120)
def test_a_page_that_is_wrong_is_found_by_a_browser(tmp_path: Path) -> None:
    """Of `scripts/site_check.py`, which looks at the site."""
    if shutil.which("chromium") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must look at the site: install the Debian package chromium")
        pytest.skip("no chromium here (Debian package chromium)")
    page = "<!doctype html><html><head></head><body><article>{}</article></body></html>"
    wrong = (
        '<script>not_there()</script><img src="gone.png"><div style="width: 700px">wide</div>'
        '<a href="gone/">1</a><a href="fine/#gone">2</a><a href="fine/#there">3</a>'
    )
    (tmp_path / "fine").mkdir()
    (tmp_path / "index.html").write_text(page.format(wrong))
    (tmp_path / "fine" / "index.html").write_text(page.format('<p id="there">'))
    command = [sys.executable, str(ROOT / "scripts" / "site_check.py"), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1
    for words in (
        *("index.html: gone/ leads nowhere", "fine/#gone leads nowhere", "wide: div wide"),
        *("not_there is not defined", "gone.png", "at 390: it is 708 wide"),
    ):
        assert words in said.stderr, words
    assert "#there" not in said.stderr
    assert "fine/index.html" not in said.stderr
    assert "1280: it is" not in said.stderr


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


def test_reference_pages_are_what_the_code_says() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import reference
    finally:
        sys.path.pop(0)
    for name, made in (("keys.md", reference.keys()), ("commands.md", reference.commands())):
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert made == written, "write it again: python scripts/reference.py"
