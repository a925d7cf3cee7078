"""The held-out loss of every cell: a training of its own. Imported by the launched processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ds_ckpt.measure.cell import Running
from ds_ckpt.measure.records import Loss
from ds_ckpt.measure.spec import BASELINES, SILENT

if TYPE_CHECKING:
    from ds_ckpt.measure.worker import Worker


def measure_losses(worker: Worker) -> None:
    """Train every cell anew, one after the other, and keep its held-out loss."""
    spec = worker.spec
    for cell in spec.cells if spec.loss_steps else ():
        if cell.method == SILENT or ("loss", cell.name) in worker.done:
            continue
        start_step = 0 if cell.method in BASELINES else spec.loss_steps // 4
        one = Running(cell, spec, start_step=start_step, total_steps=spec.loss_steps)
        losses = []
        for step in range(spec.loss_steps):
            worker.beat(f"training {cell.name} for its loss", done=step, total=spec.loss_steps)
            losses.append(one.plain_step(worker.batch(min(spec.batches), step)))
        everyone = gathered(losses)
        heldout = one.evaluate(worker.text.heldout, spec)
        one.end()
        means = tuple(sum(step) / len(everyone) for step in zip(*everyone, strict=True))
        record = Loss(
            cell=cell.name,
            steps=spec.loss_steps,
            start_step=start_step,
            heldout_loss=heldout,
            train_losses=means,
        )
        worker.append([record])


def gathered(mine: Any) -> list[Any]:
    """What every process has given, by process."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
