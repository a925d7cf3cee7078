"""Run in the worker processes: state that survives the processes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.gradients import residual_files
from tests.distributed import models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh


def state_digest(session: Any) -> str:
    """One digest over this process's residuals and factors as they are kept, bit for bit."""
    digest = hashlib.sha256()
    built = session.exchange
    digest.update(str(built.feedback.steps).encode())
    for name, stored in sorted(built.feedback.stored().items()):
        digest.update(name.encode())
        for tensor in stored.tensors:
            digest.update(tensor.view(torch.uint8).numpy())
    for key, factor in sorted(built.step.exchange.factors.state_dict().items()):
        digest.update(key.encode())
        digest.update(factor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _engine(section: dict[str, Any], **options: Any) -> Any:
    fresh()
    return models.start("llama", models.zero3_config(ds_ckpt=section, **options))


def _end(engine: Any, losses: list[float]) -> dict[str, Any]:
    session = ds_ckpt.session_of(engine)
    result = {
        "losses": losses,
        "weights": models.weights_digest(engine),
        "state": state_digest(session),
        "dtypes": {str(s.values.dtype) for s in session.exchange.feedback.stored().values()},
        "factors": len(session.exchange.step.exchange.factors.state_dict()),
    }
    engine.destroy()
    return result


def train(
    section: dict[str, Any], steps: int, after: int, folder: str = "", **options: Any
) -> dict[str, Any]:
    """Train without a break, saving after step `after` where a folder is given; the losses behind
    it."""
    engine = _engine(section, **options)
    models.train(engine, "llama", after)
    if folder:
        engine.save_checkpoint(folder)
    return _end(engine, models.train(engine, "llama", steps - after, first=after))


def resume(
    folder: str, section: dict[str, Any], split: int, steps: int, **options: Any
) -> dict[str, Any]:
    """Load the last checkpoint and train on."""
    engine = _engine(section, **options)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return _end(engine, models.train(engine, "llama", steps - split, first=split))


def save(folder: str, section: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """Train and save; digests of what was saved, and what a next step's losses would be."""
    engine = _engine(section, **options)
    models.train(engine, "llama", steps)
    engine.save_checkpoint(folder)
    weights = models.weights_digest(engine)
    unsent = _unsent(engine)
    engine.destroy()
    return {"weights": weights, "unsent": unsent}


def _unsent(engine: Any) -> dict[str, torch.Tensor]:
    """Residuals by name, summed over processes."""
    unsent = {}
    for name, residual in sorted(ds_ckpt.session_of(engine).residuals.items()):
        unsent[name] = residual.double()
        dist.all_reduce(unsent[name])
    return unsent


def load(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """Load into this world; return the unsent residuals."""
    engine = _engine(section)
    session = ds_ckpt.session_of(engine)
    reader = residual_files(engine, section["compression"]["method"], session.exchange)
    reader.restore(reader.read(Path(folder)))
    unsent = _unsent(engine)
    engine.destroy()
    return {"unsent": unsent}


def load_universal(folder: str, section: dict[str, Any], again: str = "") -> dict[str, Any]:
    """Load a universal checkpoint; return the state, the log, and three losses. If
    `again` names a folder, it is saved there as it was loaded."""
    engine = _engine(section, checkpoint={"load_universal": True})
    with captured_log() as logged:
        models.train(engine, "llama", 1)  # leaves residuals, which the load must not keep
        engine.load_checkpoint(folder)
    if again:
        engine.save_checkpoint(again)
    result = {
        "weights": models.weights_digest(engine),
        "unsent": _unsent(engine),
        "messages": logged,
        "steps": int(engine.global_steps),
        "losses": models.train(engine, "llama", 3, first=3),
    }
    result["residuals after"] = len(ds_ckpt.session_of(engine).residuals)
    engine.destroy()
    return result
