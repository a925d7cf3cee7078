"""Worker that `deepspeed` launches for `ds-ckpt measure`, once per link rate.

All configurations live in the same processes, each with an engine of its own. Their trials rotate,
so that a disturbance of the machine affects all of them. The job lists what to measure. Only rank 0
needs the folder: it appends to `samples.jsonl`.
"""

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.exchange.transport import gather_objects
from ds_ckpt.lab import workload
from ds_ckpt.lab.hosts.backends import link_interface, read_sent_bytes
from ds_ckpt.lab.hosts.heartbeat import Heartbeat, begin
from ds_ckpt.lab.measure.samples import Memory, Sample, StepTime, Store, Trial, parts
from ds_ckpt.lab.measure.spec import (
    MIN_REPETITIONS,
    NO_COMM,
    SPECS,
    Configuration,
    Spec,
    deepspeed_config,
)
from ds_ckpt.lab.subject import Sizes, find_subject, run_forward
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.memory import activations_tracker
from ds_ckpt.telemetry.timings import Spans
from ds_ckpt.zero3.resident import stored_weight_bytes
from ds_ckpt.zero3.weights_hook import forget_hpz

SETTLE_S = 0.15
"""Pause without traffic before the interfaces' counters are read."""


class EngineRun:
    """A configuration with its engine. Construction is collective."""

    def __init__(self, configuration: Configuration, spec: Spec) -> None:
        self.configuration, self.stored_weight_bytes = configuration, 0
        model = build_model(spec)
        parameters = workload.count_parameters(model)
        config = deepspeed_config(spec, configuration, parameters=parameters)
        self.engine, *_ = ds_ckpt.initialize(model=model, config=config)
        forget_hpz()
        session = ds_ckpt.session_of(self.engine)
        assert session is not None, "initialize attaches a session if the JSON has a section"
        self.session: Any = session
        self.spans = Spans(_clock())
        session.counters.crosses_host = spec.crosses_host(dist.get_rank())
        if configuration.method == NO_COMM:
            session.send_no_gradients()

    def _record(self, spans: Spans | None) -> None:
        """Begin or end the recording: of several engines one records at a time."""
        self.session.counters.spans = spans
        if self.session.exchange is not None:
            self.session.exchange.step.exchange.spans = spans

    def step(self, batches: Sequence[Any]) -> StepTime:
        """Take one optimizer step after a barrier, including sending changed weights; return parts.

        `batches` are those of the micro-steps.
        """
        dist.barrier()
        self._record(self.spans)
        start_s = time.perf_counter()
        for batch in batches:
            self._backward(batch)
            self.stored_weight_bytes = stored_weight_bytes(self.engine.module)
            with self.spans.span("update"):
                self._update()
        with self.spans.span("update"):
            self.session.drain()
        step_s = time.perf_counter() - start_s
        self._record(None)
        parts_s = parts(self.spans.take(), threading.get_ident())
        return StepTime(step_s=step_s, parts_s=parts_s)

    def _backward(self, batch: Any) -> None:
        with self.spans.span("forward"):
            loss = run_forward(self.engine, batch)
        self._set_purpose(Purpose.REDUCE)
        with self.spans.span("backward"):
            self.engine.backward(loss)

    def _update(self) -> None:
        self._set_purpose(Purpose.WEIGHTS)
        self.engine.step()

    def _set_purpose(self, purpose: Purpose) -> None:
        """Below stage 3 no hook names the purpose: backward sends gradients, the update weights."""
        if self.engine.zero_optimization_stage() < 3:
            self.session.counters.default = purpose

    def peak_bytes(self, batches: Sequence[Any]) -> int:
        """Return the highest total of activations in a step, recomputation included."""
        peak_bytes = 0
        self._record(self.spans)
        for batch in batches:
            with activations_tracker(self.engine.module, self.spans) as peak:
                self._backward(batch)
            self._update()
            peak_bytes = max(peak_bytes, peak.peak_bytes)
        self._record(None)
        self.spans.take()
        return peak_bytes

    def end(self) -> None:
        """Free the engine's memory."""
        self.engine.destroy()
        self.engine = self.session = None
        gc.collect()


class Worker:
    """This process's part of a launch."""

    def __init__(self, spec: Spec, heartbeat: Heartbeat) -> None:
        self.spec, self.heartbeat = spec, heartbeat
        self.store = Store(heartbeat.folder)
        self.interface = link_interface("loopback" if spec.hosts == 1 else spec.where)
        self.done = self.total = 0

    def batches(self, step: int) -> list[Any]:
        """Return the batches of all micro-steps of a step: random tokens."""
        random = np.random.default_rng([self.spec.seed, step, dist.get_rank()])
        size = self.spec.accumulation, self.spec.batch, self.spec.tokens
        ids = random.integers(0, workload.VOCAB_SIZE, size)
        return list(map(of_ids, torch.from_numpy(ids)))

    def run(self, job: dict[str, Any]) -> None:
        """Measure what the job lists."""
        engines: dict[str, EngineRun] = {}
        self.total = self.spec.steps_in(job["trials"])
        for configuration in self.spec.configurations:
            engines[configuration.name] = one = EngineRun(configuration, self.spec)
            for step in range(self.spec.warm_up):
                self._step(one, step)
        for policy in job["memory"]:
            names = (one.name for one in self.spec.configurations if one.policy == policy)
            self._measure_memory(engines[next(names)])
        for repetition, trials in itertools.groupby(job["trials"], key=lambda trial: trial[1]):
            begun_s = time.time()
            for name, _ in trials:
                self._measure_trial(engines[name], job["rate"], repetition)
            # one that takes as long as this one would end too late
            enough = repetition + 1 >= MIN_REPETITIONS
            is_last = [enough and 2 * time.time() - begun_s > job["until"]]
            dist.broadcast_object_list(is_last, src=0)
            if is_last[0]:
                break
        for one in engines.values():
            one.end()
        self.heartbeat.beat(words="done")

    def _step(self, one: EngineRun, step: int) -> StepTime:
        taken = one.step(self.batches(step))
        self.done += 1
        words = f"{self.done} of {self.total} steps"
        self.heartbeat.beat(words=words, done=self.done, total=self.total)
        return taken

    def _measure_memory(self, one: EngineRun) -> None:
        """Record one policy's activations, agreed across ranks."""
        device = get_accelerator().current_device_name()  # NCCL takes no tensor of the host
        peak = torch.tensor(one.peak_bytes(self.batches(0)), device=device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self._append(Memory(policy=one.configuration.policy, peak_bytes=int(peak)))

    def _measure_trial(self, one: EngineRun, rate: float | None, repetition: int) -> None:
        spec = self.spec
        first = repetition * (spec.steps + spec.drop)
        for step in range(spec.drop):
            self._step(one, first + step)
        before, counted = self._settled(), one.session.counters.snapshot()
        times = [self._step(one, first + spec.drop + step) for step in range(spec.steps)]
        delta = one.session.counters.snapshot() - counted
        interface_bytes = (self._settled() - before) / spec.steps
        far = {p.value: delta.far_bytes[p] / spec.steps for p in Purpose}
        leads = int(os.environ.get("LOCAL_RANK", "0")) == 0
        everyone = gather_objects((times, far, [interface_bytes] * leads, one.stored_weight_bytes))
        all_times, all_far, by_node, stored = zip(*everyone, strict=True)
        self._append(
            Trial(
                configuration=one.configuration.name,
                rate_mbit=rate,
                repetition=repetition,
                steps=slowest(all_times),
                far_bytes={name: sum(p[name] for p in all_far) for name in far},
                interface_bytes=tuple(itertools.chain(*by_node)),
                stored_weight_bytes=max(stored),
            )
        )

    def _settled(self) -> int:
        """Read the bytes that the interface has sent, while nothing is being sent."""
        dist.barrier()
        time.sleep(SETTLE_S)
        found = 0 if self.interface is None else read_sent_bytes(self.interface)
        dist.barrier()
        return found

    def _append(self, record: Sample) -> None:
        if dist.get_rank() == 0:
            self.store.append(record)


def build_model(spec: Spec) -> torch.nn.Module:
    """Build the model, equal on every process."""
    if spec.model is None:
        return workload.llama(seed=spec.seed, **spec.shape)
    subject = find_subject(spec.model, Sizes(spec.tokens, torch.float32))
    return workload.seeded(spec.seed, lambda: subject.build(spec.batch)[0])


def of_ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a language model's batch on this process's device, from int64 [sequences, tokens]."""
    ids = ids.to(get_accelerator().current_device_name())
    return {"input_ids": ids, "labels": ids}


def slowest(processes: Sequence[Sequence[StepTime]]) -> tuple[StepTime, ...]:
    """Return each step's time on the process that took longest."""
    return tuple(max(step, key=lambda t: t.step_s) for step in zip(*processes, strict=True))


def _clock() -> Callable[[], float]:
    """Return a clock that waits for an asynchronous accelerator before each reading."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return time.perf_counter
    return lambda: (accelerator.synchronize(), time.perf_counter())[1]


def main() -> None:
    """Run one process."""
    heartbeat, job = begin("Measure configurations; started by deepspeed.")
    Worker(SPECS.validate_python(job["spec"]), heartbeat).run(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
