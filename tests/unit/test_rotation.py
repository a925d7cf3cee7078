"""The rotation of few-bit values: orthogonal, spreading, and worth it where tails are heavy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Quantize
from ds_ckpt.compression.quantize import BITS
from ds_ckpt.compression.rotation import MAX_RUN, rotate, rotate_back

quick = settings(max_examples=150, deadline=None)


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Quantize, values: Tensor) -> tuple[Tensor, Tensor]:
    """(what was left, what arrived)."""
    left = values.clone()
    payload = torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8)
    codec.pack(left, payload)
    arrived = torch.zeros_like(values)
    codec.unpack_add(payload, arrived)
    return left, arrived


@quick
@given(
    st.sampled_from([2, 16, 32, 64]),
    st.integers(0, 20),
    st.integers(0, 2**31),
    st.sampled_from([1.0, 1e-30, 1e-40, 1e30]),
)
def test_rotations_keep_lengths_and_have_an_inverse(
    run: int, runs: int, seed: int, scale: float
) -> None:
    values = normal(run * runs, seed) * scale
    turned = rotate(values, run)
    lost = 1e-44 * run  # what denormals round
    for was, now in zip(values.split(run), turned.split(run), strict=True):
        assert abs(now.double().norm() - was.double().norm()) <= 1e-6 * was.double().norm() + lost
    gap = (rotate_back(turned, run) - values).abs().view(-1, run)
    largest = values.abs().view(-1, run).amax(1, keepdim=True)
    assert (gap <= 3e-6 * largest + lost).all()


def test_one_entry_is_spread_evenly() -> None:
    for place in (0, 5, 63):
        values = torch.zeros(MAX_RUN)
        values[place] = 8.0
        assert torch.equal(rotate(values, MAX_RUN).abs(), torch.ones(MAX_RUN))
    # and what comes out of patterns is not one entry
    for pattern in (torch.ones(64), torch.arange(64) % 2 * 2.0 - 1.0, torch.arange(64) // 8 % 2.0):
        assert rotate(pattern.float(), MAX_RUN).abs().max() < 0.5 * pattern.norm()


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.6), (2, 0.75)])
def test_a_rotation_pays_where_tails_are_heavy(bits: int, bound: float) -> None:
    torch.manual_seed(0)
    values = torch.distributions.StudentT(3.0).sample(torch.Size([1 << 16]))
    plain, turned = (Quantize(bits, 64, rotated) for rotated in (False, True))  # type: ignore[arg-type]
    assert turned.packed_bytes(values.numel()) == plain.packed_bytes(values.numel())
    errors = [float(round_trip(codec, values)[0].norm()) for codec in (plain, turned)]
    assert errors[1] < bound * errors[0]


def test_a_short_last_block_is_not_rotated() -> None:
    values = normal(64 + 40, 1)
    for bits in BITS:
        _, turned = round_trip(Quantize(bits, 64, True), values)
        _, plain = round_trip(Quantize(bits, 64), values)
        assert torch.equal(turned[64:], plain[64:])
        assert not torch.equal(turned[:64], plain[:64])
