"""Run in the worker processes: weights resident on every host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
from tests.distributed.cases_levels import hosts
from tests.distributed.pool import fresh, once

GATHERS = (Purpose.GATHER_FORWARD, Purpose.GATHER_RECOMPUTE, Purpose.GATHER_BACKWARD)


def config_of(section: dict[str, Any], **options: Any) -> dict[str, Any]:
    config = models.zero3_config(**{"bf16": {"enabled": True}, "clip": 1.0, **options})
    zero = config["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = 40  # biases and norms stay gathered
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    if section:
        config["ds_ckpt"] = section
    return config


def mismatched(engine: Any) -> int:
    """Parameters of which a host's copy is not the gather of all owners' parts."""
    wrong = 0
    for param in engine.module.parameters():
        if param.ds_status.name == "AVAILABLE":
            param.partition()
        param.all_gather_coalesced([param]).wait()
        kept = param.data.clone()
        param.partition()
        param.all_gather()
        wrong += not torch.equal(kept, param.data)
        param.partition()
    return wrong


@contextmanager
def crossing_hosts(slots: list[int]) -> Iterator[list[str]]:
    """Names of the collectives of weights that processes of several hosts take part in."""
    import deepspeed.comm.comm as ds_comm

    host = [h for h, count in enumerate(slots) for _ in range(count)]
    seen: list[str] = []
    names = ("all_gather_into_tensor", "all_gather")
    originals = {name: getattr(ds_comm.cdb, name) for name in names}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if group is None:
                group = next(
                    (a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD
                )
            if len({host[rank] for rank in dist.get_process_group_ranks(group)}) > 1:
                seen.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(ds_comm.cdb, name, watched(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(ds_comm.cdb, name, original)


def _run(slots: list[int], kind: str, section: dict[str, Any], steps: int, **options: Any) -> Any:
    """Train on such hosts."""
    fresh()
    with hosts(slots):
        engine = models.start(kind, config_of(section, **options))
        session = ds_ckpt.session_of(engine)
        losses = models.train(engine, kind, 1)
        with crossing_hosts(slots) as crossing:
            losses += models.train(engine, kind, steps - 1, first=1)
            engine.eval()
            with torch.no_grad():
                evaluated = float(models.loss_of(engine(**models.batch(kind, 99, dist.get_rank()))))
            engine.train()
        sent = session.counters.bytes_sent if session else {}
        result = {
            "losses": losses,
            "evaluated": evaluated,
            "weights": models.weights_digest(engine),
            "crossing": crossing,
            "sent": sent.get(Purpose.WEIGHTS, 0),
            "gathered": sum(sent.get(purpose, 0) for purpose in GATHERS),
            "summary": session.summary if session else "",
            "wrong": mismatched(engine) if "weights" in section else 0,
            "skipped": engine.skipped_steps,
        }
        engine.destroy()
    return result


run = once(when=lambda slots, kind, section, *a, **o: "weights" not in section)(_run)


def written(slots: list[int], section: dict[str, Any], way: str) -> Any:
    """The user writes weights in the middle of training; losses and what is kept after a step."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", config_of(section))
        losses = models.train(engine, "llama", 2)
        param = max(engine.module.parameters(), key=lambda p: p.ds_numel)
        if way == "gathered":
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if dist.get_rank() == 0:
                    param.data.mul_(1.5)
        else:
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 1.5)
        losses += models.train(engine, "llama", 2, first=2)
        wrong = mismatched(engine) if section else 0
        digest = models.weights_digest(engine)
        engine.destroy()
    return {"losses": losses, "wrong": wrong, "weights": digest}


def resumed(slots: list[int], section: dict[str, Any], folder: str, straight: bool) -> Any:
    """Four steps; or two, a checkpoint, a step too many, the checkpoint again, and two more."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", config_of(section))
        models.train(engine, "llama", 2)
        if not straight:
            engine.save_checkpoint(folder)
            models.train(engine, "llama", 1, first=7)
            engine.load_checkpoint(folder)
        losses = models.train(engine, "llama", 2, first=2)
        wrong = mismatched(engine)
        whole = Path(folder) / "whole"
        engine.save_16bit_model(str(whole), "model.bin")
        dist.barrier()
        saved = torch.load(whole / "model.bin")
        same = True
        for name, param in engine.module.named_parameters():
            param.all_gather()
            same &= torch.equal(saved[name].flatten(), param.data.flatten())
            param.partition()
        digest = models.weights_digest(engine)
        engine.destroy()
    return {"losses": losses, "wrong": wrong, "weights": digest, "same": same}


def detached(slots: list[int], section: dict[str, Any]) -> Any:
    """Two steps, `detach`, two more."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", config_of(section))
        before = models.train(engine, "llama", 2)
        ds_ckpt.session_of(engine).detach()
        secondary = [p.ds_secondary_tensor for p in engine.module.parameters()]
        with crossing_hosts(slots) as crossing:
            after = models.train(engine, "llama", 2, first=2)
        digest = models.weights_digest(engine)
        engine.destroy()
    return {
        "losses": before + after,
        "weights": digest,
        "kept": sum(s is not None for s in secondary),
        "crossing": len(crossing),
    }


def refused(slots: list[int], section: dict[str, Any], hpz: int = 1, **options: Any) -> str:
    """The words with which resident weights are refused."""
    fresh()
    config = config_of(section, **options)
    config["zero_optimization"]["zero_hpz_partition_size"] = hpz
    with hosts(slots):
        try:
            models.start("llama", config)
        except ds_ckpt.UnsupportedError as error:
            return str(error)
    return ""


def healed(slots: list[int], section: dict[str, Any]) -> Any:
    """Something writes to one host's copy; what the checks between hosts then find."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", config_of(section))
        models.train(engine, "llama", 1)
        hook = ds_ckpt.session_of(engine)._resident.hook  # type: ignore[union-attr]
        found = [hook.check()]
        if dist.get_rank() == 0:
            param = max(engine.module.parameters(), key=lambda p: p.ds_numel)
            param.ds_secondary_tensor.view(-1)[-1] += 1
        wrong = mismatched(engine)
        found += [hook.check(), hook.check()]
        healed = mismatched(engine)
        engine.destroy()
    return {"found": found, "wrong": wrong, "healed": healed}


def built_by_zero_init(slots: list[int], section: dict[str, Any]) -> Any:
    """A model that DeepSpeed divides while it is built."""
    fresh()
    with hosts(slots):
        config = config_of(section)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = models.build("llama")
        engine, *_ = ds_ckpt.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        engine.train()
        losses = models.train(engine, "llama", 3)
        wrong = mismatched(engine) if section else 0
        digest = models.weights_digest(engine)
        engine.destroy()
    return {"losses": losses, "wrong": wrong, "weights": digest}
