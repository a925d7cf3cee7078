"""Few-bit values: bytes, error, and what no input may break. Worlds of them: `test_exchange.py`."""

from __future__ import annotations

import math

import pytest
import torch
from codecs_under_test import every_byte_is_written, feedback_delivers, round_trip
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Quantize, quantize
from ds_ckpt.compression.quantize import BITS, BLOCKS

FP32 = torch.finfo(torch.float32)
EPS = FP32.eps
# bf16 rounds a scale by 2^-9 of it, and coarsely where it has no smaller numbers
SCALE_EPS = 2.0**-8
SCALES = (1.0, 3e-5, 1e-18, 1e-22, 1e-30, 8e-39, 1e-40, 1e-44, 1e18, 1e30, 0.3 * FP32.max)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

codecs = st.builds(Quantize, bits=st.sampled_from(BITS), block=st.sampled_from(BLOCKS))
numels = st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([255, 256, 257]))
seeds = st.integers(0, 2**31)
quick = settings(max_examples=150, deadline=None)


def gradient(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    """Entries of several sizes, zeros, ties and whole zero blocks among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    kind = seed % 4
    if kind == 1:
        values *= torch.randn(numel, generator=generator).mul(3).exp()  # heavy tail
    elif kind == 2:
        values[torch.rand(numel, generator=generator) < 0.95] = 0.0
    elif kind == 3:
        values[: numel // 2] = 0.0
        values[numel // 2 :].clamp_(-0.5, 0.5)
    return values.mul_(scale).clamp_(FP32.min, FP32.max)


def blocks_of(codec: Quantize, values: Tensor) -> list[Tensor]:
    return list(values.split(codec.block)) if values.numel() else []


def scales_of(codec: Quantize, payload: Tensor, numel: int) -> list[float]:
    count = -(-numel // codec.block)
    scales: list[float] = payload[: 2 * count].view(torch.bfloat16).float().tolist()
    return scales


@quick
@given(codecs, numels, seeds, st.sampled_from(SCALES), st.sampled_from(DTYPES))
@example(Quantize(bits=4, block=64), 64, 0, FP32.max, torch.float32)
@example(Quantize(bits=2, block=64), 64, 1, FP32.max, torch.float32)
def test_sent_plus_left_is_what_was_there(
    codec: Quantize, numel: int, seed: int, scale: float, dtype: torch.dtype
) -> None:
    values = gradient(numel, seed, scale).to(dtype).float().nan_to_num()
    _, left, arrived = round_trip(codec, values)
    assert torch.isfinite(left).all()
    assert torch.isfinite(arrived).all()
    gap = (left.double() + arrived.double() - values.double()).abs()
    if codec.bits == 2:
        # one rounding of a difference, relative to the larger of both
        assert (gap <= EPS * torch.maximum(left.abs(), arrived.abs()).double()).all()
        # the residual of a block has no more energy than the block
        for was, kept in zip(blocks_of(codec, values), blocks_of(codec, left), strict=True):
            assert kept.double().norm() <= was.double().norm() * (1 + 1e-5)
    else:
        # what is subtracted lies within a factor of two of the value, or is zero
        assert not gap.any()
        assert (left.abs() <= values.abs()).all()


@quick
@given(codecs, numels, seeds)
def test_a_payload_has_the_announced_size_and_every_byte_is_written(
    codec: Quantize, numel: int, seed: int
) -> None:
    groups = math.ceil(numel / codec.block)
    size_bytes = codec.packed_bytes(numel)
    planes = (2, 1) if codec.bits == 3 else (codec.bits,)
    code_bytes = sum(math.ceil(numel * width / 8) for width in planes)
    assert size_bytes == 8 * math.ceil(groups / 4) + 8 * math.ceil(code_bytes / 8)
    assert every_byte_is_written(codec, gradient(numel, seed))


@quick
@given(
    st.builds(Quantize, bits=st.sampled_from([8, 4, 3]), block=st.sampled_from(BLOCKS)),
    numels,
    seeds,
    st.sampled_from([s for s in SCALES if 1e-30 <= s <= 1e30]),
)
def test_even_steps_err_by_half_a_step(
    codec: Quantize, numel: int, seed: int, scale: float
) -> None:
    values = gradient(numel, seed, scale)
    payload, left, _ = round_trip(codec, values)
    reach = 1 << (codec.bits - 1)
    for was, kept, signed in zip(
        blocks_of(codec, values),
        blocks_of(codec, left),
        scales_of(codec, payload, numel),
        strict=True,
    ):
        step = abs(signed)
        assert step == pytest.approx(float(was.abs().max()) / reach, rel=SCALE_EPS, abs=0)
        # the end that has one level less may be missed by a whole step
        far = was.double() * math.copysign(1, signed) > (reach - 0.5) * step
        assert (kept.abs()[~far] <= step / 2 * (1 + SCALE_EPS * reach)).all()
        assert (kept.abs()[far] <= step * (1 + SCALE_EPS * reach)).all()
        # and the largest takes the other end
        largest = was.abs() == was.abs().max()
        assert kept.abs()[largest].min() <= step * SCALE_EPS * reach


# 2% above what the docstring and benchmarks/quantization.py say
@pytest.mark.parametrize(
    ("bits", "block", "bound"),
    [
        (8, 64, 0.0061),
        (3, 64, 0.1955),
        (4, 32, 0.0877),
        (4, 64, 0.0969),
        (4, 256, 0.1133),
        (2, 64, 0.343),
    ],
)
def test_the_error_on_gaussian_entries(bits: int, block: int, bound: float) -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    _, left, _ = round_trip(Quantize(bits=bits, block=block), values)  # type: ignore[arg-type]
    assert 0.9 * bound < float(left.norm() / values.norm()) < bound


def test_two_bits_are_the_lloyd_max_levels() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    payload, _, arrived = round_trip(Quantize(bits=2, block=256), values)
    inner = torch.tensor(scales_of(Quantize(bits=2, block=256), payload, values.numel()))
    levels = (arrived.view(-1, 256) / inner.unsqueeze(1)).mul(1e4).round().div(1e4).unique()
    assert levels.tolist() == pytest.approx([-3.3348, -1.0, 1.0, 3.3348], rel=1e-4)
    assert float(inner.mean()) == pytest.approx(0.4528, rel=0.02)
    assert torch.equal(arrived.sign(), values.sign())


def test_three_bits_lie_in_two_planes() -> None:
    """Low bits first: a checkpoint's or a packet's bytes mean the same in every version."""
    values = torch.tensor([-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 3.0])
    payload, left, _ = round_trip(Quantize(bits=3), values)
    assert not left.any()
    scale, low, high = payload[:2].view(torch.bfloat16), payload[8:11], payload[11:13]
    assert scale.tolist() == [1.0]
    assert low.tolist() == [0b11100100, 0b11100100, 0b11]
    assert high.tolist() == [0b00001111, 0b0]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_what_has_levels_arrives_whole(bits: int, block: int) -> None:
    codec = Quantize(bits=bits, block=block)  # type: ignore[arg-type]
    numel = 5 * block + 7
    reach = 1 << (bits - 1)
    whole = torch.randint(-reach, reach, (numel,), generator=torch.Generator().manual_seed(2))
    values = whole.float() if bits > 2 else torch.where(whole < 0, -1.0, 1.0)
    values[::block] = -float(reach) if bits > 2 else 1.0
    for sign in (1.0, -1.0):
        _, left, arrived = round_trip(codec, sign * values)
        if bits > 2:
            assert torch.equal(arrived, sign * values)
            assert not left.any()
        else:  # the scale is a fit and is rounded
            assert torch.allclose(arrived, sign * values, rtol=SCALE_EPS)


@pytest.mark.parametrize("bits", BITS)
def test_tiles_leave_no_mark(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Quantize(bits=bits, block=32)  # type: ignore[arg-type]
    values = gradient(1000, 1)
    whole = round_trip(codec, values)
    monkeypatch.setattr(quantize, "_TILE_ELEMENTS", 256)
    for expected, got in zip(whole, round_trip(codec, values), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_fp32_values_decode_to_finite_ones(bits: int, sign: float) -> None:
    codec = Quantize(bits=bits)  # type: ignore[arg-type]
    for share in torch.linspace(0.9, 1.0, 50).tolist():
        values = torch.full((130,), sign * FP32.max) * share
        for kind in (values, torch.where(torch.arange(130) % 2 == 0, values, -values)):
            _, left, arrived = round_trip(codec, kind)
            assert torch.isfinite(arrived).all()
            if bits > 2:
                assert (left.abs() <= FP32.max / (7 if bits > 3 else 3)).all()
            else:
                assert (left.abs() < 0.9 * FP32.max).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_feedback_delivers_what_rounding_held_back(bits: int, kind: int) -> None:
    codec = Quantize(bits=bits, block=64)  # type: ignore[arg-type]
    values = gradient(1000, 4 * bits + kind)
    feedback_delivers(codec, values, 100)


@pytest.mark.parametrize(
    "settings",
    [
        *({"bits": bits} for bits in (5, 1, 16, True, 4.0, "4")),
        *({"block": block} for block in (48, 512)),
        {"rotated": True},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Quantize(**settings)  # type: ignore[arg-type]
