"""Codecs: what is sent plus what stays is what was there, in the bytes that were announced."""

from __future__ import annotations

import math

import pytest
import torch
from codecs_under_test import every_byte_is_written, round_trip
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Codec, Dense, Quantize, TopK
from ds_ckpt.compression.quantize import BITS
from ds_ckpt.compression.topk import (
    MAX_BLOCK,
    VALUE_FORMATS,
    blocks_for,
    encode_values,
    value_bytes,
)

FP32 = torch.finfo(torch.float32)
SCALES = (1.0, 1e-30, 8e-39, 1e-40, 1e-44, 1e30, 0.3 * FP32.max)

numels = st.one_of(
    st.integers(0, 70), st.integers(0, 3000), st.sampled_from([255, 256, 257, 20_011])
)
densities = st.one_of(
    st.sampled_from([1e-4, 0.01, 1 / 256, 0.1, 0.5, 0.9, 1.0]), st.floats(1e-4, 1.0)
)
codecs: st.SearchStrategy[Codec] = st.one_of(
    st.builds(TopK, density=densities, values=st.sampled_from(VALUE_FORMATS)),
    st.builds(Dense, st.sampled_from([torch.float32, torch.bfloat16])),
    st.builds(Quantize, bits=st.sampled_from([8, 4]), block=st.sampled_from([32, 64, 256])),
)
quick = settings(max_examples=150, deadline=None)


def gradient(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal entries with ties and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values[torch.rand(numel, generator=generator) < 0.2] = 0.0
    values[torch.rand(numel, generator=generator) < 0.1] = 1.5
    return values.mul_(scale).clamp_(FP32.min, FP32.max)


@quick
@given(codecs, numels, st.integers(0, 2**31), st.sampled_from(SCALES))
@example(TopK(density=0.01, values="int8"), 64, 1, FP32.max)
def test_sent_plus_left_is_what_was_there(
    codec: Codec, numel: int, seed: int, scale: float
) -> None:
    values = gradient(numel, seed, scale)
    _, left, arrived = round_trip(codec, values)
    assert torch.isfinite(arrived).all()
    # exact: what is subtracted lies within a factor of two of the value, or is zero
    assert torch.equal(left.double() + arrived.double(), values.double())
    # and never overshoots: a residual does not grow by being sent
    assert (left.abs() <= values.abs()).all()


@quick
@given(codecs, numels, st.integers(0, 2**31))
def test_a_payload_has_the_announced_size_and_every_byte_is_written(
    codec: Codec, numel: int, seed: int
) -> None:
    size_bytes = codec.packed_bytes(numel)
    assert size_bytes % 8 == 0
    assert (size_bytes == 0) == (numel == 0)
    assert every_byte_is_written(codec, gradient(numel, seed))


@quick
@given(numels, st.integers(0, 2**31), st.sampled_from(SCALES))
def test_density_one_in_fp32_sends_everything_bitwise(numel: int, seed: int, scale: float) -> None:
    values = gradient(numel, seed, scale)
    codec = TopK(density=1.0, values="fp32")
    _, left, arrived = round_trip(codec, values)
    assert torch.equal(arrived, values)
    assert not left.any()
    assert codec.packed_bytes(numel) == math.ceil(numel / 2) * 8


@quick
@given(densities, st.integers(1, 5000), st.integers(0, 2**31))
def test_blocks_send_the_largest_of_each_block(density: float, numel: int, seed: int) -> None:
    # no zeros or ties: then what arrived tells what was sent
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) + 10.0
    codec = TopK(density=density, values="fp32")
    _, left, arrived = round_trip(codec, values)
    if codec.sent(numel) == numel:
        assert torch.equal(arrived, values)
        return
    blocks = blocks_for(numel, density)
    for block in range(blocks.count):
        was, got, kept = (t[block :: blocks.count] for t in (values, arrived, left))
        assert int((got != 0).sum()) == blocks.k
        smallest_sent = was[got != 0].min()
        if blocks.k < was.numel():
            # the comparison ignores the last 8 bits of 24
            assert kept.max() <= smallest_sent * (1 + 2**-15)


@pytest.mark.parametrize("density", [1 / 256, 0.01, 0.02, 0.05, 0.1, 0.25])
@pytest.mark.parametrize("numel", [65_536, 1_000_003])
def test_the_density_is_what_was_asked_or_slightly_more(density: float, numel: int) -> None:
    sent = TopK(density=density, values="int8").sent(numel) / numel
    assert density * (1 - 1e-9) <= sent <= density * 1.05


def test_where_selecting_costs_more_everything_is_sent() -> None:
    # everything in int8 is one byte and a scale's share of an entry
    assert TopK(density=0.6, values="int8").sent(10_000) == 10_000
    assert TopK(density=0.3, values="int8").sent(10_000) < 4_000


@pytest.mark.parametrize("large_by", ["row", "column"])
def test_blocks_keep_the_energy_of_structured_gradients(large_by: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(1024, generator=generator).mul(1.5).exp()
    values = torch.randn(1024, 1024, generator=generator)
    values = (values * (size.unsqueeze(1) if large_by == "row" else size)).view(-1)
    total = values.square().sum()

    _, _, arrived = round_trip(TopK(density=0.01, values="fp32"), values)
    largest = values.abs().topk(values.numel() // 100).values.square().sum() / total
    assert arrived.square().sum() / total > 0.85 * largest
    neighbours = values[: values.numel() // 200 * 200].view(-1, 200).abs().topk(2, 1).values
    if large_by == "row":
        assert neighbours.square().sum() / total < 0.5 * largest


@pytest.mark.parametrize("fmt", VALUE_FORMATS)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_values_are_as_precise_as_their_format(fmt: str, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    out = torch.empty(value_bytes(count, fmt), dtype=torch.uint8)  # type: ignore[arg-type]
    error = (encode_values(values, fmt, out) - values).abs()  # type: ignore[arg-type]
    for start in range(0, count, 64):
        largest = values[start : start + 64].abs().max()
        bound = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.504 / 127}[fmt]
        assert error[start : start + 64].max() <= bound * largest


def test_the_largest_fp32_values_decode_to_finite_ones() -> None:
    for scale in torch.linspace(0.9, 1.0, 200).tolist():
        values = torch.full((64,), FP32.max) * scale
        for codec in (
            TopK(density=1.0, values="int8"),
            TopK(density=1.0, values="bf16"),
            Dense(torch.bfloat16),
        ):
            _, left, arrived = round_trip(codec, values)
            assert torch.isfinite(arrived).all()
            assert (left.abs() <= 0.01 * FP32.max).all()


def test_a_scale_that_is_rounded_down_does_not_wrap_int8() -> None:
    smallest_scale = 2.0**-133  # bf16 has no smaller one: 1.4 of it becomes 1 of it
    values = torch.full((64,), 127 * 1.4 * smallest_scale)
    _, left, arrived = round_trip(TopK(density=1.0, values="int8"), values)
    assert torch.equal(arrived, torch.full((64,), 127 * smallest_scale))
    assert torch.equal(left, values - arrived)


def test_unpacking_adds_a_multiple() -> None:
    for codec in (
        TopK(density=0.1),
        TopK(density=0.1, values="fp32"),
        TopK(density=1.0, values="bf16"),
        Dense(),
        *(Quantize(bits=bits) for bits in BITS),
    ):
        values = gradient(1000, 3)
        payload, _, arrived = round_trip(codec, values)
        into = torch.ones(1000)
        codec.unpack_add_rows(payload[None], into, scale=8.0)
        assert torch.equal(into, arrived * 8.0 + 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.0},
        {"density": 1.5},
        {"density": math.nan},
        {"values": "int4"},
        {"selection": "exact"},
        {"offsets": "packed"},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        TopK(**settings)  # type: ignore[arg-type]


@quick
@given(densities, st.integers(1, 100_000))
@example(0.01, 1)
@example(0.9, 2)
def test_every_entry_lies_in_one_block(density: float, numel: int) -> None:
    blocks = blocks_for(numel, density)
    assert 1 <= blocks.k <= blocks.rows <= MAX_BLOCK
    offsets = torch.arange(blocks.rows, dtype=torch.uint8).unsqueeze(1).expand(-1, blocks.count)
    index = blocks.flat_index(offsets)
    assert torch.equal(index[index < numel].sort().values, torch.arange(numel))
    # only the last row may be short
    assert (blocks.rows - 1) * blocks.count < numel


def test_blocks_do_not_fall_in_step_with_row_lengths() -> None:
    for numel in (1024 * 1024, 768 * 3072, 960 * 320, 4096 * 11008):
        count = blocks_for(numel, 0.01).count
        assert math.gcd(count, 2 * 3 * 5) == 1
