"""Comparisons: what counts as a difference, verdicts, exit codes, what is kept and found again."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from ds_ckpt.errors import ConfigError, StateError, UnsupportedError
from ds_ckpt.exchange.rules import ExchangeSettings, Method, MethodSettings, Rule
from ds_ckpt.lab.validate import report, validate
from ds_ckpt.lab.validate.compare import (
    MARGINS,
    Comparison,
    compare,
    exit_code,
    false_alarms,
    records,
)
from ds_ckpt.lab.validate.data import Examples
from ds_ckpt.lab.validate.experiment import (
    DENSE,
    Plan,
    _denormals_flushed,
    checkpointed,
    far_behind,
    read_candidates,
    surroundings,
)
from ds_ckpt.lab.validate.processes import engine_config, run_processes
from ds_ckpt.lab.validate.report import document, write_report
from ds_ckpt.lab.validate.store import Key, Result, Store
from ds_ckpt.lab.validate.task import Task, TaskSpec, make_spec
from ds_ckpt.lab.validate.trainer import Outcome
from ds_ckpt.lab.validate.world import Recipe

ROOT = Path(__file__).parents[2]
STEPS = 100
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
        "train": [],
        "step_bytes": 1.0,
        "warm_up_bytes": 2000.0,
        "residual_norm": 0.0,
        "step_cpu_s": 0.2,
        "exchange_cpu_s": 0.0,
        "diverged": diverged,
    }
    return Outcome(**{**given, **over})


def opened(kind: Any = "language") -> Task:
    spec = TaskSpec(kind, steps=STEPS)
    rows = {"labels": torch.zeros(500, dtype=torch.int64)}
    data = Examples(rows, rows, 1, "toys") if kind == "digits" else None
    learner: Any = SimpleNamespace(data=data)
    return Task(spec, learner, "task", "a model", "a text", SHAPES)


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
    again = Store(tmp_path / "r.jsonl")  # what is judged is what was kept
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
    # the warm-up of 50 steps is cut to a quarter of the run, and is not in the range
    assert found.warm_up == 25
    assert found.left is not None
    assert (found.left.error, found.left.residual_norm) == (0.2, 0.5)


def test_accuracy_is_in_points_and_less_is_worse(tmp_path: Path, four_bits: Path) -> None:
    def right(share: float) -> Outcome:
        return outcome(1.0, accuracy=[(0, 0.1), (100, share)])

    dense = [right(0.90), right(0.91), right(0.89)]
    ours = [right(0.87), right(0.88), right(0.861)]
    (found,) = judged(tmp_path, [four_bits], dense, [ours], "topics")
    assert found.metric == "accuracy"
    assert found.margin == 0.01
    assert list(found.differences.values()) == pytest.approx([0.03, 0.03, 0.029])
    assert found.verdict == "worse"


def test_a_run_that_diverged_is_worse_whatever_the_others_do(
    tmp_path: Path, four_bits: Path
) -> None:
    dense = [outcome(2.0)] * 3
    (found,) = judged(tmp_path, [four_bits], dense, [[outcome(2.0), outcome(2.0, diverged=True)]])
    assert found.verdict == "worse"
    assert found.diverged == [1]
    assert found.interval is None
    assert len(found.reached) == 1
    assert "1 of 2 runs diverged" in document([found], []).markdown()


def test_what_a_diverged_run_left_behind_is_no_limit(tmp_path: Path, four_bits: Path) -> None:
    wild = outcome(9.0, diverged=True, left=[(60, 1.0, 1e6)])
    (found,) = judged(tmp_path, [four_bits], [outcome(2.0)] * 2, [[outcome(2.0), wild]])
    assert found.left is not None
    assert (found.left.error, found.left.residual_norm) == (0.2, 0.5)
    (found,) = judged(tmp_path / "all", [four_bits], [outcome(2.0)], [[wild]])
    assert found.left is None
    assert "guard" not in document([found], []).markdown()


@pytest.mark.parametrize(("warm_up_bytes", "in_16_bits"), [(2000.0, 1000), (200.0, 200)])
def test_what_it_took_to_come_as_far(
    tmp_path: Path, four_bits: Path, warm_up_bytes: float, in_16_bits: int
) -> None:
    """After a warm-up in fp32 or in few bits."""
    dense = [outcome(2.0), outcome(2.0)]
    # a straight line from 3.5 to 1.9 over 50 steps passes 2.01 after 46.56 of them
    curve = [(0, 5.0), (50, 3.5), (100, 1.9)]
    ours = [outcome(1.9, heldout=curve, warm_up_bytes=warm_up_bytes)] * 2
    (found,) = judged(tmp_path, [four_bits], dense, [ours])
    theirs, mine = 50 + 50 * 1.49 / 1.5, 50 + 50 * 1.49 / 1.6
    sent = 25 * in_16_bits + (mine - 25) * 250
    assert found.reached == [pytest.approx((mine / theirs, sent / (theirs * 1000)))] * 2
    if in_16_bits == 1000:
        assert "0.97, 0.43" in document([found], []).markdown()
    never = [outcome(2.2)] * 2
    (found,) = judged(tmp_path / "never", [four_bits], dense, [never])
    assert found.reached == []
    assert "not reached in 2 of 2 runs" in document([found], []).markdown()


def test_accuracies_that_differ_alike_are_no_certainty(tmp_path: Path, four_bits: Path) -> None:
    """Of 500 examples, 4 fewer are right: once, twice, and often enough to be sure."""
    found = []
    for seeds in (1, 2, 5):
        dense = [outcome(2.0, accuracy=[(0, 0.1), (100, 0.9)]) for _ in range(seeds)]
        ours = [outcome(2.0, accuracy=[(0, 0.1), (100, 0.892)]) for _ in range(seeds)]
        (one,) = judged(tmp_path / str(seeds), [four_bits], dense, [ours], "digits")
        found.append(one.verdict)
    assert found == ["inconclusive", "inconclusive", "equivalent"]


def test_lossless_is_judged_by_bits(tmp_path: Path) -> None:
    block = config_file(tmp_path, "block", activation={"policy": "block"})
    dense = [outcome(2.0, digest="a"), outcome(2.1, digest="b"), outcome(2.2, digest="c")]
    same = [outcome(2.0, digest="a"), outcome(2.1, digest="b")]
    other = [outcome(2.0, digest="a"), outcome(2.1, digest="x")]
    (found,) = judged(tmp_path / "1", [block], dense, [same])
    assert (found.verdict, exit_code([found])) == ("identical", 0)
    (found,) = judged(tmp_path / "2", [block], dense, [other])
    assert (found.verdict, exit_code([found])) == ("different", 1)


def test_exit_codes(tmp_path: Path, four_bits: Path) -> None:
    dense = [outcome(2.0), outcome(2.0), outcome(2.0)]

    def code(folder: str, *losses: list[float]) -> int:
        files = [
            config_file(tmp_path / folder, f"c{i}", compression={"method": "quantize"})
            for i in range(len(losses))
        ]
        runs = [[outcome(loss) for loss in of] for of in losses]
        # equal settings share results: one store for each file
        found = [
            judged(tmp_path / folder / str(i), [file], dense, [run])[0]
            for i, (file, run) in enumerate(zip(files, runs, strict=True))
        ]
        return exit_code(found)

    good, bad, open_ = [2.0, 2.001, 2.0], [2.1, 2.11, 2.1], [2.0, 2.02, 1.98]
    assert code("a", good) == 0
    assert code("b", good, bad) == 1
    assert code("c", good, open_) == 2
    assert code("d", open_, bad, good) == 1
    assert code("e", [1.9, 1.9, 1.91]) == 0
    assert exit_code([]) == 2


def test_an_open_verdict_says_how_many_seeds(tmp_path: Path, four_bits: Path) -> None:
    dense = [outcome(2.0)] * 3
    ours = [outcome(2.0), outcome(2.012), outcome(1.99)]
    (found,) = judged(tmp_path, [four_bits], dense, [ours])
    assert found.verdict_words().startswith("inconclusive: needs about ")
    assert found.more_seeds
    near = [outcome(2.01), outcome(2.0100001), outcome(2.0099999)]
    (found,) = judged(tmp_path / "near", [four_bits], dense, [near])
    assert found.verdict_words() == "inconclusive: too near the margin for any number of seeds"
    perhaps_better = [outcome(1.98), outcome(2.0), outcome(1.988)]
    (found,) = judged(tmp_path / "better", [four_bits], dense, [perhaps_better])
    assert found.verdict_words().startswith("inconclusive (not worse by the margin; better")


def test_settings_that_compress_nothing_get_no_verdict(tmp_path: Path, four_bits: Path) -> None:
    dense = [outcome(2.0)] * 3
    (found,) = judged(tmp_path, [four_bits], dense, [dense], sent=1000.0)
    assert (found.verdict, exit_code([found])) == ("inconclusive", 2)
    assert "nothing to compress" in found.verdict_words()


@pytest.mark.parametrize(
    ("dense", "words"),
    [
        (outcome(9.0, diverged=True), "lower --learning-rate"),
        (outcome(5.5), "take more --steps"),
    ],
)
def test_where_dense_training_fails_nothing_is_said_of_compression(
    tmp_path: Path, four_bits: Path, dense: Outcome, words: str
) -> None:
    runs = [outcome(2.0), outcome(2.0), dense]
    (found,) = judged(tmp_path, [four_bits], runs, [runs[:2] + [outcome(dense.heldout[-1][1])]])
    assert (found.verdict, exit_code([found])) == ("inconclusive", 2)
    assert words in found.verdict_words()


def test_a_run_too_short_to_tell_anything_gets_no_verdict(tmp_path: Path, four_bits: Path) -> None:
    # no training at all would be within half a percent of where these runs end
    dense = [outcome(4.98)] * 3
    (found,) = judged(tmp_path, [four_bits], dense, [dense])
    assert (found.verdict, exit_code([found])) == ("inconclusive", 2)
    assert "take more --steps" in found.verdict_words()


def test_dense_against_itself_is_seldom_worse() -> None:
    draw = random.Random(1)
    values = [draw.gauss(2.0, 0.01) for _ in range(400)]
    shares = false_alarms(values, 5, 0.005, metric="loss", rounds=4000)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["worse"] < 0.06
    assert shares["better"] < 0.06
    tight = [draw.gauss(2.0, 0.001) for _ in range(400)]
    assert false_alarms(tight, 5, 0.005, metric="loss")["equivalent"] > 0.95
    # were the truth at the margin, one of twenty would pass: the rate is what alpha says
    shifted = [false_alarms([2.0, 2.0, 2.0, 2.0 * 1.02], 2, 0.005, metric="loss", rounds=300)]
    assert shifted[0]["equivalent"] == 0


def test_far_behind_is_less_than_half_of_what_dense_has_learnt() -> None:
    hopeless = far_behind([(0, 5.0), (50, 3.0), (100, 2.0)])
    assert not hopeless(50, 3.9)
    assert hopeless(50, 4.1)
    assert hopeless(100, 3.6)
    assert not hopeless(75, 9.0)  # nothing to compare with there
    assert not far_behind([(0, 2.0), (50, 2.5)])(50, 9.0)  # dense training does not learn itself
    fine_tuning = far_behind([(0, 3.0), (50, 2.982)])
    assert not fine_tuning(50, 2.995)  # within half a percent
    assert fine_tuning(50, 3.3)
    # small data learnt by heart: at the end dense training has hardly any progress to show
    by_heart = far_behind([(0, 2.3), (50, 0.6), (100, 2.2)])
    assert by_heart(50, 1.5)
    assert not by_heart(100, 2.26)


def test_after_a_divergence_the_other_seeds_are_left_out(tmp_path: Path, four_bits: Path) -> None:
    (candidate,) = read_candidates([four_bits])
    plan, store = Plan(opened(), [candidate], range(3)), Store(tmp_path / "r.jsonl")
    assert not plan.gave_up(candidate, store)
    key = plan.key(candidate, 1)
    store.add(Result(key, ("language", "four"), outcome(9.0, diverged=True), 1.0, 0.0, {}))
    assert plan.gave_up(candidate, store)
    assert plan.missing(store) == [(seed, DENSE) for seed in range(3)]


def test_a_run_without_hope_beside_another_dense_run_is_trained_again(
    tmp_path: Path, four_bits: Path
) -> None:
    (candidate,) = read_candidates([four_bits])
    tuned = dataclasses.replace(opened().spec, dense_betas=(0.7, 0.95))
    plain = Plan(opened(), [candidate], range(2))
    other = Plan(dataclasses.replace(opened(), spec=tuned), [candidate], range(2))
    store = Store(tmp_path / "r.jsonl")
    for plan in (plain, other):
        for seed in plan.seeds:
            store.add(Result(plan.key(DENSE, seed), ("language", "dense"), outcome(2.0), 1, 0, {}))
    about = {"against": plain.key(DENSE, 0).settings}
    lost, names = outcome(9.0, diverged=True), ("language", "four")
    store.add(Result(plain.key(candidate, 0), names, lost, 1, 0, about))
    assert plain.gave_up(candidate, store)
    assert plain.missing(store) == []
    assert other.missing(store) == [(0, candidate), (1, candidate)]
    assert compare(plain, candidate, store, 0.005).differences == {0: math.inf}
    assert compare(other, candidate, store, 0.005).differences == {}


def test_lossless_weights_alone_are_not_held_against_themselves(tmp_path: Path) -> None:
    resident = {"resident": True, "deltas": "lossless"}
    alone = config_file(tmp_path, "alone", weights=resident)
    with pytest.raises(ConfigError, match="against itself"):
        read_candidates([alone])
    few = config_file(tmp_path, "few", weights={"resident": True, "deltas": "3bit"})
    beside = config_file(tmp_path, "b", weights=resident, compression={"method": "quantize"})
    assert [one.lossy for one in read_candidates([few, beside])] == [True, True]


def test_processes_on_another_accelerator_do_not_go_on(
    tmp_path: Path, four_bits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's digest says the device of virtual workers, not that of processes."""
    plan = Plan(opened(), read_candidates([four_bits]), range(2), "processes")
    store = Store(tmp_path / "r.jsonl")
    about = {"versions": surroundings("processes")}
    store.add(Result(plan.key(DENSE, 0), ("language", "dense"), outcome(2.0), 1.0, 0.0, about))
    validate._check_versions(plan, store, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    with pytest.raises(StateError, match=r"runs of accelerator cpu[\s\S]*accelerator H200"):
        validate._check_versions(plan, store, tmp_path)


def test_runs_that_would_be_equal_are_trained_once(tmp_path: Path, four_bits: Path) -> None:
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "other.json"
    copy.write_bytes(four_bits.read_bytes())
    candidates = read_candidates([four_bits, copy])
    missing = Plan(opened(), candidates, range(2)).missing(Store(tmp_path / "r.jsonl"))
    assert [(seed, c.name) for seed, c in missing] == [
        (0, "dense"), (0, "four"), (1, "dense"), (1, "four"),
    ]  # fmt: skip


def test_runs_are_found_by_what_they_depend_on(tmp_path: Path, four_bits: Path) -> None:
    (candidate,) = read_candidates([four_bits])
    other = config_file(tmp_path, "o", compression={"method": "quantize", "quantize": {"bits": 2}})
    clock = {"autotune": False}
    same = config_file(
        tmp_path, "s", compression={"method": "quantize", "warmup_steps": 40, "exchange": clock}
    )
    kept = config_file(
        tmp_path, "k", activation={"policy": "block"}, compression={"method": "quantize"}
    )
    digests = [c.digest(STEPS) for c in (candidate, *read_candidates([other, same, kept]))]
    # a longer warm-up than a quarter of the run is the same run; so is another clock's verdict
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3
    assert candidate.digest(STEPS) != candidate.digest(4 * STEPS)


def test_every_run_on_record_is_found_again() -> None:
    results = ROOT / "benchmarks" / "results" / "accuracy" / "results.jsonl"
    files = [*(ROOT / "ds_configs").glob("*.json"), *(ROOT / "benchmarks/accuracy").glob("*.json")]
    files.remove(ROOT / "ds_configs" / "zero3_resident_lossless.json")  # nothing to train
    candidates = {one.name: one for one in (DENSE, *read_candidates(files))}
    steps = {"language": 300, "topics": 240, "digits": 300}
    store, lines = Store(results), results.read_text().splitlines()
    assert len(lines) == 890
    for line in map(json.loads, lines):
        task, name = line["names"]
        settings, _, betas = line["key"]["settings"].partition(", betas ")
        assert settings == candidates[name].digest(steps[task]), name
        quarter = steps[task] // 4
        tuned = f"0.7, 0.95, lead 0.3 after {quarter}" if name == DENSE.name else "0.7, 0.95"
        assert betas in ("", tuned), name
        found = store.find(Key(**line["key"]))
        assert found is not None
        assert json.loads(json.dumps(dataclasses.asdict(found))) == line


def test_settings_of_other_methods_are_no_part_of_a_run(four_bits: Path) -> None:
    """Runs are found again whatever the defaults of other methods become."""
    (candidate,) = read_candidates([four_bits])

    def digest(method: Method, rules: tuple[Rule, ...] = (), **values: Any) -> str:
        settings = ExchangeSettings(MethodSettings(method, **values), rules)
        return dataclasses.replace(candidate, settings=settings).digest(STEPS)

    assert digest("dense") == digest("dense", bits=8, rank=1, density=0.5)
    assert digest("topk") == digest("topk", bits=8, rank=1, metric="energy")
    assert digest("quantize") == digest("quantize", rank=1, density=0.5)
    for method in ("topk", "powersgd"):  # low rank sends embeddings by Top-K
        assert digest(method) != digest(method, density=0.5)
    assert digest("powersgd") != digest("powersgd", rank=1)
    assert digest("quantize") != digest("quantize", bits=8)
    plain, spoken, other = (
        digest("topk", (Rule("", "*", MethodSettings("dense", **values)),) if values else ())
        for values in ({}, {"rank": 16}, {"rank": 3})
    )
    assert plain != spoken == other


def test_when_micro_steps_are_exchanged_is_part_of_a_run(tmp_path: Path) -> None:
    each, boundary, unsaid = (
        config_file(tmp_path, name, compression={"method": "quantize", "exchange": exchange})
        for name, exchange in (
            ("each", {"when": "micro_step"}),
            ("boundary", {"when": "accumulation_boundary"}),
            ("unsaid", None),
        )
    )
    digests = [c.digest(STEPS) for c in read_candidates([each, boundary, unsaid])]
    assert digests[0] != digests[1] == digests[2]


def test_a_torn_line_is_forgotten_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    key = Key("t", "s", 0, "virtual")
    result = Result(key, ("language", "x"), outcome(2.0), 1.0, 0.0, {"date": "d"})
    Store(path).add(result)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": {"task"')
    store = Store(path)
    assert store.find(key) == result
    store.add(dataclasses.replace(result, key=Key("t", "s", 1, "virtual")))
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == 2
    path.write_text('{"other": 1}\n')
    with pytest.raises(StateError, match=r"r\.jsonl:1"):
        Store(path)


def test_a_file_that_does_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain DeepSpeed"):
        read_candidates([config_file(tmp_path, "plain")])


def test_a_guard_that_waits_for_its_limits_is_in_nobody_s_way(tmp_path: Path) -> None:
    section = {"method": "quantize", "quantize": {"bits": 2}, "min_numel": 7}
    plain = config_file(tmp_path, "plain", compression=section)
    guarded = config_file(tmp_path, "g", compression={**section, "guard": {"action": "dense"}})
    one, other = read_candidates([plain, guarded])
    assert one.digest(STEPS) == other.digest(STEPS)


def test_names_are_told_apart(tmp_path: Path) -> None:
    files = [
        config_file(tmp_path / folder, "same", compression={"method": method})
        for folder, method in (("a", "quantize"), ("b", "topk"), ("c", "dense"))
    ]
    assert [c.name for c in read_candidates(files)] == ["same", "same-2", "same-3"]
    assert [c.lossy for c in read_candidates(files)] == [True, True, False]


def test_reports_name_everything_and_load_nothing(tmp_path: Path, four_bits: Path) -> None:
    pytest.importorskip("matplotlib")
    dense = [outcome(2.0), outcome(2.1), outcome(2.2)]
    ours = [outcome(2.1), outcome(2.2), outcome(2.31)]
    found = judged(tmp_path, [four_bits], dense, [ours])
    check = "a task: dense against dense: worse 4.0%"
    page = html.unescape(write_report(tmp_path / "out", found, [check]).read_text())
    plain = (tmp_path / "out" / "report.md").read_text()
    shown = io.StringIO()
    document(found, [check]).print(Console(file=shown, width=80))
    for text in (page, plain, " ".join(shown.getvalue().split())):
        for word in ("four", "worse", "+4.92", "4.00x", "perplexity", "torch 2", "worse 4.0%"):
            assert word in text, word
        assert "its dense warm-up of 50 steps was cut to 25" in text
        assert 'four: "guard": {"action": "warn", "error": 0.25, "residual_norm": 0.625}' in text
    assert page.count("<svg") == 2
    assert "left behind" in page
    assert "left behind" not in shown.getvalue()  # eighty columns have no room for it
    # names of XML vocabularies, which nobody fetches
    names = r"https?://(www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)"
    assert "http" not in re.sub(names, "", page)
    assert "<script" not in page
    assert "src=" not in page


def test_rules_that_took_nothing_are_named(tmp_path: Path) -> None:
    rules = [{"match": "w", "method": "topk"}, {"match": "*head*", "method": "topk"}]
    file = config_file(tmp_path, "r", compression={"method": "quantize", "rules": rules})
    dense = [outcome(2.0)] * 2
    found = judged(tmp_path, [file], dense, [dense])
    text = document(found, []).markdown()
    assert "r in a model: $.ds_ckpt.compression.rules[1]: no trainable parameter" in text
    assert "rules[0]" not in text


def test_the_plotted_dense_curve_is_over_all_seeds(tmp_path: Path, four_bits: Path) -> None:
    block = config_file(tmp_path, "block", activation={"policy": "block"})
    dense = [outcome(2.0), outcome(2.0), outcome(3.5)]
    group = judged(tmp_path, [block, four_bits], dense, [dense[:2], dense])
    drawn = {line.label: [value for _, value in line.points] for line in report.curves(group).lines}
    assert drawn["dense"][-1] == pytest.approx(2.5)
    assert drawn["dense"] == drawn["four"]


def test_without_matplotlib_there_is_markdown(
    tmp_path: Path, four_bits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = judged(tmp_path, [four_bits], [outcome(2.0)] * 2, [[outcome(2.0)] * 2])
    assert write_report(tmp_path / "out", found, []).name == "report.md"


def test_records_hold_what_the_verdict_holds_for(tmp_path: Path, four_bits: Path) -> None:
    dense = [outcome(2.0), outcome(2.1), outcome(2.2)]
    block = config_file(tmp_path, "block", activation={"policy": "block"})
    both = judged(tmp_path, [four_bits, block], dense, [dense, dense])
    (record,) = records(both)  # what has no method loses nothing
    assert record.preset == "four"
    assert record.verdict == "equivalent"
    assert record.settings["method"] == "quantize"
    assert record.settings["warmup_steps"] == 50
    assert (record.steps, record.warm_up, record.seeds, record.margin) == (100, 25, 3, 0.005)
    assert record.left is not None
    assert record.left.error == 0.2
    assert record.date == "2026-01-01"
    assert record.mean is not None
    assert math.isclose(record.mean, 0.0)
    assert record.betas is None  # the task's own
    plan = both[0].plan
    task = dataclasses.replace(plan.task, spec=make_spec("language", betas=(0.85, 0.999)))
    (tuned,) = records([dataclasses.replace(both[0], plan=dataclasses.replace(plan, task=task))])
    assert tuned.betas == (0.85, 0.999)


def test_a_policy_that_plans_is_refused_and_not_left_out(tmp_path: Path) -> None:
    file = config_file(tmp_path, "b", activation={"policy": "budget", "budget_gib": 1.0})
    (candidate,) = read_candidates([file])
    model = torch.nn.Linear(2, 2)
    with (
        pytest.raises(ConfigError, match='found "budget"'),
        checkpointed(model, candidate.plugin, "cpu"),
    ):
        pass


def test_a_comparison_leaves_denormals_as_they_were() -> None:
    def flushed() -> bool:
        return bool(torch.tensor(5e-324, dtype=torch.float64) * 1.0 == 0)

    assert not flushed()
    with _denormals_flushed():
        assert flushed()
    assert not flushed()


def test_weights_in_few_bits_are_judged_by_loss_and_by_virtual_workers_alone(
    tmp_path: Path,
) -> None:
    files = [
        config_file(tmp_path, deltas, weights={"resident": True, "deltas": deltas})
        for deltas in ("4bit", "3bit")
    ]
    four, three = read_candidates(files)
    assert four.lossy
    assert three.lossy
    assert four.warm_up(STEPS) == 0
    assert len({c.digest(STEPS) for c in (DENSE, four, three)}) == 3
    plan = Plan(opened("language"), [four], [0])
    store = Store(tmp_path / "results.jsonl")
    with pytest.raises(UnsupportedError, match=r"weights\.deltas"):
        run_processes(plan, store, tmp_path / "r.jsonl", tmp_path / "folder")


def test_a_file_with_an_empty_section_is_a_candidate_of_processes(tmp_path: Path) -> None:
    file = tmp_path / "empty.json"
    file.write_text(json.dumps({"activation_checkpointing": {}, "ds_ckpt": None}))
    spec = make_spec("language")
    config = engine_config(spec, Recipe(spec.steps, spec.learning_rate), str(file), 0)
    assert config["ds_ckpt"] == {"telemetry": {"enabled": True}}
    assert config["activation_checkpointing"] == {}


def test_weights_in_few_bits_have_a_verdict_though_gradients_are_dense(tmp_path: Path) -> None:
    file = config_file(tmp_path, "four", weights={"resident": True, "deltas": "4bit"})
    dense = [outcome(loss) for loss in (2.0, 3.0, 2.5)]
    for gap, verdict in ((1.001, "equivalent"), (1.1, "worse")):
        ours = [outcome(one.heldout[-1][1] * gap) for one in dense]
        (found,) = judged(tmp_path / verdict, [file], dense, [ours], sent=1000.0)
        assert found.verdict == verdict
