"""A model and a batch without memory, built and run so that they decide as real ones would."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.patch import Patches
from ds_ckpt.planner.values import KnownValues, UnknownValueError, taken_for_real
from ds_ckpt.profile.subject import Subject

_UNKNOWN = (
    UnknownValueError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


class _RealIntegers(TorchDispatchMode):
    """Random integers and constants get values, so that masks made of them are decided."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        constant = name == "aten::lift_fresh" and _is_real_whole(args[0])
        if name != "aten::randint" and not constant:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return self._values.fake(func(*args, **(kwargs or {})))


def _is_real_whole(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_floating_point()


@dataclass(frozen=True)
class Faked:
    """A model and a batch without memory; they run inside `entered`."""

    subject: Subject
    model: nn.Module
    batch: Any
    mode: FakeTensorMode
    values: KnownValues

    def known_batch(self) -> Any:
        """The batch with real tensors where their values are known."""
        return tree_map(self.values.known, self.batch)

    @contextmanager
    def entered(self, *, tracing: bool = False) -> Iterator[None]:
        """Where the model can run.

        Args:
            tracing: transformers sees that tensors are fake and decides as under torch.compile:
                masks are made, not left out.

        Raises UnsupportedError where the forward asks for values that nobody knows.
        """
        seen = nullcontext() if tracing else taken_for_real()
        with _in_words(self.subject), _torch_quiet(), seen, self.mode, self.values:
            with _RealIntegers(self.values):
                yield


def built_fake(subject: Subject, count: int) -> Faked:
    """Allocates nothing but small integers, whose values decide on masks."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a callable may have made constants before
    values = KnownValues(mode)
    with _in_words(subject), taken_for_real(), _first_values_left_out():
        with mode, values, _RealIntegers(values):
            model, batch = subject.build(count)
    return Faked(subject, model, batch, mode, values)


@contextmanager
def _first_values_left_out() -> Iterator[None]:
    """torch's truncated normal asks tensors for its bounds, which fake ones cannot tell."""
    patches = Patches()
    patches.set(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        patches.undo()


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """torch logs what operators raise; the error says it already."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _in_words(subject: Subject) -> Iterator[None]:
    """Turns fake tensors' refusal to make up values into words."""
    try:
        yield
    except _UNKNOWN as error:
        asked = getattr(error, "operator", None) or getattr(error, "func", None) or error
        raise UnsupportedError(
            Problem(
                where=subject.name,
                found=f"{asked} in the forward",
                why="what it does depends on values, and fake tensors hold none",
                remedy="measure real tensors with --real, on a smaller shape if need be",
            ),
            headline="the model cannot be profiled by fake tensors",
        ) from error
