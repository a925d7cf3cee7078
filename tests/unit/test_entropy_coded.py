"""Entropy-coded values: bytes, error, and what no input may break. Worlds of them:
`test_exchange.py`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import EntropyCoded, Feedback, entropy_coded
from ds_ckpt.compression.base import aligned
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
    elif kind == "rising":
        values *= torch.linspace(0.01, 1, max(1, numel))[:numel]
    return values.mul_(scale).clamp_(FP32.min, FP32.max)


def round_trip(codec: EntropyCoded, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(payload, what was left, what arrived)."""
    left = values.clone()
    payload = torch.full((codec.packed_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.pack(left, payload)
    arrived = torch.zeros_like(values)
    codec.unpack_add(payload, arrived)
    return payload, left, arrived


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
