"""Exchange of gradients and of changed weights: configuration, bytes and seconds.

A method of gradients is `stock` (DeepSpeed's own reduction), `dense`, or settings with verdicts.
Bytes are those of `exchange/assignment.py`. The seconds of coding are the bytes that its operators
read and write, over the device's memory bandwidth. The bytes are counted on a small tensor.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_ckpt.activation.planning.costs import moved_bytes
from ds_ckpt.compression.base import Codec, Compressor
from ds_ckpt.config import parse
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.verdicts import LossLimit, VerdictRecord, allows, sections_on_record
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.method_rules import ExchangeSettings
from ds_ckpt.lab.estimate.memory_model import (
    ExchangeMemory,
    assigned,
    dividing_ranks,
    exchange_memory,
)
from ds_ckpt.lab.estimate.model import Model
from ds_ckpt.lab.estimate.simulate import GradientTimes, Machine, Weights
from ds_ckpt.lab.workload import DENSE, RESIDENT, STOCK
from ds_ckpt.telemetry.counters import collective_bytes
from ds_ckpt.telemetry.memory import MemoryTracker

DENSE_ONCE = f"{DENSE}, once a step"
_SAMPLE = 1 << 16
"""Elements that the traffic of coding is counted on."""
_LOW_RANK_BYTES = (40.0, 20.0)
"""Guess: memory traffic of coding an element by a method that is no codec."""
_ACCUMULATE_BYTES = 20.0
"""Residual plus gradient: two fp32 read, one written, checked for finiteness, kept."""
LOSSLESS_BITS = 2.93
"""Bits per weight of a lossless change at learning rate 3e-4 (`benchmarks/lossless_bits.py`)."""
LOSSLESS_S = 17e-9
"""Seconds to encode an element, and to decode it, on one CPU core (`lossless_bits.py`)."""
_LOSSLESS_BYTES = 40.0
"""Memory traffic of the same on an accelerator, the limit that test_lossless.py counts."""


@dataclass(frozen=True, eq=False)
class PlanMethod:
    """One method for gradients; without a section DeepSpeed's own."""

    name: str
    section: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[VerdictRecord, ...] = ()

    @functools.cached_property
    def settings(self) -> ExchangeSettings | None:
        """None: DeepSpeed's own reduction."""
        if not self.section:
            return None
        file = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": dict(self.section)}}
        return exchange_settings(parse(file, source=self.name).compression)

    @property
    def betas(self) -> tuple[float, float] | None:
        """AdamW's betas of the method's verdicts; None: the default."""
        return next((record.betas for record in self.records if record.betas), None)

    @functools.lru_cache(maxsize=256)  # noqa: B019, methods are few
    def assignment(self, model: Model, world: int, hosts: int) -> Assignment:
        """Return the compressors of the model's parameters."""
        assert self.settings is not None
        return assigned(model.parameters, self.settings, world, hosts)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def exchange_memory(
        self, model: Model, machine: Machine, accumulation: int, bucket: int = 0
    ) -> ExchangeMemory:
        """Return what a rank takes to exchange buckets of so many entries."""
        if self.settings is None:
            return ExchangeMemory()
        sizes = machine.ranks, machine.hosts
        assignment = self.assignment(model, *sizes)
        found = exchange_memory(assignment, self.settings, accumulation, *sizes, bucket)
        return found if machine.streams else found._replace(nccl=0)


def plan_methods(loss: LossLimit, exchanging: int = 1) -> tuple[list[PlanMethod], list[PlanMethod]]:
    """Return the methods that may be tried, and those that verdicts do not allow.

    Without error feedback each of the `exchanging` ranks, or nodes, loses its share for good. So
    only verdicts with as many workers, or with the next more, count (docs/accuracy.md).
    """
    dense = {"method": "dense"}
    once = {**dense, "exchange": {"when": "accumulation_boundary"}}
    allowed = [PlanMethod(STOCK), PlanMethod(DENSE, dense), PlanMethod(DENSE_ONCE, once)]
    refused = list[PlanMethod]()
    for name, (section, records) in sections_on_record().items():
        method = PlanMethod(name, section, tuple(records))
        feedback = section.get("error_feedback", {})
        tried, judged = [method], records
        if feedback.get("enabled", True):
            on_host = {**section, "error_feedback": {**feedback, "device": "cpu"}}
            tried.append(replace(method, name=f"{name}, residuals in host memory", section=on_host))
        else:
            fewest = min((r.workers for r in records if r.workers >= exchanging), default=0)
            judged = [r for r in records if r.workers == fewest]
        if allows(judged, loss):
            allowed += tried
        else:
            refused.append(replace(method, records=tuple(judged)))
    return allowed, refused


def gradients(
    method: PlanMethod,
    model: Model,
    machine: Machine,
    itemsize: int,
    accumulation: int,
    bytes_per_s: float,
) -> GradientTimes:
    """Return one rank's exchange, with gradients of `itemsize` bytes an element."""
    world, hosts, local = machine.ranks, machine.hosts, machine.local
    settings = method.settings
    if settings is None:
        backend = "nccl" if machine.streams else "gloo"
        sent = collective_bytes("reduce_scatter", itemsize * model.trained, world, backend)
        rounds = 1 if machine.streams else 2
        each = sent / max(model.trained, 1)
        return GradientTimes(each, inside_bytes=each, hops=rounds * (world - 1), ring=True)
    divided = dividing_ranks(settings, world, hosts)
    two = divided > 1
    # with one level, each rank of a node sends to those of other nodes
    far = (hosts - 1) / hosts if two or local == 1 else local * (world - local) / world
    each = method.assignment(model, world, hosts).sent_bytes / max(model.trained, 1)
    # with two levels a node's sum is exact
    inside = itemsize * (local - 1) / local if two else each * (local - 1) / world
    share = 1 / divided / bytes_per_s
    moved = (4.0, 4.0) if settings.lossless else _moved(settings.default.compressor())
    held = method.exchange_memory(model, machine, accumulation)
    residual = held.residuals / max(model.trained, 1)
    accumulate_s = share * _ACCUMULATE_BYTES if residual else 0.0
    to_host_s = 2 * residual / machine.bus_bytes_per_s if held.on_host else 0.0
    return GradientTimes(
        link_bytes=each * far,
        inside_bytes=inside,
        encode_s=share * moved[0] + accumulate_s + to_host_s,
        decode_s=share * moved[1],
        accumulate_s=accumulate_s + to_host_s,
        once=settings.defers_exchange(accumulation),
    )


@functools.cache
def _moved(compressor: Compressor | None) -> tuple[float, float]:
    """Bytes an element that encoding and decoding read and write."""
    if not isinstance(compressor, Codec):
        return _LOW_RANK_BYTES
    packet = torch.zeros(compressor.packed_bytes(_SAMPLE), dtype=torch.uint8)

    def moved(work: Callable[[], None]) -> float:
        counted = list[int]()
        count = MemoryTracker(nn.Module(), operator=lambda one: counted.append(moved_bytes(one)))
        with torch.no_grad(), count:
            work()
        return sum(counted) / _SAMPLE

    packs = moved(lambda: compressor.pack_rows(torch.linspace(-1, 1, _SAMPLE)[None], packet[None]))
    return packs, moved(lambda: compressor.unpack_add_rows(packet[None], torch.zeros(_SAMPLE)))


def weights(name: str, machine: Machine, itemsize: int, bytes_per_s: float) -> Weights | None:
    """Return one rank's changes of resident weights; None for a name that is not of `RESIDENT`.

    They stay in the device's memory, of `bytes_per_s`.
    """
    if name not in RESIDENT:
        return None
    hosts, shard = machine.hosts, 1 / machine.ranks
    bits, coding_s = 8.0 * itemsize, 2 * itemsize / bytes_per_s
    if name == "lossless":
        bits = LOSSLESS_BITS
        coding_s = _LOSSLESS_BYTES / bytes_per_s if machine.streams else LOSSLESS_S
    return Weights(
        link_bytes=bits / 8 * (hosts - 1) / hosts,
        encode_s=shard * coding_s,
        decode_s=shard * (hosts - 1) * coding_s,
    )
