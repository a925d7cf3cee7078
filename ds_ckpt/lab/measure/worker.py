"""Worker that `deepspeed` launches for `ds-ckpt measure`.

All configurations live in the same processes, each with an engine of its own. Their trials and the
link's rates rotate, so that a disturbance of the machine affects all of them. Only rank 0 needs the
folder: it broadcasts the settings and appends to `samples.jsonl` after every trial. Existing
records are not measured again. The launcher sets the link's rate: see `Heartbeat.request`.
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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_map_only

import ds_ckpt
from ds_ckpt.engine.step import NoCommunication
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab import workload
from ds_ckpt.lab.hosts.backends import Sent, link_interface, sent
from ds_ckpt.lab.hosts.heartbeat import Heartbeat, begin
from ds_ckpt.lab.measure import parts
from ds_ckpt.lab.measure.figures import TrialObservation, combined, observed
from ds_ckpt.lab.measure.samples import Loss, Memory, Model, Sample, StepTime, Store, Trial
from ds_ckpt.lab.measure.spec import (
    NO_COMM,
    REFERENCES,
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
"""Pause without traffic before the interfaces' counters are read."""


class EngineRun:
    """A configuration with its engine. Construction is collective."""

    def __init__(self, configuration: Configuration, spec: Spec, **options: Any) -> None:
        self.configuration = configuration
        model, _ = build_model(spec)
        parameters = workload.count_parameters(model)
        config = deepspeed_config(spec, configuration, parameters=parameters, **options)
        self.engine, *_ = ds_ckpt.initialize(model=model, config=config)
        forget_hpz()
        session = ds_ckpt.session_of(self.engine)
        assert session is not None, "initialize attaches a session if the JSON has a section"
        self.session: Any = session
        self.spans = Spans(_synchronize())
        session.counters.is_far = spec.crosses_host(dist.get_rank())
        self.kept_weight_bytes = 0
        if configuration.method == NO_COMM:
            session.measure_with(NoCommunication(dist.get_world_size(), dist.get_rank()))

    def plain_step(self, batches: Sequence[Any]) -> float:
        """Take one optimizer step without recording; return this process's loss.

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
        """Take one optimizer step after a barrier; return its time by parts, and the loss.

        Weight changes that would be sent beside the next forward are waited for.
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
            self.session.drain()
        step_s = time.perf_counter() - start_s
        self._record(None)
        parts_s = parts.parts(spans.take(), threading.get_ident())
        return StepTime(step_s=step_s, parts_s=parts_s), float(sum(losses)) / len(losses)

    def _backward(self, loss: torch.Tensor) -> None:
        self._set_purpose(Purpose.REDUCE)
        self.engine.backward(loss)

    def _update(self) -> None:
        self._set_purpose(Purpose.WEIGHTS)
        self.engine.step()

    def _set_purpose(self, purpose: Purpose) -> None:
        """Below stage 3 no hook names the purpose: backward sends gradients, the update weights."""
        if self.engine.zero_optimization_stage() < 3:
            self.session.counters.default = purpose

    def memory(self, batches: Sequence[Any]) -> tuple[int, int]:
        """Return the bytes of activations saved after a micro-step's forward, and the peak."""
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
        """Return the held-out loss, mean over the processes."""
        self.engine.eval()
        losses = []
        with torch.no_grad():
            for batch in workload.evaluation_batches(
                text,
                sequences=spec.batch,
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
        """Return the digest of this process's partitions."""
        digest = hashlib.sha256()
        for parameter in self.engine.module.parameters():
            shard = getattr(parameter, "ds_tensor", parameter).detach().flatten()
            whole = getattr(parameter, "ds_numel", shard.numel() * dist.get_world_size())
            weights = min(max(whole - dist.get_rank() * shard.numel(), 0), shard.numel())
            part = shard[:weights].cpu().contiguous()  # the rest is padding
            digest.update(part.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def end(self) -> None:
        """Free the engine's memory."""
        self.engine.destroy()
        self.engine = self.session = None
        gc.collect()

    def _record(self, spans: Spans | None) -> None:
        self.session.counters.spans = spans
        if self.session.exchange is not None:
            self.session.exchange.step.exchange.timings.spans = spans


@dataclass
class Worker:
    """This process's part of a run. `done` holds the existing records by key."""

    spec: Spec
    store: Store
    text: workload.Corpus
    done: dict[tuple[object, ...], Sample]
    heartbeat: Heartbeat
    interface: str | None
    _own: Any = None

    def batches(self, step: int) -> list[Any]:
        """Return the batches of all micro-steps of a step."""
        accumulation, device = self.spec.accumulation, get_accelerator().current_device_name()
        if self.spec.has_own_batch:
            if self._own is None:
                _, batch = build_model(self.spec)
                check_batch(self.spec, batch)
                self._own = tree_map_only(torch.Tensor, lambda t: t.to(device), batch)
            return [self._own] * accumulation
        texts = (
            workload.training_batch(
                self.text.train,
                sequences=self.spec.batch,
                sequence_length=self.spec.tokens,
                seed=self.spec.seed,
                step=step * accumulation + micro_step,
                process=dist.get_rank(),
            )
            for micro_step in range(accumulation)
        )
        return [of_ids(ids.to(device)) for ids in texts]

    def run(self) -> None:
        """Measure what is missing."""
        self.batches(0)  # refuses a batch of another size before anything is built
        model, _ = build_model(self.spec)
        record = Model(
            parameters=workload.count_parameters(model),
            text=self.text.source,
            heldout_bytes=len(self.text.heldout),
            corpus_sha256=self.text.sha256,
        )
        self._append(record)
        self._measure_trials()
        self._measure_losses()
        self.heartbeat.beat(words="done")

    def _measure_trials(self) -> None:
        spec = self.spec
        names = [one.name for one in spec.configurations]
        turns = list(itertools.product(range(spec.repetitions), spec.rates, range(len(names))))
        needed = {("trial", names[place], rate, n) for n, rate, place in turns}
        if self.done.keys() >= needed | {("memory", policy) for policy in spec.policies}:
            return
        engines = {}
        for configuration in spec.configurations:
            self.heartbeat.beat(words=f"building {configuration.name}")
            engines[configuration.name] = one = EngineRun(configuration, spec)
            for step in range(spec.warm_up):
                one.plain_step(self.batches(step))
        for policy in spec.policies:
            self._memory(engines[f"{policy}/{STOCK}"])
        for count, (repetition, rate, place) in enumerate(turns, 1):
            if place == 0:
                self._set_rate(rate)
            name, total = names[(place + repetition) % len(names)], len(turns)
            self.heartbeat.beat(words=f"{count} of {total} trials", done=count, total=total)
            if ("trial", name, rate, repetition) not in self.done:
                self._trial(engines[name], rate, repetition)
        self._set_rate(None)
        for one in engines.values():
            one.end()

    def _memory(self, one: EngineRun) -> None:
        """Record one policy's activations, agreed across ranks."""
        policy = one.configuration.policy
        if ("memory", policy) in self.done:
            return
        self.heartbeat.beat(words=f"memory of {policy}")
        device = get_accelerator().current_device_name()  # NCCL takes no tensor of the host
        most = torch.tensor(one.memory(self.batches(0)), dtype=torch.int64, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        held, peak = (int(n) for n in most)
        self._append(Memory(policy=policy, held_bytes=held, peak_bytes=peak))

    def _trial(self, one: EngineRun, rate: float | None, repetition: int) -> None:
        spec = self.spec
        first = repetition * (spec.steps + spec.drop)
        for step in range(spec.drop):
            one.plain_step(self.batches(first + step))
        before, counted = self._settled(), one.session.counters.snapshot()
        steps = []
        for step in range(spec.steps):
            steps.append(one.step(self.batches(first + spec.drop + step)))
            self.heartbeat.beat()
        delta = one.session.counters.snapshot() - counted
        bytes_ = self._settled() - before
        leads = int(os.environ.get("LOCAL_RANK", "0")) == 0
        times, losses = zip(*steps, strict=True)
        purposes = {p.value: delta.bytes_sent[p] / spec.steps for p in Purpose}
        far = {p.value: delta.far_bytes[p] / spec.steps for p in Purpose}
        link = [bytes_.link_bytes / spec.steps] if leads else []
        mine = TrialObservation(
            times, losses, bytes_, leads, spec.hosts, far, one.kept_weight_bytes
        )
        everyone = gathered((times, purposes, link, observed(mine)))
        all_times, all_purposes, links, all_figures = zip(*everyone, strict=True)
        figures = combined(all_figures)
        trial = Trial(
            configuration=one.configuration.name,
            rate_mbit=rate,
            repetition=repetition,
            steps=slowest(all_times),
            purpose_bytes={n: sum(one[n] for one in all_purposes) for n in purposes},
            link_bytes=tuple(itertools.chain(*links)),
            interface_bytes=figures.pop("interface_bytes"),
            figures=figures,
        )
        self._append(trial)

    def _measure_losses(self) -> None:
        """Train every configuration from its beginning, one after the other."""
        spec = self.spec
        for configuration in spec.configurations if spec.loss_steps else ():
            name, method = configuration.name, configuration.method
            if method == NO_COMM or ("loss", name) in self.done:
                continue
            start_step = 0 if method in REFERENCES else spec.loss_steps // 4
            one = EngineRun(configuration, spec, start_step=start_step, total_steps=spec.loss_steps)
            losses = []
            for step in range(spec.loss_steps):
                words = f"training {name} for its loss"
                self.heartbeat.beat(words=words, done=step, total=spec.loss_steps)
                losses.append(one.plain_step(self.batches(step)))
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
            self._append(record)

    def _settled(self) -> Sent:
        """Read the interfaces' counters while nothing is being sent."""
        dist.barrier()
        time.sleep(SETTLE_S)
        found = sent(self.interface)
        dist.barrier()
        return found

    def _append(self, record: Sample) -> None:
        self.done[record.key] = record
        if dist.get_rank() == 0:
            self.store.append([record])

    def _set_rate(self, rate: float | None) -> None:
        dist.barrier()
        if self.spec.where == "emulated":
            self.heartbeat.request(rate_mbit=rate)
        dist.barrier()


def build_model(spec: Spec) -> tuple[torch.nn.Module, Any]:
    """Build the model, equal on every process, and its own batch if it has one."""
    if spec.model is None:
        return workload.llama(seed=spec.seed, **spec.shape), None
    if spec.folder not in sys.path:
        sys.path.insert(0, spec.folder)
    subject = find_subject(spec.model, Sizes(spec.tokens, torch.float32))
    made: list[Any] = []

    def make() -> torch.nn.Module:
        model, *made[:] = subject.build(spec.batch)
        return model

    return workload.seeded(spec.seed, make), made[0]


def check_batch(spec: Spec, batch: Any) -> None:
    """Raise ConfigError if a model's own batch does not have the size that figures assume."""
    rows, tokens = rows_of(batch), tokens_of(batch)
    if rows * tokens == spec.batch * spec.tokens:
        return
    raise ConfigError(
        Problem(
            f"--model {spec.model}",
            f"a batch of {rows} x {tokens} tokens (x 1 without token ids)",
            f"--batch and --tokens are {spec.batch} x {spec.tokens}, which the figures assume",
            "make the batch follow the arguments batch and tokens, or write "
            f"--batch {rows} --tokens {tokens}",
        ),
        headline="this cannot be measured",
    )


def of_ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a language model's batch, from int64 [sequences, tokens]."""
    return {"input_ids": ids, "labels": ids}


def kept_weight_bytes(model: torch.nn.Module) -> int:
    """Return the weights that this process stores from forward to backward; gathered ones aside."""
    parameters: list[Any] = list(model.parameters())
    parts = (
        part
        for p in parameters
        for part in ((p.ds_tensor, p.ds_secondary_tensor) if hasattr(p, "ds_tensor") else (p,))
    )
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def slowest(processes: Sequence[Sequence[StepTime]]) -> tuple[StepTime, ...]:
    """Return each step's time on the process that took longest."""
    return tuple(max(step, key=lambda t: t.step_s) for step in zip(*processes, strict=True))


def gathered(mine: Any) -> list[Any]:
    """Return every process's object, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _synchronize() -> Callable[[], object]:
    """Return the call that ends a span: it waits for an asynchronous accelerator."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    synchronize: Callable[[], object] = accelerator.synchronize
    return synchronize


def main() -> None:
    """Run one process."""
    heartbeat, _ = begin("Measure configurations; started by deepspeed.")
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
