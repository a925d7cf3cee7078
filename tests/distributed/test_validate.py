"""`ds-ckpt validate` and a start of two processes on one node agree, row by row.

A row: keys as in tests/unit/test_config_problems.py, then `ok` (both accept), the path that both
refuse, or `?` and the path of the condition that validate announces and the start refuses.
"""

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ds_ckpt
from ds_ckpt.cli.validate import check_file
from tests.distributed import models
from tests.distributed.pool import fresh
from tests.distributed.training import trained
from tests.unit.test_config_problems import config_of, full

ROWS = """
a.policy=block optimizer.type=OneBitAdam -> optimizer.type
a.policy=block sparse_gradients=true -> sparse_gradients
a.policy=block z.reduce_bucket=5000 -> z.reduce_bucket
a.policy=block train_batch_size=5 -> train_batch_size
activation_checkpointing=[] -> activation_checkpointing
a.policy=blok -> a.policy
d={"partition_activations":true,"cpu_checkpointing":"true","number_checkpoints":4,"x":1} -> ok
a.policy=block optimizer.type=Muon -> optimizer.type
a.policy=block prescale_gradients=true -> prescale_gradients
a.policy=block a.partition=true -> ? $.ds_ckpt.activation.partition
c.method=topk c.rules=[{"match":"nothing*","method":"dense"}] -> ? $.ds_ckpt.compression.rules
a.policy=block -> ok
a.policy=selective a.save_ops="attention+qkvo" c.method=quantize w.resident=true -> ok
a.policy=block train_batch_size=8 gradient_accumulation_steps=2 -> ok
a.policy=block optimizer.type=ZeroOneAdam -> optimizer.type
a.policy=block optimizer.type=SGD optimizer.params={"lr":0.1} -> optimizer.type
a.policy=block scheduler={"type":"WarmupLRR","params":{}} -> scheduler.type
a.policy=block elasticity={"enabled":true} -> elasticity
a.policy=block curriculum_learning={"enabled":true} -> curriculum_learning
a.policy=block progressive_layer_drop={"enabled":true} -> progressive_layer_drop
a.policy=block compression_training={} -> compression_training
a.policy=block z.reduce_bucket_size=0 -> z.reduce_bucket_size
a.policy=block z.mics_shard_size=2 -> z.mics_shard_size
a.policy=block z.zeropp_loco_param={"err_beta":0.8} -> z.zeropp_loco_param
a.policy=block gradient_predivide_factor=2.0 -> gradient_predivide_factor
a.policy=block gradient_allreduce_op=sum -> gradient_allreduce_op
a.policy=block bf16.enabled=true fp16.enabled=true -> bf16.enabled
c.method=topk z.stage=2 -> z.stage
a.policy=block train_micro_batch_size_per_gpu="auto" -> ? "auto"
a.policy=block a.modules=["Blok"] -> ? $.ds_ckpt.activation
c.method=topk c.exchange.levels=2 -> ? $.ds_ckpt.compression.exchange.levels
a.policy=block optimizer.params={"lrr":1} -> optimizer.params.lrr
a.policy=block optimizer.params={"max_grad_norm":1} -> optimizer.params.max_grad_norm
a.policy=block scheduler.type=WarmupLR -> scheduler.type
scheduler={"type":"WarmupLR","params":{"warmup_steps":3}} -> scheduler.params.warmup_steps
a.policy=block scheduler={"type":"WarmupDecayLR","params":{"warmup_min_lr":0}} -> scheduler.params
a.policy=block scheduler={"type":"WarmupLR","params":{"warmup_num_steps":5}} -> ok
a.policy=selective a.save_ops="matmul" -> a.save_ops
a.policy=block a.rules=[{"match":"0","policy":"selective","save_ops":"x"}] -> a.rules[0].save_ops
a.policy=selective a.save_ops="torchvision.nms" -> ? $.ds_ckpt.activation
a.policy=block fp16.enabled=true -> ? $.fp16.enabled
"""


def answers(configs: list[dict[str, Any]]) -> list[tuple[list[str], list[str], str]]:
    """Of each configuration: the paths that validate refuses and announces, and start's error."""
    is_first = dist.get_rank() == 0
    nothing: tuple[list[str], list[str]] = ([], [])
    return [(*(_validated(c) if is_first else nothing), _started(c)) for c in configs]


def _validated(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "zero3.json")
        path.write_text(json.dumps(config))
        result = check_file(path, dist.get_world_size())
    announced = [words.partition(": ")[0] for words in result.get("conditions", ())]
    return [problem["where"] for problem in result["problems"]], announced


def _started(config: dict[str, Any]) -> str:
    fresh()
    model = models.build("llama")
    try:
        engine, *_ = ds_ckpt.initialize(
            model=model, model_parameters=list(model.parameters()), config=copy.deepcopy(config)
        )
    except Exception as error:
        return str(error) or type(error).__name__
    with contextlib.suppress(Exception):
        engine.destroy()
    return ""


def test_validate_and_start_agree(world2: Any) -> None:
    rows = [row.split(" -> ") for row in ROWS.strip().splitlines()]
    defaults = config_of('optimizer={"type":"AdamW","params":{"lr":0.01,"torch_adam":true}}')
    defaults["zero_force_ds_cpu_optimizer"] = False
    configs = []
    for keys, _ in rows:
        written = config_of(keys)
        optimizer = {**defaults["optimizer"], **written.get("optimizer", {})}
        micro = {"train_micro_batch_size_per_gpu": 2}
        configs.append({**defaults, **micro, **written, "optimizer": optimizer})
    found = world2.run(answers, configs, timeout=240)[0]
    for (keys, expected), (refused, announced, error) in zip(rows, found, strict=True):
        if expected == "ok":
            assert (refused, error) == ([], ""), keys
        elif expected.startswith("? "):
            assert not refused, keys
            assert expected[2:] in announced, (keys, announced)
            assert error, keys
            assert "ds_ckpt" not in expected or expected[2:] in error, keys
        else:
            assert refused == [full(expected)], keys
            assert error, keys


def pasted_without_group() -> dict[str, Any]:
    """Train with `partition_activations` on ranks that are data-parallel alone."""
    fresh()
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    engine = models.start("llama", models.zero3_config(activation_checkpointing=section))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    losses = models.train(engine, "llama", 2)
    found = {"losses": losses, "summary": session.summary, "partition": session.partition}
    engine.destroy()
    return found


def test_a_pasted_section_trains_without_a_tensor_parallel_group(world2: Any) -> None:
    plain = world2.run(trained, "llama", {}, 2)
    for stock, ours in zip(plain, world2.run(pasted_without_group), strict=True):
        assert ours["losses"] == stock.losses
        assert ours["partition"] is None
        assert "host memory" in ours["summary"]
        assert "split" not in ours["summary"]
