"""The script that `deepspeed` launches: trains every cell and measures it.

All cells live in the same processes, each with a model and an engine of its own, and take turns:
step 0 of every cell, step 1 of every cell, in an order that rotates. What disturbs the machine for
a while then disturbs all cells alike. Weights and data are the same for all: built from one seed,
drawn by step.

Process 0 writes `events.jsonl` while it runs (the orchestrator's progress bar reads it) and
`measurements.json` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.harness import cells as plan
from ds_ckpt.harness import corpus, models
from ds_ckpt.harness.experiment.folder import Folder
from ds_ckpt.harness.experiment.interfaces import link_interface, sent
from ds_ckpt.harness.results import Measurements
from ds_ckpt.harness.summary import Share, StepRecord, summarise
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
    """Entry point: `deepspeed --num_gpus 2 --module ds_ckpt.harness.train_cells --run-dir D`."""
    arguments = _arguments()
    deepspeed.init_distributed()
    process, processes = dist.get_rank(), dist.get_world_size()
    events = _Events(arguments.run_dir / "events.jsonl" if process == 0 else None)
    text = corpus.load_corpus(arguments.run_dir / "corpus")
    parameters = models.count_parameters(models.llama(seed=arguments.seed))

    trained = []
    for cell in plan.CELLS:
        events.write(phase="building", cell=cell.name)
        trained.append(_build(cell, arguments))
    batches = corpus.Batches(
        text.train,
        sequences=plan.SEQUENCES_PER_PROCESS,
        sequence_length=plan.SEQUENCE_LENGTH,
        seed=arguments.seed,
        process=process,
    )
    link = Link(arguments)
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
            events.write(phase="training", cell=one.cell.name, step=step, loss=record.loss)
    link.shape(False)
    for one in trained:
        if not one.cell.reference:
            events.write(phase="evaluating", cell=one.cell.name)
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
    events.write(phase="done")
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the demo's cells; started by deepspeed.")
    parser.add_argument("--run-dir", type=Path, required=True, help="holds configs/ and corpus/")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rate-mbit", type=float, help="of the timed steps, on emulated hosts")
    parser.add_argument("--shaped-steps", type=int, default=0, help="that many last ones")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher, unused")
    return parser.parse_args()


def _build(cell: plan.Cell, arguments: argparse.Namespace) -> Trained:
    config_path = arguments.run_dir / "configs" / cell.file_name
    model = models.llama(seed=arguments.seed)
    engine, *_ = ds_ckpt.initialize(model=model, config=str(config_path))
    session = ds_ckpt.session_of(engine)
    assert session is not None, "initialize attaches a session where the JSON has a section"
    return Trained(cell, engine, session.counters)


class Link:
    """The link between the processes. On emulated hosts it has a rate while steps are timed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._folder = Folder(arguments.run_dir)
        self._rate_mbit: float | None = arguments.rate_mbit
        self._interface = link_interface("loopback" if self._rate_mbit is None else "emulated")
        self._shaped = False

    def shape(self, wanted: bool) -> None:
        """Collective: give the link its rate, or take it off."""
        if self._rate_mbit is None or wanted == self._shaped:
            return
        dist.barrier()
        if dist.get_rank() == 0:
            self._folder.ask_for(self._rate_mbit if wanted else None)
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


class _Events:
    """Lines of JSON that the orchestrator follows; nothing on processes other than 0."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1) if path else None

    def write(self, **event: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event) + os.linesep)


if __name__ == "__main__":
    main()
