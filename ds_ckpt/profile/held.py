"""What autograd holds between forward and backward, by block and part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor, nn

from ds_ckpt.activation import Block
from ds_ckpt.profile.records import OUTSIDE, BlockHeld
from ds_ckpt.profile.watch import Place, Watch
from ds_ckpt.telemetry.activations import HeldActivations

_PARTS = ("attention", "mlp", "norm", "other", "boundary")


class HeldByPlace(HeldActivations):
    """`HeldActivations` that also says which block and which part of it saved a storage first.

    Attributes:
        blocks: after the context was left, in the order of the model; what was saved outside of
            all blocks last.
        score_bytes: of storages as large as attention weights.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], watch: Watch) -> None:
        super().__init__(model)
        self._names = {b.name: type(b.module).__name__ for b in blocks}
        self._watch = watch
        self._owners: dict[int, tuple[Place, list[Place] | None]] = {}
        self._sizes: dict[int, set[int]] = {}
        self.blocks: tuple[BlockHeld, ...] = ()
        self.score_bytes = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        result = super()._pack(tensor)
        key = tensor.untyped_storage()._cdata
        if key in self._storages:
            self._owners.setdefault(key, self._watch.kept_by())
            self._sizes.setdefault(key, set()).add(tensor.numel())
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        bytes_of: Counter[tuple[str, str]] = Counter()
        for key, (reference, nbytes) in self._storages.items():
            if reference.expired():
                continue
            place, call = self._owners[key]
            block = call[0].block if call else place.block
            bytes_of[block, place.part] += nbytes
            if self._sizes[key] & self._watch.score_sizes:
                self.score_bytes += nbytes
        names = {**self._names, OUTSIDE: ""}
        self.blocks = tuple(
            BlockHeld(name, class_name, **{f"{p}_bytes": bytes_of[name, p] for p in _PARTS})
            for name, class_name in names.items()
        )
        super().__exit__(kind, error, trace)
