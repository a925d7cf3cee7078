"""`ds-ckpt validate-accuracy` from options to exit code, with a model of a few thousand weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.config import load_file, parse
from ds_ckpt.config.verdicts import read_verdicts, verdicts_on
from ds_ckpt.lab.validate import experiment
from ds_ckpt.lab.validate.data import Text
from ds_ckpt.lab.validate.runs import Store

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
SIZES = [
    "--steps",
    "60",
    "--hidden-size",
    "32",
    "--layers",
    "1",
    "--length",
    "32",
    "--learning-rate",
    "0.003",
]
run = CliRunner().invoke


@pytest.fixture
def little_heldout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of held-out text in the place of 24, for what is not about losses."""
    monkeypatch.setattr(Text.of_bytes.__func__, "__defaults__", (2,))  # type: ignore[attr-defined]


def small(folder: Path, file: Path) -> Path:
    """The file with compression of small matrices too, as such a small model has them."""
    config = load_file(file)
    compression = config["ds_ckpt"].setdefault("compression", {})
    if compression:
        compression["min_numel"] = 0
    path = folder / file.name
    path.write_text(json.dumps(config))
    return path


def validate(output: Path, files: list[Path], *options: str) -> Any:
    return run(app, ["validate-accuracy", *map(str, files), *SIZES, "--output", str(output),
                     *options])  # fmt: skip


def verdicts(output: Path) -> dict[str, str]:
    return {record.preset: record.verdict for record in read_verdicts(output / "verdicts.json")}


@pytest.mark.timeout(900)  # twenty trainings
@pytest.mark.slow
def test_what_must_fail_fails_and_what_must_pass_passes(tmp_path: Path) -> None:
    accuracy = ROOT / "benchmarks" / "accuracy"
    must_fail = [
        small(tmp_path, accuracy / "topk_0.1pct_no_feedback.json"),
        small(tmp_path, accuracy / "powersgd_rank1_no_feedback.json"),
    ]
    must_pass = [
        small(tmp_path, accuracy / "8bit.json"),
        ROOT / "ds_configs" / "zero3_block_offload.json",
    ]
    output = tmp_path / "out"
    # many workers, of whose gradients only an eighth is exact, and so small a model that little
    # is lost: the margin is small too
    options = ["--seeds", "3", "--virtual-workers", "8", "--margin", "0.1"]
    good = validate(output, must_pass, *options)
    assert good.exit_code == 0, good.output
    assert "run 1 of 8: language, seed 0, dense" in good.output
    assert verdicts(output) == {"8bit": "equivalent"}
    bad = validate(output, [*must_pass, *must_fail], *options)
    assert bad.exit_code == 1, bad.output
    found = verdicts(output)
    assert found["topk_0.1pct_no_feedback"] == found["powersgd_rank1_no_feedback"] == "worse"
    report = (output / "report.md").read_text()
    assert "identical" in report
    assert (output / "report.html").is_file()
    # what was trained is not trained again
    before = (output / "results.jsonl").read_text()
    assert len(before.splitlines()) == 3 + 3 * 3 + 2
    again = validate(output, [*must_pass, *must_fail], *options)
    assert again.exit_code == 1
    assert (output / "results.jsonl").read_text() == before


@pytest.mark.usefixtures("little_heldout", "undrawn")
def test_a_killed_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = small(tmp_path, ROOT / "benchmarks" / "accuracy" / "2bit.json")
    options = ["--seeds", "2", "--steps", "8"]
    straight = validate(tmp_path / "a", [file], *options)
    assert straight.exit_code in (0, 1, 2)
    train, trained = experiment.train, list[int]()

    def killed(*args: Any, **options: Any) -> Any:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(1)
        return train(*args, **options)

    monkeypatch.setattr(experiment, "train", killed)
    stopped = validate(tmp_path / "b", [file], *options)
    assert stopped.exit_code == 130
    assert len((tmp_path / "b" / "results.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(experiment, "train", train)
    resumed = validate(tmp_path / "b", [file], *options)
    assert resumed.exit_code == straight.exit_code
    curves = [
        {
            (result.names, key.seed): (result.outcome.heldout, result.outcome.digest)
            for key, result in Store(tmp_path / name / "results.jsonl")._results.items()
        }
        for name in "ab"
    ]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]


@pytest.mark.usefixtures("little_heldout", "undrawn")
def test_a_user_s_text_and_a_record_beside_the_file(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"some words of mine {i} " * 80 for i in range(60)))
    file = small(tmp_path, ROOT / "ds_configs" / "zero3_4bit.json")
    record = tmp_path / "verdicts.json"
    options = ["--data", str(text), "--record", str(record), "--seeds", "2", "--steps", "8"]
    found = validate(tmp_path / "out", [file], *options)
    assert found.exit_code in (0, 1, 2), found.output
    (written,) = read_verdicts(record)
    assert written.data == "mine.txt"
    assert verdicts_on(parse(load_file(file)).compression, beside=file)[0] == written
    told = json.loads(run(app, ["validate", "--json", str(file)]).stdout)[0]
    assert told["accuracy"][0]["data"] == "mine.txt"
    words = told["accuracy_words"][1]  # after the heading
    assert "mine.txt" in words
    assert written.verdict in words
    assert "margin 0.5%" in words


@pytest.mark.parametrize(
    "activation",
    [{"policy": "auto"}, {"policy": "block", "partition": True}],
    ids=["auto", "partition"],
)
def test_what_needs_an_engine_is_told(tmp_path: Path, activation: dict[str, Any]) -> None:
    file = tmp_path / "a.json"
    config = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": activation}}
    file.write_text(json.dumps(config))
    found = validate(tmp_path / "out", [file], "--steps", "8", "--seeds", "2")
    assert found.exit_code == 3, found.output
    assert "virtual workers have" in found.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["FILE", "--processes", "2", "--virtual-workers", "2"], "give one"),
        (["FILE", "--attention", "flash"], "eager or sdpa"),
        (["FILE", "--betas", "0.9"], "--betas"),
        (["FILE", "--model", "x", "--layers", "3"], "--layers"),
        (["FILE", "--processes", "2", "--device", "cpu"], "--device"),
        (["FILE", "--device", "abacus"], "--device"),
        (["FILE", "--output", "FILE"], "it is not a folder"),
        (["FILE", "--record", "."], "it is not a file"),
        (["none.json"], "none.json"),
        (["FILE", "--data", "no-such-file"], "--data"),
    ],
)
def test_what_cannot_be_done_is_told(tmp_path: Path, options: list[str], words: str) -> None:
    options = [str(ROOT / "ds_configs" / "zero3_4bit.json") if o == "FILE" else o for o in options]
    found = run(app, ["validate-accuracy", "--output", str(tmp_path / "out"), *options])
    assert found.exit_code == 3
    assert words in found.output
    assert "fix:" in found.output


def test_what_nobody_foresaw_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(experiment, "train", fails)
    found = validate(tmp_path / "out", [ROOT / "ds_configs" / "zero3_4bit.json"], "--seeds", "2")
    assert found.exit_code == 3
    assert "out of memory" in found.output


def test_what_is_missing_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "ds_ckpt.lab.validate.equivalence")
    monkeypatch.delitem(sys.modules, "ds_ckpt.lab.validate.compare")
    monkeypatch.delitem(sys.modules, "ds_ckpt.lab.validate.command")
    found = run(app, ["validate-accuracy", str(ROOT / "ds_configs" / "zero3_4bit.json")])
    assert found.exit_code == 3
    assert "scipy" in found.output
    assert "pip install 'ds_ckpt[validation]'" in found.output


def test_one_example_must_not_be_more_than_the_margin(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    rows = [{"text": f"{word} {i}", "label": word} for i in range(60) for word in ("up", "down")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(ROOT / "ds_configs" / "zero3_4bit.json")
    options = ["--data", str(data), "--output", str(tmp_path / "out"), "--length", "8"]
    found = run(app, ["validate-accuracy", file, *options])
    assert found.exit_code == 3
    assert "held-out examples" in found.output
    assert "--margin" in found.output
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_record_that_cannot_be_added_to_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "train", None)
    record = tmp_path / "verdicts.json"
    record.write_text("{}}")
    file = ROOT / "ds_configs" / "zero3_4bit.json"
    found = validate(tmp_path / "out", [file], "--record", str(record))
    assert found.exit_code == 3
    assert "the verdicts cannot be read" in found.output


@pytest.mark.usefixtures("little_heldout", "undrawn")
def test_runs_of_other_packages_are_not_paired_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small(tmp_path, ROOT / "ds_configs" / "zero3_4bit.json")
    options = ["--seeds", "2", "--steps", "8"]
    before = validate(tmp_path / "out", [file], *options).exit_code
    results = tmp_path / "out" / "results.jsonl"
    lines = results.read_text().splitlines()
    assert len(lines) == 4
    older = [json.loads(line) for line in lines]
    for line in older:
        line["about"]["versions"]["torch"] = "1.0"
    results.write_text("".join(json.dumps(line) + "\n" for line in older))
    # nothing is to come: what is there is judged
    assert validate(tmp_path / "out", [file], *options).exit_code == before
    results.write_text("".join(json.dumps(line) + "\n" for line in older[:3]))
    found = validate(tmp_path / "out", [file], *options)
    assert found.exit_code == 3
    assert "torch 1.0" in found.output
    assert "another --output" in found.output
