"""Run in the worker processes: weights resident on every host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.tuner import COUNTED_STEPS
from ds_ckpt.weights import changes, transfer
from ds_ckpt.zero3.resident import HOST_COPY, host_copy_bytes, resident_bytes
from tests.distributed import models
from tests.distributed.cases_levels import hosts
from tests.distributed.pool import fresh

BLOCK = 1 + COUNTED_STEPS


def config_of(section: dict[str, Any], *, persistence: int = 40, **options: Any) -> dict[str, Any]:
    """Return a configuration in which biases and norms stay gathered."""
    config = models.zero3_config(**{"bf16": {"enabled": True}, "clip": 1.0, **options})
    zero = config["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = persistence
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
    """Names of the collectives of weights that processes of several hosts take part in, or one
    alone, which has nothing to gather."""
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
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) == 1 or len({host[rank] for rank in ranks}) > 1:
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


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Chunks of about so many elements, of which two are under way at a time."""
    before = changes.CHUNK, transfer.IN_FLIGHT
    changes.CHUNK, transfer.IN_FLIGHT = size, 2
    try:
        yield
    finally:
        changes.CHUNK, transfer.IN_FLIGHT = before


def placed(
    slots: list[int], section: dict[str, Any], folder: str, resident_s: float, hpz: int = 1
) -> Any:
    """A cycle of the tuner on a clock on which a resident step takes `resident_s`, any other 1.

    Returns:
        losses, digest, and where the weights were in each step; the choice, and parameters with a
        copy at the end; where they are after a load; wrong copies.
    """
    fresh()
    config = config_of(section)
    config["zero_optimization"]["zero_hpz_partition_size"] = hpz
    with hosts(slots):
        engine = models.start("llama", config)
        session: Any = ds_ckpt.session_of(engine)
        if session is None:
            losses = models.train(engine, "llama", 2 * BLOCK + 2)
            plain = {"losses": losses, "weights": models.weights_digest(engine)}
            engine.destroy()
            return plain
        hook, tuner = session._resident.hook, session._resident.tuner
        places = []

        def seconds() -> float:
            places.append(hook.is_attached)
            return resident_s if hook.is_attached else 1.0

        models.set_clock(tuner, seconds)
        losses = models.train(engine, "llama", 2 * BLOCK + 2)
        wrong = mismatched(engine) if hook.is_attached else 0
        copies = [p.ds_secondary_tensor is not None for p in engine.module.parameters()]
        result = {
            "losses": losses,
            "weights": models.weights_digest(engine),
            "places": list(places),
            "choice": tuner.choice,
            "kept": sum(copies),
            "wrong": wrong,
        }
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        result["placed after a load"] = hook.is_attached
        models.train(engine, "llama", 1, first=len(losses))
        engine.destroy()
    return result


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


def budgeted(slots: list[int], kind: str, section: dict[str, Any], gib: float, **o: Any) -> Any:
    """A budget for the accelerator: what hosts keep before the first batch, what is counted of it
    there and between steps, or the words of the refusal."""
    fresh()
    hpz = o.pop("hpz", 1)
    activation = {"policy": "budget", "budget_gib": gib, "budget_of": "accelerator"}
    if kind in models.PLAIN:
        activation["modules"] = [models.PLAIN[kind]]
    config = config_of({**section, "activation": activation}, **o)
    config["zero_optimization"]["zero_hpz_partition_size"] = hpz
    with hosts(slots):
        engine = models.start(kind, config)
        session: Any = ds_ckpt.session_of(engine)
        parameters = list(engine.module.parameters())
        kept = [p.ds_secondary_tensor for p in parameters if p.ds_secondary_tensor is not None]
        counts, (itemsize,) = [p.ds_numel for p in parameters], {p.itemsize for p in parameters}
        result = {
            "kept": sum(tensor.nbytes for tensor in kept),
            "hook": session._resident.hook.nbytes if session._resident else None,
            "formula": host_copy_bytes(counts, sum(slots), slots[0], itemsize),
            "whole": sum(counts) * itemsize,
        }
        try:
            models.train(engine, kind, 1)
            result["planned"] = session.activation_plan.resident.get(HOST_COPY, 0)
            result["counted"] = resident_bytes(engine, []).get(HOST_COPY, 0)
        except ds_ckpt.UnsupportedError as error:
            result["refusal"] = str(error)
        engine.destroy()
    return result


def without_room(slots: list[int], section: dict[str, Any]) -> str:
    """Return each rank's message if the last rank has no memory for a copy."""
    fresh()
    from ds_ckpt.engine import resident_weights

    free_on = resident_weights.free_on
    if dist.get_rank() == sum(slots) - 1:
        resident_weights.free_on = lambda device: 1
    try:
        with hosts(slots):
            models.start("llama", config_of(section))
    except ds_ckpt.DsCkptError as error:
        return str(error)
    finally:
        resident_weights.free_on = free_on
    return ""


def healed(slots: list[int], kind: str, section: dict[str, Any]) -> Any:
    """Something writes to one host's copy of the largest parameter; what the checks then find."""
    fresh()
    with hosts(slots):
        engine = models.start(kind, config_of(section))
        models.train(engine, kind, 1)
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


def of_one_zero_init(
    slots: list[int], kind: str, sections: list[dict[str, Any]], end: str, **options: Any
) -> Any:
    """Two models that DeepSpeed divides together, each with its section. The first one ends in a
    way while both train on, or neither; weights of the second are written."""
    fresh()
    with hosts(slots):
        configs = [config_of(section, **options) for section in sections]
        with deepspeed.zero.Init(config_dict_or_path=config_of({}, **options)):
            two = [models.build(kind) for _ in sections]
        engines = [
            ds_ckpt.initialize(model=m, model_parameters=list(m.parameters()), config=config)[0]
            for m, config in zip(two, configs, strict=True)
        ]
        for engine in engines:
            engine.train()
        losses = [models.train(engine, kind, 2) for engine in engines]
        if end == "destroy":
            engines.pop(0).destroy()
        elif end == "detach" and sections[0]:
            ds_ckpt.session_of(engines[0]).detach()  # type: ignore[union-attr]
        param = max(engines[-1].module.parameters(), key=lambda p: p.ds_numel)
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if dist.get_rank() == 0:
                param.data.mul_(1.5)
        wrong = mismatched(engines[-1]) if sections[-1] else 0
        losses += [models.train(engine, kind, 2, first=2) for engine in engines]
        digests = [models.weights_digest(engine) for engine in engines]
        for engine in engines:
            engine.destroy()
    return {"losses": losses, "wrong": wrong, "weights": digests}


def gathered_together(
    slots: list[int], sections: dict[str, dict[str, Any]], order: str, written: str
) -> Any:
    """Engines `a` and `b`, made in that order; all weights of both are gathered in one context, a
    before b, and those of one are moved half the way to the other's."""
    fresh()
    with hosts(slots), chunks_of(200):
        engines = {name: models.start("llama", config_of(sections[name])) for name in order}
        a, b = engines["a"], engines["b"]
        losses = [models.train(a, "llama", 2), models.train(b, "llama", 1)]
        both = [list(engine.module.parameters()) for engine in (a, b)]
        to, source = both if written == "a" else reversed(both)
        with deepspeed.zero.GatheredParameters([*both[0], *both[1]], modifier_rank=0):
            if dist.get_rank() == 0:
                for param, other in zip(to, source, strict=True):
                    param.data.lerp_(other.data, 0.5)
        wrong = [mismatched(engines[name]) for name in "ab" if sections[name]]
        for engine in (a, b):
            losses.append(models.train(engine, "llama", 2, first=2))
        digests = [models.weights_digest(engine) for engine in (a, b)]
        for engine in (a, b):
            engine.destroy()
    return {"losses": losses, "wrong": sum(wrong), "weights": digests}
