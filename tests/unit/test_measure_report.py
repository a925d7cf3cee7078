"""The report: every part that the page promises, no network, and a look at it in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.errors import StateError
from ds_ckpt.lab.measure.figures import MEASURED
from ds_ckpt.lab.measure.report import Report, bytes_table, caveats, exactness, headline
from ds_ckpt.lab.measure.run import RUNS
from ds_ckpt.lab.measure.samples import Loss, Store, Trial
from ds_ckpt.lab.measure.spec import Spec
from tests.unit import measure_samples as known

PLOTS = (
    *("parts-0", "parts-1", "parts-2", "bytes-0"),
    *("sweep-steps", "sweep-paid", "losses"),
)
RUN = {
    "started_utc": "2030-01-01T00:00:00+00:00",
    "command": "ds-ckpt measure --output x",
    "ground": "two hosts <b>made up</b>",
    "versions": {"torch": "1.2.3"},
    "machine": {"cpu_model": "a CPU", "cpu_cores": 2, "memory_gib": 4.0, "system": "Linux"},
    "accelerator": "cpu",
    "ended_well": True,
    "wall_time_s": 12.0,
    "load_at_end": 0.5,
}


def write_run(folder: Path, spec: Spec = known.SPEC, drift: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    spec.save(folder)
    Store(folder).append(known.samples(spec, drift))
    (folder / RUNS).write_text(json.dumps(RUN) + "\n")
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("report") / "run")
    Report.of(folder).write(folder)
    return folder


@pytest.fixture(scope="module")
def made(run_folder: Path) -> Report:
    return Report.of(run_folder)


@pytest.fixture(scope="module")
def page(run_folder: Path) -> str:
    return (run_folder / "report.html").read_text(encoding="utf-8")


class _Strict(HTMLParser):
    """Refuses what a browser would mend: tags that are not closed, or closed in another order."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [v or "" for k, v in attrs if k in ("href", "src", "xlink:href", "data")]
        assert not [k for k, _ in attrs if k.startswith("on")], attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(page: str) -> None:
    parser = _Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert not parser.tags & {"script", "link", "iframe", "object", "embed", "img"}
    assert all(link.startswith("#") for link in parser.links), parser.links
    assert not re.search(r"@import|url\(\s*[^#)]", page)


def _plots(page: str) -> dict[str, ElementTree.Element]:
    figures = re.findall(r'<figure id="([^"]+)">\s*(<svg.*?</svg>)', page, re.DOTALL)
    return {name: ElementTree.fromstring(svg) for name, svg in figures}


def test_every_plot_is_there_with_its_data(page: str) -> None:
    drawn = _plots(page)
    assert tuple(drawn) == PLOTS
    for name, svg in drawn.items():
        said = " ".join(text for e in svg.iter() if (text := e.text))
        shapes = [e for e in svg.iter() if e.tag.endswith("}path")]
        assert len(shapes) > (10 if name == "losses" else 20), name
        wanted = {
            "parts": ["none/stock", "block/4bit", "network, backward", "compression"],
            "bytes": ["none/stock", "gradients", "weights, recompute"],
            "sweep-steps": ["block/silent", "Mbit/s"],
            "sweep-paid": ["break-even", "block: 4bit against dense"],
            "losses": ["training loss", "block/4bit"],
        }
        for word in next(v for k, v in wanted.items() if name.startswith(k)):
            assert word in said, (name, word)


def test_bars_are_told_apart_by_hatching(page: str) -> None:
    for name, svg in _plots(page).items():
        if name.startswith(("parts", "bytes")):
            patterns = [e for e in svg.iter() if e.tag.endswith("}pattern")]
            assert len(patterns) >= 4, name


def test_the_costs_stand_first_and_the_run_last(page: str) -> None:
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads == [
        "What a step costs and sends",
        "What it is made of",
        "Bytes by purpose",
        "What compression pays for",
        "Over the links&#39; rates",
        "Training loss",
        "What the figures are",
        "What these numbers cannot say",
        "What was run on what",
    ]
    for text in (
        "two hosts &lt;b&gt;made up&lt;/b&gt;",
        "ds-ckpt measure --output x",
        "torch 1.2.3",
        "a CPU, 2 cores",
        "changed no training loss by a bit",
        "pays for all recomputation up to, Mbit/s",
    ):
        assert text in page, text


def test_the_numbers_are_those_of_the_samples(run_folder: Path) -> None:
    text = (run_folder / "report.md").read_text()
    freed = known.seconds(18.75, 100.0) - known.PACKING_S
    assert f"| time freed, s | {freed:.2f} *" in text
    line = next(row for row in text.splitlines() if row.startswith("| block | 4bit | stock |"))
    step_s = known.step("block/4bit", 100.0).step_s
    sent = ["21.2", "20.0", "0", "1.25"]
    wanted = [f"{step_s:.2f}", f"{1024 / step_s:.0f}", *sent, "1.00", "2.00", "3.6000"]
    assert line.split(" | ")[3:] == [*wanted[:-1], f"{wanted[-1]} |"]
    data = json.loads((run_folder / "report.json").read_text())
    assert data["spec"]["rates"] == [100.0, 400.0, 1600.0]
    (figures,) = [
        f for f in data["figures"] if f["rate_mbit"] == 100.0 and f["baseline"] == "stock"
    ]
    assert figures["values"]["time_freed_s"]["value"] == pytest.approx(freed)
    assert "share_paid" in data["settled"][0]


def test_every_column_has_its_unit(made: Report) -> None:
    bare = [one.heading for one in MEASURED if not one.unit.startswith(("s", "MB"))]
    assert bare == ["tokens, /s", "parts / step", "interfaces / purposes", "held-out loss"]
    assert all(head.endswith(", MB") for head in bytes_table(made.findings.rows).heads[1:])


@pytest.mark.usefixtures("undrawn")
def test_losses_or_weights_that_differ_are_said_aloud(tmp_path: Path) -> None:
    """The digest of the weights is what older runs lack."""
    folder = write_run(tmp_path / "run")
    losses = {s.configuration: s for s in Store(folder).read() if isinstance(s, Loss)}

    def said_of(**updates: dict[str, Any]) -> str:
        Store(folder).append(
            [one.model_copy(update=updates.get(name, {})) for name, one in losses.items()]
        )
        return exactness(Report.of(folder).losses)

    assert "met." in said_of()
    said = said_of(**{"block/dense": {"train_losses": (5.0, 4.0, 3.4)}})
    assert "NOT met. Losses or final weights of block/dense differ" in said
    assert said in Report.of(folder).document().html()
    other = {"none/dense": {"weights_sha256": "a"}, "block/dense": {"weights_sha256": "b"}}
    assert "NOT met" in said_of(**other)


def test_the_headline_compares_the_time_freed_with_recomputation(
    made: Report, tmp_path: Path
) -> None:
    freed = known.seconds(8.75, 100.0) - known.PACKING_S
    share = freed / (known.RECOMPUTE_S + known.seconds(0, 100.0))
    assert headline(made.findings) == (
        "100 Mbit/s, block, 4bit against dense: compression frees 0.680 s a step. "
        f"Recomputation adds 0.100 s, of which that is {share:.0%}."
    )
    fast = Report.of(write_run(tmp_path / "fast", replace(known.SPEC, rates=(1e5,))))
    assert "frees no time; it adds" in headline(fast.findings)
    none = Report.of(write_run(tmp_path / "none", replace(known.SPEC, policies=("none",))))
    assert headline(none.findings).startswith("No headline")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no spec\.json"):
        Report.of(tmp_path)
    known.SPEC.save(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "no repetition" in result.output


def test_a_run_of_a_single_rate_has_a_report_too(tmp_path: Path) -> None:
    spec = replace(known.SPEC, where="loopback", hosts=1, slots=2, rates=(None,))
    page = Report.of(write_run(tmp_path / "run", spec)).document().html()
    assert "sweep" not in "".join(_plots(page))
    assert "not shaped" in page


def _change(folder: Path, whose: str, anew: Callable[[Trial], dict[str, Any]]) -> None:
    """Trials of the configurations that begin so: the last record of equal keys counts."""
    trials = [s for s in Store(folder).read() if isinstance(s, Trial)]
    mine = [t for t in trials if t.configuration.startswith(whose)]
    Store(folder).append([t.model_copy(update=anew(t)) for t in mine])


def _steps(trial: Trial, step_s: float | None = None, **parts: float) -> dict[str, Any]:
    one = trial.steps[0]
    update = {"parts_s": {**one.parts_s, **parts}, "step_s": step_s or one.step_s}
    return {"steps": (one.model_copy(update=update),) * 2}


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    """Stopped in the second round at one rate, in the first at another, before any loss."""
    folder = write_run(tmp_path / "run")
    store = Store(folder)
    kept = [
        s
        for s in store.read()
        if s.kind != "loss"
        and not (s.kind == "trial" and s.rate_mbit == 400.0 and s.repetition > 0)
        and not (s.kind == "trial" and s.rate_mbit == 1600.0 and s.configuration != "none/stock")
    ]
    store.path.unlink()
    store.append(kept)
    report = Report.of(folder)
    first = report.conclusions()[0]
    assert first.startswith("INCOMPLETE")
    assert "400 Mbit/s: 1 of 5 repetitions" in first
    assert "1600 Mbit/s: none of 5 repetitions" in first
    assert "100 Mbit/s: 5" not in first
    assert "no held-out loss of none/stock, none/dense, none/4bit, block/stock" in first
    assert first in report.document().html()
    assert first in report.document().markdown()
    whole = Report.of(write_run(tmp_path / "whole"))
    assert "INCOMPLETE" not in whole.document().html()


def test_the_file_of_a_run_without_a_share_is_json(tmp_path: Path) -> None:
    """Recomputing that costs nothing has no share that is paid; JSON has no NaN."""
    folder = write_run(tmp_path / "run")
    _change(folder, "block", lambda t: _steps(t, recompute=0.0, network_recompute=0.0))
    report = Report.of(folder)
    report.write(folder)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert data["figures"][0]["values"]["share_paid"]["value"] is None
    assert "nan" not in report.document().markdown()


def test_with_several_batches_each_is_told_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", replace(known.SPEC, batches=(4, 6)))
    trials = [s for s in Store(folder).read() if isinstance(s, Trial)]
    Store(folder).append([one.model_copy(update={"sequences": 6}) for one in trials])
    report = Report.of(folder)
    drawn = _plots(report.document().html())
    for name in ("parts-0", "bytes-0"):
        said = [text for e in drawn[name].iter() if (text := e.text)]
        for label in ("none/stock, 4 sequences", "none/stock, 6 sequences"):
            assert said.count(label) == 1, (name, label)
    assert "block/4bit, 6 sequences" in report.document().markdown()


def test_interfaces_that_count_otherwise_are_a_caveat(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")

    def said() -> list[str]:
        return [line for line in caveats(Report.of(folder).findings) if "payload" in line]

    assert said() == []
    _change(folder, "none/dense", lambda t: {"interface_bytes": 1.1 * t.interface_bytes})
    (line,) = said()
    assert "none/dense" in line


def test_without_its_packages_the_page_alone_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of hours must not end with nothing to read."""
    folder = write_run(tmp_path / "run")
    for name in ("jinja2", "matplotlib.figure"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            result = CliRunner().invoke(app, ["report", str(folder)])
        assert result.exit_code == 1
        assert "ds_ckpt[report]" in result.output
        for kind in ("md", "json"):
            (folder / f"report.{kind}").unlink()


@pytest.fixture
def with_weights(tmp_path: Path) -> Path:
    spec = replace(
        known.SPEC, weights=("lossless",), baselines=("zero2",), bf16=True, accumulation=2
    )
    return write_run(tmp_path / "weights", spec)


def test_the_axis_of_weights_is_a_column_everywhere(with_weights: Path) -> None:
    report = Report.of(with_weights)
    text = report.document().markdown()
    for line in ("| block | 4bit | lossless | ", "| none | stock | zero2 | "):
        assert text.count(line) == len(known.SPEC.rates)
    assert "block/4bit/lossless" in report.document().html()
    row = next(r for r in report.json()["rows"] if r["configuration"] == "block/4bit/lossless")
    assert (row["policy"], row["method"], row["weights"]) == ("block", "4bit", "lossless")
    assert row["link_weight_bytes"] == 2e6
    assert "bf16" in text
    assert "2 micro-steps a step" in text
    assert any("once in 2 micro-steps" in line for line in caveats(report.findings))


def test_settings_of_another_version_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    content = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**content, "colour": "red"}))
    with pytest.raises(StateError, match="settings colour"):
        Report.of(folder)


def _chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and os.environ.get("CI") == "true":
        pytest.fail("CI must look at the report in a browser: install the Debian package chromium")
    if found is None:
        pytest.skip("no chromium here (Debian package chromium)")
    return found


PROBE = """
<pre id="seen"></pre>
<script>
window.addEventListener("error", e => document.getElementById("seen").append("ERROR " + e.message));
window.addEventListener("load", () => {
  const seen = [...document.querySelectorAll("figure")].map(f => {
    const box = f.querySelector("svg").getBoundingClientRect();
    const shapes = [...f.querySelectorAll("path, use")];
    const drawn = shapes.filter(p => {
      const size = p.getBoundingClientRect();
      return size.width + size.height > 0;
    });
    return {name: f.id, width: box.width, height: box.height, drawn: drawn.length};
  });
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.getElementById("seen").append("SEEN " + JSON.stringify({figures: seen, wide: wide}));
});
</script>
"""


@pytest.mark.timeout(180)
def test_a_browser_draws_every_plot_without_an_error(page: str, tmp_path: Path) -> None:
    """The page itself has no script; the one that looks is put into a copy of it."""
    looked_at = tmp_path / "page.html"
    looked_at.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [
        _chromium(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"),
        *("--enable-logging=stderr", "--dump-dom", looked_at.as_uri()),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "CONSOLE" not in result.stderr, result.stderr
    assert "ERROR " not in re.findall(r'<pre id="seen">(.*?)</pre>', result.stdout, re.DOTALL)[0]
    (found,) = re.findall(r"SEEN (\{.*?\})</pre>", result.stdout, re.DOTALL)
    seen = json.loads(found)
    assert tuple(figure["name"] for figure in seen["figures"]) == PLOTS
    for figure in seen["figures"]:
        assert figure["width"] > 300, figure
        assert figure["height"] > 100, figure
        assert figure["drawn"] > 15, figure
    assert seen["wide"] <= 0, "the page is wider than the window"
