"""Run in the worker processes: boundaries in host memory, on real ZeRO-3 engines."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ds_ckpt
from ds_ckpt.activation.planning.trace import survey
from tests import architectures
from tests.distributed import models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh, once
from tests.unit.offload_models import device_bytes, host_bytes


def _batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    tokens = torch.randint(0, architectures.VOCAB, (2, 10), generator=generator)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@once(when=lambda kind, sections: not sections)
def steps(kind: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a tiny Hugging Face model: gradients, where boundaries were, the counters."""
    fresh()
    with captured_log() as logged:
        model = architectures.build(kind)
        config = models.zero3_config(reuse=0, **sections)
        engine, *_ = ds_ckpt.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        engine.train()
        session = ds_ckpt.session_of(engine)
        refs: list[StorageWeakRef] = []
        layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and _layer(m)]
        handles = [
            layer.register_forward_pre_hook(
                lambda _, args: refs.append(StorageWeakRef(args[0].untyped_storage()))
            )
            for layer in layers
        ]
        seen: list[torch.Tensor] = []
        losses, on_device = [], []
        for step in range(2):
            torch.manual_seed(step)
            refs.clear()
            loss = engine(**_batch(step)).loss
            on_device.append(sum(not ref.expired() for ref in refs[: len(layers)]))
            engine.backward(loss)
            losses.append(float(loss))
            seen += models.gradients(engine)
            engine.step()
            del loss
        for handle in handles:
            handle.remove()
        counters = session.offload if session is not None else None
        store = session._inputs.store if counters is not None else None
        result = {
            "gradients": seen,
            "losses": losses,
            "layers": len(layers),
            "on_device": on_device,
            "out": dict(counters.out) if counters else {},
            "back": dict(counters.back) if counters else {},
            "late": counters.late if counters else None,
            "bytes": counters.out_bytes.total() if counters else 0,
            "saved": 0 if session else 2 * _saved(engine, _batch(0)),
            "gathers": max(session.counters.gathers.values()) if session else 0,
            "left_on_host": host_bytes(store) if store else None,
            "left_on_device": device_bytes(store) if store else None,
            "summary": session.summary if session else "",
        }
        engine.destroy()
    return {**result, "lines": "\n".join(logged).splitlines()}


def _saved(engine: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that all blocks but the last save, without weights and each once, from shapes alone."""
    found = survey(engine.module, (), batch)
    blocks = [c for block in found.blocks[:-1] for c in block.calls]
    saved = {s for call in blocks for s in found.saves[slice(*call.saves)]}
    return found.bytes_of(saved & found.held.keys())


def _layer(module: torch.nn.Module) -> bool:
    return any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
