"""Run in the worker processes: the gradient hook and Top-K on real engines."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
from tests.distributed.pool import fresh, once


@once(when=lambda kind, section, *_, **__: section in ({}, {"compression": {"method": "dense"}}))
def run(kind: str, section: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """Train; losses, weights and what was sent. An empty section is plain DeepSpeed.

    Runs without a section and with everything sent are kept.
    """
    fresh()
    sections = {"ds_ckpt": section} if section else {}
    engine = models.start(kind, models.zero3_config(**sections, **options))
    session = ds_ckpt.session_of(engine)
    losses = models.train(engine, kind, steps)
    result = {
        "losses": losses,
        "weights": models.weights_digest(engine),
        "active": session is not None,
        "sent": session.counters.bytes_sent[Purpose.REDUCE] if session else 0,
        "collectives": session.counters.collectives[Purpose.REDUCE] if session else 0,
        "residuals": dict(session.residuals) if session else {},
        "skipped": engine.skipped_steps,
    }
    engine.destroy()
    return result


def conservation(
    kind: str, section: dict[str, Any], steps: int, accumulation: int = 1
) -> dict[str, float]:
    """Law 3 on a live engine: what the processes put in against what the owners took out.

    A twin engine without the plugin, fed the same weights' gradients, gives what went in: at
    lr 0 the weights never move, so both see the same gradients at every step.
    """
    delivered = _sums(kind, {"ds_ckpt": section}, steps, accumulation)
    put_in = default_sums(kind, {}, steps, accumulation)
    worst = 0.0
    for name, total in put_in["taken"].items():
        left = delivered["left"].get(name, torch.zeros_like(total))
        gap = (delivered["taken"][name] + left - total).abs().max().item()
        scale = total.abs().max().item() + 1e-12
        worst = max(worst, gap / scale)
    compressed = sum(float(r.abs().sum()) > 0 for r in delivered["left"].values())
    return {"worst": worst, "compressed": float(compressed)}


def _sums(
    kind: str, sections: dict[str, Any], steps: int, accumulation: int
) -> dict[str, dict[str, torch.Tensor]]:
    fresh()
    config = models.zero3_config(lr=0.0, accumulation=accumulation, **sections)
    engine = models.start(kind, config)
    session = ds_ckpt.session_of(engine)
    taken: dict[str, torch.Tensor] = {}
    for micro in range(steps * accumulation):
        torch.manual_seed(micro + dist.get_rank())
        data = models.batch(kind, micro, dist.get_rank())
        engine.backward(models.loss_of(engine(**data)))
        if engine.is_gradient_accumulation_boundary():
            for name, gradient in full_gradients(engine).items():
                taken[name] = taken.get(name, 0) + gradient.double()
        engine.step()
    left = {}
    for name, residual in (session.residuals if session else {}).items():
        total = residual.double().clone()
        dist.all_reduce(total)
        left[name] = total
    engine.destroy()
    return {"taken": taken, "left": left}


default_sums = once(_sums)


def full_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The averaged gradient of every parameter, flat, put together from the owners' parts."""
    names = {p.ds_id: n for n, p in engine.module.named_parameters()}
    optimizer, world, me = engine.optimizer, dist.get_world_size(), dist.get_rank()
    full = {}
    for index, group in enumerate(optimizer.fp16_groups):
        for parameter, part in zip(group, optimizer.averaged_gradients[index], strict=True):
            if not parameter.requires_grad:
                continue
            chunk = math.ceil(parameter.ds_numel / world)
            whole = torch.zeros(chunk * world)
            real = max(0, min(chunk, parameter.ds_numel - me * chunk))
            whole[me * chunk : me * chunk + real] = part.flatten()[:real]
            dist.all_reduce(whole)
            full[names[parameter.ds_id]] = whole[: parameter.ds_numel]
    return full


def poisoned(
    section: dict[str, Any],
    value: float,
    where: tuple[int, int, str],
    accumulation: int,
    **options: Any,
) -> dict[str, Any]:
    """Train with one non-finite gradient entry in one process, micro-step and parameter.

    Returns residuals before and after the bad step, and the loss curve after it, beside a run in
    which the bad step's data never came.
    """
    fresh()
    victim, micro_at, parameter = where
    bad_step = 2

    def spoil(engine: Any, step: int, micro: int) -> None:
        if (step, micro, dist.get_rank()) != (bad_step, micro_at, victim):
            return
        target = dict(engine.module.named_parameters())[parameter]

        def inject(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            spoiled = gradient.clone()
            # the last entry belongs to the last owner, the first to the first
            spoiled.view(-1)[-1 if victim == 0 else 0] = value
            return spoiled

        handle = target.register_hook(inject)

    config = models.zero3_config(accumulation=accumulation, ds_ckpt=section, **options)
    # before 0.19.1 DeepSpeed takes keys out of what it is given
    engine = models.start("llama", copy.deepcopy(config))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    models.train(engine, "llama", bad_step)
    before = {n: r.clone() for n, r in session.residuals.items()}
    weights = models.weights_digest(engine)
    models.train(engine, "llama", 1, first=bad_step, spoil=spoil)
    after = session.residuals
    skipped = weights == models.weights_digest(engine)
    equal = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    held = sum(float(r.abs().sum()) > 0 for r in before.values())
    losses = models.train(engine, "llama", 3, first=bad_step + 1)
    skips = engine.skipped_steps
    engine.destroy()
    return {
        "skipped": skipped,
        "skips": skips,
        "equal": equal,
        "held": held,
        "losses": losses,
        "expected": _without_step(config, bad_step),
    }


@once
def _without_step(config: dict[str, Any], left_out: int) -> list[float]:
    """The losses of three steps behind one that never comes."""
    fresh()
    engine = models.start("llama", config)
    models.train(engine, "llama", left_out)
    engine.global_steps += 1
    losses = models.train(engine, "llama", 3, first=left_out + 1)
    engine.destroy()
    return losses


def detach_restores(section: dict[str, Any]) -> dict[str, Any]:
    """Return differences in DeepSpeed's objects after attach and detach; empty lists are right."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import stage3

    fresh()
    engine = models.start("llama", models.zero3_config(), plugin=False)
    engine._config._param_dict["ds_ckpt"] = section
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    things = [engine, engine.optimizer, coordinator, comm.cdb, engine.module]
    things += list(engine.module.modules())
    before = [dict(vars(t)) for t in things]
    globals_before = (stage3.reduce_scatter_coalesced, deepspeed.initialize)
    session = ds_ckpt.attach(engine)
    changed = [k for t, b in zip(things, before, strict=True) for k in vars(t) if _differs(t, b, k)]
    session.detach()
    left = [k for t, b in zip(things, before, strict=True) for k in vars(t) if _differs(t, b, k)]
    left += [k for t, b in zip(things, before, strict=True) for k in b if k not in vars(t)]
    same_globals = globals_before == (stage3.reduce_scatter_coalesced, deepspeed.initialize)
    gone = ds_ckpt.session_of(engine) is None
    losses = models.train(engine, "llama", 3)
    engine.destroy()
    return {
        "changed": changed,
        "left": left,
        "globals": same_globals,
        "gone": gone,
        "losses": losses,
    }


def _differs(thing: Any, before: dict[str, Any], key: str) -> bool:
    return key not in before or vars(thing)[key] is not before[key]


def resume_error(folder: str, section: dict[str, Any], kind: str = "llama") -> str:
    """The message of a load that must be refused; residuals must be untouched after it."""
    fresh()
    engine = models.start(kind, models.zero3_config(ds_ckpt=section))
    session = ds_ckpt.session_of(engine)
    models.train(engine, kind, 2)
    before = {n: r.clone() for n, r in session.residuals.items()}
    try:
        engine.load_checkpoint(folder)
        message = ""
    except ds_ckpt.DsCkptError as error:
        message = str(error)
    after = session.residuals
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    engine.destroy()
    return message


def save_plain(folder: str) -> None:
    """A checkpoint of plain DeepSpeed."""
    fresh()
    engine = models.start("llama", models.zero3_config(), plugin=False)
    models.train(engine, "llama", 2)
    engine.save_checkpoint(folder)
    engine.destroy()


def identity_check(broken: tuple[int, ...]) -> str:
    """Attach as if DeepSpeed's source had changed; in `broken` processes its reduction has, too.

    Returns the error's message, empty where training went through.
    """
    from deepspeed.runtime.zero import stage3

    from ds_ckpt.zero3 import compatibility

    fresh()
    require, original = compatibility.require, stage3.reduce_scatter_coalesced
    symbol = compatibility.SYMBOLS[0]
    changed = compatibility.SymbolFinding(symbol.path, "digest_changed", "source changed", "")
    compatibility.require = lambda symbols=None: [changed]
    if dist.get_rank() in broken:  # the sum, where the mean was meant
        stage3.reduce_scatter_coalesced = lambda tensors, group=None: [
            part * dist.get_world_size(group) for part in original(tensors, group)
        ]
    try:
        engine = models.start("llama", models.zero3_config(ds_ckpt=topk_now()))
        models.train(engine, "llama", 2)
        engine.destroy()
        return ""
    except ds_ckpt.ContractError as error:
        return str(error)
    finally:
        compatibility.require = require
        session = ds_ckpt.session_of(engine)
        if session is not None:
            session.detach()
        stage3.reduce_scatter_coalesced = original


def topk_now() -> dict[str, Any]:
    """Top-K from the first step on."""
    return models.topk_section(topk={"density": 0.05})


def _held(session: Any) -> float:
    """Return the sum of the magnitudes of this rank's residuals."""
    return sum(float(r.abs().sum()) for r in session.residuals.values())


def save_under(folder: str, section: dict[str, Any], tag: str, steps: int) -> float:
    """Train and save under a tag of the caller's; what the residuals hold then."""
    fresh()
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    models.train(engine, "llama", steps)
    engine.save_checkpoint(folder, tag)
    held = _held(ds_ckpt.session_of(engine))
    engine.destroy()
    return held


def loads(folder: str, section: dict[str, Any]) -> dict[str, float]:
    """Return the residuals' magnitude after each way to load, each into a new run."""
    held = {}
    ways: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "latest": ((folder,), {}),
        "tag": ((folder, "mine"), {}),
        "module only": ((folder,), {"load_module_only": True}),
        "no optimizer": ((folder,), {"load_optimizer_states": False}),
        "nothing there": ((folder + "/empty",), {}),
    }
    for way, (args, kwargs) in ways.items():
        fresh()
        engine = models.start("llama", models.zero3_config(ds_ckpt=section))
        session = ds_ckpt.session_of(engine)
        models.train(engine, "llama", 1)
        before = _held(session)
        engine.load_checkpoint(*args, **kwargs)
        held[way] = _held(session)
        if way == "nothing there":
            held["kept where nothing is there"] = float(before == held[way] > 0)
        engine.destroy()
    return held


def autocast_residual() -> dict[str, float]:
    """Largest residual entry after a step in fp32, and under torch autocast with its scaler.

    `asked`: how often a second step read the scaler's scale, for which a GPU's host waits.
    """
    largest = {}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    for name, sections in (("fp32", {}), ("autocast", autocast)):
        fresh()
        config = models.zero3_config(ds_ckpt=topk_now(), **sections)
        engine = models.start("llama", config)
        models.train(engine, "llama", 1)
        residuals = ds_ckpt.session_of(engine).residuals
        largest[name] = max(float(r.abs().max()) for r in residuals.values())
        scaler = engine.optimizer.torch_autocast_gradscaler
        if scaler is not None:
            largest["autocast scale"] = float(scaler.get_scale())
            with patch.object(scaler, "get_scale", wraps=scaler.get_scale) as asked:
                models.train(engine, "llama", 1, first=1)
            largest["asked"] = asked.call_count
        engine.destroy()
    return largest


def delivered_on_resume(folder: str, section: dict[str, Any]) -> tuple[float, float]:
    """Return the residuals' magnitude after loading, and after one more step."""
    fresh()
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    session = ds_ckpt.session_of(engine)
    engine.load_checkpoint(folder)
    before = _held(session)
    models.train(engine, "llama", 1, first=3)
    after = _held(session)
    engine.destroy()
    return before, after


def start_error(section: dict[str, Any]) -> str:
    """The message with which an engine refuses this section."""
    fresh()
    try:
        models.start("llama", models.zero3_config(ds_ckpt=section))
    except ds_ckpt.DsCkptError as error:
        return str(error)
    return ""


def _disturbed(disturb: Callable[[Any], None], steps: int, **options: Any) -> dict[str, Any]:
    """Training, something between two of its steps, and three steps more, beside a run without it:
    their losses, residuals and skipped steps."""
    results = {}
    for disturbed in (True, False):
        fresh()
        engine = models.start("llama", models.zero3_config(**options))
        session = ds_ckpt.session_of(engine)
        assert session is not None
        models.train(engine, "llama", steps)
        if disturbed:
            disturb(engine)
        losses = models.train(engine, "llama", 3, first=steps)
        held = {n: float(r.norm()) for n, r in session.residuals.items()}
        results[disturbed] = losses, held, engine.skipped_steps
        engine.destroy()
    return {"with": results[True], "without": results[False]}


def step_broken_off(how: str) -> dict[str, Any]:
    """A step with a gradient that is not finite, which ends in an exception.

    Args:
        how: "least scale", by DeepSpeed, which cannot halve the loss scale any more; "early",
            before the verdict.
    """
    message = ""

    def break_off(engine: Any) -> None:
        nonlocal message
        data = models.batch("llama", 77, dist.get_rank())
        loss = models.loss_of(engine(**data))
        engine.backward(loss * (math.inf if dist.get_rank() == 1 else 1))
        if how == "early":
            engine.optimizer._partition_all_parameters = _no_memory
        try:
            engine.step()
        except Exception as error:
            message = str(error)
        vars(engine.optimizer).pop("_partition_all_parameters", None)

    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1}
    found = _disturbed(break_off, 1, fp16=fp16, ds_ckpt=models.quantize_section())
    return {"message": message, **found}


def _no_memory() -> None:
    raise MemoryError("no memory")


def given_up(section: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Backward, then `zero_grad` instead of a step."""

    def give_up(engine: Any) -> None:
        data = models.batch("llama", 77, dist.get_rank())
        loss = models.loss_of(engine(**data))
        engine.backward(loss * float("nan"))
        engine.optimizer.zero_grad()

    return _disturbed(give_up, 2, accumulation=accumulation, ds_ckpt=section)
