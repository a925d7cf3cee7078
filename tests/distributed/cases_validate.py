"""Run in the worker processes: what `ds-ckpt validate` answers to a file, and what a start does."""

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ds_ckpt
from ds_ckpt.cli.validate import check_file
from tests.distributed import models
from tests.distributed.pool import fresh


def answers(configs: list[dict[str, Any]]) -> list[tuple[list[str], list[str], str]]:
    """Of each configuration: the paths that validate refuses and announces, and start's error."""
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
    model = models.build("llama")
    try:
        engine, *_ = ds_ckpt.initialize(
            model=model, model_parameters=list(model.parameters()), config=copy.deepcopy(config)
        )
    except Exception as error:
        return str(error) or type(error).__name__
    with contextlib.suppress(Exception):
        engine.destroy()
    return ""


def pasted_without_group() -> dict[str, Any]:
    """Train with `partition_activations` on ranks that are data-parallel alone."""
    fresh()
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    engine = models.start("llama", models.zero3_config(activation_checkpointing=section))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    losses = models.train(engine, "llama", 2)
    found = {"losses": losses, "summary": session.summary, "partition": session.partition}
    engine.destroy()
    return found
