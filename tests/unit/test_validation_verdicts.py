"""Records of verdicts: which settings they speak for, where they are read, and guards' limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.config import load_file, parse
from ds_ckpt.config import verdicts as module
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.verdicts import (
    VerdictRecord,
    decisive,
    read_verdicts,
    verdicts_on,
    write_verdicts,
)
from ds_ckpt.errors import StateError

ROOT = Path(__file__).parents[2]
SHIPPED = module.SHIPPED
PRESETS = sorted((ROOT / "ds_configs").glob("*.json"))


def compression(**section: Any) -> CompressionConfig:
    config = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}}
    return parse(config).compression


FOUR = {"method": "quantize", "quantize": {"bits": 4}}


def record(section: CompressionConfig, **over: Any) -> VerdictRecord:
    given = {"settings": decisive(section), "verdict": "equivalent", "task": "a task", "seeds": 5}
    given |= {"workers": 2, "steps": 300, "margin": 0.005, "metric": "loss"}
    return read_verdicts(SHIPPED)[0].model_copy(update=given | over)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shipped.json"
    monkeypatch.setattr(module, "SHIPPED", path)
    return path


def test_a_record_speaks_for_settings_not_for_files(shipped: Path) -> None:
    four = compression(**FOUR)
    write_verdicts(shipped, [record(four)])
    for same in (
        {},
        {"exchange": {"autotune": False}},
        {"error_feedback": {"device": "cpu"}},
        {"guard": {"action": "warn", "error": 0.5}},
        {"topk": None},
    ):
        assert verdicts_on(compression(**FOUR, **same)), same
    for other in (
        {"quantize": {"bits": 2}},
        {"quantize": {"bits": 4, "block": 128}},
        {"warmup_steps": 99},
        {"min_numel": 0},
        {"error_feedback": {"dtype": "bf16"}},
        {"error_feedback": {"enabled": False}},
        {"exchange": {"when": "micro_step"}},
        {"rules": [{"match": "*", "method": "dense"}]},
        {"method": "topk", "quantize": None},
    ):
        assert not verdicts_on(compression(**{**FOUR, **other})), other
    assert verdicts_on(compression()) == []


def test_keys_that_are_newer_than_a_record_count_at_their_defaults(shipped: Path) -> None:
    four = compression(**FOUR)
    old = record(four)
    older = {k: v for k, v in old.settings.items() if k != "quantize.block"}
    write_verdicts(shipped, [old.model_copy(update={"settings": older})])
    assert verdicts_on(four)
    assert not verdicts_on(compression(**{**FOUR, "quantize": {"bits": 4, "block": 128}}))
    write_verdicts(shipped, [old.model_copy(update={"settings": {**older, "gone": 1}})])
    assert len(verdicts_on(four)) == 1  # the first record; an unknown key matches nothing


def test_the_file_beside_comes_before_the_package_s(shipped: Path, tmp_path: Path) -> None:
    four = compression(**FOUR)
    write_verdicts(shipped, [record(four), record(four, task="other", verdict="worse")])
    beside = tmp_path / "user" / "verdicts.json"
    write_verdicts(beside, [record(four, verdict="inconclusive")])
    found = verdicts_on(four, beside=tmp_path / "user" / "c.json")
    assert [(r.task, r.verdict) for r in found] == [("a task", "inconclusive"), ("other", "worse")]


def test_a_new_verdict_takes_the_old_one_s_place(shipped: Path) -> None:
    four = compression(**FOUR)
    write_verdicts(shipped, [record(four, verdict="worse"), record(four, workers=8)])
    write_verdicts(shipped, [record(four, seeds=9)])
    found = verdicts_on(four)  # few workers do not speak for many
    assert [(r.workers, r.verdict, r.seeds) for r in found] == [
        (2, "equivalent", 9), (8, "equivalent", 5),
    ]  # fmt: skip
    assert found[1].describe().endswith("5 seeds of 300 steps, 8 workers")
    open_above, open_below = (
        record(four, verdict="inconclusive", interval=interval).describe()
        for interval in ((-0.002, 0.006), (-0.006, 0.002))
    )
    assert "not worse" not in open_above
    assert "margin 0.5%: not worse by it" in open_below


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(StateError, match="validate again"):
        read_verdicts(path)
    config = tmp_path / "c.json"
    section = {"compression": FOUR}
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "ds_ckpt": section}))
    found = CliRunner().invoke(app, ["validate", str(config)])
    assert found.exit_code == 1
    assert "verdicts.json" in found.output


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_every_preset_that_compresses_has_a_verdict_on_record(preset: Path) -> None:
    whole = parse(load_file(preset))
    config = whole.compression
    found = verdicts_on(config)
    if not config.lossy:
        return
    assert {r.metric for r in found} == {"loss", "accuracy"}
    for one in found:
        assert one.seeds >= 5 or one.interval is None
        assert one.left is not None
        assert one.versions["torch"]
    if not (whole.weights.resident or whole.activation.partition):  # which change no bits
        assert preset.stem in {r.preset for r in read_verdicts(module.SHIPPED)}
    shown = CliRunner().invoke(app, ["validate", str(preset)]).output
    assert all(f"{r.verdict} (" in shown and r.model in shown for r in found)
    assert "margin 0.5%" in shown
