"""The published package: one version, licences as installed, and a complete wheel."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import ds_ckpt

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_in_one_place_and_the_citation_follows() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'attr = "ds_ckpt.__version__"' in project
    assert not re.search(r"^version\s*=\s*\"", project, re.M)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.M) == [ds_ckpt.__version__]


def test_every_dependency_is_listed_with_its_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names alone: licences are those of the versions that were installed when it was written."""
    page = (ROOT / "docs/licences.md").read_text()
    listed = re.findall(r"^\| ([\w.-]+) \| [\w]+ \| ", page, re.M)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    licences = importlib.import_module("licences")
    wanted = [name for names in licences.requirements().values() for name in names]
    assert listed == ["package", *(name for name in wanted if name != "ds_ckpt")]
    assert licences.licence("torch").startswith(("BSD", "Apache"))
