"""Offload under ZeRO-3: every boundary but the kept one goes and comes, gradients bit-equal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import ds_ckpt
from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.activation.planning.trace import survey
from tests import architectures
from tests.distributed import models
from tests.distributed.models import equal
from tests.distributed.pool import fresh, once, ranks
from tests.distributed.training import captured_log, running
from tests.unit.offload_models import device_bytes, host_bytes

OFFLOAD = {"policy": "block", "offload": True, "offload_min_bytes": 0}
T5 = pytest.param("t5", marks=pytest.mark.slow)


def _batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, architectures.VOCAB, (2, 10), generator=generator)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@once(when=lambda kind, activation=None, **sections: activation is None and not sections)
def _steps(kind: str, activation: dict[str, Any] | None = None, **sections: Any) -> Any:
    """Two steps of a tiny Hugging Face model: gradients, where boundaries were, the counters."""
    fresh()
    section = {"activation": activation} if activation else None
    found = SimpleNamespace(losses=[], gradients=[], on_device=[])
    with (
        captured_log() as found.lines,
        running(architectures.build(kind), section, reuse=0, **sections) as engine,
    ):
        session, refs = ds_ckpt.session_of(engine), []

        def note(_: Any, args: Any) -> None:
            refs.append(StorageWeakRef(args[0].untyped_storage()))

        layers = [module for module in engine.module.modules() if models.is_layer(module)]
        found.layers = len(layers)
        handles = [layer.register_forward_pre_hook(note) for layer in layers]
        for step in range(2):
            torch.manual_seed(step)
            refs.clear()
            loss = engine(**_batch(step)).loss
            found.on_device.append(sum(not ref.expired() for ref in refs[: len(layers)]))
            engine.backward(loss)
            found.losses.append(float(loss))
            found.gradients += models.gradients(engine)
            engine.step()
            del loss
        for handle in handles:
            handle.remove()
        if session is None:
            found.saved = 2 * _saved(engine, _batch(0))
            return found
        found.summary = session.summary
        weights = {p.ds_id for layer in layers for p in layer.parameters()}
        found.gathers = max(session.counters.gathers[number] for number in weights)
        if session.offload is not None:
            counters, store = session.offload, session._inputs.store
            found.out, found.back = dict(counters.out), dict(counters.back)
            found.late, found.bytes = counters.late, counters.out_bytes.total()
            found.left = host_bytes(store), device_bytes(store)
    return found


def _saved(engine: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that all blocks but the last save, without weights and each once, from shapes alone."""
    found = survey(Forward(engine.module, (), batch))
    blocks = [c for block in found.blocks[:-1] for c in block.calls]
    saved = {s for call in blocks for s in found.saves[slice(*call.saves)]}
    return found.bytes_of(saved & found.held.keys())


@pytest.mark.parametrize(
    "kind", ["llama", T5, *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "bert"))]
)
@ranks(2)
def test_every_boundary_but_the_kept_one_leaves_and_returns(kind: str) -> None:
    plain, kept, moved = (_steps(kind, how) for how in (None, {"policy": "block"}, OFFLOAD))
    # T5's position bias adds its gradients up in another order under any checkpointing
    reference = kept if kind == "t5" else plain
    assert moved.losses == reference.losses
    assert equal(moved.gradients, reference.gradients)
    # DeepSpeed's own offload moves none of them under ZeRO-3
    assert sum(moved.out.values()) >= 2 * (moved.layers - 1)
    assert len(moved.out) >= moved.layers - 1
    assert moved.out == moved.back
    assert moved.late == 0
    assert kept.on_device == [kept.layers] * 2
    # the decoder of T5 uses the encoder's result to the end
    assert moved.on_device == [1] * 2
    assert moved.left == (0, 0)
    assert "inputs in host memory, 1 ahead" in moved.summary


@pytest.mark.parametrize("kind", ["llama", T5])
@ranks(2)
def test_all_that_blocks_save_leaves_but_no_weight(kind: str) -> None:
    plain, ours = _steps(kind), _steps(kind, {"policy": "offload", "offload_min_bytes": 0})
    assert ours.losses == plain.losses
    assert equal(ours.gradients, plain.gradients)
    assert ours.bytes == plain.saved, "activations, each once, and nothing else"
    shared = {"llama": 2, "t5": 1}[kind]  # cos and sin; the mask
    assert sum(ours.out.values()) - 2 * shared == sum(ours.back.values())
    assert ours.late == 0
    assert ours.left == (0, 0)
    assert ours.gathers <= 2 * 2, "of a block's weight, in two steps"
    assert "saved tensors in host memory" in ours.summary


@ranks(2)
def test_nothing_large_enough_is_said_once() -> None:
    found = _steps("llama", {"policy": "block", "offload": True})
    assert "inputs from 64.0 KiB on in host memory, 1 ahead" in found.summary
    lines = [line for line in found.lines if "nothing went to host memory" in line]
    assert len(lines) == (dist.get_rank() == 0)
    assert all("64.0 KiB" in line for line in lines)


@ranks(2)
def test_deepspeeds_own_key_does_what_it_says() -> None:
    pasted = {"cpu_checkpointing": True, "number_checkpoints": 4}
    ours = _steps("llama", {"offload_min_bytes": 0}, activation_checkpointing=pasted)
    assert equal(_steps("llama").gradients, ours.gradients)
    assert sum(ours.out.values()) == 6
