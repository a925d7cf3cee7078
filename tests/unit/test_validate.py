"""`ds-ckpt validate`: what the installed DeepSpeed refuses, in the form of our own problems.

Rows as in test_config_problems.py, on a file with a micro-batch, ZeRO-3 and block checkpointing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.cli.validate import REPLACEMENTS, check_file
from ds_ckpt.config import parse
from tests.unit.test_config_problems import GOLDEN, config_of, full, problems, read_row, short
from tests.unit.test_config_problems import ROWS as OURS

ROWS = (GOLDEN / "deepspeeds_refusals.txt").read_text().splitlines()


def answer(tmp_path: Path, config: dict[str, Any], ranks: int | None = None) -> dict[str, Any]:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(config))
    return check_file(path, ranks)


@pytest.mark.parametrize("row", ROWS)
def test_deepspeeds_refusals_by_path(tmp_path: Path, row: str) -> None:
    keys, expected = read_row(row)
    found = answer(tmp_path, config_of(f"train_micro_batch_size_per_gpu=2 a.policy=block {keys}"))
    words = {one["where"]: short(f"{one['why']} {one['remedy']}") for one in found["problems"]}
    assert words.keys() == {"$" if path == "$" else full(path) for path in expected}
    assert found["ok"] == (not expected)
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


def test_what_a_start_decides_is_announced(tmp_path: Path) -> None:
    keys = (
        'train_micro_batch_size_per_gpu="auto" d.partition_activations=true w.resident=true '
        'w.deltas=lossless c.method=topk c.exchange.levels=2 a.policy=block a.modules=["B"]'
    )
    found = [line.partition(": ")[0] for line in answer(tmp_path, config_of(keys))["conditions"]]
    assert found == [
        "$.ds_ckpt.activation",
        "$.activation_checkpointing.partition_activations",
        "$.ds_ckpt.compression.exchange.levels",
        "$.ds_ckpt.weights.resident",
        "$.ds_ckpt.weights.deltas",
        "$.optimizer",
        '"auto"',
    ]
    keys = "train_micro_batch_size_per_gpu=1 z.offload_param.device=nvme optimizer.type=Adam"
    assert "ds_report" in answer(tmp_path, config_of(keys))["conditions"][0]
    plain = {"optimizer": {"type": "Adam"}, "train_micro_batch_size_per_gpu": 1}
    assert answer(tmp_path, plain)["conditions"] == []
