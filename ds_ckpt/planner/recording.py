"""Watches one forward of a fake copy: operators, tensors that autograd saves, calls of modules.

`survey.py` makes sense of it. Storages are told apart by their address, which a weak reference
keeps from being given to another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.checkpoint import Arguments
from ds_ckpt.activation.install import without_empty_caches
from ds_ckpt.activation.selective import is_view, writes_to
from ds_ckpt.planner.work import NO_WORK, flops_of, moved_bytes

Storage = int
"""A storage's address."""


@dataclass
class Event:
    """One operator.

    Attributes:
        module: number of the innermost module that runs.
        packs: tensors that autograd had saved when the operator had run, parameters not counted.
        given: storages of the tensors that it got.
        results: storages of the tensors that it returned, in order.
        written: storages that it wrote into.
    """

    func: Any
    module: int
    packs: int
    given: frozenset[Storage]
    results: tuple[Storage, ...]
    written: tuple[Storage, ...]
    view: bool
    flops: int
    moved_bytes: int
    output_bytes: int


@dataclass
class Save:
    """One tensor that autograd saved; `event` is the number of events before it."""

    storage: Storage
    event: int


@dataclass
class Run:
    """One call of one module: what was inside, from where to where.

    Attributes:
        arguments: storages of the tensors that checkpointing the call would keep, in order.
        results: storages of its tensors.
        events, saves: first, and one behind the last.
    """

    module: int
    depth: int
    arguments: list[Storage]
    events: tuple[int, int]
    saves: tuple[int, int]
    results: list[Storage] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Entered around the forward of a copy, above the modes that make it fake.

    Args:
        module: the copy.
        watched: modules whose calls are noted with their arguments.
    """

    def __init__(self, module: nn.Module, watched: Sequence[nn.Module]) -> None:
        super().__init__()
        self.names: list[str] = []
        self.classes: list[str] = []
        self.events: list[Event] = []
        self.saves: list[Save] = []
        self.runs: list[Run] = []
        self.sizes: dict[Storage, int] = {}
        """Bytes of every storage that was seen."""
        self._refs: dict[Storage, StorageWeakRef] = {}
        self._living: frozenset[Storage] = frozenset()
        self._open: list[int] = [0]
        self._stopped = 0
        self._packing = False
        self.parameters = frozenset(
            p.untyped_storage()._cdata for p in module.parameters() if p.layout == torch.strided
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _as_it_is)
        self._hooks = hooks
        noted = {id(m) for m in watched}
        for number, (name, part) in enumerate(module.named_modules()):
            self.names.append(name)
            self.classes.append(type(part).__name__)
            if type(part).forward is not nn.Module.forward:
                part.forward = self._wrapped(number, part, part.forward, id(part) in noted)

    def __enter__(self) -> Recorder:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    @property
    def running(self) -> str:
        """The innermost module in which the forward is, or where it stopped."""
        return self.names[self._stopped or self._open[-1]]

    def storage_of(self, tensor: Tensor) -> Storage | None:
        """The tensor's storage; None where it has none of its own (sparse)."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._refs:
            self._refs[key] = StorageWeakRef(storage)
        self.sizes[key] = storage.nbytes()  # some operators resize
        return key

    def finish(self) -> None:
        """The forward has ended and its result is still there: note what is held."""
        living = {s for s, ref in self._refs.items() if not ref.expired()}
        self._living = frozenset(living - self.parameters)

    def alive(self, storage: Storage) -> bool:
        """Whether it was held when the forward had ended; parameters do not count."""
        return storage in self._living

    def storages(self, value: Any) -> list[Storage]:
        """Of all tensors in a structure, in order, parameters left out."""
        leaves = (t for t in tree_leaves(value) if isinstance(t, Tensor))
        found = (self.storage_of(t) for t in leaves)
        return [s for s in found if s is not None and s not in self.parameters]

    def _pack(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = self.storage_of(tensor)
            self.saves.append(Save(-1 if storage is None else storage, len(self.events)))
        if tensor.is_leaf:
            return tensor
        self._packing = True
        try:
            return tensor.detach()
        finally:
            self._packing = False

    def _wrapped(
        self, number: int, module: nn.Module, forward: Callable[..., Any], noted: bool
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._open.append(number)
            run = None
            if noted:
                given, named = without_empty_caches(self.names[number], args, kwargs)
                tensors = Arguments(forward, given, named).tensors
                arguments = self.storages(tensors)
                events, saves = len(self.events), len(self.saves)
                run = Run(number, len(self._open), arguments, (events, events), (saves, saves))
                self.runs.append(run)
            try:
                result = forward(*args, **kwargs)
            except BaseException:
                self._stopped = self._stopped or number
                raise
            finally:
                self._open.pop()
            if run is not None:
                run.events = (run.events[0], len(self.events))
                run.saves = (run.saves[0], len(self.saves))
                run.results = self.storages(result)
            return result

        return recorded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._packing or func in NO_WORK:
            return func(*args, **kwargs)
        written = []
        for position, name in writes_to(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        view = not written and is_view(func)
        given = _tensors(args) + (_tensors(kwargs) if kwargs else [])
        results = [-1 if (s := self.storage_of(t)) is None else s for t in _tensors(out)]
        inputs = frozenset(s for t in given if (s := self.storage_of(t)) is not None)
        self.events.append(
            Event(
                func,
                self._open[-1],
                len(self.saves),
                inputs,
                tuple(results),
                tuple(s for t in written if (s := self.storage_of(t)) is not None),
                view,
                0 if view else flops_of(func, args, kwargs, out),
                0 if view else moved_bytes(given, _tensors(out)),
                0 if view else sum(self.sizes[s] for s in {*results} - inputs - {-1}),
            )
        )
        return out


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple) and not any(isinstance(v, list | dict) for v in value):
        return [v for v in value if isinstance(v, Tensor)]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
