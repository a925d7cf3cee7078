"""What a frame knows of its calls: where they ran, with what, and what came out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.arguments import TakenApart
from ds_ckpt.activation.choice import Choice
from ds_ckpt.activation.guards import changed_later
from ds_ckpt.activation.kept import Kept
from ds_ckpt.activation.operators import Recording
from ds_ckpt.activation.state import State, StateOfSite
from ds_ckpt.activation.surroundings import Buffers, Surroundings, Tracker

Scope = Callable[[], AbstractContextManager[Any]]


class Recomputing(threading.local):
    """The recompute that runs in this thread."""

    newest: int | None = None
    """The last plan that was there for its forward: plans of higher numbers had no part in it."""


recomputing = Recomputing()


class Plans:
    """How many plans there have been."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


plans = Plans()


@dataclass(frozen=True)
class Around:
    """What surrounds calls: the same for every block of a model.

    Attributes:
        recompute: scopes entered around every recompute.
        trackers: random states beside torch's own.
        number: of the plan, in the order in which plans were put on models.
    """

    recompute: Sequence[Scope] = ()
    trackers: Sequence[Tracker] = ()
    number: int = field(default_factory=plans.next)


@dataclass
class Site:
    """A module whose forward is run by frames."""

    name: str
    module: nn.Module
    choice: Choice | None = None
    buffers: Buffers | None = None
    state: StateOfSite | None = None
    replaying: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
    """What the module's forward has to run when it is called with its hooks in a recompute."""
    raw: Any = None


@dataclass
class Output:
    """A tensor that a call returned, recognisable without being held.

    Only where it has memory of its own and a version: no sparse one, none from inference mode.
    """

    storage: StorageWeakRef
    place: tuple[Any, ...]
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Output | None:
        if not cls._traceable(tensor):
            return None
        return cls(StorageWeakRef(tensor.untyped_storage()), cls._place(tensor), tensor._version)

    @staticmethod
    def _traceable(tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and not tensor.is_inference()

    @staticmethod
    def _place(tensor: Tensor) -> tuple[Any, ...]:
        geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return (tensor.untyped_storage()._cdata, *geometry, tensor.dtype)

    def is_(self, tensor: Tensor) -> bool:
        """The same memory, unchanged, even if it is another tensor object (ZeRO-3's hooks)."""
        return (
            self._traceable(tensor)
            and not self.storage.expired()
            and self._place(tensor) == self.place
            and tensor._version == self.version
        )


@dataclass
class Call:
    """One forward of one site."""

    site: Site
    arguments: TakenApart
    surroundings: Surroundings
    state: State
    first: int
    """Number of its first saved tensor in the frame."""
    links: dict[int, int] = field(default_factory=dict)
    """Argument tensor -> output tensor of the call before."""
    needs_gradient: dict[int, bool] = field(default_factory=dict)
    kept: Kept = field(default_factory=lambda: Kept(()))
    results: Kept = field(default_factory=lambda: Kept(()))
    """Of operators that are not computed again."""
    recording: Recording | None = None
    buffers: list[Any] = field(default_factory=list)
    """Copies of those that the forward has changed."""
    read: list[Any] = field(default_factory=list)
    """Those that it has not."""
    outputs: list[Output | None] = field(default_factory=list)

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """The arguments that were kept, and the results of operators."""
        try:
            return self.kept.get(), self.results.get()
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise changed_later(self.site.name) from error


def outputs_of(result: Any) -> list[Output | None]:
    """The tensors of a result, in pytree order."""
    return [Output.of(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(result)]
