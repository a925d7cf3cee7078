"""ZeRO-1: no candidate, since it is no setting of this plugin; where it fits it may be faster.

It keeps weights and gradients whole on every process, so it gathers nothing in a step. Once a step
it all-reduces gradients, beside backward, and gathers what the optimizer has changed, with nothing
beside (DeepSpeed's `stage_1_and_2.py`; `benchmarks/weight_bytes.py` has measured these bytes).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from ds_ckpt.lab.estimate.memory import States, estimate
from ds_ckpt.lab.estimate.search import Candidate, Question, Search, best_of
from ds_ckpt.lab.estimate.ways import STOCK, Method

ZERO1 = "ZeRO-1"
ALL_GATHER = 500_000_000
"""Elements of one of its gathers (`allgather_bucket_size`)."""


class Zero1(Search):
    """Its candidates, with what ZeRO-1 keeps on every process; steps are those of `zero1`."""

    @property
    def kinds(self) -> list[str]:
        return [ZERO1]

    def methods_with(self, kind: str) -> list[Method]:
        return [Method(STOCK)]

    @functools.cached_property
    def _states(self) -> dict[str, States]:
        question = self.question
        file = {
            "optimizer": {"type": "AdamW"},
            question.dtype: {"enabled": True},
            "zero_optimization": {"stage": 1},
        }
        states, _ = estimate(question.model.parameters, file, question.machine.processes)
        return {ZERO1: states}


def zero1(one: Candidate) -> Candidate:
    """Nothing is gathered but what the optimizer has changed, when nothing else goes on."""
    machine, way = one.machine, one.way
    links = [machine.network] if machine.hosts > 1 else []
    links += [machine.inside] if machine.local > 1 else []
    trained, hops = sum(b.trained for b in one.blocks), machine.processes - 1
    each = way.itemsize * hops / machine.processes
    gather_s = each * trained / min((link.bytes_per_s for link in links), default=math.inf)
    hop_s = max((link.latency_s for link in links), default=0.0)
    gather_s += -(-trained // ALL_GATHER) * (machine.call_s + hops * hop_s)
    gradients = replace(
        way.gradients, link_bytes=2 * each, inside_bytes=2 * each, hops=2 * hops, once=True
    )
    blocks = [replace(block, elements=0) for block in one.blocks]
    way = replace(way, gradients=gradients, update_s=way.update_s + gather_s)
    return replace(one, blocks=blocks, way=way)


def best_zero1(question: Question) -> Candidate | None:
    """The shortest step of ZeRO-1; None: it does not fit."""
    found = [zero1(one) for one in Zero1(question).all]
    return best_of(found) if found else None
