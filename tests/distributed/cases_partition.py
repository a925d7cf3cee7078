"""Run in the worker processes: boundaries split over a tensor-parallel group, on real engines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import ds_ckpt
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.counters import PartitionCounters, Purpose
from tests.distributed import models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh, once
from tests.distributed.tensor_parallel import (
    MegatronMpu,
    ParallelModel,
    across,
    auto_tp,
    mpu_forgotten,
    neighbours,
)
from tests.unit.offload_models import device_bytes, host_bytes


def _build(kind: str, dropout: float) -> torch.nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "attention_dropout": dropout,
        "use_cache": False,
    }
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    config = transformers.GPTNeoXConfig(hidden_dropout=dropout, **sizes)
    return transformers.GPTNeoXForCausalLM(config)


def tokens_of(replica: int, step: int, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    tokens = torch.randint(0, 64, (2, length), generator=generator)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@once(when=lambda kind, size, sections, **how: not sections)
def auto(
    kind: str,
    size: int,
    sections: dict[str, Any],
    *,
    dropout: float = 0.0,
    seeds: str = "equal",
    steps: int = 2,
    twice: bool = False,
) -> dict[str, Any]:
    """Steps under AutoTP and ZeRO-3: gradients, what was kept, what was sent; or the error.

    Args:
        seeds: "equal" in the whole tensor-parallel group, or "different" in each process.
        twice: two forwards before a backward, and the second graph's backward twice.
    """
    fresh()
    with captured_log() as logged, auto_tp(size):
        model = _build(kind, dropout)
        config = models.zero3_config(reuse=0, tensor_parallel={"autotp_size": size}, **sections)
        engine, *_ = ds_ckpt.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        try:
            trained = _train(engine, size, seeds, steps, twice)
            return {**trained, "lines": "\n".join(logged).splitlines()}
        finally:
            engine.destroy()


def _train(engine: Any, size: int, seeds: str, steps: int, twice: bool) -> dict[str, Any]:
    engine.train()
    session = ds_ckpt.session_of(engine)
    layers = [m for m in engine.module.modules() if _layer(m)]
    inputs: list[tuple[int, StorageWeakRef]] = []

    def see(_: Any, args: Any) -> None:
        storage = args[0].untyped_storage()
        inputs.append((storage.nbytes(), StorageWeakRef(storage)))

    handles = [layer.register_forward_pre_hook(see) for layer in layers]
    replica = dist.get_rank() // size
    result: dict[str, Any] = {"gradients": [], "losses": [], "alive": [], "kept": [], "whole": []}
    counters = session.counters if session is not None else Counters()
    for step in range(steps):
        seed = 31 * step + replica
        torch.manual_seed(seed if seeds == "equal" else 1000 * seed + dist.get_rank())
        inputs.clear()
        before = counters.snapshot()
        extra = engine(**tokens_of(replica, step + 50)).loss if twice else None
        held = len(inputs)
        loss = engine(**tokens_of(replica, step)).loss
        result["alive"].append(sum(not ref.expired() for _, ref in inputs[held:]))
        result["whole"].append(sum(nbytes for nbytes, _ in inputs[held:]))
        store = session._inputs.store if session and session._inputs else None
        partition = session.partition if session else None
        result["kept"].append(dict(partition.kept_bytes) if partition else {})
        result["held"] = device_bytes(store) + host_bytes(store) if store else None
        if extra is not None:
            loss = loss + extra
        engine.backward(loss)
        result["losses"].append(float(loss))
        result["gradients"] += models.gradients(engine)
        result["sent"] = (counters.snapshot() - before).bytes_sent[Purpose.PARTITION]
        if partition is not None:
            result["late"] = partition.late
        engine.step()
        if partition is not None:
            session._inputs.partition.counters = PartitionCounters()
        del loss, extra
    for handle in handles:
        handle.remove()
    if store is not None:
        result["left_over"] = (device_bytes(store), host_bytes(store))
        result["out"] = store.counters.out.total()
    return {**result, "summary": session.summary if session else ""}


def _layer(module: torch.nn.Module) -> bool:
    return any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)


def _config(sections: dict[str, Any]) -> dict[str, Any]:
    return models.zero3_config(reuse=0, **sections)


def megatron(
    size: int,
    sections: dict[str, Any],
    *,
    way: str = "initialize",
    dropout: float = 0.0,
    modules: bool = True,
) -> dict[str, Any]:
    """One step of a Megatron-style model, its mpu handed over in one of the ways there are.

    Args:
        way: "initialize", "old" (an mpu of old Megatron's), or "attach" (to an engine that knows
            of a mpu only through `attach`).
    """
    fresh()
    mpu = MegatronMpu(neighbours(size), across(size), old=way == "old")
    replica = dist.get_rank() // size
    with mpu_forgotten():
        model = ParallelModel(mpu.get_model_parallel_group(), dropout=dropout)
        given = {"model": model, "model_parameters": list(model.parameters()), "mpu": mpu}
        if way == "attach":
            import deepspeed

            engine, *_ = deepspeed.initialize(**given, config=_config(sections))
            engine.mpu = None
            ds_ckpt.attach(engine, mpu=mpu)
        else:
            engine, *_ = ds_ckpt.initialize(**given, config=_config(sections))
        engine.train()
        torch.manual_seed(replica)
        x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(replica))
        session = ds_ckpt.session_of(engine)
        loss = engine(x)
        partition = session.partition if session else None
        kept = dict(partition.kept_bytes) if partition else {}
        engine.backward(loss)
        gradients = models.gradients(engine)
        engine.step()
        engine.destroy()
    return {"gradients": gradients, "loss": float(loss), "kept": kept}


def refused(how: str) -> str:
    """The words of the error for a group over which nothing can be split.

    Args:
        how: "none" (data parallel alone), "one" (AutoTP of one process).
    """
    fresh()
    own = {"policy": "block", "partition": True, "modules": ["ParallelBlock"]}
    sections: dict[str, Any] = {"ds_ckpt": {"activation": own}}
    mpu = MegatronMpu(neighbours(1), neighbours(dist.get_world_size())) if how == "one" else None
    with mpu_forgotten():
        model = ParallelModel(None)
        parameters = list(model.parameters())
        try:
            ds_ckpt.initialize(
                model=model, model_parameters=parameters, mpu=mpu, config=_config(sections)
            )
        except ds_ckpt.DsCkptError as error:
            return str(error)
    return ""


def disguised(what: str) -> str:
    """Processes that train on different data under an mpu that calls them tensor-parallel.

    Args:
        what: "data" (other values), "length" (other shapes) or "blocks" (another number of blocks).
    """
    fresh()
    world, me = dist.get_world_size(), dist.get_rank()
    mpu = MegatronMpu(neighbours(world), neighbours(1))
    sections: dict[str, Any] = {"activation_checkpointing": {"partition_activations": True}}
    own = {"modules": ["ParallelBlock"], "partition_min_bytes": 0}
    sections["ds_ckpt"] = {"activation": own}
    with mpu_forgotten():
        model = ParallelModel(None, blocks=3 + (me if what == "blocks" else 0))
        engine, *_ = ds_ckpt.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            mpu=mpu,
            config=_config(sections),
        )
        engine.train()
        length = 5 + (me if what == "length" else 0)
        seed = me if what == "data" else 0
        x = torch.randn(2, length, 7, generator=torch.Generator().manual_seed(seed))
        try:
            engine.backward(engine(x))
        except ds_ckpt.DsCkptError as error:
            return str(error)
        finally:
            engine.destroy()
    return ""


def different_seeds(kind: str, dropout: float) -> str:
    """The words of the error that AutoTP with a seed of its own in every process ends in."""
    sections: dict[str, Any] = {
        "activation_checkpointing": {"partition_activations": True},
        "ds_ckpt": {"activation": {"partition_min_bytes": 0}},
    }
    try:
        auto(kind, 2, sections, dropout=dropout, seeds="different")
    except ds_ckpt.DsCkptError as error:
        return str(error)
    return ""
