"""Comparisons: differences, verdicts, exit codes, stored runs, records and reports."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.config import load_file, parse
from ds_ckpt.config import verdicts as module
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.verdicts import VerdictRecord, read_verdicts, verdicts_on, write_verdicts
from ds_ckpt.errors import ConfigError, StateError
from ds_ckpt.lab.validate import experiment, processes
from ds_ckpt.lab.validate.accuracy_report import accuracy_document
from ds_ckpt.lab.validate.compare import MARGINS, Judgement, compare, exit_code
from ds_ckpt.lab.validate.data import Examples
from ds_ckpt.lab.validate.experiment import Outcome, Result, RunPlan, read_candidates, read_results
from ds_ckpt.lab.validate.processes import run_processes
from ds_ckpt.lab.validate.task import Task, TaskSpec
from ds_ckpt.telemetry.timings import ResidualStats
from tests import guide

STEPS = 100
TASK = TaskSpec(steps=STEPS)


def config_file(folder: Path, name: str, **section: Any) -> Path:
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "ds_ckpt": section}))
    return path


@pytest.fixture
def four_bits(tmp_path: Path) -> Path:
    return config_file(tmp_path, "four", compression={"method": "quantize", "warmup_steps": 50})


def outcome(final: float, *, diverged: bool = False, digest: str = "d", **over: Any) -> Outcome:
    given: dict[str, Any] = {
        "heldout": [(0, 5.0), (100, final)],
        "residual_stats": [(10, 0.9, 9.0), (60, 0.1, 0.5), (70, 0.2, 0.3)],
        "digest": digest,
        "diverged": diverged,
    }
    return Outcome(**{**given, **over})


def opened(kind: Any = "language", **sizes: Any) -> Task:
    spec = TaskSpec(kind, steps=STEPS, **sizes)
    rows = {"labels": torch.zeros(500, dtype=torch.int64)}
    data = Examples(rows, rows, 1, "toys") if kind == "labelled" else SimpleNamespace(source="text")
    fake: Any = SimpleNamespace(spec=spec, data=data, digest="task")
    fake.describe_model = lambda: "a model"
    task: Task = fake
    return task


def judged(file, dense, ours, kind="language", sent=250.0, **sizes) -> Judgement:
    (candidate,) = read_candidates([file], "processes")
    plan = RunPlan(opened(kind, **sizes), [candidate], range(len(dense)), "processes")
    path = file.with_name("r.jsonl")
    path.unlink(missing_ok=True)
    for one, outcomes in ((experiment.DENSE_CONTENDER, dense), (candidate, ours)):
        for seed, found in enumerate(outcomes):
            each = 1000.0 if one is experiment.DENSE_CONTENDER else sent
            about = found, each, {"torch": "2"}, "2026-01-01"
            experiment.add_result(path, Result(plan.key(one, seed), one.name, *about))
    return compare(plan, candidate, read_results(path), MARGINS[plan.task.spec.metric])


def test_differences_are_paired_and_relative(four_bits: Path) -> None:
    # seeds differ by 50%, pairs by 0.1%: only pairing shows it
    dense = [outcome(loss) for loss in (2.0, 3.0, 2.5)]
    ours = [outcome(loss * gap) for loss, gap in ((2.0, 1.001), (3.0, 1.0012), (2.5, 1.0008))]
    found = judged(four_bits, dense, ours, betas=(0.85, 0.999))
    assert found.differences == pytest.approx([0.001, 0.0012, 0.0008])
    assert found.interval is not None
    assert found.interval.mean == pytest.approx(0.001)
    record = found.record
    assert (record.preset, record.verdict, record.data) == ("four", "equivalent", "text")
    assert record.settings["method"] == "quantize"
    assert record.settings["warmup_steps"] == 50
    # the warm-up of 50 steps is cut to a quarter of the run and not part of the limits
    assert (record.steps, record.warm_up, record.seeds, record.margin) == (100, 25, 3, 0.005)
    assert record.residual_stats == ResidualStats(0.2, 0.5)
    assert record.mean == pytest.approx(0.001)
    assert (record.betas, record.fewer_bytes, record.date) == ((0.85, 0.999), 4.0, "2026-01-01")


def test_accuracy_is_in_points_and_less_is_worse(four_bits: Path) -> None:
    def runs(*shares: float) -> list[Outcome]:
        return [outcome(1.0, heldout=[(0, 0.1), (100, share)]) for share in shares]

    found = judged(four_bits, runs(0.90, 0.91, 0.89), runs(0.87, 0.88, 0.861), "labelled")
    assert (found.record.metric, found.record.margin, found.record.verdict) == (
        "accuracy", 0.01, "worse",
    )  # fmt: skip
    assert found.differences == pytest.approx([0.03, 0.03, 0.029])
    # 4 of 500 examples fewer, in two seeds and in enough of them
    for seeds, verdict in ((2, "inconclusive"), (5, "equivalent")):
        equal = judged(four_bits, runs(*[0.9] * seeds), runs(*[0.892] * seeds), "labelled")
        assert equal.record.verdict == verdict


def test_a_diverged_run_is_worse_and_sets_no_limit(four_bits: Path) -> None:
    wild = outcome(9.0, diverged=True, residual_stats=[(60, 1.0, 1e6)])
    found = judged(four_bits, [outcome(2.0)] * 2, [outcome(2.0), wild])
    assert (found.record.verdict, found.interval) == ("worse", None)
    assert found.differences == [0.0, math.inf]
    assert found.record.residual_stats == ResidualStats(0.2, 0.5)
    assert "1 of 2 runs diverged" in accuracy_document([found]).markdown()
    found = judged(four_bits, [outcome(2.0)], [wild])
    assert found.record.residual_stats is None
    assert "guard" not in accuracy_document([found]).markdown()


def test_lossless_is_judged_by_bits(tmp_path: Path) -> None:
    block = config_file(tmp_path, "block", activation={"policy": "block"})
    dense = [outcome(2.0, digest="a"), outcome(2.1, digest="b")]
    same = [outcome(2.0, digest="a"), outcome(2.1, digest="b")]
    other = [outcome(2.0, digest="a"), outcome(2.1, digest="x")]
    for ours, verdict, code in ((same, "identical", 0), (other, "different", 1)):
        found = judged(block, dense, ours)
        assert (found.record.verdict, exit_code([found])) == (verdict, code)


@pytest.mark.parametrize(
    ("losses", "code", "words"),
    [
        ([2.0, 2.001, 2.0], 0, "equivalent"),
        ([2.1, 2.11, 2.1], 1, "worse"),
        ([1.9, 1.9, 1.91], 0, "better"),
        ([2.0, 2.012, 1.99], 2, "inconclusive: needs about "),
        ([2.01, 2.0100001, 2.0099999], 2, "inconclusive: too near the margin for any number"),
    ],
)
def test_verdicts_and_exit_codes(four_bits, losses, code, words) -> None:
    found = judged(four_bits, [outcome(2.0)] * 3, [outcome(x) for x in losses])
    assert exit_code([found]) == code
    assert found.describe_verdict().startswith(words)
    good, bad = (judged(four_bits, [outcome(2.0)] * 2, [outcome(x)] * 2) for x in (2.0, 2.1))
    assert exit_code([good, found]) == code  # the worst file decides
    assert exit_code([found, bad, good]) == 1


@pytest.mark.parametrize(
    ("dense", "sent", "words"),
    [
        (outcome(2.0), 1000.0, "nothing to compress"),
        (outcome(9.0, diverged=True), 250.0, "lower --learning-rate"),
        (outcome(5.5), 250.0, "take more --steps"),
        (outcome(4.98), 250.0, "take more --steps"),  # within the margin of no training at all
    ],
)
def test_useless_runs_get_no_verdict(four_bits, dense, sent, words) -> None:
    runs = [outcome(2.0), outcome(2.0), dense]
    found = judged(four_bits, runs, [*runs[:2], outcome(dense.heldout[-1][1])], sent=sent)
    assert (found.record.verdict, exit_code([found])) == ("inconclusive", 2)
    assert words in found.describe_verdict()


def test_runs_are_found_by_everything_they_depend_on(tmp_path, monkeypatch) -> None:
    usual = {"method": "quantize", "warmup_steps": 50}

    def key(steps: int = STEPS, activation: Any = None, **section: Any) -> str:
        file = config_file(tmp_path, "c", compression=usual | section, activation=activation)
        (candidate,) = read_candidates([file])
        task = SimpleNamespace(spec=dataclasses.replace(TASK, steps=steps), digest="task")
        return RunPlan(task, [], range(1), "processes").key(candidate, 0)  # type: ignore[arg-type]

    # the warm-up is cut to 25 steps in either; clocks change no number
    for same in ({"warmup_steps": 40}, {"exchange": {"autotune": False}}):
        assert key(**same) == key(), same
    other: tuple[dict[str, Any], ...] = (
        {"quantize": {"bits": 2}}, {"activation": {"policy": "block"}}, {"steps": 4 * STEPS},
    )  # fmt: skip
    assert len({key(), *(key(**section) for section in other)}) == 1 + len(other)
    with guide.registered():
        mine = {"method": "sign", "warmup_steps": 0}
        before = key(**mine)
        (tmp_path / "signs.py").write_text("# another pack_rows")
        sys.modules["my_signs"].__file__ = str(tmp_path / "signs.py")
        assert key(**mine) != before
    before = key()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert key() != before


def test_a_torn_line_is_overwritten_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    result = Result("t", "x", outcome(2.0), 1.0, {}, "d")
    experiment.add_result(path, result)
    complete = path.read_bytes()
    path.write_bytes(complete + b'{"key": {"task"')
    assert read_results(path) == {"t": result}
    experiment.add_result(path, dataclasses.replace(result, key="u"))
    assert path.read_bytes().startswith(complete)
    assert set(read_results(path)) == {"t", "u"}
    path.write_text('{"other": 1}\n')
    with pytest.raises(StateError, match=r"r\.jsonl:1"):
        read_results(path)


@pytest.mark.parametrize(
    ("mode", "section"),
    [
        ("virtual", {}),
        ("virtual", {"activation": {"policy": "block"}}),
        ("virtual", {"compression": {"method": "dense"}}),
        ("processes", {"weights": {"resident": True, "deltas": "lossless"}}),
    ],
)
def test_dense_training_is_not_compared_with_itself(tmp_path, mode, section) -> None:
    with pytest.raises(ConfigError, match=r"with itself(?s:.*)leave this file out"):
        read_candidates([config_file(tmp_path, "plain", **section)], mode)


def test_equal_runs_are_trained_once_and_names_are_unique(tmp_path: Path, four_bits: Path) -> None:
    copy = config_file(tmp_path / "other", "four")
    copy.write_bytes(four_bits.read_bytes())
    candidates = read_candidates([four_bits, copy])
    assert len({c.name for c in candidates}) == 2
    missing = RunPlan(opened(), candidates, range(2)).missing({})
    assert [(seed, c.name) for seed, c in missing] == [
        (0, "dense"), (0, "four"), (1, "dense"), (1, "four"),
    ]  # fmt: skip


@pytest.mark.usefixtures("undrawn")
def test_the_report_is_the_golden_one(four_bits: Path, is_golden: Any) -> None:
    dense, ours = ([outcome(x) for x in row] for row in ((2.0, 2.1, 2.2), (2.1, 2.2, 2.31)))
    report = accuracy_document([judged(four_bits, dense, ours)])
    assert is_golden("accuracy_report.md", report.markdown())
    assert report.html().count("<svg") == 1


def test_the_launch_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RunPlan(opened(world=3), (), range(1), "processes")

    def launch(backend, module, job, folder, *, on_event, stall_s) -> None:
        assert (backend.processes, backend.gpus) == (3, True)
        assert job["results"] == str(tmp_path / "r.jsonl")
        assert 600 < stall_s < 3600  # a hang ends, a slow step does not
        on_event({"kind": "begun"})
        on_event({"kind": "progress", "name": "dense", "done": 10, "loss": 1.0})

    monkeypatch.setattr(processes, "launch", launch)
    reported: list[tuple[str, int, float]] = []
    run_processes(plan, tmp_path / "r.jsonl", tmp_path, lambda *event: reported.append(event))
    assert reported == [("dense", 10, 1.0)]


ROOT = Path(__file__).parents[2]
SHIPPED = module.SHIPPED
PRESETS = sorted((ROOT / "ds_configs").glob("*.json"))


def compression(**section: Any) -> CompressionConfig:
    config = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}}
    return parse(config).compression


FOUR = {"method": "quantize", "quantize": {"bits": 4}}


def record(section: CompressionConfig, **over: Any) -> VerdictRecord:
    given = {"settings": module.decisive(section), "verdict": "equivalent", "task": "a task"}
    given |= {"seeds": 5, "workers": 2, "steps": 300, "margin": 0.005, "metric": "loss"}
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
    assert found[1].describe(details=True).endswith("5 seeds of 300 steps, 8 workers")
    open_above, open_below = (
        record(four, verdict="inconclusive", interval=interval).describe(details=True)
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
        assert one.residual_stats is not None
        assert one.versions["torch"]
    if not (whole.weights.resident or whole.activation.partition):  # which change no bits
        assert preset.stem in {r.preset for r in read_verdicts(module.SHIPPED)}
    shown = CliRunner().invoke(app, ["validate", "--details", str(preset)]).output
    assert all(f"{r.verdict} (" in shown and r.model in shown for r in found)
    assert "margin 0.5%" in shown
