"""One policy at one batch size: a step on fake tensors or on real ones, under observation or timed.

The memory tracker follows storages and says where the step is; here its records are added up by
block, part and phase. Gradients of weights are dropped as soon as they are there, as ZeRO-3 moves
them into its bucket: they count while they are made and not after. In timed steps no dispatch mode
is on, and policies take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

from ds_ckpt.activation import Block, CheckpointedBlocks
from ds_ckpt.activation.blocks import attention_parts, is_norm, mlp_parts
from ds_ckpt.activation.install import Surrounding
from ds_ckpt.activation.planning.costs import flops_of, launches, moved_bytes, stored_attention
from ds_ckpt.activation.planning.fake import FakeModel
from ds_ckpt.activation.planning.survey import gradients_dropped
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab.estimate.policies import ComparedPolicy, blocks_of, with_plan
from ds_ckpt.lab.estimate.profiles import PARTS, BlockHeld, Footprint, Peak, Times, Work
from ds_ckpt.lab.subject import Subject, run_forward, tokens_of
from ds_ckpt.telemetry.memory import (
    OUTSIDE,
    MemoryTracker,
    ModuleTracker,
    Operator,
    Phase,
    Place,
    SavedActivations,
    Storage,
    tensors_in,
)

Told = Callable[[str], object]


class Observation(MemoryTracker):
    """Enter it around one step, `saved` around the forward.

    Args:
        model: nothing of it is changed but for hooks, which are taken off again.
        blocks: what bytes and operators are told apart by.

    Attributes:
        where: says which phase, block and part runs; to be told when backward begins.
        work: launches, FLOPs and bytes by place.
        by_operator: launches of each operator.
        avoided_bytes: of attention weights that attention cores did not store.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self._names = {b.name: type(b.module).__name__ for b in blocks}
        self.where = ModuleTracker(
            {b.name: b.module for b in blocks}, {b.name: list(_parts_of(b)) for b in blocks}
        )
        super().__init__(
            model, place=lambda: self.where.place, operator=self._ran, noted=self._noted
        )
        self.work: defaultdict[Place, Work] = defaultdict(Work)
        self.by_operator: Counter[str] = Counter()
        self.avoided_bytes = 0
        self._scores: dict[Storage | None, int] = {None: 0}
        """Attention weights that were stored, casts and dropout of them: their elements."""
        self._savers: dict[Storage, Callable[[], Place]] = {}

    def __enter__(self) -> Observation:
        self.where.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.where.__exit__(*error)

    def _ran(self, operator: Operator) -> None:
        if not launches(operator):
            return
        place, flops = self.where.place, flops_of(operator)
        self.work[place] += Work(1, flops, moved_bytes(operator))
        self.by_operator[str(operator.func)] += 1
        if place.phase == "forward" and place.block != OUTSIDE:
            stored, avoided = stored_attention(operator)
            self.avoided_bytes += avoided
            elements = stored or (0 if flops else self._scores_in(operator.given))
            if elements:
                made = (t for t in operator.made if t.numel() == elements)
                self._scores.update({self.storages.number(t): elements for t in made})

    def _scores_in(self, tensors: Sequence[Tensor]) -> int:
        """Elements of the attention weights among these tensors; 0 without any."""
        return max((self._scores.get(self.storages.number(t), 0) for t in tensors), default=0)

    def _noted(self, tensor: Tensor, storage: Storage | None) -> None:
        if storage is not None:
            self._savers.setdefault(storage, self.where.saver())

    def total(self, phase: Phase) -> Work:
        """All operators of a phase."""
        return sum((work for place, work in self.work.items() if place.phase == phase), Work())

    @property
    def peak(self) -> Peak:
        place = self.peak_place or Place("forward", OUTSIDE)
        return Peak(self.peak_bytes, place.phase, place.block)

    def blocks(self) -> tuple[BlockHeld, ...]:
        """Saved activations of each block; what lies outside of all blocks last."""
        bytes_of: Counter[tuple[str, str]] = Counter()
        for storage, nbytes in self.saved.held.items():
            place = self._savers[storage]()
            bytes_of[place.block, place.part] += nbytes
        return tuple(
            BlockHeld(name, kind, *(bytes_of[name, part] for part in (*PARTS, "checkpointed")))
            for name, kind in {**self._names, OUTSIDE: ""}.items()
        )

    def score_bytes(self) -> int:
        """Of the saved activations: attention weights."""
        return sum(nbytes for s, nbytes in self.saved.held.items() if s in self._scores)


def _parts_of(block: Block) -> Iterator[tuple[str, nn.Module]]:
    """Attention, MLP and norms of a block; a norm inside attention is a norm."""
    for name, module in block.module.named_modules():
        if name and is_norm(type(module).__name__):
            yield "norm", module
    for _, module in attention_parts(block.name, block.module):
        yield "attention", module
    for chain in mlp_parts(block.name, block.module):
        for _, module in chain:
            yield "mlp", module


@contextmanager
def nothing_left(model: nn.Module, batch: Any) -> Iterator[None]:
    """Weights' gradients are let go as they come, the batch's at the end."""
    with gradients_dropped(model):
        yield
    for leaf in tensors_in(batch):
        leaf.grad = None


@contextmanager
def checkpointed(
    model: nn.Module,
    policy: ComparedPolicy,
    scope: Callable[[], Any] | None = None,
    around: Surrounding | None = None,
) -> Iterator[None]:
    """The policy on the model. ConfigError or UnsupportedError as in training."""
    activation = policy.policy()
    if activation is None:
        yield
        return
    scopes = (scope,) if scope is not None else ()
    units = None if policy.plan is None else policy.plan.units(model)
    put = CheckpointedBlocks(model, scopes=scopes, policy=activation, units=units, around=around)
    try:
        yield
    finally:
        put.remove()


def _footprint(
    model: nn.Module,
    batch: Any,
    policy: ComparedPolicy,
    modules: Sequence[str] | None,
    *,
    count: int,
    fake: bool,
) -> Footprint:
    """One step under observation; the model is left as it was found."""
    seen = Observation(model, blocks_of(model, modules)[0])
    with (
        nothing_left(model, batch),
        checkpointed(model, policy, seen.where.recomputing, seen.where.around),
        seen,
    ):
        with seen.saved:
            loss = run_forward(model, batch)
        seen.where.backward()
        loss.backward()
    return Footprint(
        policy=policy.name,
        batch=count,
        tokens=tokens_of(batch),
        fake=fake,
        held_bytes=seen.saved.bytes,
        blocks=seen.blocks(),
        peak=seen.peak,
        forward=seen.total("forward"),
        recompute=seen.total("recompute"),
        backward=seen.total("backward"),
        score_bytes=seen.score_bytes(),
        core_avoided_bytes=seen.avoided_bytes,
        operators=tuple(seen.by_operator.most_common(20)),
    )


def built_fake(subject: Subject, count: int) -> FakeModel:
    """Without memory; UnsupportedError where that cannot be."""
    return FakeModel.build(subject.name, lambda: subject.build(count))


def built_real(subject: Subject, count: int, device: torch.device) -> tuple[nn.Module, Any]:
    """On the device; the same weights and inputs every time."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)
        model, batch = subject.build(count)
    return model.to(device), tree_map(lambda t: t.to(device) if hasattr(t, "to") else t, batch)


def footprints(
    subject: Subject,
    count: int,
    policies: Sequence[ComparedPolicy],
    modules: Sequence[str] | None,
    device: torch.device | None = None,
    told: Told = lambda text: None,
) -> list[Footprint]:
    """One of each policy at a batch of `count`.

    Args:
        device: of real tensors; None: fake ones.

    Raises UnsupportedError where real ones do not fit, or fake ones lack a value.
    """
    entered: Callable[[], Any] = nullcontext
    with out_of_memory(count):
        if device is None:
            made = built_fake(subject, count)
            model, batch, known, entered = made.model, made.batch, made.known_batch(), made.entered
        else:
            model, batch = built_real(subject, count, device)
            known = batch
        found = []
        for unplanned in policies:
            told(f"{unplanned.name}, batch {count}")
            policy = with_plan(unplanned, model, known, device or torch.device("cpu"))
            with entered():
                found.append(
                    _footprint(model, batch, policy, modules, count=count, fake=device is None)
                )
    return found


def real_bytes(
    model: nn.Module, batch: Any, policy: ComparedPolicy, device: torch.device
) -> tuple[int, int]:
    """Saved activations of a real forward, and the allocator's peak above what was there before."""
    with nothing_left(model, batch), checkpointed(model, policy):
        saved = SavedActivations(model)
        with saved:
            loss = run_forward(model, batch)
        del loss
        return saved.bytes, _allocated(lambda: run_forward(model, batch).backward(), device)


def _allocated(step: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0)))


def times_of(
    model: nn.Module,
    batch: Any,
    policies: Sequence[ComparedPolicy],
    device: torch.device,
    repeats: int,
    told: Told = lambda text: None,
) -> dict[str, Times]:
    """Medians by policy. The first round warms up and does not count.

    Raises ConfigError, UnsupportedError: from putting a policy on the model.
    """
    taken: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for repeat in range(repeats + 1):
        told(f"timed steps, {repeat} of {repeats}" if repeat else "warming up")
        for policy in policies:
            step = _timed_step(model, batch, policy, device)
            if repeat:
                taken[policy.name].append(step)
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = str(torch.cuda.get_device_name(device))
    return {
        policy: Times(name, repeats, *map(statistics.median, zip(*steps, strict=True)))
        for policy, steps in taken.items()
    }


def _timed_step(
    model: nn.Module, batch: Any, policy: ComparedPolicy, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of forward, of backward, and of the recomputes in it."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    recompute_s = 0.0

    @contextmanager
    def recomputing() -> Iterator[None]:
        nonlocal recompute_s
        start_s = now()
        try:
            yield
        finally:
            recompute_s += now() - start_s

    with nothing_left(model, batch), checkpointed(model, policy, recomputing):
        start_s = now()
        loss = run_forward(model, batch)
        middle_s = now()
        loss.backward()
        end_s = now()
    return middle_s - start_s, end_s - middle_s, recompute_s


@contextmanager
def out_of_memory(count: int) -> Iterator[None]:
    """The allocator's error as one with a remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not exhausted and "not enough memory" not in text:
            raise
        gc.collect()
        raise too_big(count, text) from error


def too_big(count: int, found: str) -> UnsupportedError:
    """The batch does not fit into the memory of this machine."""
    return UnsupportedError(
        Problem(
            where="--batch" if count == 1 else f"--batch or --batches, at {count}",
            found=found,
            why="a step on real tensors needs more memory than there is",
            remedy="write a smaller batch or fewer --tokens, or use --fake, which allocates none",
        ),
        headline="the batch is too big for this machine",
    )
