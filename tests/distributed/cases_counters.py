"""Run in the worker processes: what the counters say against what the interface says."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm

from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.zero3 import collectives
from tests.distributed.isolation import is_isolated, loopback_sent_bytes


def collective(op: str, elements: int, repeats: int) -> dict[str, Any]:
    """Bytes that this process's counters saw, and those that left through the interface."""
    world = dist.get_world_size()
    counters = Counters()
    collectives.listen(counters)
    whole = torch.zeros(elements * world)
    part = torch.zeros(elements)
    dist.barrier()
    time.sleep(0.2)
    before = loopback_sent_bytes()
    dist.barrier()
    with counters.purpose(Purpose.REDUCE):
        for _ in range(repeats):
            if op == "all_gather":
                comm.all_gather_into_tensor(whole, part)
            elif op == "reduce_scatter":
                comm.reduce_scatter_fn(part, whole)
            elif op == "all_to_all":
                comm.all_to_all_single(torch.empty_like(whole), whole)
            else:
                comm.all_reduce(whole)
    dist.barrier()
    time.sleep(0.2)
    interface = loopback_sent_bytes() - before
    collectives.unlisten(counters)
    total = torch.tensor([counters.bytes_sent[Purpose.REDUCE]], dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "isolated": is_isolated(),
        "counted": float(total),
        "interface": interface,
        "other": counters.bytes_sent[Purpose.OTHER],
        "calls": counters.collectives[Purpose.REDUCE],
    }


def nothing_left_after() -> list[str]:
    """Attributes of DeepSpeed's backend that listening changed and did not restore."""
    from deepspeed.comm import comm as ds_comm

    before = dict(vars(ds_comm.cdb))
    one, two = Counters(), Counters()
    collectives.listen(one)
    collectives.listen(two)
    comm.all_reduce(torch.zeros(4))
    collectives.unlisten(one)
    comm.all_reduce(torch.zeros(4))
    collectives.unlisten(two)
    comm.all_reduce(torch.zeros(4))
    seen = [one.collectives[Purpose.OTHER], two.collectives[Purpose.OTHER]]
    assert seen == [1, 2], seen
    after = vars(ds_comm.cdb)
    return [k for k in {*before, *after} if before.get(k) is not after.get(k)]


def group_of_one() -> int:
    """Bytes counted for collectives among one process: nothing leaves it."""
    counters = Counters()
    groups = [dist.new_group([i]) for i in range(dist.get_world_size())]
    alone = groups[dist.get_rank()]
    collectives.listen(counters)
    tensor = torch.zeros(1000)
    comm.all_reduce(tensor, group=alone)
    comm.reduce(tensor, dist.get_rank(), group=alone)
    comm.all_gather_into_tensor(torch.zeros(1000), tensor, group=alone)
    collectives.unlisten(counters)
    assert counters.collectives[Purpose.OTHER] == 3
    return counters.bytes_sent[Purpose.OTHER]
