"""One step of ZeRO-3 with this plugin as a schedule of tasks: its time, and what decides it.

A task occupies one resource of the slowest rank. Resources are "compute", "network" (a node's link,
each direction the same), "inside" (a node's links) and "bus" (device to host). In program order a
task begins when the tasks that it waits for have ended and the resource is free. It takes
`calls (c + hops a) + bytes / rate`, for c of a call and a latency a. A ring has P-1 hops, a few
numbers 2 log2 P (Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)). So a faster link never makes a
step longer.

Bytes over a node's link, for N elements of w bytes on P = H nodes x L ranks:

    gather            w N (P-1)/P; none of resident weights, and with hpZ in a step's first forward
    gradients         the bytes that `exchange.assignment` counts, times (H-1)/H
    changed weights   w N (H-1)/H whole, b/8 instead of w with b bits a weight
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_ckpt.weights.changes import CHUNK

CONCURRENT_BUCKETS = 2
"""Buckets that are exchanged at a time, with streams."""
ALL_GATHER_BUCKET = 500_000_000
"""Elements of one gather of ZeRO-1 (`allgather_bucket_size`)."""
MOST_PIECES = 4
"""Largest number of pieces that a block's gathers are divided into."""
SIMULATED = 3
"""Micro-steps that are simulated; those between the first and the last are all alike."""
_LEFT_OUT = ("left out", "")


@dataclass(frozen=True)
class Link:
    """Each direction of one node's or rank's link."""

    bytes_per_s: float
    latency_s: float = 0.0
    burst_bytes: float = 0.0
    """Bytes that pass at once after a pause, earned at the link's rate: a shaper's bucket."""
    duplex: bool = True
    """An all-to-all goes both ways at once. With TCP on a link that queues, one direction waits for
    the other's acknowledgements (Zhang, Shenker, Clark 1991, SIGCOMM)."""


@dataclass(frozen=True)
class Machine:
    """The cluster that a step runs on.

    Attributes:
        call_s: cost of a collective for the rank that calls it, beside the link.
        module_s: ZeRO-3's Python around one pass through a module with weights.
        streams: collectives run beside computing by themselves (NCCL on GPUs).
        slowest: factor of the slowest node's computing time, which all wait for.
    """

    hosts: int
    local: int
    network: Link
    inside: Link
    bus_bytes_per_s: float = math.inf
    call_s: float = 0.0
    module_s: float = 0.0
    streams: bool = True
    slowest: float = 1.0

    @property
    def ranks(self) -> int:
        """Count the ranks of all nodes."""
        return self.hosts * self.local


@dataclass(frozen=True)
class TimedBlock:
    """A stretch of the model that is gathered, run and reduced together.

    Attributes:
        calls: gathers that it takes: about one for each module with weights.
        offloaded_bytes: tensors in host memory, which come back one block ahead.
        kept: stays gathered from forward to backward (`stage3_max_reuse_distance`).
    """

    elements: int
    trained: int
    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    calls: int = 1
    offloaded_bytes: int = 0
    kept: bool = False


@dataclass(frozen=True)
class GradientTimes:
    """Exchange of gradients, by element of the model; seconds of one rank.

    Attributes:
        accumulate_s: time of adding to the residuals in micro-steps that send nothing.
        hops: latencies of an exchange.
        once: only in the last micro-step.
        ring: DeepSpeed's own, inside and between nodes at the same time.
    """

    link_bytes: float
    inside_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    accumulate_s: float = 0.0
    hops: int = 1
    once: bool = False
    ring: bool = False


@dataclass(frozen=True)
class Weights:
    """Changes of resident weights, by element: sent in chunks beside the next forward."""

    link_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Strategy:
    """The settings of a step.

    Attributes:
        bucket: elements of a bucket of gradients.
        weights: None: ZeRO-3's, gathered between nodes.
        hpz: weights that the first forward gathers stay in their node (arXiv 2306.10209).
        gathers_changed: all ranks gather trained weights after the optimizer (ZeRO-1 and 2).
        gathers_twice: recomputed blocks are gathered again for backward (not by this plugin).
    """

    micro_steps: int
    itemsize: int
    gradients: GradientTimes
    bucket: int = 500_000_000
    prefetch: int = 50_000_000
    weights: Weights | None = None
    hpz: bool = False
    gathers_changed: bool = False
    gathers_twice: bool = False
    update_s: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """One simulated step: busy seconds by resource and kind, bytes over a node's link by kind."""

    seconds: float
    busy_s: Mapping[tuple[str, str], float]
    sent_bytes: Mapping[str, float]

    @property
    def link_bytes(self) -> float:
        """Add up the bytes over a node's link."""
        return sum(self.sent_bytes.values())

    @property
    def waits_s(self) -> float:
        """Time in which the accelerator computes nothing."""
        return self.seconds - sum(s for (of, _), s in self.busy_s.items() if of == "compute")


def simulate(machine: Machine, blocks: Sequence[TimedBlock], strategy: Strategy) -> StepTimes:
    """Simulate a step among others like it: changes of the step before are sent in its forward."""
    run = _Simulation(machine, blocks, strategy)
    run.update()  # of the step before
    run.totals.clear()
    begin_s = run.now_s
    run.step()
    return run.result(begin_s, 1)


def at_least_s(machine: Machine, blocks: Sequence[TimedBlock], strategy: Strategy) -> float:
    """Return a lower bound of a step, much faster: its computing, or a node's bytes."""
    micro_steps, how, weights = strategy.micro_steps, strategy.gradients, strategy.weights
    exchanges = 1 if how.once else micro_steps
    trained, elements = sum(b.trained for b in blocks), sum(b.elements for b in blocks)
    computes_s = micro_steps * sum(b.forward_s + b.backward_s + b.recompute_s for b in blocks)
    computes_s += trained * exchanges * (how.encode_s + how.decode_s) + strategy.update_s
    gathered = trained * strategy.gathers_changed + elements * (weights is None and strategy.hpz)
    if weights is None and not strategy.hpz:
        gathered += micro_steps * sum(b.elements * (1 if b.kept else 2) for b in blocks)
    sent = gathered * strategy.itemsize * (machine.ranks - 1) / machine.ranks
    sent += trained * exchanges * how.link_bytes + elements * (weights.link_bytes if weights else 0)
    crosses_host = machine.hosts > 1 and not machine.network.burst_bytes
    return max(computes_s * machine.slowest, crosses_host * sent / machine.network.bytes_per_s)


def in_a_row(
    machine: Machine, blocks: Sequence[TimedBlock], strategy: Strategy, steps: int
) -> StepTimes:
    """Return the mean of so many steps, from nothing under way to nothing under way."""
    run = _Simulation(machine, blocks, strategy)
    for _ in range(steps):
        run.step()
    run.receive_changes(math.inf)
    return run.result(0.0, steps)


@dataclass
class _TimedPart:
    """Computing that needs weights: a part of a block's forward, recompute or backward."""

    block: int
    kind: str
    seconds: float
    elements: float = 0.0
    calls: float = 0.0
    first: bool = True
    last: bool = True


class _Simulation:
    """Steps one after the other. A task is represented by the moment of its end.

    `totals` are busy seconds by resource and kind, bytes by ("sent", kind), and seconds of
    micro-steps that are not simulated.
    """

    def __init__(self, machine: Machine, blocks: Sequence[TimedBlock], strategy: Strategy) -> None:
        self.machine, self.blocks, self.strategy = machine, blocks, strategy
        self.now_s = 0.0
        self.totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._free: defaultdict[str, float] = defaultdict(float)
        """Moment at which each resource is free."""
        self._earned_s = 0.0
        """Moment at which the shaper's bucket is full again."""
        self._pieces = self._micro_step()
        self._until = list(itertools.accumulate(b.elements for b in blocks))
        self._moved = [n for n, b in enumerate(blocks) if b.offloaded_bytes]
        self._changes: list[tuple[float, float, float]] = []
        """Chunks of changed weights under way. Each has the model's elements up to its end, its own
        elements, and the task that it is sent after."""

    def _micro_step(self) -> list[_TimedPart]:
        forward, backward = list[_TimedPart](), list[_TimedPart]()
        for number, block in enumerate(self.blocks):
            forward += self._divided(number, "forward", block.forward_s, True)
        for number, block in reversed([*enumerate(self.blocks)]):
            if block.recompute_s:
                backward += self._divided(number, "recompute", block.recompute_s, not block.kept)
            gathers = not block.kept and (self.strategy.gathers_twice or not block.recompute_s)
            backward += self._divided(number, "backward", block.backward_s, gathers)
        return forward + backward

    def _divided(self, number: int, kind: str, seconds: float, gathers: bool) -> list[_TimedPart]:
        block = self.blocks[number]
        seconds += block.calls * self.machine.module_s
        if not gathers or not block.elements:
            return [_TimedPart(number, kind, seconds)]
        count = max(1, min(block.calls, MOST_PIECES)) if self.machine.streams else 1
        each = (seconds / count, block.elements / count, block.calls / count)
        return [_TimedPart(number, kind, *each, i == 0, i == count - 1) for i in range(count)]

    def step(self) -> None:
        count = self.strategy.micro_steps
        marks = []
        for number in range(simulated := min(count, SIMULATED)):
            self._run_micro_step(first=number == 0, last=number == simulated - 1)
            marks.append({**self.totals, _LEFT_OUT: self.now_s})
        self.update()
        for key, value in marks[1].items() if count > simulated else ():
            self.totals[key] += (count - simulated) * (value - marks[0].get(key, 0.0))

    def result(self, begin_s: float, steps: int) -> StepTimes:
        """Return the mean step since a moment."""
        mean = {key: n / steps for key, n in self.totals.items() if n}
        left_out_s = mean.pop(_LEFT_OUT, 0.0)
        sent = {kind: mean.pop((of, kind)) for of, kind in [*mean] if of == "sent"}
        return StepTimes((self.now_s - begin_s) / steps + left_out_s, mean, sent)

    def _add(
        self, on: str, kind: str, seconds: float, call_s: float, *after: float, burst_s: float = 0.0
    ) -> float:
        """Occupy a resource after other tasks; a pause earns `burst_s`."""
        start_s = max(self._free[on], *after)
        end_s = start_s + seconds
        if burst_s:
            self._earned_s = max(start_s, self._earned_s) + seconds
            end_s = max(start_s, self._earned_s - burst_s)
        self.totals[on, kind] += seconds + call_s
        self._free[on] = end_s + call_s
        return end_s + call_s

    def _compute(self, kind: str, seconds: float, *after: float) -> float:
        return self._add("compute", kind, seconds * self.machine.slowest, 0.0, *after)

    def _run_micro_step(self, *, first: bool, last: bool) -> None:
        pieces, bucket = self._pieces, self.strategy.bucket
        gathered, exchanges, returned = list[float](), list[float](), dict[int, float]()
        ahead, filled = 0.0, 0
        computed = offloaded = self.now_s
        for number, piece in enumerate(pieces):
            while len(gathered) < len(pieces) and (
                len(gathered) <= number or self._runs_ahead(len(gathered) - number, ahead)
            ):
                gathered.append(self._gather(pieces[len(gathered)], computed, first=first))
                ahead += pieces[len(gathered) - 1].elements
            ahead -= piece.elements
            waits = [gathered[number], self.now_s]
            needed_in = "recompute" if self.blocks[piece.block].recompute_s else "backward"
            if piece.kind == needed_in and piece.first:
                waits.append(self._bring_back(piece.block, returned, computed))
            computed = self.now_s = self._compute(piece.kind, piece.seconds, *waits)
            if piece.kind == "forward" and piece.last and piece.block in self._moved:
                # a block's tensors are released when the next block has ended
                self.now_s = max(computed, offloaded)
                offloaded = self._offload(piece.block, computed)
            if piece.kind == "backward" and piece.last:
                filled += self.blocks[piece.block].trained
                at_end = number == len(pieces) - 1
                while filled >= bucket or (at_end and filled):
                    self._exchange(min(filled, bucket), computed, exchanges, last=last)
                    filled -= min(filled, bucket)
        self.now_s = max(self.now_s, *exchanges[-CONCURRENT_BUCKETS:], 0.0)

    def _runs_ahead(self, pieces: int, elements: float) -> bool:
        """Return whether one more piece is gathered, given the gathered pieces not used yet."""
        if not (self.machine.streams and self.strategy.prefetch) or self._changes:
            return False
        return pieces <= 1 or elements < self.strategy.prefetch

    def _gather(self, piece: _TimedPart, after: float, *, first: bool) -> float:
        strategy = self.strategy
        if not piece.elements:
            return after
        if strategy.weights is not None:
            self.receive_changes(self._until[piece.block])
        if strategy.weights is not None or not self.machine.streams:
            after = max(after, self.now_s)
        own_copy = strategy.hpz and not (first and piece.kind == "forward")
        far = strategy.weights is None and not own_copy
        return self._all_gather(f"gather in {piece.kind}", piece.elements, after, piece.calls, far)

    def _all_gather(
        self, kind: str, elements: float, after: float, calls: float, far: bool
    ) -> float:
        machine = self.machine
        far = far and machine.hosts > 1
        members = machine.ranks if far else machine.local
        nbytes = elements * self.strategy.itemsize * (members - 1) / members
        links = [True] * far + [False] * (machine.local > 1)
        send = functools.partial(self._send, kind, nbytes, members - 1, after, calls)
        return max((send(far=crosses_host) for crosses_host in links), default=after)

    def _send(
        self,
        kind: str,
        nbytes: float,
        hops: int,
        after: float,
        calls: float = 1,
        *,
        far: bool = True,
        all_to_all: bool = False,
    ) -> float:
        """Send over a node's link to other nodes, or over a rank's link inside its node."""
        link = self.machine.network if far else self.machine.inside
        if far:
            self.totals["sent", kind] += nbytes
        seconds = nbytes / link.bytes_per_s * (2 if all_to_all and not link.duplex else 1)
        call_s = calls * (self.machine.call_s + hops * link.latency_s)
        burst_s = link.burst_bytes / link.bytes_per_s
        resource = "network" if far else "inside"
        return self._add(resource, kind, seconds, call_s, after, burst_s=burst_s)

    def _offload(self, block: int, after: float) -> float:
        seconds = self.blocks[block].offloaded_bytes / self.machine.bus_bytes_per_s
        return self._add("bus", "offload", seconds, 0.0, after)

    def _bring_back(self, block: int, returned: dict[int, float], after: float) -> float:
        """Bring this block's inputs and the next one's from host memory; this block's task."""
        ahead = [n for n in self._moved if n <= block][-1 - (block in self._moved) :]
        for number in reversed(ahead):
            if number not in returned:
                returned[number] = self._offload(number, after)
        return returned.get(block, 0.0)

    def _exchange(self, elements: int, after: float, exchanges: list[float], *, last: bool) -> None:
        machine, how = self.machine, self.strategy.gradients
        if how.once and not last:
            exchanges.append(self._compute("compression", elements * how.accumulate_s, after))
            return
        if len(exchanges) >= CONCURRENT_BUCKETS:
            self.now_s = max(self.now_s, exchanges[-CONCURRENT_BUCKETS])
        begun = after
        if machine.local > 1 and how.inside_bytes:
            inside = elements * how.inside_bytes
            after = self._send("gradients", inside, machine.local - 1, after, far=False)
        encode_s, decode_s = how.encode_s, how.decode_s
        if machine.streams:  # kernels share the device with backward
            encode_s, decode_s = encode_s + decode_s, 0.0
        if encode_s:
            after = self._compute("compression", elements * encode_s, after)
        if machine.hosts > 1:
            nbytes, ready = elements * how.link_bytes, begun if how.ring else after
            arrived = self._send("gradients", nbytes, how.hops, ready, all_to_all=not how.ring)
            after = max(arrived, after)
        if decode_s:
            after = self._compute("compression", elements * decode_s, after)
        exchanges.append(after)
        if not machine.streams:
            self.now_s = max(self.now_s, after)

    def update(self) -> None:
        """Run the optimizer, and begin to send the changes of resident weights."""
        machine, strategy = self.machine, self.strategy
        if machine.ranks > 1:  # overflow and norm
            hops = 2 * math.ceil(math.log2(machine.ranks))
            self.now_s = self._send("update", 0.0, hops, self.now_s, 2, far=machine.hosts > 1)
        self.now_s = self._compute("update", strategy.update_s, self.now_s)
        if strategy.gathers_changed:
            trained = sum(b.trained for b in self.blocks)
            calls = -(-trained // ALL_GATHER_BUCKET)
            self.now_s = self._all_gather("gather after update", trained, self.now_s, calls, True)
        if strategy.weights is not None and machine.hosts > 1:
            elements = self._until[-1]
            encode_s = elements * strategy.weights.encode_s
            self.now_s = self._compute("changed weights", encode_s, self.now_s)
            count = max(1, round(elements / machine.ranks / CHUNK))
            each = elements / count
            self._changes = [(elements * (n + 1) / count, each, self.now_s) for n in range(count)]

    def receive_changes(self, until: float) -> None:
        """Wait for the changes of the model's first `until` elements."""
        weights, begun = self.strategy.weights, 0.0
        while self._changes and begun < until and weights is not None:
            begun, change, after = self._changes.pop(0)
            nbytes = change * weights.link_bytes
            arrived = self._send("changed weights", nbytes, 1, after, all_to_all=True)
            decode_s = change * weights.decode_s
            self.now_s = self._compute("changed weights", decode_s, self.now_s, arrived)
