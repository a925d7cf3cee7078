"""The script that `deepspeed` launches for `ds-ckpt measure`.

    hosts.launcher.launch(backend, "ds_ckpt.lab.measure.worker", {}, folder)

All configurations live in the same processes, each with an engine of its own, and take turns at
their trials, in an order that rotates, so that what disturbs the machine for a while disturbs all
of them alike; so do the link's rates. Only process 0 needs the folder: it hands the others what is
to be done, and appends to `samples.jsonl` after every trial. What stands there already is not
measured again.

Which rate a link has is not this process's to decide: `Heartbeat.ask` asks whoever launched.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_map_only

import ds_ckpt
from ds_ckpt.engine.step import NoCommunication
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab import workload
from ds_ckpt.lab.hosts.heartbeat import Heartbeat, begin
from ds_ckpt.lab.hosts.interfaces import Sent, link_interface, sent
from ds_ckpt.lab.measure import parts
from ds_ckpt.lab.measure.figures import Take, put_together, taken
from ds_ckpt.lab.measure.samples import (
    Key,
    Loss,
    Memory,
    Model,
    Sample,
    StepTime,
    Store,
    Trial,
)
from ds_ckpt.lab.measure.spec import (
    REFERENCES,
    SILENT,
    STOCK,
    Configuration,
    Spec,
    deepspeed_config,
)
from ds_ckpt.lab.subject import Sizes, find_subject, rows_of, run_forward, tokens_of
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.memory import SavedActivations, activations_tracker
from ds_ckpt.telemetry.timings import Spans
from ds_ckpt.zero3.weights import forget_hpz

EVALUATION_BATCHES = 24
SETTLE_S = 0.15
"""How long nothing is sent around a reading of the interfaces' counters."""


class Running:
    """A configuration with its engine while it trains. Every process makes one; collective."""

    def __init__(self, configuration: Configuration, spec: Spec, **options: Any) -> None:
        self.configuration = configuration
        model, _ = built(spec, 1)
        parameters = workload.count_parameters(model)
        config = deepspeed_config(spec, configuration, parameters=parameters, **options)
        self.engine, *_ = ds_ckpt.initialize(model=model, config=config)
        forget_hpz()
        session = ds_ckpt.session_of(self.engine)
        assert session is not None, "initialize attaches a session where the JSON has a section"
        self.session: Any = session
        self.spans = Spans(_synchronize())
        session.counters.is_far = spec.is_far(dist.get_rank())
        self.kept_weight_bytes = 0
        if configuration.method == SILENT:
            session.measure_with(NoCommunication(dist.get_world_size(), dist.get_rank()))

    def plain_step(self, batches: Sequence[Any]) -> float:
        """One optimizer step, nothing recorded; this process's loss.

        Args:
            batches: of the micro-steps, as the model's forward takes them.
        """
        self.engine.train()
        losses = []
        for part in batches:
            loss = run_forward(self.engine, part)
            self._backward(loss)
            self.kept_weight_bytes = kept_weight_bytes(self.engine.module)
            self._update()
            losses.append(float(loss))
        return sum(losses) / len(losses)

    def step(self, batches: Sequence[Any]) -> tuple[StepTime, float]:
        """One optimizer step, begun by all processes at once: its time by parts, and the loss.

        A step is timed alone: changes of weights that would travel beside the next forward are
        waited for.
        """
        self.engine.train()
        spans, losses = self.spans, []
        dist.barrier()
        self._record(spans)
        start_s = time.perf_counter()
        for part in batches:
            with spans.span("forward"):
                loss = run_forward(self.engine, part)
            with spans.span("backward"):
                self._backward(loss)
            with spans.span("update"):
                self._update()
            losses.append(loss)
        with spans.span("update"):
            self.session.land()
        step_s = time.perf_counter() - start_s
        self._record(None)
        found = spans.take()
        times = StepTime(
            step_s=step_s,
            parts_s=parts.parts(found, threading.get_ident()),
            in_collectives_s=parts.in_collectives_s(found),
        )
        return times, float(sum(losses)) / len(losses)

    def _backward(self, loss: torch.Tensor) -> None:
        self._below_stage_3(Purpose.REDUCE)
        self.engine.backward(loss)

    def _update(self) -> None:
        self._below_stage_3(Purpose.WEIGHTS)
        self.engine.step()

    def _below_stage_3(self, purpose: Purpose) -> None:
        """There no hook says what is sent: in backward gradients, in the update weights."""
        if self.engine.zero_optimization_stage() < 3:
            self.session.counters.default = purpose

    def memory(self, batches: Sequence[Any]) -> tuple[int, int]:
        """Bytes of activations in a micro-step: held after the forward, and the peak."""
        self.engine.train()
        spans = self.spans
        for part in batches:
            with SavedActivations(self.engine.module) as held:
                loss = run_forward(self.engine, part)
            self._backward(loss)
            self._update()
            del loss
        for part in batches:
            self._record(spans)
            with activations_tracker(self.engine.module, spans) as peak:
                with spans.span("forward"):
                    loss = run_forward(self.engine, part)
                with spans.span("backward"):
                    self._backward(loss)
            self._record(None)
            self._update()
        spans.take()
        return held.bytes, peak.peak_bytes

    def evaluate(self, text: bytes, spec: Spec) -> float:
        """Held-out loss, mean over the processes."""
        self.engine.eval()
        losses = []
        with torch.no_grad():
            for batch in workload.evaluation_batches(
                text,
                sequences=min(spec.batches),
                sequence_length=spec.tokens,
                batches=EVALUATION_BATCHES,
                process=dist.get_rank(),
                processes=dist.get_world_size(),
            ):
                ids = batch.to(get_accelerator().current_device_name())
                losses.append(run_forward(self.engine, of_ids(ids)).double())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def weights_sha256(self) -> str:
        """Over this process's partitions."""
        digest = hashlib.sha256()
        for parameter in self.engine.module.parameters():
            shard = getattr(parameter, "ds_tensor", parameter).detach().flatten()
            whole = getattr(parameter, "ds_numel", shard.numel() * dist.get_world_size())
            weights = min(max(whole - dist.get_rank() * shard.numel(), 0), shard.numel())
            part = shard[:weights].cpu().contiguous()  # what follows is padding
            digest.update(part.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def end(self) -> None:
        """Give its memory back."""
        self.engine.destroy()
        self.engine = self.session = None
        gc.collect()

    def _record(self, spans: Spans | None) -> None:
        self.session.counters.spans = spans
        if self.session.exchange is not None:
            self.session.exchange.step.exchange.timings.spans = spans


@dataclass
class Worker:
    """This process's end of a run."""

    spec: Spec
    store: Store
    text: workload.Corpus
    done: dict[tuple[object, ...], Sample]
    """What is measured already, by its key."""
    heartbeat: Heartbeat
    interface: str | None
    _own: dict[int, Any] = field(default_factory=dict)
    """A model's own batch, by its sequences."""

    def batches(self, sequences: int, step: int) -> list[Any]:
        """Of all micro-steps of a step."""
        accumulation, device = self.spec.accumulation, get_accelerator().current_device_name()
        if self.spec.own_batch:
            if sequences not in self._own:
                _, batch = built(self.spec, sequences)
                check_batch(self.spec, batch, sequences)
                self._own[sequences] = tree_map_only(torch.Tensor, lambda t: t.to(device), batch)
            return [self._own[sequences]] * accumulation
        texts = (
            workload.training_batch(
                self.text.train,
                sequences=sequences,
                sequence_length=self.spec.tokens,
                seed=self.spec.seed,
                step=step * accumulation + micro_step,
                process=dist.get_rank(),
            )
            for micro_step in range(accumulation)
        )
        return [of_ids(ids.to(device)) for ids in texts]

    def run(self) -> None:
        if self.spec.own_batch:
            for sequences in self.spec.batches:
                self.batches(sequences, 0)
        model, _ = built(self.spec, 1)
        record = Model(
            parameters=workload.count_parameters(model),
            text=self.text.source,
            heldout_bytes=len(self.text.heldout),
            corpus_sha256=self.text.sha256,
        )
        self.append(record)
        self._measure_trials()
        self._measure_losses()
        self.beat("done")

    def _measure_trials(self) -> None:
        spec = self.spec
        trials = [Key(c.name, batch) for batch in spec.batches for c in spec.configurations]
        memories = [
            (Configuration(policy, STOCK).name, batch)
            for policy in spec.policies
            for batch in spec.batches
        ]
        everything = itertools.product(trials, spec.rates, range(spec.repetitions))
        wanted = {one.trial(rate, n) for one, rate, n in everything}
        if self.done.keys() >= wanted | {("memory", *one) for one in memories}:
            return
        running = {}
        for configuration in spec.configurations:
            self.beat(f"building {configuration.name}")
            running[configuration.name] = one = Running(configuration, spec)
            for step in range(spec.warm_up):
                one.plain_step(self.batches(min(spec.batches), step))
        for name, sequences in memories:
            self._memory(running[name], sequences)
        total = spec.repetitions * len(spec.rates) * len(trials)
        count = 0
        for repetition, rate in itertools.product(range(spec.repetitions), spec.rates):
            self._ask_for(rate)
            for place in range(len(trials)):
                key = trials[(place + repetition) % len(trials)]
                count += 1
                self.beat(f"{count} of {total} trials", done=count, total=total)
                if key.trial(rate, repetition) not in self.done:
                    self._trial(running[key.configuration], key, rate, repetition)
        self._ask_for(None)
        for one in running.values():
            one.end()

    def _memory(self, one: Running, sequences: int) -> None:
        """Have the record of one configuration's activations; the same on all processes."""
        name = one.configuration.name
        if ("memory", name, sequences) in self.done:
            return
        self.beat(f"memory of {name}")
        device = get_accelerator().current_device_name()  # NCCL takes no tensor of the host
        most = torch.tensor(
            one.memory(self.batches(sequences, 0)), dtype=torch.int64, device=device
        )
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        held, peak = (int(n) for n in most)
        record = Memory(configuration=name, sequences=sequences, held_bytes=held, peak_bytes=peak)
        self.done[record.key] = record
        self.append(record)

    def _trial(self, one: Running, key: Key, rate: float | None, repetition: int) -> None:
        spec = self.spec
        first = repetition * (spec.steps + spec.drop)
        for step in range(spec.drop):
            one.plain_step(self.batches(key.sequences, first + step))
        before, counted = self._settled(), one.session.counters.snapshot()
        steps = []
        for step in range(spec.steps):
            steps.append(one.step(self.batches(key.sequences, first + spec.drop + step)))
            self.beat(None)
        delta = one.session.counters.snapshot() - counted
        bytes_ = self._settled() - before
        leads = int(os.environ.get("LOCAL_RANK", "0")) == 0
        times, losses = zip(*steps, strict=True)
        purposes = {p.value: delta.bytes_sent[p] / spec.steps for p in Purpose}
        far = {p.value: delta.far_bytes[p] / spec.steps for p in Purpose}
        link = [bytes_.link_bytes / spec.steps] if leads else []
        seen = Take(times, losses, bytes_, leads, spec.hosts, far, one.kept_weight_bytes)
        figures = taken(seen)
        everyone = gathered((times, purposes, link, figures))
        all_times, all_purposes, links, all_figures = zip(*everyone, strict=True)
        figures = put_together(all_figures)
        trial = Trial(
            configuration=key.configuration,
            rate_mbit=rate,
            sequences=key.sequences,
            repetition=repetition,
            steps=slowest(all_times),
            purpose_bytes={n: sum(one[n] for one in all_purposes) for n in purposes},
            link_bytes=tuple(itertools.chain(*links)),
            interface_bytes=figures.pop("interface_bytes"),
            figures=figures,
        )
        self.append(trial)

    def _measure_losses(self) -> None:
        """Train every configuration anew, one after the other, and keep its held-out loss."""
        spec = self.spec
        for configuration in spec.configurations if spec.loss_steps else ():
            name, method = configuration.name, configuration.method
            if method == SILENT or ("loss", name) in self.done:
                continue
            start_step = 0 if method in REFERENCES else spec.loss_steps // 4
            one = Running(configuration, spec, start_step=start_step, total_steps=spec.loss_steps)
            losses = []
            for step in range(spec.loss_steps):
                self.beat(f"training {name} for its loss", done=step, total=spec.loss_steps)
                losses.append(one.plain_step(self.batches(min(spec.batches), step)))
            everyone = gathered((losses, one.weights_sha256()))
            means = [sum(s) / len(everyone) for s in zip(*(e[0] for e in everyone), strict=True)]
            record = Loss(
                configuration=name,
                steps=spec.loss_steps,
                start_step=start_step,
                heldout_loss=one.evaluate(self.text.heldout, spec),
                train_losses=tuple(means),
                weights_sha256=hashlib.sha256("".join(e[1] for e in everyone).encode()).hexdigest(),
            )
            one.end()
            self.append(record)

    def _settled(self) -> Sent:
        """The interfaces' counters while nothing is under way."""
        dist.barrier()
        time.sleep(SETTLE_S)
        found = sent(self.interface)
        dist.barrier()
        return found

    def beat(self, words: str | None, **more: int) -> None:
        """Say that this process goes on; process 0 says so to whoever launched, too."""
        self.heartbeat.beat(words=words, **more)

    def append(self, record: Sample) -> None:
        if dist.get_rank() == 0:
            self.store.append([record])

    def _ask_for(self, rate: float | None) -> None:
        dist.barrier()
        if self.spec.where == "emulated":
            self.heartbeat.ask(rate_mbit=rate)
        dist.barrier()


def built(spec: Spec, sequences: int) -> tuple[torch.nn.Module, Any]:
    """The model, the same on every process, and the batch that belongs to it."""
    if spec.model is None:
        return workload.llama(seed=spec.seed, **spec.shape), None
    if spec.folder not in sys.path:
        sys.path.insert(0, spec.folder)
    subject = find_subject(spec.model, Sizes(spec.tokens, torch.float32))
    made: list[Any] = []

    def make() -> torch.nn.Module:
        model, *made[:] = subject.build(sequences)
        return model

    return workload.seeded(spec.seed, make), made[0]


def check_batch(spec: Spec, batch: Any, sequences: int) -> None:
    """Raises ConfigError where a model's own batch is not of the size that figures are told of."""
    rows, tokens = rows_of(batch), tokens_of(batch)
    if rows * tokens == sequences * spec.tokens:
        return
    raise ConfigError(
        Problem(
            f"--model {spec.model}",
            f"a batch of {rows} x {tokens} tokens (x 1, where it has no token ids)",
            f"--batches and --tokens say {sequences} x {spec.tokens}, and figures are told of that",
            "have it make as many as its arguments batch and tokens say, or write "
            f"--batches {rows} --tokens {tokens}",
        ),
        headline="this cannot be measured",
    )


def of_ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of a language model, int64 [sequences, tokens]."""
    return {"input_ids": ids, "labels": ids}


def kept_weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that this process keeps from forward to backward; gathered ones are not."""
    parameters: list[Any] = list(model.parameters())
    parts = (
        part
        for p in parameters
        for part in ((p.ds_tensor, p.ds_secondary_tensor) if hasattr(p, "ds_tensor") else (p,))
    )
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def slowest(processes: Sequence[Sequence[StepTime]]) -> tuple[StepTime, ...]:
    """Of each step the process that took longest: a step is as long as that."""
    return tuple(max(step, key=lambda t: t.step_s) for step in zip(*processes, strict=True))


def gathered(mine: Any) -> list[Any]:
    """What every process has given, by process."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _synchronize() -> Callable[[], object]:
    """On an accelerator that runs behind, a span ends when its work has."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    synchronize: Callable[[], object] = accelerator.synchronize
    return synchronize


def main() -> None:
    """Entry point of every process."""
    heartbeat, _ = begin("Measures configurations; started by deepspeed.")
    folder = heartbeat.folder
    store, content = Store(folder), list[Any]([None])
    if dist.get_rank() == 0:
        done = {sample.key: sample for sample in store.read()}
        content = [(Spec.load(folder), workload.load_corpus(folder / "corpus"), done)]
    dist.broadcast_object_list(content, src=0)
    spec, text, done = content[0]
    Worker(spec, store, text, done, heartbeat, link_interface(spec.where)).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
