"""Run in the worker processes: the engines that `ds-ckpt measure` holds beside each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_ckpt.lab.measure.spec import Configuration, Spec
from ds_ckpt.lab.measure.worker import EngineRun, of_ids

SHAPE = {"hidden_size": 32, "layers": 1, "intermediate_size": 64, "heads": 2}


def stored_weights(names: list[str]) -> dict[str, float]:
    """Return the share of the weights that a process stores, on two hosts of two."""
    spec = Spec(hosts=2, slots=2, bf16=True, batch=1, tokens=8, shape=SHAPE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = [of_ids(torch.randint(0, 256, (1, 8), generator=generator))]
    running = {name: EngineRun(Configuration.of(name), spec) for name in names}
    found = {}
    for name, one in running.items():
        one.step(batch)
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in one.engine.module.parameters())
        found[name] = one.stored_weight_bytes / (2 * whole)
        one.end()
    return found
