"""`ds-ckpt validate`: what the installed DeepSpeed refuses, in the form of our own problems.

Rows as in test_config_problems.py, on a file with a micro-batch, ZeRO-3 and block checkpointing.
"""

import ast
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ds_ckpt
from ds_ckpt.cli import app
from ds_ckpt.cli.validate import REPLACEMENTS, check_file
from ds_ckpt.config import parse
from ds_ckpt.errors import ConfigError
from tests.unit.test_config_problems import GOLDEN, config_of, full, problems, read_row, short
from tests.unit.test_config_problems import ROWS as OURS

ROWS = (GOLDEN / "deepspeeds_refusals.txt").read_text().splitlines()
REFUSALS = (GOLDEN / "refusals.txt").read_text()


def answer(tmp_path: Path, config: dict[str, Any], ranks: int | None = None) -> dict[str, Any]:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(config))
    return check_file(path, ranks)


@pytest.mark.parametrize("row", ROWS)
def test_deepspeeds_refusals_by_path(tmp_path: Path, monkeypatch: Any, row: str) -> None:
    keys, expected = read_row(row)
    logged: list[Any] = []
    monkeypatch.setattr("deepspeed.runtime.lr_schedules.logger.handle", logged.append)
    found = answer(tmp_path, config_of(f"train_micro_batch_size_per_gpu=2 a.policy=block {keys}"))
    words = {one["where"]: short(f"{one['why']} {one['remedy']}") for one in found["problems"]}
    assert words.keys() == {"$" if path == "$" else full(path) for path in expected}
    assert found["ok"] == (not expected)
    assert "before it has started" not in str([record.msg for record in logged])
    for path, word in expected.items():
        assert word in words["$" if path == "$" else full(path)]


def test_our_own_rules_are_those_of_a_start(tmp_path: Path) -> None:
    """Every row that `parse` refuses is refused, and what it accepts DeepSpeed may refuse alone."""
    for row in OURS[::4]:
        config = config_of(row.partition("->")[0])
        found = {one["where"] for one in answer(tmp_path, config)["problems"]}
        assert found >= problems(config).keys(), row


@pytest.mark.parametrize("remedy", sorted(set(REPLACEMENTS.values())))
def test_a_replacement_can_be_pasted(remedy: str) -> None:
    (section,) = re.findall(r'"ds_ckpt": (\{.*\})', remedy)
    assert parse({"zero_optimization": {"stage": 3}, "ds_ckpt": json.loads(section)}).active


def test_batch_sizes_are_checked_for_a_stated_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "zero3.json"
    config = config_of("a.policy=block train_batch_size=64 train_micro_batch_size_per_gpu=4")
    path.write_text(json.dumps(config))
    for ranks, code in ((8, 0), (5, 1)):
        result = CliRunner().invoke(app, ["validate", str(path), f"--world={ranks}"])
        assert result.exit_code == code, result.output
    assert "$.train_batch_size" in result.output


def test_a_key_that_deepspeed_ignores_is_warned_of_in_its_file(tmp_path: Path) -> None:
    words = [
        "gradient_cliping=1.0 steps_per_pint=5 fp6={}",
        "gradient_clipping=1.0 bf16={} wandb={}",
    ]
    for name, keys in zip("ab", words, strict=True):
        (tmp_path / name).write_text(json.dumps(config_of(f"train_batch_size=4 {keys}")))
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "a"), str(tmp_path / "b")])
    warned, clean = result.output.split("OK ")[1:]
    assert re.findall('you mean "(.*)"', warned) == ["gradient_clipping", "steps_per_print", "fp16"]
    assert "warning" not in clean


def test_what_a_start_decides_is_announced(tmp_path: Path) -> None:
    keys = (
        'train_micro_batch_size_per_gpu="auto" d.partition_activations=true w.resident=true '
        "w.deltas=lossless c.method=powersgd c.powersgd.rank=1000 c.exchange.levels=2 "
        'a.policy=block a.modules=["B"] pipeline.stages=2'
    )
    result = answer(tmp_path, config_of(keys))
    assert "tensor-parallel group, if there is one" in result["summary"]
    found = [line.partition(": ")[0] for line in result["conditions"]]
    expected = "pipeline ds_ckpt ds_ckpt.activation d.partition_activations ds_ckpt.compression "
    expected += "c.error_feedback.dtype c.powersgd.rank c.exchange.levels w.resident w.deltas "
    expected += "optimizer train_micro_batch_size_per_gpu"
    assert found == [full(path) for path in expected.split()]
    keys = "train_micro_batch_size_per_gpu=1 z.offload_param.device=nvme optimizer.type=Adam"
    assert "ds_report" in answer(tmp_path, config_of(keys))["conditions"][0]
    section = {"activation": {"policy": "block"}}
    assert answer(tmp_path, section)["summary"] == "checkpointing block"
    assert answer(tmp_path, section | {"weights": 1})["problems"][0]["where"] == full(
        "ds_ckpt.weights"
    )
    plain = {"optimizer": {"type": "SGD"}, "train_micro_batch_size_per_gpu": 1}
    assert answer(tmp_path, plain)["conditions"] == []


def test_a_start_names_every_auto_that_nothing_has_filled_in(tmp_path: Path) -> None:
    config = config_of(
        'a.policy=block train_batch_size="auto" optimizer={"type":"Adam","params":{"lr":"auto"}} '
        'scheduler.params.warmup_max_lr="auto" gradient_clipping="auto" bf16.enabled="auto"'
    )
    always = "$.train_batch_size, $.gradient_clipping"
    every = f"{always}, $.optimizer.params.lr, $.scheduler.params.warmup_max_lr"
    for given, where in (({"optimizer": 1, "lr_scheduler": 1}, always), ({}, every)):
        with pytest.raises(ConfigError) as caught:
            ds_ckpt.initialize(config=config, **given)
        (one,) = caught.value.problems
        assert one.where == where
    first, second = answer(tmp_path, config)["conditions"][-2:]
    assert first == f"$.train_batch_size and 3 more: {one.found}: {one.remedy}"
    assert second.startswith('"auto" elsewhere: DeepSpeed\'s default')
    parse({"gradient_clipping": "auto"}, given={})  # inference: nothing is clipped


def test_each_refusal_is_a_rule_or_announced(tmp_path: Path) -> None:
    """The reason is a `rule`, an announced path, a `later` event or user `code`."""
    decided = {name: row[0] for row in map(str.split, REFUSALS.split("\n")) for name in row[1:]}
    found, package = set(), Path(ds_ckpt.__file__).parent
    for file in package.rglob("*.py"):
        room = file.relative_to(package).with_suffix("").as_posix()
        for function in ast.walk(ast.parse(file.read_text())):
            raises = (
                (isinstance(node, ast.Raise) and node.exc) or getattr(node, "id", "") == "Problem"
                for node in ast.walk(function)
            )
            if isinstance(function, ast.FunctionDef) and "/" in room and any(raises):
                found.add(f"{room}.{function.name}")
    found = {name for name in found if name.partition("/")[0] not in ("cli", "lab")}
    assert found == decided.keys()
    keys = (
        "a.policy=block a.partition=true c.method=topk c.exchange.levels=2 w.resident=true "
        'w.deltas=lossless c.rules=[{"match":"x","method":"topk"}] fp16.enabled=true '
        "optimizer.type=Adam tensorboard.enabled=true train_micro_batch_size_per_gpu=1"
    )
    announced = {w.partition(": ")[0] for w in answer(tmp_path, config_of(keys))["conditions"]}
    lossless = config_of(keys.replace("fp16.enabled=true", "a.policy=block"))
    announced |= {w.partition(": ")[0] for w in answer(tmp_path, lossless)["conditions"]}
    assert {path for path in decided.values() if path.startswith("$")} <= announced
    assert announced >= {"$.fp16.enabled", "$.optimizer.type", "$.tensorboard.enabled"}


def test_rules_of_a_start_are_called_by_validate(tmp_path: Path) -> None:
    called = set()

    def note(frame: Any, event: str, _: Any) -> None:
        called.add((frame.f_code.co_filename, frame.f_code.co_name))

    files = ["[]", '{"a": NaN}', json.dumps(config_of("c.method=topk w.resident=true"))]
    rows = ("a.polcy=block", "a.policy=blok", "ds_ckpt=[]", "a.policy=selective a.save_ops=aten.mm")
    files += [json.dumps(config_of(f"{row} train_micro_batch_size_per_gpu=1")) for row in rows]
    (tmp_path / "zero3.json").touch()
    sys.setprofile(note)
    try:
        for text in files:
            (tmp_path / "zero3.json").write_text(text)
            check_file(tmp_path / "zero3.json")
    finally:
        sys.setprofile(None)
    package = Path(ds_ckpt.__file__).parent
    rows = map(str.split, REFUSALS.splitlines())
    for rule in itertools.chain(*(names for word, *names in filter(None, rows) if word == "rule")):
        file, _, name = rule.rpartition(".")
        assert (str(package / f"{file}.py"), name) in called, rule
