"""Run in the worker processes: two levels on one machine that acts as two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.gradients import shapes_of
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.telemetry import Purpose
from tests.distributed import cases_compression, models
from tests.distributed.pool import fresh


@contextmanager
def hosts(slots: list[int]) -> Iterator[None]:
    """The launcher's host numbers for hosts with so many processes each."""
    numbers = [host for host, count in enumerate(slots) for _ in range(count)]
    before = os.environ.get("CROSS_RANK")
    os.environ["CROSS_RANK"] = str(numbers[dist.get_rank()])
    try:
        yield
    finally:
        if before is None:
            del os.environ["CROSS_RANK"]
        else:
            os.environ["CROSS_RANK"] = before


def run(slots: list[int], kind: str, section: dict[str, Any], steps: int, **options: Any) -> Any:
    """Run `cases_compression.run` on such nodes."""
    with hosts(slots):
        return cases_compression.run(kind, section, steps, **options)


def whole_residuals(session: Any) -> dict[str, torch.Tensor]:
    """Residuals summed over processes, at their places in the flattened parameters (fp64)."""
    world, me = dist.get_world_size(), dist.get_rank()
    columns = session.exchange.groups.peers or (tuple(range(world)),)
    members = next(column for column in columns if me in column)
    shapes = {name: shape for name, shape, _ in shapes_of(session.engine)}
    sums = {}
    for name, residual in session.residuals.items():
        numel = shapes[name].numel()
        layout = LocalShard(ShardLayout(numel, world), members)
        total = torch.zeros(numel, dtype=torch.float64)
        for member in range(len(members)):
            total[layout.source(member)] = residual[layout.shard(member)].double()
        dist.all_reduce(total)
        sums[name] = total
    return sums


def conservation(slots: list[int], section: dict[str, Any], steps: int, accumulation: int) -> Any:
    """Law 3 over two levels: the worst gap between gradients and delivered plus unsent ones."""
    with hosts(slots):
        ours, left, levels = _sums(section, steps, accumulation)
    put_in = cases_compression.default_sums("llama", {}, steps, accumulation)["taken"]
    worst = 0.0
    for name, total in put_in.items():
        gap = (ours[name] + left.get(name, torch.zeros_like(total)) - total).abs().max().item()
        worst = max(worst, gap / (total.abs().max().item() + 1e-12))
    return {
        "worst": worst,
        "levels": levels,
        "unsent": sum(t.abs().sum().item() for t in left.values()),
    }


def _sums(section: dict[str, Any], steps: int, accumulation: int) -> Any:
    fresh()
    config = models.zero3_config(lr=0.0, accumulation=accumulation, ds_ckpt=section)
    engine = models.start("llama", config)
    session = ds_ckpt.session_of(engine)
    taken: dict[str, torch.Tensor] = {}
    for micro in range(steps * accumulation):
        data = models.batch("llama", micro, dist.get_rank())
        engine.backward(models.loss_of(engine(**data)))
        if engine.is_gradient_accumulation_boundary():
            for name, gradient in cases_compression.full_gradients(engine).items():
                taken[name] = taken.get(name, 0) + gradient.double().flatten()
        engine.step()
    left = whole_residuals(session)
    levels = session.exchange.groups.levels
    engine.destroy()
    return taken, left, levels


def refused(slots: list[int]) -> str:
    """The words with which two levels are refused on such hosts."""
    fresh()
    section = models.topk_section(exchange={"levels": 2})
    with hosts(slots):
        try:
            models.start("llama", models.zero3_config(ds_ckpt=section))
        except ds_ckpt.UnsupportedError as error:
            return str(error)
    return ""


def save(slots: list[int], folder: str, section: dict[str, Any], steps: int) -> Any:
    """Train on such hosts and save; the residuals' sums."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    models.train(engine, "llama", steps)
    engine.save_checkpoint(folder, tag="mine")
    sums = whole_residuals(ds_ckpt.session_of(engine))
    engine.destroy()
    return sums


def load(slots: list[int], folder: str, section: dict[str, Any]) -> Any:
    """The residuals' sums after loading on such hosts, and losses of two more steps."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    engine.load_checkpoint(folder, tag="mine")
    sums = whole_residuals(ds_ckpt.session_of(engine))
    losses = models.train(engine, "llama", 2, first=10)
    engine.destroy()
    return sums, losses


def entries_held(slots: list[int], section: dict[str, Any]) -> Any:
    """Entries of residuals that this process holds, of the parameters' entries, and its traffic."""
    fresh()
    with hosts(slots):
        engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    session = ds_ckpt.session_of(engine)
    models.train(engine, "llama", 2)
    assert session is not None
    result = {
        "held": sum(r.numel() for r in session.residuals.values()),
        "whole": sum(s.numel() for n, s, _ in shapes_of(session.engine) if n in session.residuals),
        "sent": dict(session.counters.bytes_sent),
        "tensors": len(session.residuals),
        "summary": session.summary,
        "bytes": session.exchange.feedback.nbytes,
        "reduce": session.counters.bytes_sent[Purpose.REDUCE],
    }
    engine.destroy()
    return result
