"""The exchange that sends nothing: own shards, in the place and shape that ZeRO-3 counts on."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.engine.step import NoCommunication
from ds_ckpt.exchange.layout import ShardLayout


def _never(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise AssertionError("DeepSpeed's reduction was asked")


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4),
    world=st.integers(1, 7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_shards_of_all_processes_are_their_own_gradients(
    shapes: list[list[int]], world: int, dtype: torch.dtype
) -> None:
    numels = [torch.Size(shape).numel() for shape in shapes]
    for dp_rank in range(world):
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        names = [f"w{i}" for i in range(len(tensors))]
        exchange = NoCommunication(world, dp_rank)
        parts = exchange.reduce(
            names, [t.clone() for t in tensors], loss_scale=8.0, deepspeed_reduce=_never
        )
        exchange.commit()
        for part, tensor, numel in zip(parts, tensors, numels, strict=True):
            shard = ShardLayout(numel, world).shard(dp_rank)
            assert part.dtype == dtype
            assert torch.equal(part, tensor.reshape(-1)[shard])
