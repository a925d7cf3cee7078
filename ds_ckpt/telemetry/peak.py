"""The peak of what activations take, counted storage by storage while a step runs.

An activation is what an operator allocates in the forward or in a recompute. Weights that are
gathered there are none (they are allocated inside a `gather_*` span), and neither are gradients
(allocated in backward, outside a recompute). So the peak has in it what autograd holds, what one
recompute brings back, and the temporaries of the operator that runs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ckpt.telemetry.spans import Spans

_COUNTED = ("forward", "recompute")


class PeakActivations(TorchDispatchMode):
    """Surrounds forward and backward of one step; afterwards `peak_bytes` is known.

    Slow: every operator passes through Python. Values are not touched.

    Args:
        spans: tells forward, recompute and gathers apart; the step must be recorded with it.
    """

    def __init__(self, spans: Spans) -> None:
        super().__init__()
        self._spans = spans
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0
        """Bytes of activations that are there now."""
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in self._known and storage.nbytes():
                # a view of what was there before is not allocated here: weights, inputs
                given = {s._cdata for s in _storages((args, kwargs))}
                self._seen(storage, storage._cdata not in given and self._counts())
        return result

    def _counts(self) -> bool:
        inside = self._spans.open
        if any(kind.startswith("gather_") or kind == "collective" for kind in inside):
            return False
        innermost = next((k for k in reversed(inside) if k in (*_COUNTED, "backward")), "")
        return innermost in _COUNTED

    def _seen(self, storage: torch.UntypedStorage, counts: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if counts else 0
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.live_bytes -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
