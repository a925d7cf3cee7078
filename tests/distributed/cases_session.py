"""Run in the worker processes: every way in ends in the same session."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt import environment
from ds_ckpt.compression import wire
from ds_ckpt.telemetry.memory import SavedActivations
from tests.distributed import models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh, once

BLOCK = {"ds_ckpt": {"activation": {"policy": "block"}}}


@once(when=lambda kind, sections, plugin=True: not sections)
def held_bytes(kind: str, sections: dict[str, Any], plugin: bool = True) -> dict[str, Any]:
    """Activation bytes that autograd holds after forward, and the gradients' bits."""
    fresh()
    engine = models.start(kind, models.zero3_config(**sections), plugin=plugin)
    data = models.batch(kind, 0, dist.get_rank())
    with SavedActivations(engine.module) as held:
        loss = models.loss_of(engine(**data))
    engine.backward(loss)
    gradients = models.gradients(engine)
    engine.destroy()
    return {"held": held.bytes, "gradients": gradients, "loss": float(loss)}


@once(when=lambda way, sections: way == "stock")
def ways_in(way: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Train three steps through one way in; what the session looks like, and the losses."""
    fresh()
    config = models.zero3_config(**sections)
    model = models.build("llama")
    installed = way == "install"
    if installed:
        ds_ckpt.install()
        ds_ckpt.install()  # idempotent
    try:
        if way == "attach":
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            before = ds_ckpt.session_of(engine)
            assert before is None
            ds_ckpt.attach(engine)
        elif way in ("install", "stock"):
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
        elif way == "file":
            path = Path("/tmp") / f"ds_ckpt_test_{dist.get_rank()}.json"
            path.write_text(json.dumps(config))
            engine, *_ = ds_ckpt.initialize(
                model=model, model_parameters=model.parameters(), config=str(path)
            )
            path.unlink()
        else:
            engine, *_ = ds_ckpt.initialize(
                None, model, model_parameters=model.parameters(), config=config
            )
        result = _look(engine)
        engine.train()
        result["losses"] = models.train(engine, "llama", 3)
        engine.destroy()
        return result
    finally:
        ds_ckpt.uninstall()
        assert not hasattr(deepspeed.initialize, "__wrapped__")


def _look(engine: Any) -> dict[str, Any]:
    session = ds_ckpt.session_of(engine)
    if session is None:
        return {"session": None}
    blocks = session._blocks.blocks if session._blocks else []
    return {
        "session": type(session).__name__,
        "summary": session.summary,
        "blocks": [b.name for b in blocks],
        "method": session.config.compression.method,
    }


def refused(sections: dict[str, Any], kind: str = "llama") -> dict[str, Any]:
    """The error of an engine that must be refused; DeepSpeed must be untouched after it."""
    from deepspeed.runtime.zero import stage3

    fresh()
    original = stage3.reduce_scatter_coalesced
    message = ""
    try:
        models.start(kind, models.zero3_config(**sections))
    except ds_ckpt.DsCkptError as error:
        message = str(error)
    return {"message": message, "untouched": stage3.reduce_scatter_coalesced is original}


def unlike_ranks(rank_1: str) -> dict[str, Any]:
    """The error on each rank if rank 1 has no plugin or other settings, and its seconds."""
    fresh()
    sections = {"none": {}, "other": {"ds_ckpt": {"activation": {"policy": "mlp"}}}}
    config = models.zero3_config(**(sections.get(rank_1, BLOCK) if dist.get_rank() else BLOCK))
    is_plain = rank_1 == "stock" and dist.get_rank() == 1
    initialize = deepspeed.initialize if is_plain else ds_ckpt.initialize
    model, message = models.build("llama"), ""
    start_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environment.WAIT_VARIABLE, "0.5")
        if rank_1 == "wire" and dist.get_rank():
            patch.setattr(wire, "VERSION", 99)
        try:
            initialize(model=model, model_parameters=model.parameters(), config=config)
        except ds_ckpt.UnsupportedError as error:
            message = str(error)
    return {"message": message, "seconds": time.monotonic() - start_s}


def idle_section() -> list[str]:
    """What is said at the start with a section that switches nothing on."""
    fresh()
    model = models.build("llama")
    config = models.zero3_config(ds_ckpt={"activation": {"policy": "none"}})
    with captured_log() as said:
        ds_ckpt.initialize(model=model, model_parameters=model.parameters(), config=config)
    return said


def inference(way: str) -> dict[str, Any]:
    """An engine without an optimizer, as transformers builds it for evaluation."""
    fresh()
    config = models.zero3_config(**BLOCK)
    del config["optimizer"]
    model = models.build("llama")
    ds_ckpt.install()
    try:
        with captured_log() as said:
            engine, *_ = deepspeed.initialize(model=model, config=config)
    finally:
        ds_ckpt.uninstall()
    result = {**_look(engine), "said": said}
    if way == "attach":
        try:
            ds_ckpt.attach(engine)
        except ds_ckpt.UnsupportedError as error:
            result["message"] = str(error)
    engine.eval()
    with torch.no_grad():
        data = models.batch("llama", 0, dist.get_rank())
        result["loss"] = float(engine(**data).loss)
    engine.destroy()
    return result


def part_that_raises(part: str) -> dict[str, Any]:
    """An engine is destroyed while one part of its session cannot be left; what is left of ours."""
    from deepspeed.runtime.zero import stage3

    from ds_ckpt.zero3 import collectives

    fresh()
    before = stage3.reduce_scatter_coalesced
    section = models.topk_section() | BLOCK["ds_ckpt"]
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    optimizer, blocks = engine.optimizer, engine.module.model.layers
    session = ds_ckpt.session_of(engine)
    leave = getattr(session, part).detach if part != "_blocks" else session._blocks.remove

    def raises() -> None:
        leave()
        raise RuntimeError("the other process has gone")

    setattr(getattr(session, part), leave.__name__, raises)
    message = ""
    try:
        engine.destroy()
    except RuntimeError as error:
        message = str(error)
    left = [name for name in ("zero_grad", "_loss_scale_update_and_overflow_cleanup")
            if name in vars(optimizer)]  # fmt: skip
    return {
        "message": message,
        "left": left + [name for block in blocks for name in vars(block) if name == "forward"],
        "restored": stage3.reduce_scatter_coalesced is before,
        "listening": session.counters in collectives._listeners,
        "session": ds_ckpt.session_of(engine) is not None,
    }
