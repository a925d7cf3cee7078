"""Stands around every checkpointed block call: who keeps its tensors, and what it costs.

`Boundaries.around` is handed to `CheckpointedBlocks`. It lets a `BoundaryStore` keep the tensors
that the call saves for its recompute, times forward and recompute, and synchronizes at the
boundaries, each where it was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_ckpt.activation.offload import BoundaryStore
from ds_ckpt.activation.partition import Partition
from ds_ckpt.activation.pieces import Kept, Left
from ds_ckpt.activation.prefetch import BlockCall
from ds_ckpt.activation.shards import Split
from ds_ckpt.telemetry.timings import BlockProfile


class Boundaries:
    """What happens at the boundaries of one model's blocks.

    Args:
        model: names its modules.
        store: keeps the tensors; None leaves them to autograd.
        partition: splits what blocks are given, and has the store keep a part; needs a store.
        profile: told of every forward and recompute of a block.
        synchronize: called at the begin and the end of each forward and recompute of a block.
    """

    def __init__(
        self,
        model: nn.Module,
        store: BoundaryStore | None = None,
        *,
        partition: Partition | None = None,
        profile: BlockProfile | None = None,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        self.store, self.profile, self._synchronize = store, profile, synchronize
        assert partition is None or store is not None, "somebody must keep the parts"
        self.partition = partition
        self._model = model  # holds the modules, so that no other gets one's id
        self._names = {id(module): name for name, module in model.named_modules()}
        self._places: dict[str, tuple[int, int]] = {}
        self._local = threading.local()

    def recomputed_together(self, groups: Sequence[Sequence[str]]) -> None:
        """Names of blocks that one recompute runs through, in order: they come back together."""
        self._places = {n: (g, i) for g, names in enumerate(groups) for i, n in enumerate(names)}

    def around(
        self,
        checkpointed: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`checkpointed(function, *args, **kwargs)`, with what it saves kept here.

        A block inside a block is left alone: the outer recompute makes its input again.
        """
        if getattr(self._local, "inside", False) or not torch.is_grad_enabled():
            return checkpointed(function, *args, **kwargs)
        label = self._label(function, args)
        call = self._begin(label)
        forward = [True]

        def run(*args: Any, **kwargs: Any) -> Any:
            first = bool(forward)
            forward.clear()
            with self._in_block(call if first else None, label, forward=first):
                return function(*args, **kwargs)

        if self.partition is not None:
            self.partition.begin(label)
        with self._kept_by(call, label, forward):
            return checkpointed(run, *args, **kwargs)

    def _begin(self, label: str) -> BlockCall | None:
        if self.store is None:
            return None
        before, place = self.store.last, self._places.get(label)
        if before is not None and place is not None:
            group, index = self._places.get(before.label, (-1, 0))
            if (group, index + before.blocks) == place:
                before.blocks += 1
                return before
        return self.store.begin(label)

    def _kept_by(
        self, call: BlockCall | None, label: str, given: list[bool]
    ) -> AbstractContextManager[Any]:
        """Hooks that see what the call saves for its recompute, and nothing inside it.

        Args:
            given: not empty while what the call was given is saved; then come results of operators,
                which tensor parallelism may have sharded already and which are kept whole.
        """
        store, partition, profile = self.store, self.partition, self.profile
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Kept | Left | Split | Tensor:
            if partition is not None and call is not None and given:
                split = partition.pack(tensor, label, call)
                if profile is not None:
                    profile.kept(label, split.new_bytes(seen))
                return split
            if profile is not None and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                profile.kept(label, 0 if storage._cdata in seen else storage.nbytes())
                seen.add(storage._cdata)
            return store.pack(tensor, call) if store is not None and call is not None else tensor

        def unpack(kept: Kept | Left | Split | Tensor) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            if isinstance(kept, Split):
                assert partition is not None
                return partition.unpack(kept)
            assert store is not None
            return store.unpack(kept)

        if store is None and profile is None:
            return nullcontext()
        return saved_tensors_hooks(pack, unpack)

    @contextmanager
    def _in_block(self, call: BlockCall | None, label: str, *, forward: bool) -> Iterator[None]:
        self._local.inside = True
        store = self.store if call is not None else None
        try:
            if self._synchronize is not None:
                self._synchronize()
            if store is not None and call is not None:
                store.started(call)
            with self.profile.timed(label, forward=forward) if self.profile else nullcontext():
                yield
        finally:  # a recompute is left by an exception when it has all that is needed
            if store is not None and call is not None:
                store.ended(call)
            self._local.inside = False
            if self._synchronize is not None:
                self._synchronize()

    def _label(self, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
        """The block's name; `function` is its forward, bound or with the module to come first."""
        owner = getattr(function, "__self__", None)
        module = owner if isinstance(owner, nn.Module) else next(iter(args), function)
        return self._names.get(id(module), "") or type(module).__name__
