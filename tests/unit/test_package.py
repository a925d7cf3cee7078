"""What is published: one version, licences as they are installed, and a wheel that is whole."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_every_dependency_is_listed_with_its_licence() -> None:
    """Names alone: licences are those of the versions that were installed when it was written."""
    listed = re.findall(
        r"^\| ([\w.-]+) \| [\w]+ \| ", (ROOT / "docs/licences.md").read_text(), re.M
    )
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import licences
    finally:
        sys.path.pop(0)
    wanted = [name for names in licences.requirements().values() for name in names]
    assert listed[0] == "package"
    assert listed[1:] == [name for name in wanted if name != "ds_ckpt"]
    assert licences.licence("torch").startswith(("BSD", "Apache"))


@pytest.mark.slow
def test_sdist_and_wheel_are_whole() -> None:
    """A part of .ci/run, too."""
    run = subprocess.run(
        [str(ROOT / "scripts" / "package_check.sh")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
