"""The report: its golden text, the page without network, and a look at it in a browser."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.errors import StateError
from ds_ckpt.lab.measure.report import Report
from ds_ckpt.lab.measure.run import RUNS
from ds_ckpt.lab.measure.samples import Store, Trial
from ds_ckpt.lab.measure.spec import Spec
from tests.unit import measure_samples as known

GOLDEN = Path(__file__).parent / "golden" / "measure_report.md"
PLOTS = ("parts-0", "parts-1", "parts-2", "bytes-0")
RUN = {
    "started_utc": "2030-01-01T00:00:00+00:00",
    "command": "ds-ckpt measure --output x",
    "place": "two nodes <b>made up</b>",
    "versions": {"torch": "1.2.3"},
    "machine": {"CPU": "a CPU", "cores": 2},
}
WITH_WEIGHTS = replace(
    known.SPEC, weights=("lossless",), baselines=("zero2",), bf16=True, accumulation=2
)


def write_run(folder: Path, spec: Spec = known.SPEC) -> Path:
    folder.mkdir(parents=True)
    spec.save(folder)
    Store(folder).append(*known.samples(spec))
    (folder / RUNS).write_text(json.dumps(RUN) + "\n")
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("report") / "run")
    Report.of(folder).write(folder)
    return folder


@pytest.fixture(scope="module")
def page(run_folder: Path) -> str:
    return (run_folder / "report.html").read_text(encoding="utf-8")


def test_the_text_is_the_golden_one(run_folder: Path) -> None:
    """Write it anew with REWRITE_GOLDEN=1, and read the difference."""
    text = (run_folder / "report.md").read_text()
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_terminal_shows_the_first_table_and_the_headline(run_folder: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run_folder)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for text in ("none/stock", "block/4bit", "steps are 1.31x", "report.html"):
        assert text in result.output, text


def test_the_page_needs_no_network(page: str) -> None:
    assert not re.search(r"<(script|link|iframe|object|embed|img)\b", page)
    assert not re.search(r"""\b(href|src|data)=["'][^#]""", page)
    assert not re.search(r"@import|url\(\s*[^#)]", page)
    assert "two nodes &lt;b&gt;made up&lt;/b&gt;" in page


def _plots(page: str) -> dict[str, ElementTree.Element]:
    figures = re.findall(r'<figure id="([^"]+)">\s*(<svg.*?</svg>)', page, re.DOTALL)
    return {name: ElementTree.fromstring(svg) for name, svg in figures}


def test_every_plot_has_its_data(page: str) -> None:
    drawn = _plots(page)
    assert tuple(drawn) == PLOTS
    wanted = {
        "parts": ["none/stock", "block/4bit", "network: backward", "compression"],
        "bytes": ["none/stock", "reduce", "gather recompute"],
    }
    for name, svg in drawn.items():
        texts = " ".join(text for e in svg.iter() if (text := e.text))
        shapes = [e for e in svg.iter() if e.tag.endswith("}path")]
        assert len(shapes) > 12, name
        for word in next(v for k, v in wanted.items() if name.startswith(k)):
            assert word in texts, (name, word)
        if name.startswith(("parts", "bytes")):  # distinguished without colour
            assert len([e for e in svg.iter() if e.tag.endswith("}pattern")]) >= 4, name


def test_the_numbers_are_those_of_the_samples(run_folder: Path) -> None:
    data = json.loads((run_folder / "report.json").read_text())
    assert data["spec"]["rates"] == [100.0, 400.0, 1600.0]
    (one,) = [c for c in data["comparisons"] if c["rate_mbit"] == 100.0]
    freed = known.seconds(8.75, 100.0) - known.PACKING_S
    assert one["values"]["time_freed_s"]["value"] == pytest.approx(freed)
    assert f"{freed:.2f}" in (run_folder / "report.md").read_text()
    row = next(r for r in data["rows"] if r["configuration"] == "block/4bit")
    assert (row["policy"], row["method"], row["weights"]) == ("block", "4bit", "stock")
    assert row["step_s"]["value"] == pytest.approx(known.step("block/4bit", 100.0).step_s)


@pytest.mark.usefixtures("undrawn")
def test_placements_of_weights_are_in_the_text(tmp_path: Path) -> None:
    text = Report.of(write_run(tmp_path / "run", WITH_WEIGHTS)).document().markdown()
    assert text.count("| block/4bit/lossless | ") == 1 + len(known.SPEC.rates)
    assert "### block, 4bit/lossless" in text
    assert "bf16" in text


@pytest.mark.usefixtures("undrawn")
def test_missing_parts_come_first_and_json_has_no_nan(tmp_path: Path) -> None:
    """Stopped in the second repetition; recomputation that costs nothing has no share."""
    folder = write_run(tmp_path / "run", replace(known.SPEC, rates=(100.0, 400.0)))
    samples = Store(folder).read()
    (folder / "samples.jsonl").unlink()
    for sample in samples:
        if isinstance(sample, Trial) and sample.repetition == 0:
            free = {"recompute": 0.0, "network_recompute": 0.0}
            steps = [t.model_copy(update={"parts_s": t.parts_s | free}) for t in sample.steps]
            Store(folder).append(sample.model_copy(update={"steps": tuple(steps)}))
    report = Report.of(folder)
    text = report.document().markdown()
    first = text.partition("## Summary\n\n- ")[2].partition("\n")[0]
    assert first.startswith("INCOMPLETE: 100 Mbit/s: 1 of 5 repetitions; 400 Mbit/s: 1 of 5")
    assert "nan" not in text
    report.write(folder)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert data["comparisons"][0]["values"]["share_paid"]["value"] is None


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no spec\.json"):
        Report.of(tmp_path)
    known.SPEC.save(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "no repetition" in result.output
    content = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps({**content, "colour": "red"}))
    with pytest.raises(StateError, match="settings colour"):
        Report.of(tmp_path)


def test_without_its_packages_the_page_alone_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("jinja2", "matplotlib.figure"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            result = CliRunner().invoke(app, ["report", str(folder)])
        assert result.exit_code == 1
        assert "ds_ckpt[report]" in result.output
        for kind in ("md", "json"):
            (folder / f"report.{kind}").unlink()
