"""Comparisons: differences, verdicts, exit codes, stored runs, records and reports."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from ds_ckpt.errors import ConfigError, StateError
from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.validate import command, processes
from ds_ckpt.lab.validate.compare import MARGINS, Comparison, compare, exit_code, records
from ds_ckpt.lab.validate.data import Examples
from ds_ckpt.lab.validate.experiment import (
    DENSE,
    Plan,
    _denormals_flushed,
    checkpointed,
    environment,
    read_candidates,
)
from ds_ckpt.lab.validate.processes import engine_config, run_processes
from ds_ckpt.lab.validate.report import document
from ds_ckpt.lab.validate.runs import Key, Outcome, Result, Store
from ds_ckpt.lab.validate.task import Task, TaskSpec, make_spec

STEPS = 100
TASK = TaskSpec(steps=STEPS)
SHAPES = (("w", torch.Size([64, 64])),)


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
        "heldout": [(0, 5.0), (50, (5 + final) / 2), (100, final)],
        "accuracy": [],
        "left": [(10, 0.9, 9.0), (60, 0.1, 0.5), (70, 0.2, 0.3)],
        "digest": digest,
        "diverged": diverged,
    }
    return Outcome(**{**given, **over})


def opened(kind: Any = "language") -> Task:
    spec = TaskSpec(kind, steps=STEPS)
    rows = {"labels": torch.zeros(500, dtype=torch.int64)}
    data = Examples(rows, rows, 1, "toys") if kind == "labelled" else SimpleNamespace(source="text")
    fake: Any = SimpleNamespace(spec=spec, data=data, digest="task", shapes=SHAPES)
    fake.describe_model = lambda: "a model"
    task: Task = fake
    return task


def judged(
    tmp_path: Path,
    files: list[Path],
    dense: list[Outcome],
    ours: list[list[Outcome]],
    kind: Any = "language",
    sent: float = 250.0,
) -> list[Comparison]:
    store = Store(tmp_path / "r.jsonl")
    plan = Plan(opened(kind), read_candidates(files), range(len(dense)))
    for candidate, outcomes in zip((DENSE, *plan.candidates), (dense, *ours), strict=True):
        for seed, one in enumerate(outcomes):
            each = 1000.0 if candidate is DENSE else sent
            about = {"date": "2026-01-01", "versions": {"torch": "2"}}
            key = plan.key(candidate, seed)
            store.add(Result(key, ("language", candidate.name), one, each, 0.0, about))
    again = Store(tmp_path / "r.jsonl")  # judged from the file
    return [compare(plan, c, again, MARGINS[plan.task.spec.metric]) for c in plan.candidates]


def test_differences_are_paired_and_relative(tmp_path: Path, four_bits: Path) -> None:
    # seeds differ by 50%, pairs by 0.1%: only pairing shows it
    dense = [outcome(loss) for loss in (2.0, 3.0, 2.5)]
    ours = [outcome(loss * gap) for loss, gap in ((2.0, 1.001), (3.0, 1.0012), (2.5, 1.0008))]
    (found,) = judged(tmp_path, [four_bits], dense, [ours])
    assert found.verdict == "equivalent"
    assert list(found.differences.values()) == pytest.approx([0.001, 0.0012, 0.0008])
    assert found.interval is not None
    assert found.interval.mean == pytest.approx(0.001)
    assert found.dense == pytest.approx(2.5)
    assert found.fewer_bytes == 4.0
    # the warm-up of 50 steps is cut to a quarter of the run and not part of the limits
    assert found.warm_up == 25
    assert found.left is not None
    assert (found.left.error, found.left.residual_norm) == (0.2, 0.5)


def test_accuracy_is_in_points_and_less_is_worse(tmp_path: Path, four_bits: Path) -> None:
    def correct(share: float) -> Outcome:
        return outcome(1.0, accuracy=[(0, 0.1), (100, share)])

    dense = [correct(0.90), correct(0.91), correct(0.89)]
    ours = [correct(0.87), correct(0.88), correct(0.861)]
    (found,) = judged(tmp_path, [four_bits], dense, [ours], "labelled")
    assert (found.metric, found.margin, found.verdict) == ("accuracy", 0.01, "worse")
    assert list(found.differences.values()) == pytest.approx([0.03, 0.03, 0.029])


def test_a_diverged_run_is_worse_and_sets_no_limit(tmp_path: Path, four_bits: Path) -> None:
    wild = outcome(9.0, diverged=True, left=[(60, 1.0, 1e6)])
    (found,) = judged(tmp_path, [four_bits], [outcome(2.0)] * 3, [[outcome(2.0), wild]])
    assert (found.verdict, found.diverged, found.interval) == ("worse", [1], None)
    assert found.left is not None
    assert (found.left.error, found.left.residual_norm) == (0.2, 0.5)
    assert "1 of 2 runs diverged" in document([found]).markdown()
    (found,) = judged(tmp_path / "all", [four_bits], [outcome(2.0)], [[wild]])
    assert found.left is None
    assert "guard" not in document([found]).markdown()


def test_equal_differences_of_accuracy_are_not_certain(tmp_path: Path, four_bits: Path) -> None:
    """4 of 500 examples fewer: in one seed, in two, and in enough of them."""
    found = []
    for seeds in (1, 2, 5):
        dense = [outcome(2.0, accuracy=[(0, 0.1), (100, 0.9)]) for _ in range(seeds)]
        ours = [outcome(2.0, accuracy=[(0, 0.1), (100, 0.892)]) for _ in range(seeds)]
        (one,) = judged(tmp_path / str(seeds), [four_bits], dense, [ours], "labelled")
        found.append(one.verdict)
    assert found == ["inconclusive", "inconclusive", "equivalent"]


def test_lossless_is_judged_by_bits(tmp_path: Path) -> None:
    block = config_file(tmp_path, "block", activation={"policy": "block"})
    dense = [outcome(2.0, digest="a"), outcome(2.1, digest="b"), outcome(2.2, digest="c")]
    same = [outcome(2.0, digest="a"), outcome(2.1, digest="b")]
    other = [outcome(2.0, digest="a"), outcome(2.1, digest="x")]
    for ours, verdict, code in ((same, "identical", 0), (other, "different", 1)):
        (found,) = judged(tmp_path / verdict, [block], dense, [ours])
        assert (found.verdict, exit_code([found])) == (verdict, code)


@pytest.mark.parametrize(
    ("losses", "code", "words"),
    [
        ([2.0, 2.001, 2.0], 0, "equivalent"),
        ([2.1, 2.11, 2.1], 1, "worse"),
        ([1.9, 1.9, 1.91], 0, "better"),
        ([2.0, 2.012, 1.99], 2, "inconclusive: needs about "),
        ([2.01, 2.0100001, 2.0099999], 2, "inconclusive: too near the margin for any number"),
        ([1.98, 2.0, 1.988], 2, "inconclusive (not worse by the margin; better"),
    ],
)
def test_verdicts_and_exit_codes(
    tmp_path: Path, four_bits: Path, losses: list[float], code: int, words: str
) -> None:
    (found,) = judged(tmp_path, [four_bits], [outcome(2.0)] * 3, [[outcome(x) for x in losses]])
    assert exit_code([found]) == code
    assert found.describe_verdict().startswith(words)


def test_the_worst_file_decides(tmp_path: Path) -> None:
    found = {}
    for name, losses in {"good": [2.0] * 3, "bad": [2.1] * 3, "open": [2.0, 2.02, 1.98]}.items():
        file = config_file(tmp_path, name, compression={"method": "quantize"})
        ours = [outcome(loss) for loss in losses]
        (found[name],) = judged(tmp_path / name, [file], [outcome(2.0)] * 3, [ours])
    assert exit_code([found["good"], found["open"]]) == 2
    assert exit_code([found["open"], found["bad"], found["good"]]) == 1
    assert exit_code([]) == 2


@pytest.mark.parametrize(
    ("dense", "sent", "words"),
    [
        (outcome(2.0), 1000.0, "nothing to compress"),
        (outcome(9.0, diverged=True), 250.0, "lower --learning-rate"),
        (outcome(5.5), 250.0, "take more --steps"),
        (outcome(4.98), 250.0, "take more --steps"),  # within the margin of no training at all
    ],
)
def test_useless_runs_get_no_verdict(
    tmp_path: Path, four_bits: Path, dense: Outcome, sent: float, words: str
) -> None:
    runs = [outcome(2.0), outcome(2.0), dense]
    ours = [*runs[:2], outcome(dense.heldout[-1][1])]
    (found,) = judged(tmp_path, [four_bits], runs, [ours], sent=sent)
    assert (found.verdict, exit_code([found])) == ("inconclusive", 2)
    assert words in found.describe_verdict()


def test_ranks_on_another_accelerator_do_not_continue(
    tmp_path: Path, four_bits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(opened(), read_candidates([four_bits]), range(2), "processes")
    store = Store(tmp_path / "r.jsonl")
    about = {"versions": environment("processes")}
    store.add(Result(plan.key(DENSE, 0), ("language", "dense"), outcome(2.0), 1.0, 0.0, about))
    command._check_versions(plan, store, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    with pytest.raises(StateError, match=r"runs with accelerator cpu[\s\S]*accelerator H200"):
        command._check_versions(plan, store, tmp_path)


def test_equal_runs_are_trained_once(tmp_path: Path, four_bits: Path) -> None:
    copy = config_file(tmp_path, "other")
    copy.write_bytes(four_bits.read_bytes())
    missing = Plan(opened(), read_candidates([four_bits, copy]), range(2)).missing(
        Store(tmp_path / "r.jsonl")
    )
    assert [(seed, c.name) for seed, c in missing] == [
        (0, "dense"), (0, "four"), (1, "dense"), (1, "four"),
    ]  # fmt: skip


def test_runs_are_found_by_everything_they_depend_on(tmp_path: Path) -> None:
    usual = {"method": "quantize", "warmup_steps": 50}

    def digest(steps: int = STEPS, activation: Any = None, **section: Any) -> str:
        file = config_file(tmp_path, "c", compression=usual | section, activation=activation)
        (candidate,) = read_candidates([file])
        return candidate.digest(dataclasses.replace(TASK, steps=steps))

    # the warm-up is cut to 25 steps in either; clocks, devices and guards change no number
    same = (
        {"warmup_steps": 40},
        {"exchange": {"autotune": False}},
        {"exchange": {"when": "accumulation_boundary"}},
        {"guard": {"action": "dense"}},
        {"topk": None},
    )
    for section in same:
        assert digest(**section) == digest(), section
    other: tuple[dict[str, Any], ...] = (
        {"quantize": {"bits": 2}},
        {"exchange": {"when": "micro_step"}},
        {"activation": {"policy": "block"}},
        {"steps": 4 * STEPS},
    )
    assert len({digest(), *(digest(**section) for section in other)}) == 1 + len(other)


def test_a_torn_line_is_overwritten_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    result = Result(Key("t", "s", 0, "virtual"), ("a", "x"), outcome(2.0), 1.0, 0.0, {"date": "d"})
    Store(path).add(result)
    complete = path.read_bytes()
    path.write_bytes(complete + b'{"key": {"task"')
    store = Store(path)
    assert store.find(result.key) == result
    other = dataclasses.replace(result, key=Key("t", "s", 1, "virtual"))
    store.add(other)
    assert path.read_bytes().startswith(complete)
    assert len(path.read_bytes().splitlines()) == 2
    reader = Store(path, writes=False)
    reader.add(dataclasses.replace(result, key=Key("t", "s", 2, "virtual")))
    assert reader.find(other.key) == other
    assert len(path.read_bytes().splitlines()) == 2
    path.write_text('{"other": 1}\n')
    with pytest.raises(StateError, match=r"r\.jsonl:1"):
        Store(path)


@pytest.mark.parametrize("section", [{}, {"weights": {"resident": True, "deltas": "lossless"}}])
def test_dense_training_is_not_compared_with_itself(tmp_path: Path, section: Any) -> None:
    with pytest.raises(ConfigError, match="with itself"):
        read_candidates([config_file(tmp_path, "plain", **section)])


def test_names_are_unique(tmp_path: Path) -> None:
    files = [
        config_file(tmp_path / folder, "same", compression={"method": method})
        for folder, method in (("a", "quantize"), ("b", "topk"), ("c", "dense"))
    ]
    assert [c.name for c in read_candidates(files)] == ["same", "same-2", "same-3"]
    assert [c.lossy for c in read_candidates(files)] == [True, True, False]


def test_reports_contain_everything_and_load_nothing(tmp_path: Path, four_bits: Path) -> None:
    pytest.importorskip("matplotlib")
    dense = [outcome(2.0), outcome(2.1), outcome(2.2)]
    ours = [outcome(2.1), outcome(2.2), outcome(2.31)]
    report = document(judged(tmp_path, [four_bits], dense, [ours]))
    (tmp_path / "out").mkdir()
    page = html.unescape(report.write(tmp_path / "out")[0].read_text())
    plain = (tmp_path / "out" / "report.md").read_text()
    shown = io.StringIO()
    report.print(Console(file=shown, width=80))
    for text in (page, plain, " ".join(shown.getvalue().split())):
        for word in ("four", "worse", "+4.92", "4.00x", "perplexity", "torch 2"):
            assert word in text, word
        assert "the uncompressed warm-up of 50 steps was cut to 25" in text
        assert 'four: "guard": {"action": "warn", "error": 0.25, "residual_norm": 0.625}' in text
    assert page.count("<svg") == 1
    assert "residuals" in page
    assert "residuals" not in shown.getvalue()  # too wide for eighty columns
    # names of XML vocabularies, which are not fetched
    names = r"https?://(www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)"
    assert "http" not in re.sub(names, "", page)
    assert "<script" not in page
    assert "src=" not in page


def test_rules_without_a_match_are_reported(tmp_path: Path) -> None:
    rules = [{"match": "w", "method": "topk"}, {"match": "*head*", "method": "topk"}]
    file = config_file(tmp_path, "r", compression={"method": "quantize", "rules": rules})
    dense = [outcome(2.0)] * 2
    text = document(judged(tmp_path, [file], dense, [dense])).markdown()
    assert "r in a model: $.ds_ckpt.compression.rules[1]: no trainable parameter" in text
    assert "rules[0]" not in text


def test_records_contain_the_conditions_of_the_verdict(tmp_path: Path, four_bits: Path) -> None:
    dense = [outcome(2.0), outcome(2.1), outcome(2.2)]
    block = config_file(tmp_path, "block", activation={"policy": "block"})
    both = judged(tmp_path, [four_bits, block], dense, [dense, dense])
    (record,) = records(both)  # nothing is lost without a method
    assert (record.preset, record.verdict, record.data) == ("four", "equivalent", "text")
    assert record.settings["method"] == "quantize"
    assert record.settings["warmup_steps"] == 50
    assert (record.steps, record.warm_up, record.seeds, record.margin) == (100, 25, 3, 0.005)
    assert record.left is not None
    assert (record.left.error, record.mean, record.betas) == (0.2, 0.0, None)
    assert record.date == "2026-01-01"
    plan = both[0].plan
    task: Any = SimpleNamespace(**vars(plan.task))
    task.spec = make_spec("language", betas=(0.85, 0.999))
    (tuned,) = records([dataclasses.replace(both[0], plan=dataclasses.replace(plan, task=task))])
    assert tuned.betas == (0.85, 0.999)


def test_a_policy_that_plans_is_refused(tmp_path: Path) -> None:
    file = config_file(tmp_path, "b", activation={"policy": "budget", "budget_gib": 1.0})
    (candidate,) = read_candidates([file])
    model = torch.nn.Linear(2, 2)
    with (
        pytest.raises(ConfigError, match='found "budget"'),
        checkpointed(model, candidate.plugin, "cpu"),
    ):
        pass


def test_a_comparison_restores_the_treatment_of_denormals() -> None:
    def flushed() -> bool:
        return bool(torch.tensor(5e-324, dtype=torch.float64) * 1.0 == 0)

    assert not flushed()
    with _denormals_flushed():
        assert flushed()
    assert not flushed()


def test_an_empty_section_is_a_candidate_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "empty.json"
    file.write_text(json.dumps({"activation_checkpointing": {}, "ds_ckpt": None}))
    config = engine_config(TASK, TASK.recipe(), str(file), 0)
    assert config["ds_ckpt"] == {"telemetry": {"enabled": True}}
    assert config["activation_checkpointing"] == {}


def test_the_launch_reports_progress_and_is_left_out_if_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []
    results, folder = tmp_path / "r.jsonl", tmp_path / "new"
    task = opened()
    task.spec = dataclasses.replace(TASK, world=3)
    plan = Plan(task, (), range(1), "processes")

    def launch(
        backend: Loopback, module: str, job: Any, folder: Path, *, on_event: Any, **bounds: float
    ) -> None:
        launched.append({"backend": backend, "folder": folder, **bounds})
        on_event({"kind": "begun"})
        on_event({"kind": "progress", "name": "dense", "done": 10, "loss": 1.0})
        Store(results).add(Result(plan.key(DENSE, 0), ("a", "dense"), outcome(2.0), 1, 1, {}))

    monkeypatch.setattr(processes, "launch", launch)
    store, reported = Store(results), list[tuple[str, int, float]]()
    for _ in range(2):
        run_processes(plan, store, results, folder, lambda *event: reported.append(event))
    (once,) = launched
    assert reported == [("dense", 10, 1.0)]
    assert (once["backend"].processes, once["backend"].gpus) == (3, True)
    assert once["folder"].is_dir()
    assert 600 < once["stall_s"] < 3600  # a hang ends, a slow step does not
    assert store.find(plan.key(DENSE, 0)) is not None
