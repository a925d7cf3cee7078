"""Universal checkpoints, which are DeepSpeed's way to another world (law 5)."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import ds_ckpt
from tests.distributed import models
from tests.distributed.test_compression import SECTIONS
from tests.distributed.training import captured_log, convert, running, unsent


def _saved(folder: Path) -> dict[str, Any]:
    with running("llama", SECTIONS["powersgd bf16"]) as engine:
        models.train(engine, "llama", 3)
        engine.save_checkpoint(str(folder))
        return {"weights": models.weights_digest(engine), "unsent": unsent(engine)}


def _loaded(folder: Path, *, holds_residuals: bool, again: str = "") -> dict[str, Any]:
    """Load a universal checkpoint and train on. If `again` names a folder, it is saved there as it
    was loaded."""
    with running("llama", SECTIONS["powersgd bf16"], checkpoint={"load_universal": True}) as engine:
        with captured_log() as logged:
            models.train(engine, "llama", 1)  # leaves residuals, which the load must not keep
            engine.load_checkpoint(str(folder))
        if again:
            engine.save_checkpoint(again)
        warnings = sum("holds no residuals; they start at 0" in line for line in logged)
        assert warnings == (not holds_residuals)
        assert engine.global_steps == 3
        found = {"weights": models.weights_digest(engine), "unsent": unsent(engine)}
        assert all(loss == loss for loss in models.train(engine, "llama", 3, first=3))
        assert len(ds_ckpt.session_of(engine).residuals) > 3
    return found


@pytest.mark.slow
def test_universal_checkpoints_work_with_compression_on(world2, world4, tmp_path) -> None:
    """They are DeepSpeed's way to another world; residuals come along, without a hand copy."""
    four = tmp_path / "on four"
    saved = world2.run(_saved, tmp_path)
    universal = convert(tmp_path, "global_step3")
    shutil.rmtree(tmp_path / "global_step3")
    more = world4.run(_loaded, tmp_path, holds_residuals=True, again=str(four))
    convert(four, "global_step3")
    fewer = world2.run(_loaded, four, holds_residuals=True)
    for path in universal.glob("ds_ckpt_residuals_*"):
        path.unlink()
    without = world2.run(_loaded, tmp_path, holds_residuals=False)
    assert all(process["unsent"] == {} for process in without)
    assert [p["weights"] for p in without] == [p["weights"] for p in saved]
    for process in (*more, *fewer):
        assert process["unsent"].keys() == saved[0]["unsent"].keys()
        for name, total in saved[0]["unsent"].items():
            assert total.abs().max() > 0
            gap = (process["unsent"][name] - total).abs().max()
            assert gap <= 1e-6 * total.abs().max()
