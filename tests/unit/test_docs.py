"""Documents: commands that can be typed, files that are there, configurations that are valid."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ds_ckpt.config import parse
from tests.command_lines import check_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = [ROOT / "docs" / name for name in ("index.md", "tutorial.md", "troubleshooting.md")]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


def _commands(path: Path) -> list[str]:
    lines = "\n".join(_blocks(path, "bash")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:sudo )?ds-ckpt [a-z][^`]*)`", path.read_text(encoding="utf-8"))
    return [" ".join(x.split()) for x in [*lines, *inline] if "ds-ckpt " in x or "deepspeed " in x]


@pytest.mark.parametrize("command", sorted({c for page in GUIDES for c in _commands(page)}))
def test_commands_of_guides_can_be_typed(command: str) -> None:
    if command.startswith("deepspeed"):
        for word in re.findall(r"\S+\.(?:py|json)|hostfiles/\S+", command):
            assert (ROOT / word).exists(), word
    else:
        stand_ins = {"MODEL": "demo", "FILE": "zero3.json", "HOSTS": "hostfiles/two_hosts"}
        for name, value in stand_ins.items():
            command = re.sub(rf"\b{name}\b", value, command)
        check_command(command)


def test_configurations_of_the_front_page_are_valid() -> None:
    (block,) = _blocks(GUIDES[0], "json")
    assert parse(json.loads(block)).activation.policy == "block"


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
