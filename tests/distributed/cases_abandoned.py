"""Run in the worker processes: steps that do not end, and what is trained after them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

import ds_ckpt
from tests.distributed import models
from tests.distributed.cases_resume import state_digest
from tests.distributed.pool import fresh


def _engine(section: dict[str, Any], **options: Any) -> Any:
    return models.start("llama", models.zero3_config(ds_ckpt=section, **options))


def _micro_step(engine: Any, number: int) -> float:
    loss = engine(**models.batch("llama", number, dist.get_rank())).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    session = ds_ckpt.session_of(engine)
    return {
        "losses": losses,
        "weights": models.weights_digest(engine),
        "state": state_digest(session),
    }


def _interrupt(engine: Any, number: int) -> bool:
    """A micro-step whose backward raises when most buckets are on their way or exchanged."""
    target = dict(engine.module.named_parameters())["model.embed_tokens.weight"]

    def stop(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop here")

    handle = target.register_hook(stop)
    try:
        _micro_step(engine, number)
    except ValueError:
        return True
    finally:
        handle.remove()
    return False


def tried_again(section: dict[str, Any], accumulation: int, **options: Any) -> dict[str, Any]:
    """The first micro-step of a step fails in backward and is done again; beside a run in which
    nothing fails."""
    options = {"gradient_accumulation_steps": accumulation, **options}
    results: dict[str, Any] = {}
    for name in ("smooth", "interrupted"):
        fresh()
        engine = _engine(section, **options)
        losses = [_micro_step(engine, i) for i in range(2 * accumulation)]
        if name == "interrupted":
            results["raised"] = _interrupt(engine, 2 * accumulation)
        losses += [_micro_step(engine, i) for i in range(2 * accumulation, 4 * accumulation)]
        results[name] = _outcome(engine, losses)
        engine.destroy()
    return results


def failing_exchange(section: dict[str, Any], bucket: int) -> dict[str, Any]:
    """One bucket's exchange raises on every rank; then training goes on."""
    results: dict[str, Any] = {}
    for name in ("smooth", "failing"):
        fresh()
        engine = _engine(section)
        losses = [_micro_step(engine, i) for i in range(2)]
        if name == "failing":
            session = ds_ckpt.session_of(engine)
            exchange = session.exchange.step  # type: ignore[union-attr]
            reduce, count = exchange.reduce, iter(range(10**9))

            def fail_once(*args: Any, reduce: Any = reduce, count: Any = count, **kw: Any) -> Any:
                if next(count) == bucket:
                    raise ConnectionError("no link to host1")
                return reduce(*args, **kw)

            exchange.reduce = fail_once
            before = _outcome(engine, [])
            try:
                _micro_step(engine, 2)
            except ConnectionError as error:
                results["message"] = str(error)
            results["kept"] = before == _outcome(engine, [])
        losses += [_micro_step(engine, i) for i in range(3, 6)]
        results[name] = _outcome(engine, losses)
        engine.destroy()
    return results


def interrupted_save(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """A second save under one tag, whose DeepSpeed part fails; what a load restores then."""
    fresh()
    engine = _engine(section)
    for step in range(2):
        if step:
            engine._save_checkpoint = _no_space
        _micro_step(engine, step)
        with contextlib.suppress(OSError):
            engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    fresh()
    engine = _engine(section)
    engine.load_checkpoint(folder, tag="t")
    session = ds_ckpt.session_of(engine)
    assert session is not None
    results = {"steps": engine.global_steps, "residuals": len(session.residuals)}
    engine.destroy()
    return results


def _no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError("no space left")


def _attach(engine: Any, section: dict[str, Any]) -> None:
    """Attach to an engine as if it had been made with this section."""
    before = ds_ckpt.session_of(engine)
    if before is not None:
        before.detach()
    engine._config._param_dict["ds_ckpt"] = section
    ds_ckpt.attach(engine)


def refused_group(section: dict[str, Any]) -> tuple[str, int]:
    """Return the error of a refused attach, and the number of process groups that it leaves."""
    fresh()
    engine = models.start("llama", models.zero3_config())
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    try:
        _attach(engine, section)
    except ds_ckpt.UnsupportedError as error:
        return str(error), len(groups) - before
    finally:
        engine.destroy()
    return "", 0


def loaded_after(folder: str, section: dict[str, Any], what: str) -> dict[str, Any]:
    """Loads amid a step: its backward was interrupted, or its first micro-step brought a NaN."""
    results: dict[str, Any] = {}
    for name in ("new", "amid"):
        fresh()
        engine = _engine(section, gradient_accumulation_steps=2)
        if name == "new":
            for i in range(4):
                _micro_step(engine, i)
            engine.save_checkpoint(folder)
        else:
            for i in range(6):
                _micro_step(engine, i)
            if what == "interrupted":
                results["raised"] = _interrupt(engine, 6)
            else:
                parameter = engine.module.model.norm.weight
                handle = parameter.register_hook(lambda g: torch.full_like(g, torch.nan))
                _micro_step(engine, 6)
                handle.remove()
            engine.load_checkpoint(folder)
            engine.micro_steps = 4  # DeepSpeed counts on from where it was
        losses = [_micro_step(engine, i) for i in range(4, 8)]
        results[name] = _outcome(engine, losses) | {"skipped": engine.skipped_steps}
        engine.destroy()
    return results
