"""Run in the worker processes: the state of resident weights, step by step and across runs."""

from __future__ import annotations

import copy
import gc
import hashlib
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

import ds_ckpt
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Purpose
from ds_ckpt.weights import changes
from ds_ckpt.zero3.weights_hook import WeightsHook
from tests.distributed import models
from tests.distributed.cases_levels import hosts
from tests.distributed.cases_precision import fp16_on_cpu
from tests.distributed.cases_weights import chunks_of, config_of, crossing_hosts
from tests.distributed.pool import fresh, once

GATHERS = (Purpose.GATHER_FORWARD, Purpose.GATHER_RECOMPUTE, Purpose.GATHER_BACKWARD)


class OddModel(models.PlainModel):
    """Has single elements, sizes that no world divides, and weights without a gradient: some in
    every other step, one always."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1, 1))
        self.sometimes = nn.Linear(17, 17)
        self.never = nn.Parameter(torch.ones(3))
        self.even = True

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.to(self.scale.dtype)
        if self.even:
            x = x + self.sometimes(x)
        return super().forward(x * self.scale + self.shift, labels)


def _every_other(engine: Any, step: int, micro: int) -> None:
    engine.module.even = step % 2 == 0


def _start(kind: str, section: dict[str, Any], zero: Any = None, **options: Any) -> Any:
    """An engine; `zero` are further keys of `zero_optimization`. Needs hosts."""
    config = config_of(section, **options)
    config["zero_optimization"].update(zero or {})
    if kind != "odd":
        return models.start(kind, config)
    torch.manual_seed(0)
    model = OddModel()
    flat = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": flat, "weight_decay": 0.0},
    ]
    engine, *_ = ds_ckpt.initialize(model=model, model_parameters=groups, config=config)
    engine.train()
    return engine


def _train(engine: Any, kind: str, steps: int, first: int) -> list[float]:
    if kind == "odd":
        return models.train(engine, "plain", steps, first=first, spoil=_every_other)
    return models.train(engine, kind, steps, first=first)


def _evaluate(engine: Any, kind: str) -> float:
    engine.eval()
    data = models.batch("plain" if kind == "odd" else kind, 99, dist.get_rank())
    with torch.no_grad():
        loss = float(models.loss_of(engine(**data)))
    engine.train()
    return loss


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().contiguous().view(torch.uint8)


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bits(tensor).numpy().tobytes())
    return digest.hexdigest()


def stale(engine: Any, slots: list[int]) -> list[str]:
    """Names of parameters of which this process does not keep, bit for bit, its part of what all
    owners have, with zeros behind it, once all that is under way is there."""
    session = ds_ckpt.session_of(engine)
    if session:
        session.drain()
    world, mine = dist.get_world_size(), dist.get_rank() % slots[0]
    wrong = []
    for name, param in engine.module.named_parameters():
        part = param.ds_tensor.detach().flatten()
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part)
        whole = torch.cat(parts)
        whole[param.ds_numel :] = 0
        kept = param.ds_secondary_tensor
        expected = whole[mine * kept.numel() : (mine + 1) * kept.numel()]
        right = torch.equal(_bits(kept), _bits(expected))
        if param.ds_status.name == "AVAILABLE":  # small ones are, and what is used again soon
            right &= torch.equal(_bits(param.data), _bits(whole[: param.ds_numel]))
        if not right:
            wrong.append(name)
    return wrong


def _sent(engine: Any, *purposes: Purpose) -> int:
    session = ds_ckpt.session_of(engine)
    return sum(session.counters.bytes_sent.get(p, 0) for p in purposes) if session else 0


def _laws(
    slots: list[int],
    kind: str,
    section: dict[str, Any],
    steps: int,
    chunk: int = changes.CHUNK,
    **options: Any,
) -> dict[str, Any]:
    """Train with an evaluation after each step; what is kept and what has crossed, step by step."""
    fresh()
    with hosts(slots), fp16_on_cpu(), chunks_of(chunk):
        engine = _start(kind, section, **options)
        session: Any = ds_ckpt.session_of(engine)
        resident = session and session._resident
        result: dict[str, list[Any]] = {
            key: []
            for key in ("losses", "evaluated", "weights", "skipped")
            + ("stale", "crossing", "sent", "gathered", "kept")
        }
        for step in range(steps):
            sent, gathered = _sent(engine, Purpose.WEIGHTS), _sent(engine, *GATHERS)
            skipped = engine.skipped_steps
            with crossing_hosts(slots) as crossing:
                result["losses"] += _train(engine, kind, 1, step)
                result["sent"].append(_sent(engine, Purpose.WEIGHTS) - sent)
                result["evaluated"].append(_evaluate(engine, kind))
            result["crossing"].append(len(crossing))
            result["gathered"].append(_sent(engine, *GATHERS) - gathered)
            result["skipped"].append(engine.skipped_steps - skipped)
            result["weights"].append(models.weights_digest(engine))
            if resident and resident.hook.is_attached:
                result["stale"] += stale(engine, slots)
                kept = [p.ds_secondary_tensor for p in engine.module.parameters()]
                result["kept"].append(_digest(kept))
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        owned = sum(-(-p.ds_numel // dist.get_world_size()) * p.element_size() for p in trained)
        choice = resident.tuner.choice if resident and resident.tuner else ""
        summary = session.summary if session else ""
        engine.destroy()
    return {**result, "owned": owned, "choice": choice, "summary": summary}


laws = once(when=lambda slots, kind, section, *a, **o: "weights" not in section)(_laws)


def _write(engine: Any) -> None:
    """One large parameter, and one that stays gathered, in each way that DeepSpeed has."""
    large = sorted(
        (p for p in engine.module.parameters() if p.requires_grad),
        key=lambda p: (-p.ds_numel, p.ds_id),
    )
    gathered, full, local, small = large[0], large[1], large[2], large[-1]
    with deepspeed.zero.GatheredParameters([gathered, small], modifier_rank=1):
        if dist.get_rank() == 1:
            gathered.data.mul_(1.5)
            small.data.add_(0.25)
    value = deepspeed.utils.safe_get_full_fp32_param(full)
    deepspeed.utils.safe_set_full_fp32_param(full, value * 1.5)
    value = safe_get_local_fp32_param(local)
    safe_set_local_fp32_param(local, value * (1.25 + dist.get_rank()))
    if frozen := [p for p in engine.module.parameters() if not p.requires_grad]:
        with deepspeed.zero.GatheredParameters(frozen[:2], modifier_rank=0):
            if dist.get_rank() == 0:
                frozen[0].data.mul_(0.5)


def written(slots: list[int], kind: str, section: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Two steps, writes, two steps."""
    fresh()
    with hosts(slots):
        engine = _start(kind, section, **options)
        losses = _train(engine, kind, 2, 0)
        before = _evaluate(engine, kind)
        _write(engine)
        evaluated = _evaluate(engine, kind)
        losses += _train(engine, kind, 1, 2)
        wrong = stale(engine, slots) if section else []
        losses += _train(engine, kind, 1, 3)
        result = {
            "losses": losses,
            "evaluated": evaluated,
            "before": before,
            "weights": models.weights_digest(engine),
            "stale": wrong,
        }
        engine.destroy()
    return result


# across runs


def _saved_files(folder: str) -> str:
    """One digest of the whole weights as DeepSpeed's two ways to them give them."""
    sixteen = torch.load(Path(folder) / "whole" / "model.bin")
    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder)
    ordered = [state[name] for state in (sixteen, fp32) for name in sorted(state)]
    return _digest(ordered)


def _going_on(engine: Any, split: int, steps: int) -> dict[str, Any]:
    """Return the results of an engine that has made `split` of `steps` steps."""
    return {
        "evaluated": _evaluate(engine, "llama"),
        "losses": _train(engine, "llama", steps - split, split),
        "weights": models.weights_digest(engine),
    }


def straight(
    slots: list[int], section: dict[str, Any], folder: str, split: int, steps: int, **options: Any
) -> dict[str, Any]:
    """Train without a break, saving after `split` steps; losses behind it."""
    fresh()
    with hosts(slots):
        engine = _start("llama", section, **options)
        _train(engine, "llama", split, 0)
        engine.save_checkpoint(folder)
        engine.save_16bit_model(str(Path(folder) / "whole"), "model.bin")
        dist.barrier()
        files = _saved_files(folder) if dist.get_rank() == 0 else ""
        result = {"files": files, **_going_on(engine, split, steps)}
        engine.destroy()
    return result


def resumed(
    slots: list[int], section: dict[str, Any], folder: str, split: int, steps: int, **options: Any
) -> dict[str, Any]:
    """A run with other weights loads the checkpoint and goes on."""
    fresh()
    with hosts(slots):
        engine = _start("llama", section, **options)
        _train(engine, "llama", 1, 50)
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        wrong = stale(engine, slots) if section else []
        result = _going_on(engine, split, steps)
        wrong += stale(engine, slots) if section else []
        engine.destroy()
    return {**result, "stale": wrong}


def loaded(slots: list[int], section: dict[str, Any], folder: str) -> dict[str, Any]:
    """Into a run whose weights have changed, frozen ones too: its own checkpoint; then the state of
    its optimizer by hand."""
    fresh()
    wrong, evaluated = [], []
    with hosts(slots):
        engine = _start("lora", section)
        losses = _train(engine, "lora", 1, 0)
        engine.save_checkpoint(folder)
        states = [
            copy.deepcopy(engine.optimizer.state_dict()) for _ in range(dist.get_world_size())
        ]
        frozen = next(p for p in engine.module.parameters() if not p.requires_grad)
        with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
            frozen.data.mul_(1.5)
        loads = (engine.load_checkpoint, folder), (engine.optimizer.load_state_dict, states)
        for load, what in loads:
            losses += _train(engine, "lora", 1, 1)
            load(what)
            wrong += stale(engine, slots) if section else []
            evaluated.append(_evaluate(engine, "lora"))
        losses += _train(engine, "lora", 1, 2)
        wrong += stale(engine, slots) if section else []
        result = {
            "losses": losses,
            "evaluated": evaluated,
            "weights": models.weights_digest(engine),
            "stale": wrong,
        }
        engine.destroy()
    return result


def loaded_in_vain(slots: list[int], section: dict[str, Any], folder: str) -> dict[str, Any]:
    """A load that raises when DeepSpeed has written frozen weights, and is caught: a step before
    it, three behind it, and an evaluation."""
    fresh()
    with hosts(slots):
        engine = _start("lora", section)
        losses = _train(engine, "lora", 1, 0)
        engine.save_checkpoint(folder)
        frozen = next(p for p in engine.module.parameters() if not p.requires_grad)
        with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
            frozen.data.mul_(1.5)
        losses += _train(engine, "lora", 1, 1)
        before = frozen.ds_tensor.detach().clone()

        def refuses(*args: Any, **kwargs: Any) -> None:
            raise ValueError("no such optimizer")

        patches = Patches()
        patches.set(engine.optimizer, "load_state_dict", refuses)
        with pytest.raises(ValueError, match="no such optimizer"):
            engine.load_checkpoint(folder)
        patches.undo()
        result = {"written": not torch.equal(before, frozen.ds_tensor)}
        result["evaluated"] = _evaluate(engine, "lora")
        result["losses"] = losses + _train(engine, "lora", 3, 2)
        result["weights"] = models.weights_digest(engine)
        result["stale"] = stale(engine, slots) if section else []
        engine.destroy()
    return result


# what is left behind


def moved(slots: list[int], section: dict[str, Any], folder: str) -> dict[str, Any]:
    """Weights and gradients leave the device between two steps and come back; saved where they
    are, and loaded after a step that goes elsewhere."""
    fresh()
    states = OffloadStateTypeEnum
    with hosts(slots):
        engine = _start("llama", section)
        losses = _train(engine, "llama", 2, 0)
        engine.offload_states(
            include=[states.lp_params, states.lp_grads, states.contiguous_grad_buffer]
        )
        engine.save_checkpoint(folder)
        engine.reload_states()
        wrong = stale(engine, slots) if section else []
        _train(engine, "llama", 1, 3)
        engine.load_checkpoint(folder)
        losses += _train(engine, "llama", 2, 2)
        wrong += stale(engine, slots) if section else []
        result = {"losses": losses, "weights": models.weights_digest(engine), "stale": wrong}
        if section:
            result["followed"] = _follows(engine)
        engine.destroy()
    return result


def _follows(engine: Any) -> Any:
    """Return the device of one parameter's copy after DeepSpeed has moved its shard. A stand-in
    replaces the second device. The engine is unusable afterwards."""
    param = next(engine.module.parameters())
    param.ds_tensor = SimpleNamespace(device="elsewhere")
    param.ds_secondary_tensor = SimpleNamespace(data=SimpleNamespace(to=lambda device: device))
    engine.offload_states(include=[])
    return param.ds_secondary_tensor.data


def left(slots: list[int], section: dict[str, Any]) -> dict[str, Any]:
    """Detach, a step of plain DeepSpeed, attach again, destroy. What each end leaves."""
    fresh()
    ends = []
    with hosts(slots):
        engine = _start("llama", section)
        losses = _train(engine, "llama", 2, 0)
        ends.append(_ended(engine, ds_ckpt.session_of(engine).detach))  # type: ignore[union-attr]
        losses += _train(engine, "llama", 1, 2)
        ds_ckpt.attach(engine)
        wrong = stale(engine, slots)
        losses += _train(engine, "llama", 1, 3)
        wrong += stale(engine, slots)
        digest = models.weights_digest(engine)
        ends.append(_ended(engine, engine.destroy))
        return {
            "losses": losses,
            "weights": digest,
            "stale": wrong,
            "ends": ends,
            "replaced": Init._partition.__module__.startswith("ds_ckpt"),
        }


def set_up_that_fails(slots: list[int], section: dict[str, Any]) -> dict[str, Any]:
    """Memory runs out while the copy is made: what is left of it, and a step that follows."""
    fresh()
    with hosts(slots):
        engine = _start("llama", section)
        ds_ckpt.session_of(engine).detach()  # type: ignore[union-attr]
        before = len(_GROUPS)

        def fails(self: WeightsHook) -> None:
            raise MemoryError("out of memory")

        gather, WeightsHook.gather_anew = WeightsHook.gather_anew, fails  # type: ignore[method-assign]
        message = ""
        try:
            ds_ckpt.attach(engine)
        except MemoryError as error:
            message = str(error)
        finally:
            WeightsHook.gather_anew = gather  # type: ignore[method-assign]
        grouped = sum(p.ds_zero_param_process_group is not None for p in engine.module.parameters())
        groups = len(_GROUPS) - before
        losses = _train(engine, "llama", 1, 0)
        engine.destroy()
    return {"message": message, "grouped": grouped, "groups": groups, "losses": losses}


def after_another(section: dict[str, Any]) -> list[str]:
    """Four hosts of one process, after an engine whose `zero_hpz_partition_size` was 2."""
    fresh()
    with hosts([1] * 4):
        _start("odd", {}, {"zero_hpz_partition_size": 2}).destroy()
        engine = _start("odd", section)
        _train(engine, "odd", 1, 0)
        wrong = stale(engine, [1] * 4)
        engine.destroy()
    return wrong


_GROUPS = dist.distributed_c10d._world.pg_map


def _inside(engine: Any) -> Any:
    return ds_ckpt.session_of(engine)._resident.groups[1]  # type: ignore[union-attr]


def _ended(engine: Any, end: Callable[[], None]) -> dict[str, Any]:
    """Return the objects that remain after `end`."""
    params = list(engine.module.parameters())
    kept = [weakref.ref(p.ds_secondary_tensor) for p in params]
    inside = _inside(engine)
    assert inside in _GROUPS
    end()
    gc.collect()
    return {
        "tensors": sum(tensor() is not None for tensor in kept),
        "group": inside in _GROUPS,
        "grouped": sum(p.ds_zero_param_process_group is not None for p in params),
    }
