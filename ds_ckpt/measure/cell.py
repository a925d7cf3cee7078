"""A cell while it trains: its engine, one recorded step, its memory, its loss.

Imported by the launched processes alone; DeepSpeed is up.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.exchange.silent import SilentExchange
from ds_ckpt.harness import corpus, models
from ds_ckpt.measure import parts
from ds_ckpt.measure.records import StepTime, Stretch
from ds_ckpt.measure.spec import SILENT, Cell, Spec, deepspeed_config
from ds_ckpt.telemetry.activations import HeldActivations
from ds_ckpt.telemetry.peak import PeakActivations
from ds_ckpt.telemetry.spans import Span, Spans

EVALUATION_BATCHES = 24


@dataclass
class Step:
    """One recorded step of this process."""

    time: StepTime
    loss: float
    main: tuple[Stretch, ...]
    beside: tuple[Stretch, ...]


class Running:
    """A cell with its engine. Every process makes one; collective."""

    def __init__(self, cell: Cell, spec: Spec, **options: Any) -> None:
        self.cell = cell
        model = models.llama(seed=spec.seed, **spec.shape)
        config = deepspeed_config(spec, cell, parameters=models.count_parameters(model), **options)
        self.engine, *_ = ds_ckpt.initialize(model=model, config=config)
        session = ds_ckpt.session_of(self.engine)
        assert session is not None, "initialize attaches a session where the JSON has a section"
        self.session: Any = session
        self.spans = Spans(_synchronize())
        if cell.method == SILENT:
            session.measure_with(SilentExchange(dist.get_world_size(), dist.get_rank()))

    def plain_step(self, batch: torch.Tensor) -> float:
        """One optimizer step, nothing recorded; this process's loss."""
        self.engine.train()
        loss = self.engine(input_ids=batch, labels=batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def step(self, batch: torch.Tensor) -> Step:
        """One optimizer step with its spans, begun by all processes at once."""
        self.engine.train()
        spans = self.spans
        dist.barrier()
        self._record(spans)
        start_s = time.perf_counter()
        with spans.span("forward"):
            loss = self.engine(input_ids=batch, labels=batch).loss
        with spans.span("backward"):
            self.engine.backward(loss)
        with spans.span("update"):
            self.engine.step()
        step_s = time.perf_counter() - start_s
        self._record(None)
        return _recorded(spans.take(), start_s, step_s, float(loss))

    def memory(self, batch: torch.Tensor) -> tuple[int, int]:
        """Bytes of activations in one step: held after the forward, and the peak."""
        self.engine.train()
        spans = self.spans
        with HeldActivations(self.engine.module) as held:
            loss = self.engine(input_ids=batch, labels=batch).loss
        self.engine.backward(loss)
        self.engine.step()
        del loss
        self._record(spans)
        with PeakActivations(spans) as peak:
            with spans.span("forward"):
                loss = self.engine(input_ids=batch, labels=batch).loss
            with spans.span("backward"):
                self.engine.backward(loss)
        self._record(None)
        self.engine.step()
        spans.take()
        return held.bytes, peak.peak_bytes

    def evaluate(self, text: bytes, spec: Spec) -> float:
        """Held-out loss, mean over the processes."""
        self.engine.eval()
        losses = []
        with torch.no_grad():
            for batch in corpus.evaluation_batches(
                text,
                sequences=min(spec.batches),
                sequence_length=spec.tokens,
                batches=EVALUATION_BATCHES,
                process=dist.get_rank(),
                processes=dist.get_world_size(),
            ):
                ids = batch.to(get_accelerator().current_device_name())
                losses.append(self.engine(input_ids=ids, labels=ids).loss.double())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def end(self) -> None:
        """Give its memory back."""
        self.engine.destroy()
        self.engine = self.session = None
        gc.collect()

    def _record(self, spans: Spans | None) -> None:
        self.session.counters.spans = spans
        if self.session.exchange is not None:
            self.session.exchange.timings.spans = spans


def _recorded(spans: list[Span], start_s: float, step_s: float, loss: float) -> Step:
    thread = threading.get_ident()
    taken = StepTime(
        step_s=step_s,
        parts_s=parts.parts(spans, thread),
        in_collectives_s=parts.in_collectives_s(spans),
    )

    def stretches(pieces: list[parts.Piece]) -> tuple[Stretch, ...]:
        return tuple(
            Stretch(
                start_s=round(p.start_s - start_s, 6),
                end_s=round(p.end_s - start_s, 6),
                part=p.part,
                purpose=p.purpose,
            )
            for p in pieces
        )

    main = stretches(parts.main_pieces(spans, thread))
    return Step(taken, loss, main, stretches(parts.beside_pieces(spans, thread)))


def _synchronize() -> Callable[[], object]:
    """On an accelerator that runs behind, a span ends when its work has."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    synchronize: Callable[[], object] = accelerator.synchronize
    return synchronize
