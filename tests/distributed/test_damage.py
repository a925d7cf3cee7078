"""A damaged checkpoint is refused on every process, before anything of it is applied (law 5)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import ds_ckpt
from ds_ckpt.sealed import SealedFile, write
from tests.distributed import models, training
from tests.distributed.models import topk_section
from tests.distributed.pool import ranks

SECTION = {
    **topk_section(
        method="powersgd", powersgd={"rank": 2}, error_feedback={"dtype": "int8"}, min_numel=16
    ),
    "weights": {"resident": True, "deltas": "lossless"},
}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def _nan(path: Path) -> None:
    """Write NaN with a right digest, as a run with wrong values would have saved it."""
    tensors, metadata = load_file(path), SealedFile(path).metadata
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = torch.nan
    write(path, tensors, metadata)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "checksum": _flip,
    "NaN or infinity in": _nan,
    "_00001_of_00002": Path.unlink,
    "cannot be read": lambda path: path.write_bytes(path.read_bytes()[:100]),
}
"""By words of the message: what happens to the second rank's file."""


def _digest(engine: Any) -> dict[str, Any]:
    optimizer, tensors = engine.optimizer, []
    for flat in optimizer.fp32_partitioned_groups_flat:
        tensors += [flat, *(value for _, value in sorted(optimizer.optimizer.state[flat].items()))]
    counts = engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples
    found = {"optimizer": models.digest(tensors), "counts": counts, "scale": optimizer.loss_scale}
    return {**found, **training.outcome(engine, [])}


@ranks(1, 1)
def test_a_damaged_checkpoint_is_refused_everywhere_and_changes_nothing(tmp_path: Path) -> None:
    """Residuals and factors; training continues to the bit, and another tag loads."""
    results = []
    for damages in ({}, DAMAGES):
        with training.running("llama", config=training.resident_config(SECTION)) as engine:
            models.train(engine, "llama", 2)
            engine.save_checkpoint(str(tmp_path), tag="good")
            good = _digest(engine)
            models.train(engine, "llama", 1, first=2)
            engine.save_checkpoint(str(tmp_path), tag="bad", client_state={"mine": 1})
            models.train(engine, "llama", 1, first=3)
            for words, act in damages.items():
                _refused(engine, tmp_path, act, words)
            results.append((models.train(engine, "llama", 2, first=4), _digest(engine)))
            engine.load_checkpoint(str(tmp_path), tag="good")
            loaded = _digest(engine)
            assert all(loaded[key] == good[key] for key in ("optimizer", "state"))
    assert results[0] == results[1]


def _refused(engine: Any, top: Path, act: Callable[[Path], Any], words: str) -> None:
    before = _digest(engine)
    training.on_rank_0(lambda: shutil.copytree(top / "bad", top / "whole"))
    training.on_rank_0(lambda: act(sorted((top / "bad").glob("ds_ckpt_residuals_*"))[1]))
    with training.refused(words, "ds_ckpt_residuals_0000", kind=ds_ckpt.StateError):
        engine.load_checkpoint(str(top), tag="bad")
    assert _digest(engine) == before
    training.on_rank_0(lambda: shutil.rmtree(top / "bad"))
    training.on_rank_0(lambda: (top / "whole").rename(top / "bad"))


FP16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}


@pytest.mark.parametrize(
    ("section", "options", "warns"),
    [
        (topk_section(), {}, True),
        ({"activation": {"policy": "block"}}, {"bf16": {"enabled": True}}, True),
        (topk_section(), {"fp16": {"enabled": True, "loss_scale": 8.0}}, True),
        (topk_section(), {"fp16": FP16}, False),  # which looks for its scale
    ],
    ids=["fp32", "bf16, nothing compressed", "fp16, fixed scale", "fp16, dynamic scale"],
)
@pytest.mark.sampled(2)
@ranks(2)
def test_a_run_that_skips_every_step_warns_once(section, options, warns) -> None:
    """One rank's gradients are not finite, in twelve steps."""

    def spoil(engine: Any, step: int, micro: int) -> None:
        if dist.get_rank() == 1:
            weight = engine.module.model.norm.weight
            handle = weight.register_hook(lambda grad: handle.remove() or grad * torch.nan)

    with training.fp16_on_cpu(), training.running("llama", section, **options) as engine:
        with training.captured_log() as logged:
            models.train(engine, "llama", 12, spoil=spoil)
        assert engine.skipped_steps == 12
    warnings = sum("in a row" in line for line in logged)
    assert warnings == (warns and dist.get_rank() == 0)
