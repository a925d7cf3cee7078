"""Codecs: what is sent plus what stays is what was there, in the announced bytes, whatever it is.

Worlds of them: `test_exchange.py`.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Codec, Dense, EntropyCoded, Quantize, TopK, quantize, topk, wire
from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.quantize import BITS, BLOCKS

FP32 = torch.finfo(torch.float32)
SCALES = (1.0, 3e-5, 1e-18, 1e-30, 8e-39, 1e-40, 1e-44, 1e18, 1e30, 0.3 * FP32.max, FP32.max)
Shaped = Callable[[Tensor, Tensor, torch.Generator], Tensor]
SHAPED: dict[str, Shaped] = {
    "normal": lambda x, at, draw: x,
    "heavy tail": lambda x, at, draw: x * torch.randn(len(x), generator=draw).mul(3).exp(),
    "few": lambda x, at, draw: x.where(torch.rand(len(x), generator=draw) >= 0.98, 0.0),
    "half zero": lambda x, at, draw: x.where(at >= len(x) // 2, 0.0),
    "zero": lambda x, at, draw: torch.zeros_like(x),
    "constant": lambda x, at, draw: torch.ones_like(x),
    "signs": lambda x, at, draw: x.sign(),
    "one outlier": lambda x, at, draw: x.where(at != len(x) // 3, 1e6),
    "all octaves": lambda x, at, draw: torch.logspace(-37, 0, max(1, len(x)))[: len(x)],
    "in clusters": lambda x, at, draw: x.where(at // 64 % 5 == 0, 1e-3 * x),
    # as embeddings have them
    "rows": lambda x, at, draw: x.where(torch.rand(len(x), generator=draw)[at // 64] <= 0.05, 0.0),
    "rising": lambda x, at, draw: x * torch.linspace(0.01, 1, max(1, len(x)))[: len(x)],
    "ties": lambda x, at, draw: x.where(torch.rand(len(x), generator=draw) >= 0.1, 1.5).where(
        at < len(x) // 2, x.clamp(-0.5, 0.5)
    ),
}
KINDS = tuple(SHAPED)
numels = st.one_of(
    st.integers(0, 70), st.integers(0, 3000), st.sampled_from([255, 256, 257, 20_011])
)
densities = st.sampled_from([1e-4, 0.01, 1 / 256, 0.1, 0.37, 0.5, 0.9, 1.0])
codecs: st.SearchStrategy[Codec] = st.one_of(
    st.builds(TopK, density=densities, values=...),
    st.builds(Dense, st.sampled_from([torch.float32, torch.bfloat16])),
    st.builds(Quantize, bits=st.sampled_from(BITS), block=st.sampled_from(BLOCKS)),
    st.builds(EntropyCoded, bits=st.sampled_from([0.05, 0.33, 0.7, 1.0, 2.0])),
)
seeds = st.integers(0, 2**31)


FORMATS = (TopK(density=0.1, values="int8"), Dense(torch.bfloat16), Quantize(bits=3))


@pytest.mark.parametrize(
    "codec", [*FORMATS, EntropyCoded(bits=1.0)], ids=lambda codec: codec.describe()
)
def test_a_payload_of_this_version_is_decoded(codec: Any) -> None:
    """A format that reads them otherwise needs another version."""
    file = Path(__file__).parent / "golden" / f"payloads_{wire.VERSION}.json"
    kept = json.loads(file.read_text())[codec.describe()]
    payload, into = (
        torch.tensor([[*bytes.fromhex(kept["payload"])]], dtype=torch.uint8),
        torch.zeros(64),
    )
    codec.unpack_add_rows(payload, into)
    torch.testing.assert_close(into, torch.tensor(kept["values"]))


def gradient(kind: str, numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    values = SHAPED[kind](torch.randn(numel, generator=draw), torch.arange(numel), draw)
    return values.mul(scale).clamp_(FP32.min, FP32.max)


def round_trip(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(payload, what was left, what arrived)."""
    left = values.clone()
    payload = torch.full((codec.packed_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.pack_rows(left[None], payload[None])
    arrived = torch.zeros_like(values)
    codec.unpack_add_rows(payload[None], arrived)
    return payload, left, arrived


@given(codecs, numels, seeds, st.sampled_from(KINDS), st.sampled_from(SCALES))
@example(Quantize(bits=4), 64, 0, "normal", FP32.max)
@example(Quantize(bits=2), 64, 1, "heavy tail", FP32.max)
@example(TopK(density=0.01, values="int8"), 64, 1, "normal", FP32.max)
@example(TopK(density=1.0, values="int8"), 64, 0, "constant", 127 * 1.4 * 2.0**-133)
@example(Dense(torch.bfloat16), 64, 0, "constant", FP32.max)
def test_sent_plus_left_is_what_was_there(codec, numel, seed, kind, scale) -> None:
    values = gradient(kind, numel, seed, scale)
    _, left, arrived = round_trip(codec, values)
    assert torch.isfinite(left).all()
    assert torch.isfinite(arrived).all()
    assert left.double().norm() <= values.double().norm() * (1 + 1e-5)
    gap = (left.double() + arrived.double() - values.double()).abs()
    if isinstance(codec, EntropyCoded):
        assert torch.equal(left, values - arrived)
        assert torch.equal(arrived.sign(), values.sign() * (arrived != 0))
    elif isinstance(codec, Quantize) and codec.bits == 2:
        # one rounding of a difference, relative to the larger of both
        assert (gap <= FP32.eps * torch.maximum(left.abs(), arrived.abs()).double()).all()
    else:
        # exact: what is subtracted lies within a factor of two of the value, or is zero
        assert not gap.any()
        assert (left.abs() <= values.abs()).all()


@given(codecs, numels, seeds, st.sampled_from(KINDS))
def test_every_byte_of_a_payload_is_written(codec: Codec, numel: int, seed: int, kind: str) -> None:
    values, size_bytes = gradient(kind, numel, seed), codec.packed_bytes(numel)
    assert size_bytes % 8 == 0
    assert (size_bytes == 0) == (numel == 0)
    payloads = torch.tensor([[0x00], [0xFF]], dtype=torch.uint8).repeat(1, size_bytes)
    for payload in payloads:
        codec.pack_rows(values.clone()[None], payload[None])
    assert torch.equal(*payloads)


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        (Dense(), (8, 4000, 400_000)),
        (Dense(torch.bfloat16), (8, 2000, 200_000)),
        (TopK(density=0.01), (16, 40, 2048)),
        (TopK(density=0.1, values="fp32"), (8, 520, 50_120)),
        (Quantize(bits=8), (16, 1032, 103_128)),
        (Quantize(bits=3), (16, 408, 40_632)),
        (Quantize(bits=2, block=256), (16, 264, 25_784)),
        (EntropyCoded(bits=1.0), (32, 152, 12_552)),
        (EntropyCoded(bits=0.33), (32, 72, 4176)),
    ],
    ids=str,
)
def test_payloads_have_the_sizes_of_the_format(codec: Codec, sizes: tuple[int, ...]) -> None:
    assert tuple(map(codec.packed_bytes, (1, 1000, 100_000))) == sizes


@given(codecs, st.integers(1, 700), seeds, st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
def test_rows_are_sent_as_if_alone(codec: Codec, numel: int, seed: int, kinds: list[str]) -> None:
    rows = torch.stack([gradient(kind, numel, seed + i) for i, kind in enumerate(kinds)])
    alone = [round_trip(codec, row) for row in rows]
    payloads = torch.full((len(rows), codec.packed_bytes(numel)), 0xAA, dtype=torch.uint8)
    left, arrived = rows.clone(), torch.ones(numel)
    codec.pack_rows(left, payloads)
    codec.unpack_add_rows(payloads, arrived, 8.0)
    expected = torch.ones(numel)
    for _, _, arrived_alone in alone:
        expected += arrived_alone * 8.0
    assert torch.equal(payloads, torch.stack([payload for payload, _, _ in alone]))
    assert torch.equal(left, torch.stack([left_alone for _, left_alone, _ in alone]))
    assert torch.equal(arrived, expected)


@pytest.mark.parametrize("codec", [EntropyCoded(), Quantize(), TopK(), Dense(torch.bfloat16)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_end_without_an_error(codec: Codec, value: float) -> None:
    for share in (0.001, 1.0):
        values = torch.randn(3, 2000)
        values[torch.rand(3, 2000) < share] = value
        payloads = torch.empty(3, codec.packed_bytes(2000), dtype=torch.uint8)
        codec.pack_rows(values, payloads)
        codec.unpack_add_rows(payloads, torch.zeros(2000))


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        (Quantize(bits=2), "half zero"),
        (Quantize(bits=3), "heavy tail"),
        (EntropyCoded(bits=1.0), "normal"),
        (EntropyCoded(bits=0.33), "constant"),
        (EntropyCoded(bits=0.33), "in clusters"),
        (EntropyCoded(bits=1.0), "rows"),
    ],
    ids=str,
)
def test_feedback_delivers_what_was_held_back(codec: Codec, kind: str) -> None:
    """The same gradient step after step: its mean arrives, and with what is left all of it."""
    values, steps = gradient(kind, 1000), 200
    feedback, total = Feedback(), torch.zeros_like(values)
    payload = torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8)
    for _ in range(steps):
        pending = feedback.accumulate("w", values, 1)
        codec.pack_rows(pending[None], payload[None])
        codec.unpack_add_rows(payload[None], total)
        feedback.commit()
    residual = feedback.state_dict()["w"]
    assert (total + residual - steps * values).norm() < 1e-4 * steps * values.norm()
    assert (total / steps - values).norm() < 0.15 * values.norm()


# the bounds are 2% above what the docstring and benchmarks/quantization.py say
@pytest.mark.parametrize(
    ("bits", "block", "bound"),
    [(8, 64, 0.0061), (3, 64, 0.1955), (4, 32, 0.0877), (4, 256, 0.1133), (2, 64, 0.343)],
)
def test_the_error_on_gaussian_entries(bits: Any, block: Any, bound: float) -> None:
    values = gradient("normal", 1 << 18)
    _, left, _ = round_trip(Quantize(bits=bits, block=block), values)
    assert 0.9 * bound < float(left.norm() / values.norm()) < bound


def test_two_bits_are_the_lloyd_max_levels() -> None:
    values = gradient("normal", 1 << 16)
    payload, _, arrived = round_trip(Quantize(bits=2, block=256), values)
    inner = payload[:512].view(torch.bfloat16).float()
    levels = (arrived.view(-1, 256) / inner.unsqueeze(1)).mul(1e4).round().div(1e4).unique()
    assert levels.tolist() == pytest.approx([-3.3348, -1.0, 1.0, 3.3348], rel=1e-4)
    assert float(inner.mean()) == pytest.approx(0.4528, rel=0.02)


def test_three_bits_lie_in_two_planes() -> None:
    """Low bits first: a packet's bytes mean the same in every version."""
    values = torch.tensor([-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 3.0])
    payload, left, _ = round_trip(Quantize(bits=3), values)
    assert not left.any()
    assert payload[:2].view(torch.bfloat16).tolist() == [1.0]
    assert payload[8:11].tolist() == [0b11100100, 0b11100100, 0b11]
    assert payload[11:13].tolist() == [0b00001111, 0b0]


@pytest.mark.parametrize("bits", BITS)
def test_tiles_leave_no_mark(bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = Quantize(bits=bits, block=32), gradient("heavy tail", 1000)
    whole = round_trip(codec, values)
    monkeypatch.setattr(quantize, "_TILE_ELEMENTS", 256)
    assert all(map(torch.equal, whole, round_trip(codec, values)))


@given(densities, st.integers(1, 5000), seeds)
def test_blocks_send_the_largest_of_each_block(density: float, numel: int, seed: int) -> None:
    # no zeros or ties, so the arrived values identify the sent ones
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) + 10.0
    codec = TopK(density=density, values="fp32")
    _, left, arrived = round_trip(codec, values)
    if codec.sent(numel) == numel:
        assert torch.equal(arrived, values)
        return
    blocks = topk.blocks_for(numel, density)
    assert 1 <= blocks.k <= blocks.rows <= topk.MAX_BLOCK
    for block in range(blocks.count):
        was, got, kept = (t[block :: blocks.count] for t in (values, arrived, left))
        assert int((got != 0).sum()) == blocks.k
        if blocks.k < was.numel():
            # the comparison ignores the last 8 bits of 24
            assert kept.max() <= was[got != 0].min() * (1 + 2**-15)


@pytest.mark.parametrize("density", [1 / 256, 0.01, 0.02, 0.05, 0.1, 0.25])
@pytest.mark.parametrize("numel", [65_536, 1_000_003])
def test_the_density_is_what_was_asked_or_slightly_more(density: float, numel: int) -> None:
    sent = TopK(density=density, values="int8").sent(numel) / numel
    assert density * (1 - 1e-9) <= sent <= density * 1.05
    assert math.gcd(topk.blocks_for(numel, density).count, 30) == 1


@pytest.mark.parametrize("fmt", topk.ValueFormat.__args__)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_values_are_as_precise_as_their_format(fmt: Any, count: int) -> None:
    values = gradient("normal", count, count)
    out = torch.empty(topk.value_bytes(count, fmt), dtype=torch.uint8)
    error = (topk.encode_values(values, fmt, out) - values).abs()
    bound = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.504 / 127}[fmt]
    for was, off in zip(values.split(64), error.split(64), strict=True):
        assert off.max() <= bound * was.abs().max()


def test_long_tensors_are_sent_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = EntropyCoded(bits=1.0)
    for numel, segments in ((2500, 3), (3000, 3), (3001, 4)):
        monkeypatch.setattr("ds_ckpt.compression.entropy_format.SEGMENT", 1000)
        values = gradient("rising", numel)
        payload, _, arrived = round_trip(codec, values)
        monkeypatch.undo()
        alone = [round_trip(codec, part) for part in values.split(math.ceil(numel / segments))]
        assert torch.equal(payload, torch.cat([part for part, _, _ in alone]))
        assert torch.equal(arrived, torch.cat([part for _, _, part in alone]))


# of normal entries at most 3% more than one threshold leaves at so many bits of entropy
@pytest.mark.parametrize(
    ("kind", "bits", "bound"),
    [
        ("normal", 1.0, 0.37),
        ("normal", 0.33, 0.75),
        ("normal", 2.0, 0.11),
        ("heavy tail", 0.33, 0.02),
        *(("rows", bits, bound) for bits, bound in ((0.33, 0.05), (0.5, 0.02), (2.0, 0.02))),
    ],
)
@pytest.mark.parametrize("numel", [1 << 16, 1 << 19])
def test_residual_energy_is_bounded(kind: str, bits: float, bound: float, numel: int) -> None:
    shares = []
    for seed in range(3):  # of a heavy tail a few entries decide
        values = gradient(kind, numel, seed)
        _, left, _ = round_trip(EntropyCoded(bits=bits), values)
        shares.append(float(left.square().sum() / values.square().sum()))
    assert sum(shares) / len(shares) < bound


def test_all_entries_arrive_where_there_is_room() -> None:
    values = torch.zeros(5000)
    values[[3, 4, 4999]] = torch.tensor([-2.0, 2.0, 2.0])
    _, _, arrived = round_trip(EntropyCoded(bits=1.0), values)
    assert torch.allclose(arrived, values)
