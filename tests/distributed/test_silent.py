"""`Session.send_no_gradients`: a ceiling that sends no gradient and still trains and gathers."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
from tests.distributed.pool import ranks
from tests.distributed.test_parallel import engine_of, loss_at
from tests.distributed.training import DENSE, running


@pytest.mark.parametrize(
    "section", [{}, {"compression": {"method": "topk", "warmup_steps": 0}}], ids=["none", "topk"]
)
@ranks(2)
def test_no_gradient_is_sent_and_training_goes_on(section: dict[str, Any]) -> None:
    with running("llama", section) as engine:
        session = ds_ckpt.session_of(engine) or ds_ckpt.attach(engine)
        session.send_no_gradients()
        before, losses = session.counters.snapshot(), []
        for _ in range(3):
            loss = models.loss_of(engine(**models.batch("llama", 0, dist.get_rank())))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        sent = (session.counters.snapshot() - before).bytes_sent
    assert sent[Purpose.REDUCE] == 0
    assert sent[Purpose.GATHER_FORWARD] > 0
    assert losses[-1] < losses[0]


@ranks(4, timeout=240)
def test_a_tensor_parallel_rank_trains_its_shards_on_its_own_gradients() -> None:
    own: dict[str, torch.Tensor] = {}
    with engine_of("tp", {"ds_ckpt": DENSE}) as engine:
        ds_ckpt.session_of(engine).send_no_gradients()
        me = dist.get_rank(engine.optimizer.dp_process_group)
        for name, parameter in engine.module.named_parameters():
            parameter.register_hook(functools.partial(own.__setitem__, name))
        engine.backward(loss_at(engine, "tp", 0))
        for name, parameter in engine.module.named_parameters():
            shard = safe_get_local_grad(parameter).flatten()
            part = own[name].flatten()[me * len(shard) :][: len(shard)]
            assert torch.equal(shard[: len(part)], part), name
