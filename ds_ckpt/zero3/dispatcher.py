"""DeepSpeed's module-global reduction, replaced while at least one seam is attached.

Whoever is about to reduce a bucket says so with `set_bucket`; calls in that thread then go to its
seam, all others straight to DeepSpeed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ds_ckpt.patch import Patches
from ds_ckpt.zero3.worker import Worker

log = logging.getLogger("ds_ckpt")
_PATIENCE_S = 10.0
"""How long closing waits for an exchange under way; it hangs where another process has gone."""

Reduce = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A bucket's full gradients to this process's parts."""


class Seam(Protocol):
    """What answers in the place of DeepSpeed's reduction."""

    def reduce_bucket(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any, stock: Reduce
    ) -> list[torch.Tensor]:
        """`stock` is DeepSpeed's own reduction over `group`."""


class _Dispatcher:
    """Replaces `stage3.reduce_scatter_coalesced` while at least one seam is attached."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._users = 0
        self._patches = Patches()

    def acquire(self) -> None:
        from deepspeed.runtime.zero import stage3

        self._users += 1
        if self._users > 1:
            return
        stock = stage3.reduce_scatter_coalesced

        def reduce_scatter_coalesced(
            tensors: list[torch.Tensor], group: Any = None
        ) -> list[torch.Tensor]:
            def in_group(bucket: list[torch.Tensor]) -> list[torch.Tensor]:
                result: list[torch.Tensor] = stock(bucket, group)
                return result

            seam, params = getattr(self._local, "bucket", (None, ()))
            if seam is None:  # another engine in this program, which has no session
                return in_group(tensors)
            parts: list[torch.Tensor] = seam.reduce_bucket(params, tensors, group, in_group)
            return parts

        reduce_scatter_coalesced.__wrapped__ = stock  # type: ignore[attr-defined]
        self._patches.set(stage3, "reduce_scatter_coalesced", reduce_scatter_coalesced)

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._patches.undo()

    def bucket(self, seam: Seam | None, params: Sequence[Any]) -> None:
        self._local.bucket = (seam, params)


_dispatcher = _Dispatcher()


def set_bucket(seam: Seam | None, params: Sequence[Any] = ()) -> None:
    """This thread's next reduction is of these parameters and is the seam's; None: DeepSpeed's."""
    _dispatcher.bucket(seam, params)


class Lease:
    """What one user holds of the program: the replaced module-global and the exchange's thread.

    Apart from the seam, so that it can be given up when an engine is dropped without a word.
    `close()` may be called more than once.
    """

    def __init__(self) -> None:
        self.worker = Worker("exchange of ds_ckpt")
        self._open = True
        _dispatcher.acquire()

    def close(self) -> None:
        if self._open:
            self._open = False
            _dispatcher.release()
        if not self.worker.close(_PATIENCE_S):
            log.warning(
                "ds_ckpt: an exchange is still under way after %g s; its thread ends with it",
                _PATIENCE_S,
            )
