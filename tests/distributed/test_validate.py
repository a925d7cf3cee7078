"""`ds-ckpt validate` and a start of two processes on one node agree, row by row.

A row of golden/starts.txt: keys as in tests/unit/test_config_problems.py, then `ok` (both accept),
the path that both refuse, or `?` and the path that validate announces and the start refuses.
"""

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ds_ckpt
from ds_ckpt.cli.validate import check_file
from ds_ckpt.config import rules
from tests.distributed import models
from tests.distributed.pool import fresh
from tests.distributed.training import trained
from tests.unit.test_config_problems import GOLDEN, config_of, full

ROWS = (GOLDEN / "starts.txt").read_text().splitlines()


def answers(configs: list[dict[str, Any]]) -> list[tuple[list[str], list[str], str]]:
    """Return for each configuration the paths refused and announced, and the start's error."""
    is_first = dist.get_rank() == 0
    nothing: tuple[list[str], list[str]] = ([], [])
    return [(*(_validated(c) if is_first else nothing), _started(c)) for c in configs]


def _validated(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "zero3.json")
        path.write_text(json.dumps(config))
        result = check_file(path, dist.get_world_size())
    announced = [words.partition(": ")[0] for words in result.get("conditions", ())]
    return [problem["where"] for problem in result["problems"]], announced


def _started(config: dict[str, Any]) -> str:
    fresh()
    try:
        engine = models.start("llama", copy.deepcopy(config))
    except Exception as error:
        return str(error) or type(error).__name__
    with contextlib.suppress(Exception):
        engine.destroy()
    return ""


def test_validate_and_start_agree(world2: Any) -> None:
    rows = [row.split(" -> ") for row in ROWS]
    defaults = config_of('optimizer={"type":"AdamW","params":{"lr":0.01,"torch_adam":true}}')
    defaults["zero_force_ds_cpu_optimizer"] = False
    configs = []
    for keys, _ in rows:
        written = config_of(keys)
        optimizer = {**defaults["optimizer"], **written.get("optimizer", {})}
        micro = {"train_micro_batch_size_per_gpu": 2}
        configs.append({**defaults, **micro, **written, "optimizer": optimizer})
    found = world2.run(answers, configs, timeout=240)[0]
    for (keys, expected), (refused, announced, error) in zip(rows, found, strict=True):
        if expected == "ok":
            assert (refused, error) == ([], ""), keys
        elif expected.startswith("? "):
            assert not refused, keys
            assert expected[2:] in announced, (keys, announced)
            assert error, keys
            named = "ds_ckpt" in expected or '"auto"' in keys
            assert not named or expected[2:] in error, keys
        else:
            assert refused == [full(expected)], keys
            assert error, keys


def trained_with_auto(keys: list[str]) -> list[str]:
    """Return the keys with whose "auto" DeepSpeed alone trains."""
    written = 'optimizer={"type":"AdamW","params":{"torch_adam":true}} train_batch_size=4 '
    written += 'scheduler={"type":"WarmupDecayLR","params":{"total_num_steps":9}}'
    found = []
    for key in keys:
        fresh()
        with contextlib.suppress(Exception):
            engine = models.start("plain", config_of(f'{written} {key}="auto"'), plugin=False)
            models.train(engine, "plain", 1)
            found.append(key)
    return found


def test_deepspeed_fails_on_each_auto_that_a_start_refuses(world2: Any) -> None:
    keys = [*rules.FILLED_BY_HF.split(), *rules.NEVER_FILLED.split()]
    others = ["bf16.enabled", "z.reduce_bucket_size", "scheduler.params.warmup_type"]
    assert world2.run(trained_with_auto, [*keys, *others], timeout=240)[0] == others


def pasted_without_group() -> tuple[list[float], str, Any]:
    """Train with `partition_activations` on ranks that are data-parallel alone."""
    fresh()
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    engine = models.start("llama", models.zero3_config(activation_checkpointing=section))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    losses = models.train(engine, "llama", 2)
    engine.destroy()
    return losses, session.summary, session.partition


def test_a_pasted_section_trains_without_a_tensor_parallel_group(world2: Any) -> None:
    plain = world2.run(trained, "llama", {}, 2)
    for stock, found in zip(plain, world2.run(pasted_without_group), strict=True):
        losses, summary, partition = found
        assert (losses, partition) == (stock.losses, None)
        assert "host memory" in summary
        assert "split" not in summary
