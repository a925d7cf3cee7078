"""Run in the worker processes: checkpoints that are refused, and what a refusal leaves."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import ds_ckpt
from ds_ckpt.sealed import SealedFile, write
from tests.distributed import models
from tests.distributed.cases_levels import hosts
from tests.distributed.cases_resume import state_digest
from tests.distributed.cases_weights import config_of
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("ds_ckpt_residuals_*"))


def _flip(folder: Path) -> None:
    path = _files(folder)[1]
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def _nan(folder: Path) -> None:
    """Write NaN with a right digest, as a run with wrong values would have saved it."""
    path = _files(folder)[1]
    tensors, metadata = load_file(path), SealedFile(path).metadata
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = torch.nan
    write(path, tensors, metadata)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a byte": _flip,
    "NaN": _nan,
    "missing": lambda folder: _files(folder)[1].unlink(),
}


def _digest(engine: Any) -> dict[str, Any]:
    """Everything that a load may replace."""
    optimizer, digest = engine.optimizer, hashlib.sha256()
    for flat in optimizer.fp32_partitioned_groups_flat:
        digest.update(flat.detach().view(torch.uint8).numpy())
        for _, value in sorted(optimizer.optimizer.state[flat].items()):
            digest.update(value.reshape(-1).view(torch.uint8).numpy())
    counts = engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples
    return {
        "optimizer": digest.hexdigest(),
        "weights": models.weights_digest(engine),
        "state": state_digest(ds_ckpt.session_of(engine)),
        "counts": counts,
        "scale": optimizer.loss_scale,
    }


def refused(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """Two saves; loads of the second with each damage; training on; a load of the first.

    Beside it a run that tries no such load.
    """
    results: dict[str, Any] = {"messages": {}, "changed": []}
    for name in ("smooth", "ill"):
        fresh()
        with hosts([1, 1]):
            engine = models.start("llama", config_of(section))
            models.train(engine, "llama", 2)
            engine.save_checkpoint(folder, tag="good")
            good = _digest(engine)
            models.train(engine, "llama", 1, first=2)
            engine.save_checkpoint(folder, tag="bad", client_state={"mine": 1})
            models.train(engine, "llama", 1, first=3)
            if name == "ill":
                _try_all(engine, Path(folder), results)
            results[name] = models.train(engine, "llama", 2, first=4), _digest(engine)
            engine.load_checkpoint(folder, tag="good")
            loaded = _digest(engine)
            results[f"{name} loaded"] = {k: loaded[k] == good[k] for k in ("optimizer", "state")}
            engine.destroy()
    return results


def _try_all(engine: Any, top: Path, results: dict[str, Any]) -> None:
    before, whole = _digest(engine), top / "whole"
    _on_one(lambda: shutil.copytree(top / "bad", whole))
    for damage, act in DAMAGES.items():
        _on_one(lambda act=act: act(top / "bad"))  # type: ignore[misc]
        results["messages"][damage] = ""
        try:
            engine.load_checkpoint(str(top), tag="bad")
        except ds_ckpt.StateError as error:
            results["messages"][damage] = str(error)
        if _digest(engine) != before:
            results["changed"].append(damage)
        _on_one(lambda: _restore(whole, top / "bad"))


def _restore(whole: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)


def _on_one(act: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def skipping(section: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Twelve steps whose gradients are not finite, on one of two processes."""
    fresh()

    def spoil(engine: Any, step: int, micro: int) -> None:
        if dist.get_rank() == 1:
            weight = dict(engine.module.named_parameters())["model.norm.weight"]
            handle = weight.register_hook(lambda grad: handle.remove() or grad * torch.nan)

    engine = models.start("llama", models.zero3_config(ds_ckpt=section, **options))
    with captured_log() as logged:
        models.train(engine, "llama", 12, spoil=spoil)
    skipped = engine.skipped_steps
    engine.destroy()
    return {"skipped": skipped, "messages": [line for line in logged if "in a row" in line]}
