"""One policy at one batch size: a step on fake tensors, or on real ones, under observation.

The memory tracker follows storages and says where the step is; here its records are added up by
block, part and phase. Gradients of weights are dropped as soon as they are there, as ZeRO-3 moves
them into its bucket: they count while they are made and not after.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ds_ckpt.activation import Block, CheckpointedBlocks
from ds_ckpt.activation.blocks import attention_parts, is_norm, mlp_parts
from ds_ckpt.activation.install import Surrounding
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.planner.costs import flops_of, launches, moved_bytes, stored_attention
from ds_ckpt.planner.fake import FakeModel
from ds_ckpt.profile.policies import ComparedPolicy, blocks_of, with_plan
from ds_ckpt.profile.records import BlockHeld, Footprint, Peak, Work
from ds_ckpt.profile.subject import Subject, run_forward, tokens_of
from ds_ckpt.telemetry.memory import (
    OUTSIDE,
    MemoryTracker,
    ModuleTracker,
    Operator,
    Phase,
    Place,
    Storage,
    tensors_in,
)

_PARTS = ("attention", "mlp", "norm", "other", "boundary")
Told = Callable[[str], object]


class Observation:
    """One step, seen by the memory tracker. Enter it around the step, `saved` around the forward.

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
        self._tracker = MemoryTracker(
            model, place=lambda: self.where.place, operator=self._ran, noted=self._noted
        )
        self.saved = self._tracker.saved
        self.work: defaultdict[Place, Work] = defaultdict(Work)
        self.by_operator: Counter[str] = Counter()
        self.avoided_bytes = 0
        self._score_sizes: set[int] = set()
        """Numbers of elements of attention weights that were stored."""
        self._savers: dict[Storage, Callable[[], Place]] = {}
        self._sizes: defaultdict[Storage, set[int]] = defaultdict(set)
        """Numbers of elements of the tensors that share a saved storage."""

    def __enter__(self) -> Observation:
        self.where.__enter__()
        self._tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracker.__exit__(*error)
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
            if stored:
                self._score_sizes.add(stored)

    def _noted(self, tensor: Tensor, storage: Storage | None) -> None:
        if storage is not None:
            self._savers.setdefault(storage, self.where.saver())
            self._sizes[storage].add(tensor.numel())

    def total(self, phase: Phase) -> Work:
        """All operators of a phase."""
        return sum((work for place, work in self.work.items() if place.phase == phase), Work())

    @property
    def peak(self) -> Peak:
        place = self._tracker.peak_place or Place("forward", OUTSIDE)
        return Peak(self._tracker.peak_bytes, place.phase, place.block)

    def blocks(self) -> tuple[BlockHeld, ...]:
        """What each block held after the forward; what lies outside of all blocks last."""
        bytes_of: Counter[tuple[str, str]] = Counter()
        for storage, nbytes in self.saved.held.items():
            place = self._savers[storage]()
            bytes_of[place.block, place.part] += nbytes
        return tuple(
            BlockHeld(name, class_name, **{f"{p}_bytes": bytes_of[name, p] for p in _PARTS})
            for name, class_name in {**self._names, OUTSIDE: ""}.items()
        )

    def score_bytes(self) -> int:
        """Of what was held: storages as large as attention weights."""
        held = self.saved.held.items()
        return sum(nbytes for s, nbytes in held if self._sizes[s] & self._score_sizes)


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
def gradients_dropped(model: nn.Module, batch: Any = None) -> Iterator[None]:
    """Weights' gradients are let go as they come, as ZeRO-3 does; the batch's at the end."""

    def drop(tensor: Tensor) -> None:
        tensor.grad = None

    with ExitStack() as stack:
        for leaf in tensors_in(batch):
            stack.callback(drop, leaf)
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        yield


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
        gradients_dropped(model, batch),
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


def fake_footprints(
    subject: Subject,
    count: int,
    policies: Sequence[ComparedPolicy],
    modules: Sequence[str] | None,
    told: Told = lambda text: None,
) -> list[Footprint]:
    """One of each policy at a batch of `count`."""
    made = built_fake(subject, count)
    found = []
    for unplanned in policies:
        told(f"{unplanned.name}, batch {count}")
        policy = with_plan(unplanned, made.model, made.known_batch(), torch.device("cpu"))
        with made.entered():
            found.append(
                _footprint(made.model, made.batch, policy, modules, count=count, fake=True)
            )
    return found


def real_footprints(
    subject: Subject,
    count: int,
    policies: Sequence[ComparedPolicy],
    modules: Sequence[str] | None,
    device: torch.device,
    told: Told = lambda text: None,
) -> list[Footprint]:
    """The same with real tensors on the device. UnsupportedError where they do not fit."""
    found = []
    with out_of_memory(count):
        model, batch = built_real(subject, count, device)
        for unplanned in policies:
            told(f"{unplanned.name}, batch {count}, real tensors")
            policy = with_plan(unplanned, model, batch, device)
            found.append(_footprint(model, batch, policy, modules, count=count, fake=False))
    return found


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
