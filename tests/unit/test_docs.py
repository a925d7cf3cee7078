"""Documents: links, the site's list of pages, generated pages, the package's metadata."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ds_ckpt
from tests import guide
from tests.command_lines import check_command

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
    assert len(PAGES) - 1 <= 20  # licences.md is left out


def test_home_page_and_readme_begin_alike_with_the_headline_of_the_results() -> None:
    report = (ROOT / "benchmarks/results/measure/shares.md").read_text(encoding="utf-8")
    headline = report.splitlines()[0].removeprefix("# ")
    for page in ("README.md", "docs/expect.md"):
        assert headline in " ".join((ROOT / page).read_text(encoding="utf-8").split()), page
    readme, home = (
        " ".join((ROOT / p).read_text().split()) for p in ("README.md", "docs/index.md")
    )
    assert readme.startswith(home.replace("](", "](docs/").partition(" If you have one")[0])
    lines = json.loads((ROOT / "benchmarks/results/memory_of_a_step.json").read_text())["lines"]
    none, _, block = ([max(axis) for axis in zip(*line, strict=True)] for line in lines.values())
    flops = f"for {block[0] / none[0]:.3g}x the FLOPs"
    assert f"fall from {none[1]:.3g} to {block[1]:.3g} GiB, {flops}" in home


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib before Python 3.11")
def test_figures_are_what_the_results_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("figures")
    written = {path.name: path.read_text() for path in figures.FIGURES.glob("*.svg")}
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    figures.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == written, "draw them again: python benchmarks/figures.py"


def test_reference_pages_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    reference = importlib.import_module("reference")
    for name, made in (("keys.md", reference.keys()), ("commands.md", reference.commands())):
        assert made == (ROOT / "docs" / name).read_text("utf-8"), "run python scripts/reference.py"
    heads = {re.sub(r"\W", "", one) for one in re.findall("^## `(.*)`", reference.keys(), re.M)}
    assert all(one.startswith(("ds_ckpt", "activation_checkpointing")) for one in heads)
    assert heads > set(re.findall(r"\(#(\w+)", reference.keys()))
    for name in re.findall("compression import (.*)", guide.block("python"))[0].split(", "):
        assert f"\n::: ds_ckpt.compression.{name}\n" in reference.commands(), name


def test_links_lead_somewhere_on_a_package_index() -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    shown, kept = "![a](docs/a.svg) [b](docs/b.md#c) ", "[d](https://e.f) [g](#h)"
    assert description(shown + kept, None, "1") == f" b {kept}"
    links = "![a](https://x/y/raw/v1/docs/a.svg) [b](https://x/y/blob/v1/docs/b.md#c) "
    assert description(shown + kept, "https://x/y/", "1") == links + kept


def agree(version: str, changelog: str, tag: str) -> bool:
    """A tag is of the newest heading's version; an open changelog of that one or a later one."""
    heads = re.findall(r"^## \[(.*)", changelog, re.M)
    is_open = heads[0] == "Unreleased]"
    form = re.compile(r"(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d$")
    found = [version.split("."), *(form.findall(head)[0] for head in heads[is_open:])]
    versions = [tuple(map(int, one)) for one in found]
    if tag or not is_open:
        return not is_open and tag in ("", f"v{version}") and versions[0] == versions[1]
    return versions == sorted(versions, reverse=True)


def test_version_tag_and_changelog_agree() -> None:
    """Rows: version, headings (u: unreleased, 1: of 0.1.0, 2: of 0.2.0), tag."""
    heads = {"u": "Unreleased]", "1": "0.1.0] - 2030-01-02", "2": "0.2.0] - 2030-03-04"}
    right = ["0.1.0 u", "0.1.0 1 v0.1.0", "0.2.0 u1", "0.2.0 21 v0.2.0"]
    wrong = ["0.1.0 u v0.1.0", "0.1.0 1 v0.1.1", "0.2.0 1", "0.2.0 u1 v0.2.0", "0.1.0 u21"]
    for row in right + wrong:
        version, log, *tags = row.split()
        changelog = "".join(f"## [{heads[x]}\n" for x in log)
        assert agree(version, changelog, "".join(tags)) == (row in right), row


def test_the_version_is_in_one_place_and_the_others_follow() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'attr = "ds_ckpt.__version__"' in project
    assert not re.search(r"^version\s*=\s*\"", project, re.M)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.M) == [ds_ckpt.__version__]
    command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    assert agree(ds_ckpt.__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tags)


def test_every_dependency_is_listed_with_its_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names alone: licences are those of the versions that were installed when it was written."""
    listed = re.findall(r"^\| ([\w.-]+) \| \w+ \| ", (ROOT / "docs/licences.md").read_text(), re.M)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    licences = importlib.import_module("licences")
    wanted = [name for names in licences.requirements().values() for name in names]
    assert listed == ["package", *(name for name in wanted if name != "ds_ckpt")]
    assert licences.licence("torch").startswith(("BSD", "Apache"))


sys.path.insert(0, str(ROOT / "benchmarks"))
import claims as ledger  # noqa: E402

THEMES, CASES, CLAIMS = ledger.load()
BY_ID = {claim.id: claim for claim in CLAIMS}


@pytest.mark.parametrize("command", sorted({c.command for c in CLAIMS}))
def test_a_reader_can_type_the_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_command(command)
    _, _, names = command.partition("claims.py --measure")
    assert set(names.split()) <= {case.name for case in CASES}
    _, _, row = command.partition("claims.py --row")
    assert set(row.split()) <= set(BY_ID)


def test_each_claim_is_decided_one_way() -> None:
    """Figures decide, or a verdict that no figure decides; a condition is one of `found`."""
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.source.startswith(claim.id.partition("-")[0] + "_")
        assert claim.theme in THEMES
        assert claim.by in ledger.DECIDED_BY
        assert bool(claim.holds) != bool(claim.verdict), claim.id
        assert not claim.under or claim.holds, claim.id
        assert claim.verdict in ("", *ledger.VERDICTS), claim.id
        if claim.by in ("fake", "arithmetic", "result", "source") and claim.holds:
            assert claim.figures or "." in claim.holds, claim.id


def test_a_measurement_leaves_the_record_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """`--measure` is the command of many claims, which readers type."""
    before = [path.read_bytes() for path in (ledger.RECORD, ledger.PAGE)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(CASES[0]), "measure", lambda self: {})
    monkeypatch.setattr(sys, "argv", ["claims.py", "--measure", CASES[0].name])
    ledger.main()
    assert "wrote runs/claims.md" in capsys.readouterr().out
    assert (tmp_path / "runs/claims.json").exists()
    assert [path.read_bytes() for path in (ledger.RECORD, ledger.PAGE)] == before


def test_others_are_credited() -> None:
    """Who acts on DeepSpeed's section, and who had the ideas."""
    text = "".join(page.read_text("utf-8") for page in PAGES)
    for words in ("Lightning's DeepSpeed strategy does", "2605.00539", "2602.06499", "2602.03839"):
        assert words in text


def test_the_page_is_what_the_data_renders_to() -> None:
    record = ledger.read_record()["measurements"]
    assert {name: set(one["steps"]) for name, one in record.items()} == {
        case.name: {"none", *case.policies} for case in CASES
    }
    judged = ledger.judge(CASES, CLAIMS)
    written = ledger.PAGE.read_text(encoding="utf-8")
    assert ledger.page(THEMES, CASES, judged) == written, "run python benchmarks/claims.py"
    assert {row.verdict for row in judged} <= set(ledger.VERDICTS)
