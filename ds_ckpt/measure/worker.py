"""The script that `deepspeed` launches for `ds-ckpt measure`.

    deepspeed ... --module ds_ckpt.measure.worker --folder F

All cells live in the same processes, each with an engine of its own, and take turns, in an order
that rotates, so that what disturbs the machine for a while disturbs all of them alike; so do the
link's rates. Only process 0 needs the folder: it hands the others what is to be done, and appends
to `samples.jsonl` after every turn. What stands there already is not measured again.

Which rate a link has is not this process's to decide: `Folder.ask_for` asks whoever launched.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_ckpt.harness import corpus, models
from ds_ckpt.harness.experiment.folder import Folder, Watchdog
from ds_ckpt.harness.experiment.interfaces import Sent, link_interface, sent
from ds_ckpt.measure.cell import Running, Step
from ds_ckpt.measure.losses import gathered, measure_losses
from ds_ckpt.measure.records import Memory, Model, Sample, Timeline, Turn
from ds_ckpt.measure.spec import STOCK, Cell, Spec
from ds_ckpt.measure.turns import Variant, equal_memory, median_index, slowest
from ds_ckpt.telemetry import Purpose

SETTLE_S = 0.15
"""How long nothing is sent around a reading of the interfaces' counters."""


@dataclass
class Worker:
    """This process's end of a run."""

    spec: Spec
    folder: Folder
    text: corpus.Corpus
    done: set[tuple[Any, ...]]
    watchdog: Watchdog
    interface: str | None

    def batch(self, sequences: int, step: int) -> torch.Tensor:
        batches = corpus.Batches(
            self.text.train,
            sequences=sequences,
            sequence_length=self.spec.tokens,
            seed=self.spec.seed,
            process=dist.get_rank(),
        )
        return batches.batch(step).to(get_accelerator().current_device_name())

    def run(self) -> None:
        parameters = models.count_parameters(models.llama(seed=self.spec.seed, **self.spec.shape))
        model = Model(
            parameters=parameters,
            text=self.text.source,
            heldout_bytes=len(self.text.heldout),
            corpus_sha256=self.text.sha256,
        )
        self.append([model])
        self._measure_turns()
        measure_losses(self)
        self.folder.beat("done")

    def _measure_turns(self) -> None:
        spec = self.spec
        usual = [Variant(c, b) for b in spec.batches for c in spec.cells]
        memories = [
            ("memory", cell.name, factor * min(spec.batches))
            for cell in spec.cells
            for factor in (1, 2)
            if cell.method == STOCK
        ]
        wanted = [v.key(rate, r) for r in range(spec.rounds) for rate in spec.rates for v in usual]
        if self.done.issuperset([*wanted, *memories]) and ("turns done",) in self.done:
            return
        running = {}
        for cell in spec.cells:
            self.beat(f"building {cell.name}")
            running[cell] = Running(cell, spec)
            for step in range(spec.warm_up):
                running[cell].plain_step(self.batch(min(spec.batches), step))
        found: dict[tuple[object, ...], Memory] = {
            key: self._memory(running[Cell.of(key[1])], key[2]) for key in memories
        }
        variants = [*usual, *(equal_memory(spec, found) if spec.equal_memory else [])]
        for variant in variants:
            if variant.equal_memory and variant.cell.method == STOCK:
                self._memory(running[variant.cell], variant.sequences)
        total = spec.rounds * len(spec.rates) * len(variants)
        count = 0
        for round_ in range(spec.rounds):
            for rate in spec.rates:
                self._ask_for(rate)
                for place in range(len(variants)):
                    variant = variants[(place + round_) % len(variants)]
                    count += 1
                    self.beat(f"{count} of {total} turns", done=count, total=total)
                    if variant.key(rate, round_) not in self.done:
                        self._turn(running[variant.cell], variant, rate, round_)
        self._ask_for(None)
        for one in running.values():
            one.end()
        self._note_turns_done()

    def _memory(self, one: Running, sequences: int) -> Memory:
        """The record of one cell's activations; the same on all processes."""
        self.beat(f"memory of {one.cell.name}")
        device = get_accelerator().current_device_name()  # NCCL takes no tensor of the host
        most = torch.tensor(one.memory(self.batch(sequences, 0)), dtype=torch.int64, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        held, peak = (int(n) for n in most)
        record = Memory(cell=one.cell.name, sequences=sequences, held_bytes=held, peak_bytes=peak)
        if record.key not in self.done:
            self.append([record])
        return record

    def _turn(self, one: Running, variant: Variant, rate: float | None, round_: int) -> None:
        spec = self.spec
        first = round_ * (spec.steps + spec.drop)
        for step in range(spec.drop):
            one.plain_step(self.batch(variant.sequences, first + step))
        before, counted = self._settled(), one.session.counters.snapshot()
        steps: list[Step] = []
        for step in range(spec.steps):
            steps.append(one.step(self.batch(variant.sequences, first + spec.drop + step)))
            self.beat(None)
        delta = one.session.counters.snapshot() - counted
        bytes_ = self._settled() - before
        mine = {
            "times": [step.time for step in steps],
            "purposes": {p.value: delta.bytes_sent.get(p, 0) / spec.steps for p in Purpose},
            "sent": bytes_,
            "leads": int(os.environ.get("LOCAL_RANK", "0")) == 0,
        }
        everyone = gathered(mine)
        hosts = [one["sent"] for one in everyone if one["leads"]]
        at: dict[str, Any] = {
            "cell": one.cell.name,
            "rate_mbit": rate,
            "sequences": variant.sequences,
        }
        turn = Turn(
            **at,
            equal_memory=variant.equal_memory,
            round=round_,
            steps=slowest([one["times"] for one in everyone]),
            purpose_bytes={
                p.value: sum(one["purposes"][p.value] for one in everyone) for p in Purpose
            },
            link_bytes=tuple(host.link_bytes / spec.steps for host in hosts),
            interface_bytes=sum(host.all_bytes for host in hosts) / spec.steps,
        )
        records: list[Sample] = [turn]
        if round_ == spec.rounds - 1 and not variant.equal_memory:
            shown = steps[median_index([step.time.step_s for step in steps])]
            records.append(
                Timeline(
                    **at,
                    round=round_,
                    step_s=shown.time.step_s,
                    main=shown.main,
                    beside=shown.beside,
                )
            )
        self.append(records)

    def _settled(self) -> Sent:
        """The interfaces' counters while nothing is under way."""
        dist.barrier()
        time.sleep(SETTLE_S)
        found = sent(self.interface)
        dist.barrier()
        return found

    def beat(self, words: str | None, **more: int) -> None:
        """Say that this process goes on; process 0 says so to whoever launched, too."""
        self.watchdog.beat()
        if dist.get_rank() == 0:
            self.folder.beat(words, **more)

    def append(self, records: Sequence[Sample]) -> None:
        if dist.get_rank() == 0:
            self.folder.store.append(records)

    def _note_turns_done(self) -> None:
        if dist.get_rank() == 0:
            self.folder.turns_done.touch()

    def _ask_for(self, rate: float | None) -> None:
        dist.barrier()
        if dist.get_rank() == 0 and self.spec.where == "emulated":
            self.folder.ask_for(rate)
        dist.barrier()


def _handed_out(folder: Folder) -> tuple[Spec, corpus.Corpus, set[tuple[Any, ...]]]:
    """What process 0 has read, on every process."""
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        content[0] = folder.handout()
    dist.broadcast_object_list(content, src=0)
    spec, text, done = content[0]
    return spec, text, done


def main() -> None:
    """Entry point of every process."""
    parser = argparse.ArgumentParser(description="Measures cells; started by deepspeed.")
    parser.add_argument("--folder", type=Path, required=True, help="of the run; process 0 reads it")
    parser.add_argument("--stall-s", type=float, default=180.0, help="end after so long a silence")
    parser.add_argument("--token", default="", help="of the launch, in the folder's file alive")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher, unused")
    arguments = parser.parse_args()
    watchdog = Watchdog(arguments.stall_s)
    deepspeed.init_distributed(verbose=False)
    folder = Folder(arguments.folder)
    if dist.get_rank() == 0:
        watchdog.look_at(folder.alive, arguments.token)
    spec, text, done = _handed_out(folder)
    Worker(spec, folder, text, done, watchdog, link_interface(spec.where)).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
