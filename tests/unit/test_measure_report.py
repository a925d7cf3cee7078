"""The report: its golden text, the page without network, and a look at it in a browser."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.cli.measure import DEMO_OPTIONS
from ds_ckpt.errors import StateError
from ds_ckpt.lab.measure import measure_report
from ds_ckpt.lab.measure.figures import Figure
from ds_ckpt.lab.measure.findings import headline
from ds_ckpt.lab.measure.measure_report import Report
from ds_ckpt.lab.measure.samples import Store, Trial
from ds_ckpt.lab.measure.spec import Spec
from ds_ckpt.lab.measure.trials import RUNS
from ds_ckpt.telemetry.units import number
from tests.unit import measure_samples as known

PLOTS = ("shares", "parts-0", "parts-1", "parts-2")
RUN = {
    "started_utc": "2030-01-01T00:00:00+00:00",
    "command": "ds-ckpt measure --output x",
    "place": "two nodes <b>made up</b>",
    "versions": {"torch": "1.2.3"},
    "machine": {"CPU": "a CPU", "cores": 2},
}
OTHERS = replace(known.SPEC, weights=("lossless",), baselines=("zero2",), bf16=True, accumulation=2)


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


def test_text_and_first_screen_are_the_golden_ones(run_folder, page, is_golden) -> None:
    """The page's part: sentence, table and chart, up to the next heading."""
    assert is_golden("measure_report.md", (run_folder / "report.md").read_text())
    first, *_ = page[page.index("<body>") :].partition("<h2>")
    first = re.sub(r"<svg.*?</svg>", "<svg/>", first, flags=re.S)
    assert is_golden("measure_first_screen.html", first)


METHODS = tuple(DEMO_OPTIONS["methods"].split(","))
DEMO = Spec(methods=METHODS, weights=(DEMO_OPTIONS["weights"],), demo=True)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values with the intervals of a busy machine."""
    monkeypatch.setattr(measure_report, "share_text", lambda one: "none shown (-168 to 621)")
    text, more = Figure.text, {"step_s": " ± 0.0143", "cost_s": " (0.0956 to 0.337)"}
    monkeypatch.setattr(Figure, "text", lambda self, v: text(self, v) + more.get(self.name, ""))


@pytest.mark.usefixtures("undrawn", "wide")
def test_80_columns_show_a_line_per_configuration_and_the_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", DEMO)
    result = CliRunner().invoke(app, ["report", str(folder)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    table, _, advice = result.output.partition(" block with 3bit or dense (block/3bit/whole)")
    assert " ".join(table.split()).startswith(headline(Report.of(folder).findings))
    assert max(map(len, table.splitlines())) <= 80
    for row in Report.of(folder).findings.rows:
        (line,) = (x for x in table.splitlines() if x.split()[:1] == [row.configuration])
        assert line.split()[1] == number(row.step_s.value)
        assert line.rstrip().endswith(("-", "none (-168 to 621)"))
    assert "Why none/dense is here" in table
    assert json.loads(advice.partition("wrote")[0])["ds_ckpt"] == {
        "activation": {"policy": "block"},
        "compression": {"method": "quantize", "quantize": {"bits": 3}},
        "weights": {"resident": True},
    }


LOOK = """<!doctype html><script>onload = () => document.title = JSON.stringify(
  [0, 1].map(place => frames[place].document).map(page => [
    ["h1", "table", "figure svg"].map(one => page.querySelector(one).getBoundingClientRect()),
    [page.documentElement, ...page.querySelectorAll(".scroll")].map(
      one => one.scrollWidth > one.clientWidth)]))</script>"""


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("spec", [DEMO, replace(known.SPEC, methods=METHODS)])
def test_sentence_table_and_chart_are_on_the_first_screen(spec: Spec, tmp_path: Path) -> None:
    """Of a desk and of a telephone, without scrolling; on a desk no table is cut."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        assert "CI" not in os.environ, "chromium is missing (on Debian: the package chromium)"
        pytest.skip("there is no chromium")
    folder = write_run(tmp_path / "run", spec)
    Report.of(folder).write(folder)
    page, sizes = html.escape((folder / "report.html").read_text()), ((1280, 800), (390, 844))
    frames = [f'<iframe width={x} height={y} srcdoc="{page}"></iframe>' for x, y in sizes]
    (around := tmp_path / "around.html").write_text(LOOK + "".join(frames))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'p'}"]
    options += ["--dump-dom", around.as_uri()]
    shown = subprocess.run([chromium, *options], capture_output=True, text=True, timeout=60)
    looks = json.loads(html.unescape(re.findall("<title>(.*?)</title>", shown.stdout)[0]))
    for (width, height), (boxes, wide) in zip(sizes, looks, strict=True):
        end = 0.0
        for box in boxes:
            assert end <= box["top"] < box["bottom"] <= height, box
            assert 0 <= box["left"] < box["right"] <= width, box
            end = box["bottom"]
        assert not any(wide if width > 390 else wide[:2]), wide  # the page and its tables


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
        "shares": ["100 Mbit/s", "4-bit quantization", "all of the recomputation", "200% or more"],
        "parts": ["none/stock", "block/4bit", "network: backward", "compression"],
    }
    for name, svg in drawn.items():
        texts = " ".join(text for e in svg.iter() if (text := e.text))
        shapes = [e for e in svg.iter() if e.tag.endswith("}path")]
        assert len(shapes) > 12, name
        for word in next(v for k, v in wanted.items() if name.startswith(k)):
            assert word in texts, (name, word)
        if name.startswith("parts"):  # distinguished without colour
            assert len([e for e in svg.iter() if e.tag.endswith("}pattern")]) >= 4, name


@pytest.mark.usefixtures("undrawn")
def test_placements_of_weights_are_in_the_text(tmp_path: Path) -> None:
    text = Report.of(write_run(tmp_path / "run", OTHERS)).document().markdown()
    assert text.count("| block/4bit/lossless | ") == 2 * len(known.SPEC.rates)
    assert "### block, 4bit/lossless" in text
    assert "bf16" in text


@pytest.mark.usefixtures("undrawn")
def test_missing_parts_come_first_and_json_has_no_nan(tmp_path: Path) -> None:
    """Stopped in the second repetition."""
    folder = write_run(tmp_path / "run", replace(known.SPEC, rates=(100.0, 400.0)))
    samples = Store(folder).read()
    (folder / "samples.jsonl").unlink()
    for sample in samples:
        if isinstance(sample, Trial) and sample.repetition == 0:
            Store(folder).append(sample)
    report = Report.of(folder)
    text = report.document().markdown()
    sentence, _, first, *_ = text.splitlines()
    assert "there are too few repetitions for an interval" in sentence
    assert first.startswith("INCOMPLETE: 100 Mbit/s: 1 of 5 repetitions; 400 Mbit/s: 1 of 5")
    assert "nan" not in text
    report.write(folder)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert data["comparisons"][0]["values"]["share_paid"]["low"] is None
    assert data["headline"] == sentence.removeprefix("# ")


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


def test_without_its_packages_the_page_alone_is_missing(tmp_path, monkeypatch) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("jinja2", "matplotlib.figure"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            result = CliRunner().invoke(app, ["report", str(folder)])
        assert result.exit_code == 1
        assert "ds_ckpt[report]" in result.output
        for kind in ("md", "json"):
            (folder / f"report.{kind}").unlink()
    (folder / "report.md").symlink_to("/dev/full")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert (result.exit_code, "No space left on device" in result.output) == (1, True)
