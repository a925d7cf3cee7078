"""A tensor's bytes in equal parts, and together again; checksums that see every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.activation.fingerprints import checksum
from ds_ckpt.activation.offload import storage_bytes
from ds_ckpt.activation.partition import shard_bytes, shard_of

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any shape and dtype; also views: transposed, a stretch of a larger one, expanded."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    tensor = _tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["plain", "transposed", "rows", "expanded"]))
    if kind == "transposed" and len(shape) > 1:
        return tensor.transpose(0, -1)
    if kind == "rows" and shape and shape[0] > 1:
        return tensor[draw(st.integers(0, shape[0] - 1)) :]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    return tensor


@given(tensor=tensors(), parts=st.integers(1, 9))
def test_parts_are_equal_and_make_the_whole(tensor: Tensor, parts: int) -> None:
    flat = storage_bytes(tensor)
    split_up = [shard_of(flat, parts, index) for index in range(parts)]
    sizes = {part.numel() for part in split_up}
    assert sizes == {shard_bytes(flat.numel(), parts)}
    (size,) = sizes
    # exactly 1/t where it divides, the next whole byte where it does not
    assert size * parts - flat.numel() in range(parts)
    assert torch.equal(torch.cat(split_up)[: flat.numel()], flat)
    # a part owns no more memory than itself, and is no window on the original
    assert all(part.untyped_storage().nbytes() == size for part in split_up)
    assert all(p.untyped_storage().data_ptr() != flat.data_ptr() for p in split_up)


@given(tensor=tensors(), data=st.data())
def test_every_bit_counts(tensor: Tensor, data: Any) -> None:
    before = int(checksum(tensor))
    plain = tensor[0] if tensor.dim() and tensor.stride(0) == 0 else tensor  # expanded
    raw = plain.contiguous().view(-1).view(torch.uint8).clone()
    again = raw.clone().view(tensor.dtype).view(plain.shape)
    assert int(checksum(again)) == int(checksum(plain))
    index = data.draw(st.integers(0, raw.numel() - 1))
    raw[index] ^= 1 if tensor.dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    other = raw.view(tensor.dtype).view(plain.shape)
    assert int(checksum(other)) != int(checksum(plain))
    assert int(checksum(tensor)) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_places_count(dtype: torch.dtype) -> None:
    tensor = _tensor((64, 33), dtype)
    seen = {int(checksum(tensor))}
    seen |= {int(checksum(tensor.flip(dim))) for dim in (0, 1)}
    seen |= {int(checksum(torch.roll(tensor, n, dim))) for n in range(1, 33) for dim in (0, 1)}
    assert len(seen) == 1 + 2 + 64
