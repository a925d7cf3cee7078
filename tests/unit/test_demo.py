"""The demo's choices before anything is launched: options, accelerator, the files it gives away."""

from __future__ import annotations

import io
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ds_ckpt.cli import demo
from ds_ckpt.config import load_file, parse
from ds_ckpt.errors import ConfigError
from ds_ckpt.lab.measure.run import RUNS
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import Spec, check
from tests.unit import measure_samples as known
from tests.unit.test_measure_report import RUN


def test_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        demo.spec_of(5, 1, None, on_hosts=False)
    assert [problem.where for problem in caught.value.problems] == ["--steps"]
    assert "6" in str(caught.value)


@pytest.mark.parametrize("on_hosts", [True, False])
def test_the_settings_are_an_experiment(on_hosts: bool, tmp_path: Path) -> None:
    spec = demo.spec_of(8, 3, tmp_path / "text", on_hosts=on_hosts)
    check(spec)
    assert spec.processes == demo.PROCESSES
    assert (spec.rates == (None,)) == (not on_hosts)
    assert os.path.isabs(spec.text or "")
    assert {one.name for one in spec.configurations} == {
        *(f"{p}/{m}" for p in ("none", "block") for m in ("stock", "dense", "topk")),
        *(("block/dense/whole", "block/topk/whole") if on_hosts else ()),
    }


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    app = demo.typer.Typer()
    app.command()(demo.main)
    result = CliRunner().invoke(app, [f"--output={tmp_path}", "--loopback"])
    assert result.exit_code == 1
    assert "it holds something else" in result.output
    assert "Traceback" not in result.output


@pytest.fixture(params=[False, True], ids=["loopback", "hosts"])
def shown(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[Path, str]:
    """What a run with made-up samples prints, 80 columns wide."""

    def measured(spec: Spec, folder: Path, **_: object) -> None:
        folder.mkdir()
        spec.save(folder)
        (folder / RUNS).write_text(json.dumps(RUN) + "\n")
        monkeypatch.setitem(known.GRADIENTS_MB, "topk", 0.25)
        Store(folder).append(known.samples(spec))

    monkeypatch.setattr(demo, "measure", measured)
    monkeypatch.setattr(demo, "EmulatedHosts", lambda *_, **__: nullcontext())
    spec, folder = demo.spec_of(12, 1, None, on_hosts=request.param), tmp_path / "run"
    said = io.StringIO()
    report = demo.run(spec, folder, 1.0, Console(file=said))
    demo.show(report, folder, Console(file=said, width=80))
    return folder, said.getvalue()


def test_the_table_and_its_meaning_fit_a_terminal(shown: tuple[Path, str]) -> None:
    folder, said = shown
    assert "…" not in said.split("*")[0]
    for word in ("none/stock", "block/topk", "0.250", "3.5000"):
        assert word in said, word
    assert "Exactness: met" in " ".join(said.split())
    assert "activations" in said.split("dense:")[0]
    for kind in ("html", "md", "json"):
        assert (folder / f"report.{kind}").exists()


def test_the_files_to_take_away_are_ones_the_plugin_accepts(shown: tuple[Path, str]) -> None:
    files = sorted((shown[0] / "configs").glob("*.json"))
    assert len(files) in (6, 8)
    for path in files:
        config = parse(load_file(path), source=str(path))
        assert config.weights.resident == path.name.endswith("whole.json")
        assert config.telemetry.enabled
        assert (config.activation.policy == "block") == path.name.startswith("block")
        if "topk" in path.name:
            assert config.compression.warmup_steps == 3
