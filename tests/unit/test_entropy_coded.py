"""Entropy-coded values: bytes, error, and what no input may break. Worlds of them:
`test_exchange.py`."""

from __future__ import annotations

import math

import pytest
import torch
from codecs_under_test import every_byte_is_written, feedback_delivers, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import EntropyCoded, entropy_coded
from ds_ckpt.compression.entropy_coded import HEADER_BYTES

FP32 = torch.finfo(torch.float32)
EPS = FP32.eps
SCALES = (1.0, 3e-5, 1e-18, 1e-30, 8e-39, 1e-44, 1e18, 1e30, 0.3 * FP32.max, FP32.max)
KINDS = (
    "normal",
    "heavy tail",
    "few",
    "half zero",
    "zero",
    "constant",
    "signs",
    "one outlier",
    "all octaves",
    "in clusters",
    "rows",
    "rising",
)

codecs = st.builds(EntropyCoded, bits=st.sampled_from([0.05, 0.33, 0.7, 1.0, 2.0]))
numels = st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([255, 256, 257]))
seeds = st.integers(0, 2**31)
quick = settings(max_examples=150, deadline=None)


def gradient(kind: str, numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    if kind == "heavy tail":
        values *= torch.randn(numel, generator=generator).mul(3).exp()
    elif kind == "few":
        values[torch.rand(numel, generator=generator) < 0.98] = 0.0
    elif kind == "half zero":
        values[: numel // 2] = 0.0
    elif kind == "zero":
        values.zero_()
    elif kind == "constant":
        values.fill_(1.0)
    elif kind == "signs":
        values.sign_()
    elif kind == "one outlier":
        values[numel // 3 : numel // 3 + 1] = 1e6
    elif kind == "all octaves":
        values = torch.logspace(-37, 0, max(1, numel))[:numel]
    elif kind == "in clusters":
        values[torch.arange(numel) // 64 % 5 > 0] *= 1e-3
    elif kind == "rows":  # as embeddings have them
        values[
            torch.rand(numel // 64 + 1, generator=generator)[torch.arange(numel) // 64] > 0.05
        ] = 0
    elif kind == "rising":
        values *= torch.linspace(0.01, 1, max(1, numel))[:numel]
    return values.mul_(scale).clamp_(FP32.min, FP32.max)


@quick
@given(codecs, numels, seeds, st.sampled_from(KINDS), st.sampled_from(SCALES))
def test_sent_plus_left_is_what_was_there(
    codec: EntropyCoded, numel: int, seed: int, kind: str, scale: float
) -> None:
    values = gradient(kind, numel, seed, scale)
    _, left, arrived = round_trip(codec, values)
    assert torch.isfinite(left).all()
    assert torch.isfinite(arrived).all()
    # what is subtracted is what is added, to the bit
    assert torch.equal(left, values - arrived)
    assert left.double().norm() <= values.double().norm() * (1 + 1e-5)
    assert torch.equal(arrived.sign(), values.sign() * (arrived != 0))


@quick
@given(codecs, numels, seeds, st.sampled_from(KINDS))
def test_a_payload_has_the_announced_size_and_every_byte_is_written(
    codec: EntropyCoded, numel: int, seed: int, kind: str
) -> None:
    size_bytes = codec.packed_bytes(numel)
    assert size_bytes == (HEADER_BYTES + 8 * math.ceil(numel * codec.bits / 64) if numel else 0)
    assert every_byte_is_written(codec, gradient(kind, numel, seed))


def test_long_tensors_travel_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = EntropyCoded(bits=1.0)
    for numel, segments in ((2500, 3), (3000, 3), (3001, 4)):
        monkeypatch.setattr(entropy_coded, "SEGMENT", 1000)
        values = gradient("rising", numel)
        payload, left, arrived = round_trip(codec, values)
        length, start = math.ceil(numel / segments), 0
        monkeypatch.undo()
        for values_of, arrived_of in zip(values.split(length), arrived.split(length), strict=True):
            alone, _, arrived_alone = round_trip(codec, values_of)
            assert torch.equal(alone, payload[start : start + len(alone)])
            assert torch.equal(arrived_of, arrived_alone)
            start += len(alone)
        assert start == len(payload)
        assert torch.equal(left, values - arrived)


@settings(max_examples=40, deadline=None)
@given(codecs, st.integers(1, 700), seeds, st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
@pytest.mark.parametrize("host", [True, False])
def test_rows_travel_as_if_alone_and_alike_on_every_device(
    host: bool, codec: EntropyCoded, numel: int, seed: int, kinds: list[str]
) -> None:
    """Without waiting for counts, as on an accelerator, the bytes are the same."""
    rows = torch.stack([gradient(kind, numel, seed + i) for i, kind in enumerate(kinds)])
    alone = [round_trip(codec, row) for row in rows]
    payloads = torch.full((len(rows), codec.packed_bytes(numel)), 0xAA, dtype=torch.uint8)
    left, arrived = rows.clone(), torch.zeros(numel)
    with pytest.MonkeyPatch.context() as patch:
        if not host:
            patch.setattr(entropy_coded, "on_host", lambda device: False)
        codec.pack_rows(left, payloads)
        codec.unpack_add_rows(payloads, arrived)
    expected = torch.zeros(numel)
    for payload, left_alone, arrived_alone, row, kept in zip(
        *zip(*alone, strict=True), payloads, left, strict=True
    ):
        assert torch.equal(payload, row)
        assert torch.equal(left_alone, kept)
        expected += arrived_alone
    assert torch.equal(arrived, expected)


# of normal entries 3% more than one threshold leaves at so many bits of entropy
@pytest.mark.parametrize(
    ("kind", "bits", "bound"),
    [
        ("normal", 1.0, 0.37),
        ("normal", 0.33, 0.75),
        ("normal", 2.0, 0.11),
        ("heavy tail", 0.33, 0.02),
        ("rows", 0.33, 0.05),
        ("rows", 0.5, 0.02),
        ("rows", 1.0, 0.02),
        ("rows", 2.0, 0.02),
    ],
)
@pytest.mark.parametrize("numel", [1 << 16, 1 << 19])
def test_what_is_left(kind: str, bits: float, bound: float, numel: int) -> None:
    shares = []
    for seed in range(3):  # of a heavy tail a few entries decide
        values = gradient(kind, numel, seed)
        _, left, _ = round_trip(EntropyCoded(bits=bits), values)
        shares.append(float(left.square().sum() / values.square().sum()))
    assert sum(shares) / len(shares) < bound


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([256, 640, 768, 1000, 1536, 3072, 5120]),
    st.integers(1, 40),
    st.sampled_from([0.33, 1.0]),
    seeds,
)
def test_what_is_left_is_the_same_wherever_large_columns_stand(
    columns: int, period: int, bits: float, seed: int
) -> None:
    """A sample that meets some of the columns alone would let nothing be sent, and in no later step
    either."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(98304 * (1 + seed % 3) // columns, columns, generator=generator)
    matrix[:, seed % period :: period] *= 1e3
    left = []
    for order in (torch.arange(columns), torch.randperm(columns, generator=generator)):
        _, rest, _ = round_trip(EntropyCoded(bits=bits), matrix[:, order].view(-1))
        left.append(float(rest.square().sum() / matrix.square().sum()))
    assert left[0] == pytest.approx(left[1], rel=0.3, abs=1e-3)


def test_all_entries_arrive_where_there_is_room() -> None:
    codec = EntropyCoded(bits=1.0)
    for numel in (1, 2, 63, 5000):
        _, left, arrived = round_trip(codec, torch.zeros(numel))
        assert not left.any()
        assert not arrived.any()
    values = torch.zeros(5000)
    values[[3, 4, 4999]] = torch.tensor([-2.0, 2.0, 2.0])
    _, left, arrived = round_trip(codec, values)
    assert torch.allclose(arrived, values)
    values[7] = 1e-3  # 11 octaves below, where a level is a fifth to either side
    _, left, arrived = round_trip(codec, values)
    assert float(left.norm()) < 3e-4


def test_an_outlier_is_sent_and_hides_no_more_than_is_far_below_it() -> None:
    rest = torch.arange(4096) != 4096 // 3
    for outlier, least in ((1e3, 0.0), (1e6, 1.0)):
        values = gradient("normal", 4096)
        values[4096 // 3] = outlier
        _, left, _ = round_trip(EntropyCoded(bits=1.0), values)
        assert left[4096 // 3].abs() < 0.25 * outlier
        assert least <= float(left[rest].norm() / values[rest].norm()) < 0.7 + 0.5 * least


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.001, 1.0])
def test_values_that_are_not_finite_end_without_an_error(value: float, share: float) -> None:
    values = torch.randn(3, 2000)
    values[torch.rand(3, 2000) < share] = value
    codec = EntropyCoded(bits=1.0)
    payloads = torch.empty(3, codec.packed_bytes(2000), dtype=torch.uint8)
    codec.pack_rows(values, payloads)
    codec.unpack_add_rows(payloads, torch.zeros(2000))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("normal", 1.0), ("constant", 0.33), ("constant", 2.0), ("in clusters", 0.33), ("rows", 1.0)],
)
def test_feedback_delivers_what_was_held_back(kind: str, bits: float) -> None:
    codec = EntropyCoded(bits=bits)
    values = gradient(kind, 1000)
    feedback_delivers(codec, values, 200)


@pytest.mark.parametrize("bits", [0.01, 3, 0, -1.0, math.inf, math.nan, True, "1"])
def test_settings_out_of_range_are_refused(bits: object) -> None:
    with pytest.raises(ValueError, match="bits"):
        EntropyCoded(bits=bits)  # type: ignore[arg-type]
