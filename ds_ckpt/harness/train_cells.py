"""The script that `deepspeed` launches: trains every cell and measures it.

All cells live in the same processes, each with a model and an engine of its own, and take turns:
step 0 of every cell, step 1 of every cell, in an order that rotates. What disturbs the machine for
a while then disturbs all cells alike. Weights and data are the same for all: built from one seed,
drawn by step.

Process 0 tells of every step (the progress bar shows it) and
`measurements.json` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.harness import cells as plan
from ds_ckpt.harness import corpus, models
from ds_ckpt.harness.results import Measurements
from ds_ckpt.harness.summary import Share, StepRecord, summarise
from ds_ckpt.hosts.heartbeat import Heartbeat, begin
from ds_ckpt.hosts.interfaces import link_interface, sent
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.telemetry.memory import SavedActivations

EVALUATION_BATCHES = 24


@dataclass
class Trained:
    """A cell while it trains."""

    cell: plan.Cell
    engine: Any
    counters: Counters
    held_bytes: int = 0
    heldout_loss: float | None = None
    weights_sha256: str = ""
    steps: list[StepRecord] = field(default_factory=list)


def main() -> None:
    """Entry point of every process."""
    heartbeat, job = begin("Trains the demo's cells; started by deepspeed.")
    arguments = argparse.Namespace(run_dir=heartbeat.folder, **job)
    process, processes = dist.get_rank(), dist.get_world_size()
    text = corpus.load_corpus(arguments.run_dir / "corpus")
    parameters = models.count_parameters(models.llama(seed=arguments.seed))

    trained = []
    for cell in plan.CELLS:
        heartbeat.beat(phase="building", cell=cell.name)
        trained.append(_build(cell, arguments))
    batches = corpus.Batches(
        text.train,
        sequences=plan.SEQUENCES_PER_PROCESS,
        sequence_length=plan.SEQUENCE_LENGTH,
        seed=arguments.seed,
        process=process,
    )
    link = Link(arguments, heartbeat)
    for step in range(arguments.steps):
        link.shape(step >= arguments.steps - arguments.shaped_steps)
        batch = batches.batch(step).to(get_accelerator().current_device_name())
        for place in range(len(trained)):
            one = trained[(place + step) % len(trained)]
            if step >= plan.cell_steps(one.cell, arguments.steps):
                continue
            with link.shaped_for(one.cell):
                record = _step(one, batch, link, measure_activations=step == 0)
            one.steps.append(record)
            heartbeat.beat(phase="training", cell=one.cell.name, step=step, loss=record.loss)
    link.shape(False)
    for one in trained:
        if not one.cell.reference:
            heartbeat.beat(phase="evaluating", cell=one.cell.name)
            one.heldout_loss = _evaluate(one.engine, text.heldout, process, processes)
        one.weights_sha256 = _weights_sha256(one.engine)

    everyone: list[list[Share] | None] = [None] * processes
    dist.all_gather_object(everyone, [_share(one) for one in trained])
    if process == 0:
        shares = [share for share in everyone if share is not None]
        results = tuple(
            summarise(
                one.cell,
                [share[i] for share in shares],
                arguments.steps,
                shaped_steps=arguments.shaped_steps,
            )
            for i, one in enumerate(trained)
        )
        measurements = Measurements(cells=results, parameters=parameters)
        path = arguments.run_dir / "measurements.json"
        path.write_text(measurements.model_dump_json(indent=2), encoding="utf-8")
    heartbeat.beat(phase="done")
    dist.barrier()
    dist.destroy_process_group()


def _build(cell: plan.Cell, arguments: argparse.Namespace) -> Trained:
    config_path = arguments.run_dir / "configs" / cell.file_name
    model = models.llama(seed=arguments.seed)
    engine, *_ = ds_ckpt.initialize(model=model, config=str(config_path))
    session = ds_ckpt.session_of(engine)
    assert session is not None, "initialize attaches a session where the JSON has a section"
    return Trained(cell, engine, session.counters)


class Link:
    """The link between the processes. On emulated hosts it has a rate while steps are timed."""

    def __init__(self, arguments: argparse.Namespace, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._rate_mbit: float | None = arguments.rate_mbit
        self._interface = link_interface("loopback" if self._rate_mbit is None else "emulated")
        self._shaped = False

    def shape(self, wanted: bool) -> None:
        """Collective: give the link its rate, or take it off."""
        if self._rate_mbit is None or wanted == self._shaped:
            return
        dist.barrier()
        self._heartbeat.ask(rate_mbit=self._rate_mbit if wanted else None)
        dist.barrier()
        self._shaped = wanted

    @contextmanager
    def shaped_for(self, cell: plan.Cell) -> Iterator[None]:
        """The reference takes few steps, the first ones; its link has the rate in each of them."""
        before = self._shaped
        self.shape(before or cell.reference)
        yield
        self.shape(before)

    def sent_bytes(self) -> int | None:
        """By the interface to the other process, since the machine was started."""
        return None if self._interface is None else sent(self._interface).link_bytes


def _step(
    one: Trained, batch: torch.Tensor, link: Link, *, measure_activations: bool
) -> StepRecord:
    engine = one.engine
    engine.train()
    dist.barrier()
    before = link.sent_bytes()
    counted_before = one.counters.snapshot()
    started = time.perf_counter()
    if measure_activations:
        with SavedActivations(engine.module) as held:
            loss = engine(input_ids=batch, labels=batch).loss
        one.held_bytes = held.bytes
    else:
        loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    get_accelerator().synchronize()
    time_s = time.perf_counter() - started
    # Every session hears the collectives of all engines; between these two moments they are ours.
    delta = one.counters.snapshot() - counted_before
    by_purpose = {purpose.value: delta.bytes_sent.get(purpose, 0) for purpose in Purpose}
    dist.barrier()  # The other process still sends until here.
    after = link.sent_bytes()
    by_interface = None if before is None or after is None else after - before
    return StepRecord(loss.item(), time_s, by_purpose, by_interface)


def _evaluate(engine: Any, text: bytes, process: int, processes: int) -> float:
    engine.eval()
    device = get_accelerator().current_device_name()
    losses = []
    with torch.no_grad():
        for batch in corpus.evaluation_batches(
            text,
            sequences=plan.SEQUENCES_PER_PROCESS,
            sequence_length=plan.SEQUENCE_LENGTH,
            batches=EVALUATION_BATCHES,
            process=process,
            processes=processes,
        ):
            ids = batch.to(device)
            losses.append(engine(input_ids=ids, labels=ids).loss.double())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return float(mean) / processes


def _weights_sha256(engine: Any) -> str:
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        shard = parameter.ds_tensor.detach().cpu().contiguous()
        digest.update(shard.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _share(one: Trained) -> Share:
    return Share(one.held_bytes, one.heldout_loss, one.weights_sha256, tuple(one.steps))


if __name__ == "__main__":
    main()
