"""Hashes of tensor values.

A fingerprint is the sum of a tensor's memory read as 64-bit integers, modulo 2**64: one pass,
exact, and equal for equal bits. Tensors above `WHOLE_BYTES` are sampled: 256 bytes of every 2,048.
Changes that cancel in the sum, or lie between the samples of every tensor, are not seen. A checksum
also depends on the places of values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WORDS_AT_A_TIME = 1 << 20
"""Words of 8 bytes: what the checksum makes of them takes as much memory again."""
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
WHOLE_BYTES = 1 << 16
_LINE = 32  # words of 8 bytes
_EVERY = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _each_once(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph and without expanded dimensions."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.detach()


def fingerprint(tensor: Tensor) -> Tensor | None:
    """Return an int64 scalar on the tensor's device; None if it has no memory to read."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    tensor = _each_once(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():  # entries in the order in which they lie
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    size = tensor.element_size()
    if not tensor.is_contiguous() or (tensor.storage_offset() | tensor.numel()) * size % 8:
        return tensor.view(_WORDS[size]).sum(dtype=torch.int64)
    words = tensor.view(-1).view(torch.int64)
    if words.numel() * 8 > WHOLE_BYTES:
        lines = words.numel() // _LINE
        words = words[: lines * _LINE].view(lines, _LINE)[::_EVERY]
    return words.sum()


def _is_bookkeeping(tensor: Tensor) -> bool:
    # Flash attention saves its random seed and offset, and leaves them uninitialised where there is
    # no dropout: uint64, or whole numbers in tensors of one or two. Recurrent layers and cuDNN's
    # norms save work space in flat uint8, parts of it never written. Not results, so not compared.
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return True
    if tensor.dtype in (torch.bool, torch.uint64):
        return tensor.dtype == torch.uint64
    return tensor.numel() <= 2 and not (tensor.is_floating_point() or tensor.is_complex())


class FingerprintCache:
    """Fingerprints of saved tensors; the same tensor several times in a row is read once.

    Views of parameters are not computed, so they have none; nor has bookkeeping of kernels.

    Args:
        given: storages of the call's arguments, which have none either.
    """

    def __init__(self, given: frozenset[int] = frozenset()) -> None:
        self._given = given
        self._last: Tensor | None = None
        self._key: tuple[object, ...] = ()
        self._print: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor's fingerprint, or None if it is not compared."""
        if tensor.layout != torch.strided or isinstance(tensor._base, nn.Parameter):
            return None
        if _is_bookkeeping(tensor):
            return None
        storage = tensor.untyped_storage()._cdata
        if storage in self._given:
            return None
        place = (storage, tensor.storage_offset(), tensor._version)
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        if self._last is None or key != self._key:
            # held, so that nothing else gets its memory
            self._last, self._key, self._print = tensor.detach(), key, fingerprint(tensor)
        return self._print

    def forget(self) -> None:
        """Release the last tensor."""
        self._last = self._print = None


# checksums, which tell places apart


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 scalar on the tensor's device, equal for equal bits in equal places.

    The sum, modulo 2**64, of splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014) of each
    64-bit word and its place. A sum of weighted words would miss a pair of flipped signs.

    Args:
        tensor: strided, any dtype, no conjugate or negative view.
    """
    tensor = _each_once(tensor).contiguous()
    # a single entry may have stride 0
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if (flat.storage_offset() | flat.numel()) % 8:
        padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
        padded[: flat.numel()].copy_(flat)
        flat = padded
    words = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, words.numel(), _WORDS_AT_A_TIME):
        some = words[first : first + _WORDS_AT_A_TIME]
        place = torch.arange(first + 1, first + 1 + some.numel(), device=flat.device)
        total += _mixed(place.mul_(_STEP).add_(some)).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """Apply splitmix64's finalizer in place, on int64 that wraps around."""
    x ^= (x >> 30) & (2**34 - 1)  # a logical shift
    x *= _FIRST
    x ^= (x >> 27) & (2**37 - 1)
    x *= _SECOND
    x ^= (x >> 31) & (2**33 - 1)
    return x
