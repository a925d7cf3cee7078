"""Values of small integers in a run with fake tensors: masks are decided as in the real run.

A fake tensor has no values, and models ask for some: whether a padding mask is all ones decides
which attention runs, and so what autograd saves. Small integer and boolean inputs keep theirs here,
and so does whatever is computed from them and from constants alone. Everything else stays without.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ckpt.patch import Patches
from ds_ckpt.planner.fake_copy import faked
from ds_ckpt.planner.work import NO_WORK

MOST_ELEMENTS = 2**20
"""Of tensors whose values are kept: beyond it an attention mask of every pair of positions."""


class UnknownValueError(Exception):
    """A forward needs a value that a fake tensor does not have. `operator` asked for it."""

    def __init__(self, operator: str) -> None:
        super().__init__(operator)
        self.operator = operator


class KnownValues(TorchDispatchMode):
    """Entered above a `FakeTensorMode`: computes for real what depends on known values alone."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._known = WeakTensorKeyDictionary()

    def fake(self, value: Tensor) -> Tensor:
        """A fake tensor for `value`, whose values are remembered if it is small and whole."""
        twin = faked(value, self._mode)
        real = not isinstance(value, FakeTensor) and value.device.type != "meta"
        if real and may_be_known(value):
            self._known[twin] = value.detach().clone()  # a forward may write into it
        return twin

    def known(self, leaf: Any) -> Any:
        """The values of a fake tensor where they are known; anything else as it is."""
        return self._known.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NO_WORK:
            return func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = all(t in self._known for t in tensors)
        try:
            out = _grouped(func, args, kwargs) if _is_grouped(func) else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not known:
                raise UnknownValueError(str(func)) from None
            return tree_map(self._to_fake, self._really(func, args, kwargs))
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if known and self._wanted(func, tensors, results):
            real = [t for t in tree_leaves(self._really(func, args, kwargs)) if _is_tensor(t)]
            for twin, value in zip(results, real, strict=True):
                self._known[twin] = value
        elif _is_mutable(func):
            self._forget(tensors)
        return out

    def _wanted(self, func: Any, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        if _is_random(func):  # one number that decides: whether LayerDrop leaves out a layer
            return not tensors and all(t.numel() == 1 for t in results)
        return _has_values(func) and all(_small(t) for t in results)

    def _really(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        def value(leaf: Any) -> Any:
            return self._known[leaf] if isinstance(leaf, Tensor) else leaf

        with unset_fake_temporarily():
            return func(*tree_map(value, args), **tree_map(value, kwargs))

    def _to_fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        twin = self._mode.from_tensor(leaf, static_shapes=True)
        self._known[twin] = leaf
        return twin

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """What may have been written over, under whatever view."""
        storages = {t.untyped_storage()._cdata for t in tensors}
        for twin in list(self._known.keys()):
            if twin.untyped_storage()._cdata in storages:
                del self._known[twin]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def may_be_known(tensor: Tensor) -> bool:
    """Whether the tensor's values are kept: it is small, and of whole numbers."""
    return not tensor.is_floating_point() and not tensor.is_complex() and _small(tensor)


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= MOST_ELEMENTS and tensor.layout == torch.strided


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _has_values(func: Any) -> bool:
    """Memory that nobody has written has none."""
    return "empty" not in func._schema.name


@functools.cache
def _is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@functools.cache
def _is_grouped(func: Any) -> bool:
    return str(func._schema.name) == "aten::_grouped_mm"


def _grouped(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Torch tells the shape of grouped products for bf16 alone, and computes them for all types."""
    dtype = args[0].dtype

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if floating else leaf

    out = func(*tree_map(cast, args), **tree_map(cast, kwargs))
    return out.to(dtype)


@contextmanager
def taken_for_real() -> Iterator[None]:
    """While it lasts, transformers treats fake tensors as any: it would else trace, not train."""
    patches = Patches()
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is not None and hasattr(utils, "is_fake_tensor"):
        patches.set(utils, "is_fake_tensor", lambda _: False)
    try:
        yield
    finally:
        patches.undo()
