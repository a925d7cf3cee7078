"""`ds-ckpt plan` compared with measured and published steps; its tables.

The benchmarks behind docs/plan.md and docs/plan_tables.md, on what is on record.
"""

import importlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.estimate.search import NEEDED, TIE, ZERO1, Question, Search
from ds_ckpt.lab.hosts.hardware import Hardware

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize(
    ("machine", "fewest", "chosen"), [("plan_accuracy", 60, 6), ("plan_accuracy_slow_cores", 50, 5)]
)
def test_measured_steps_are_predicted_and_the_choice_is_near_the_best(
    benchmark: Any, capsys: pytest.CaptureFixture[str], machine: str, fewest: int, chosen: int
) -> None:
    bench = benchmark("plan_accuracy")
    pairs = bench.predicted(RESULTS / f"{machine}.json")
    record = (RESULTS / f"{machine}.txt").read_text().splitlines()
    found = bench.predict(pairs)
    assert len(found.errors) >= fewest
    assert round(statistics.median(found.errors), 2) == TIE
    assert bench.within(found.errors) >= 0.9 * len(found.errors)
    assert found.tau >= 0.85
    # not all of them: a lossless change takes fewer bits after more steps
    assert bench.within(found.bytes_off, 0.03) >= 0.95 * len(found.bytes_off)
    assert max(found.bytes_off) <= 0.035
    assert capsys.readouterr().out.splitlines()[-1] in record, "predict again, keep the output"
    assert bench.within(bench.choose(pairs).values(), 0.05) >= chosen
    assert capsys.readouterr().out.splitlines()[-1] in record, "choose again, keep the output"


def test_published_points_come_out_within_25_percent(benchmark, capsys) -> None:
    """The share of peak is the data sheet's, or that which the program itself reached."""
    benchmark("plan_published").main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "%" in line]
    record = (RESULTS / "plan_published.txt").read_text().splitlines()
    assert len(rows) >= 10
    for row in rows:
        assert row in record, "run it again, keep the output"
        off = [int(cell.strip()[:-1]) for cell in row.split("|") if cell.strip().endswith("%")]
        assert min(map(abs, off)) <= 25, row


def test_the_tables_of_clusters_are_what_the_command_writes(benchmark: Any) -> None:
    tables = benchmark("plan_tables")
    written = (ROOT / "docs" / "plan_tables.md").read_text(encoding="utf-8")
    assert "\n".join([tables.HEAD, *tables.sections()]) + "\n" == written


@pytest.mark.parametrize("accumulation", [1, 8])
def test_zero_1_of_the_tables_sends_what_was_measured(benchmark: Any, accumulation: int) -> None:
    bench = benchmark("plan_accuracy")
    model = bench.Predictor().model("wider")
    cluster = Hardware.load(None, "--cluster").cluster("2 nodes x 1 A100, 1 Gbit/s", NEEDED)
    assert cluster is not None
    search = Search(Question(model, cluster, 5e-6, 2 * accumulation, "equal"))
    zero1 = [one for one in search.all if one.setting.weights == ZERO1]
    one = next(one for one in zero1 if one.setting.micro_steps == accumulation)
    rows = json.loads((RESULTS / "weight_bytes.json").read_text())
    wanted = {"layout": "2x1", "cell": "ZeRO-1", "accumulation": accumulation}
    (row,) = (row for row in rows if wanted.items() <= row.items())
    assert bench.HEADERS * one.step.link_bytes == pytest.approx(row["sent"], rel=0.01)
