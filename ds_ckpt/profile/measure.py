"""One policy at one batch size: a step on fake tensors, or on real ones, under observation.

Gradients of weights are dropped as soon as they are there, as ZeRO-3 moves them into its bucket:
they count while they are made and not after.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.install import Surrounding
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.profile.fakes import built_fake
from ds_ckpt.profile.held import HeldByPlace
from ds_ckpt.profile.plans import with_plan
from ds_ckpt.profile.policies import Choice, blocks_of
from ds_ckpt.profile.records import Footprint
from ds_ckpt.profile.subject import Subject, run_forward, tokens_of
from ds_ckpt.profile.watch import Watch


@contextmanager
def gradients_dropped(model: nn.Module, batch: Any = None) -> Iterator[None]:
    """Weights' gradients are let go as they come, as ZeRO-3 does; the batch's at the end."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None


@contextmanager
def checkpointed(
    model: nn.Module,
    choice: Choice,
    scope: Callable[[], Any] | None = None,
    around: Surrounding | None = None,
) -> Iterator[None]:
    """The policy on the model. ConfigError or UnsupportedError as in training."""
    policy = choice.policy()
    if policy is None:
        yield
        return
    scopes = (scope,) if scope is not None else ()
    units = None if choice.plan is None else choice.plan.units(model)
    put = CheckpointedBlocks(model, scopes=scopes, policy=policy, units=units, around=around)
    try:
        yield
    finally:
        put.remove()


def observe(
    model: nn.Module,
    batch: Any,
    choice: Choice,
    modules: Sequence[str] | None,
    *,
    count: int,
    fake: bool,
) -> Footprint:
    """One step under observation; the model is left as it was found."""
    blocks, _ = blocks_of(model, modules)
    watch = Watch(model, blocks)
    held = HeldByPlace(model, blocks, watch)
    with ExitStack() as stack:
        stack.enter_context(gradients_dropped(model, batch))
        stack.enter_context(checkpointed(model, choice, watch.recomputing, watch.around))
        stack.enter_context(watch)
        with held:
            loss = run_forward(model, batch)
        watch.backward()
        loss.backward()
    return Footprint(
        policy=choice.name,
        batch=count,
        tokens=tokens_of(batch, count),
        fake=fake,
        held_bytes=held.bytes,
        blocks=held.blocks,
        peak=watch.peak,
        forward=watch.total("forward"),
        recompute=watch.total("recompute"),
        backward=watch.total("backward"),
        score_bytes=held.score_bytes,
        core_avoided_bytes=watch.avoided_bytes,
        operators=tuple(watch.by_operator.most_common(20)),
    )


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
    wanted: Sequence[Choice],
    modules: Sequence[str] | None,
    told: Callable[[str], object] = lambda text: None,
) -> list[Footprint]:
    """One of each policy at a batch of `count`."""
    made = built_fake(subject, count)
    found = []
    for unplanned in wanted:
        told(f"{unplanned.name}, batch {count}")
        choice = with_plan(unplanned, made.model, made.known_batch(), torch.device("cpu"))
        with made.entered():
            found.append(observe(made.model, made.batch, choice, modules, count=count, fake=True))
    return found


def real_footprints(
    subject: Subject,
    count: int,
    wanted: Sequence[Choice],
    modules: Sequence[str] | None,
    device: torch.device,
    told: Callable[[str], object] = lambda text: None,
) -> list[Footprint]:
    """The same with real tensors on the device. UnsupportedError where they do not fit."""
    found = []
    with out_of_memory(count):
        model, batch = built_real(subject, count, device)
        for unplanned in wanted:
            told(f"{unplanned.name}, batch {count}, real tensors")
            choice = with_plan(unplanned, model, batch, device)
            found.append(observe(model, batch, choice, modules, count=count, fake=False))
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
