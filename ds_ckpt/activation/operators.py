"""Operator rules: which results a recompute takes from memory instead of computing them again.

Two dispatch modes, one around the forward and one around the recompute. The results themselves are
kept with the block's inputs (`kept.py`), so offload and measurement see them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ds_ckpt.activation.choice import Choice
from ds_ckpt.activation.surroundings import RandomState, Tracker, devices_of


@dataclass
class _Entry:
    operator: Any
    results: list[Any]
    spec: TreeSpec
    packs: int
    versions: list[int]
    after: RandomState | None
    first: int = -1
    """Where its tensors begin among what is kept; -1: it is computed again."""


@functools.cache
def is_view(operator: Any) -> bool:
    """Whether a result shares memory with an argument."""
    return any(r.alias_info is not None for r in operator._schema.returns)


@functools.cache
def writes_to(operator: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of every argument that it changes.

    Collectives do not say which: all of theirs. (AutoTP sums over the group in the memory of a
    product.)
    """
    collective = operator.namespace == "c10d"
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if collective or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def _storage(tensor: Tensor) -> int | None:
    strided = tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if strided else None


class _Pausing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While fingerprints are taken: their operators are none of the block's."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class Recording(_Pausing):
    """Around a forward: remembers the results that are to be saved.

    Args:
        choice: which.
        packs: tells how many tensors autograd has saved so far.
        trackers: random states beside torch's.
    """

    def __init__(
        self, choice: Choice, packs: Callable[[], int], trackers: Sequence[Tracker] = ()
    ) -> None:
        super().__init__()
        self._choice, self._packs, self._trackers = choice, packs, trackers
        self.entries: list[_Entry] = []
        self.seen: Counter[str] = Counter()
        self._writes: dict[int | None, int] = {}
        """Storage: how many entries there were when it was last written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        self._note_writes(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if not is_view(func):
            self.seen[str(func)] += 1
        if self._choice.wants(func):
            self._choice.count(func)
            results, spec = tree_flatten(out)
            tensors = [r for r in results if isinstance(r, Tensor)]
            random = torch.Tag.nondeterministic_seeded in func.tags
            self.entries.append(
                _Entry(
                    func,
                    results,
                    spec,
                    self._packs(),
                    [t._version for t in tensors],
                    RandomState(devices_of(tensors), self._trackers) if random else None,
                )
            )
        return out

    def _note_writes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for position, name in writes_to(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tree_flatten(value)[0]:
                if isinstance(tensor, Tensor):
                    self._writes[_storage(tensor)] = len(self.entries)

    def _unchanged(self, index: int, tensors: Sequence[Tensor]) -> bool:
        """Whether nothing has written over an entry's results.

        Versions alone do not tell: `aten._unsafe_view` (every 3-D product) and `.data` share the
        storage and count versions of their own.
        """
        if [t._version for t in tensors] != self.entries[index].versions:
            return False
        return all(self._writes.get(_storage(t), 0) <= index for t in tensors)

    def finish(self, outside: Iterable[Tensor], *, whole: bool) -> list[Tensor]:
        """What is to be kept, in order; afterwards the entries hold no tensors.

        Args:
            outside: tensors of the block that others can reach. What lies in their memory is not
                kept: somebody may write there.
            whole: the recompute runs to the end. Otherwise it stops where autograd has saved its
                last tensor, and what came later is not kept.
        """
        kept: list[Tensor] = []
        reachable = {_storage(t) for t in outside}
        for index, entry in enumerate(self.entries):
            tensors = [r for r in entry.results if isinstance(r, Tensor)]
            reached = whole or entry.packs < self._packs()
            inside = not any(_storage(t) in reachable for t in tensors)
            if reached and inside and self._unchanged(index, tensors):
                entry.first = len(kept)
                kept += [t.detach() for t in tensors]
            entry.results = [_TENSOR if isinstance(r, Tensor) else r for r in entry.results]
        return kept


_TENSOR = object()


class Replaying(_Pausing):
    """Around a recompute: hands out what was saved, in the order of the forward.

    Args:
        choice: the same as in the forward.
        entries: of the forward's `Recording`.
        kept: what its `finish` returned.
        differs: raises the error that names the block.
    """

    def __init__(
        self,
        choice: Choice,
        entries: Sequence[_Entry],
        kept: Sequence[Tensor],
        differs: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._choice, self._entries, self._kept = choice, entries, kept
        self._differs = differs
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._paused or not self._choice.wants(func):
            return func(*args, **(kwargs or {}))
        if self._next >= len(self._entries):
            self._differs(f"{func} runs once more than in the forward")
        entry = self._entries[self._next]
        self._next += 1
        if entry.operator is not func:
            self._differs(f"{func} runs where the forward ran {entry.operator}")
        if entry.first < 0:
            return func(*args, **(kwargs or {}))
        position = iter(range(entry.first, len(self._kept)))
        results = [
            self._kept[next(position)].detach() if r is _TENSOR else r for r in entry.results
        ]
        if entry.after is not None:
            entry.after.put_back()
        return tree_unflatten(results, entry.spec)
