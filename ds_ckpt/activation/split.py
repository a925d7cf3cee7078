"""A tensor's bytes in equal parts, and together again; checksums of tensors. Pure, no processes.

Everything is in bytes, so that one code serves every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS_AT_A_TIME = 1 << 20
"""Words of 8 bytes: what the checksum makes of them takes as much memory again."""
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def part_bytes(nbytes: int, parts: int) -> int:
    """Bytes of each of `parts` equal parts: `nbytes / parts`, rounded up."""
    return -(-nbytes // parts)


def part_of(flat: Tensor, parts: int, index: int) -> Tensor:
    """Part `index` of `flat` (uint8 [n]) in memory of its own: uint8 [part_bytes], padded by 0."""
    size = part_bytes(flat.numel(), parts)
    part = flat[index * size : (index + 1) * size]
    if part.numel() == size:
        return part.clone()
    padded = flat.new_zeros(size)
    padded[: part.numel()].copy_(part)
    return padded


def whole_of(joined: Tensor, nbytes: int) -> Tensor:
    """The bytes that `part_of` took apart: `joined` has the parts one behind the other."""
    return joined[:nbytes]


def _bytes(tensor: Tensor) -> Tensor:
    """The elements' bytes in order, uint8 [n]; what is expanded is read once."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.detach().contiguous()
    # a single entry may have stride 0
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: Tensor) -> Tensor:
    """An int64 scalar on the tensor's device: equal for equal bits in equal places.

    The sum, modulo 2**64, over the tensor's words of 8 bytes of splitmix64's finalizer (Steele,
    Lea, Flood, OOPSLA 2014) of word and place. Two tensors that differ have the same with a chance
    of about 2**-64, whatever differs; a sum of weighted words misses a pair of flipped signs.

    Args:
        tensor: strided, any dtype, no conjugate or negative view.
    """
    flat = _bytes(tensor)
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
    """splitmix64's finalizer in place, on int64 that wraps around."""
    x ^= (x >> 30) & (2**34 - 1)  # a logical shift
    x *= _FIRST
    x ^= (x >> 27) & (2**37 - 1)
    x *= _SECOND
    x ^= (x >> 31) & (2**33 - 1)
    return x
