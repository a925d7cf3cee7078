"""`ds-ckpt validate-accuracy` from options to exit code, with a model of a few thousand weights."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.config import load_file, parse
from ds_ckpt.config.verdicts import read_verdicts, verdicts_on
from ds_ckpt.lab.validate import data, experiment, task
from ds_ckpt.lab.validate.experiment import read_results

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
FOUR_BITS = ROOT / "ds_configs" / "zero3_4bit.json"
SHORT = ("--seeds", "2", "--steps", "8")
run = CliRunner().invoke


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.DEFAULTS, "language", {"hidden_size": 32, "layers": 1, "length": 32})


@pytest.fixture
def little_heldout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of held-out text in the place of 24, for what is not about losses."""
    monkeypatch.setattr(data, "EVALUATION_BATCHES", 2)


def small(folder: Path, file: Path) -> Path:
    """The file with compression of small matrices too, as such a small model has them."""
    config = load_file(file)
    config["ds_ckpt"]["compression"]["min_numel"] = 0
    path = folder / file.name
    path.write_text(json.dumps(config))
    return path


def validate(output: Path, files: list[Path], *options: str) -> Any:
    return run(app, ["validate-accuracy", *map(str, files), "--output", str(output), *options])


@pytest.mark.timeout(900)  # twelve trainings
@pytest.mark.slow
def test_bad_settings_fail_and_good_ones_pass(tmp_path: Path) -> None:
    names = ("8bit", "topk_0.1pct_no_feedback", "powersgd_rank1_no_feedback")
    files = [small(tmp_path, ROOT / "benchmarks" / "accuracy" / f"{name}.json") for name in names]
    output = tmp_path / "out"
    # many workers, of whose gradients only an eighth is exact, and so small a model that little
    # is lost: the margin is small too
    options = ["--seeds", "3", "--steps", "60", "--virtual-workers", "8", "--margin", "0.1"]
    good = validate(output, files[:1], *options)
    assert good.exit_code == 0, good.output
    assert "run 1 of 6: seed 0, dense" in good.output
    bad = validate(output, files, *options)
    assert bad.exit_code == 1, bad.output
    verdicts = {record.preset: record.verdict for record in read_verdicts(output / "verdicts.json")}
    assert verdicts == dict(zip(names, ("equivalent", "worse", "worse"), strict=True))
    assert (output / "report.html").is_file()
    # what was trained is not trained again
    before = (output / "results.jsonl").read_text()
    assert len(before.splitlines()) == 3 + 3 * 3
    assert validate(output, files, *options).exit_code == 1
    assert (output / "results.jsonl").read_text() == before


@pytest.mark.usefixtures("little_heldout", "undrawn")
@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = small(tmp_path, ROOT / "benchmarks" / "accuracy" / "2bit.json")
    straight = validate(tmp_path / "a", [file], *SHORT)
    assert straight.exit_code in (0, 1, 2)
    train, trained = experiment.train, list[int]()

    def killed(*args: Any) -> Any:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(1)
        return train(*args)

    monkeypatch.setattr(experiment, "train", killed)
    stopped = validate(tmp_path / "b", [file], *SHORT)
    assert stopped.exit_code == 130
    assert len((tmp_path / "b" / "results.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(experiment, "train", train)
    assert validate(tmp_path / "b", [file], *SHORT).exit_code == straight.exit_code
    first, second = (read_results(tmp_path / name / "results.jsonl") for name in "ab")
    assert len(first) == 4
    assert {k: r.outcome for k, r in first.items()} == {k: r.outcome for k, r in second.items()}


@pytest.mark.usefixtures("little_heldout", "undrawn")
def test_a_user_s_text_and_a_record_beside_the_file(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"some words of mine {i} " * 80 for i in range(60)))
    file = small(tmp_path, FOUR_BITS)
    tuned = ("--betas", "0.7", "0.95", "--dense-correction", "0.3")
    found = validate(tmp_path, [file], "--data", str(text), *SHORT, *tuned)
    assert found.exit_code in (0, 1, 2), found.output
    (written,) = read_verdicts(tmp_path / "verdicts.json")
    assert (written.data, written.betas) == ("mine.txt", (0.7, 0.95))
    assert written.task.endswith("mine.txt, betas 0.7, 0.95, dense correction 0.3")
    assert verdicts_on(parse(load_file(file)).compression, beside=file)[0] == written
    report = json.loads(run(app, ["validate", "--json", "--details", str(file)]).stdout)[0]
    assert report["accuracy"][0]["data"] == "mine.txt"
    words = report["accuracy_words"][1]  # after the heading
    assert all(word in words for word in ("mine.txt", written.verdict, "margin 0.5%"))


def test_an_unexpected_error_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Mock(side_effect=RuntimeError("out of memory"))
    monkeypatch.setattr(experiment, "train", train)
    found = validate(tmp_path / "out", [FOUR_BITS], *SHORT)
    assert found.exit_code == 3
    assert "out of memory" in found.output
    train.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    found = validate(tmp_path / "out", [FOUR_BITS], *SHORT)
    assert found.exit_code == 3
    assert "disk: found No space left on device" in found.output
    assert "Traceback" not in found.output
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "verdicts.json").write_text("{}}")  # found out before training
    found = validate(tmp_path / "out", [FOUR_BITS], *SHORT)
    assert found.exit_code == 3
    assert "the verdicts cannot be read" in found.output


def test_a_missing_package_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    for name in ("equivalence", "compare", "command"):
        monkeypatch.delitem(sys.modules, f"ds_ckpt.lab.validate.{name}")
    found = run(app, ["validate-accuracy", str(FOUR_BITS)])
    assert found.exit_code == 3
    assert "scipy" in found.output
    assert "pip install 'ds_ckpt[validation]'" in found.output


def test_one_example_must_not_be_more_than_the_margin(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    rows = [{"text": f"{word} {i}", "label": word} for i in range(60) for word in ("up", "down")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = validate(tmp_path / "out", [FOUR_BITS], "--data", str(data), "--length", "8")
    assert found.exit_code == 3
    assert "held-out examples" in found.output
    assert "--margin" in found.output
    assert not (tmp_path / "out" / "results.jsonl").exists()
