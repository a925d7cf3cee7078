"""Lossless changes of 16-bit weights: every bit pattern comes through, and few bytes do it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.weights import lossless

DTYPES = (torch.bfloat16, torch.float16)


def through(old: Tensor, new: Tensor) -> Tensor:
    weights = old.clone()
    lossless.decode_(weights, lossless.encode(old, new))
    return weights


def bits(weights: Tensor) -> Tensor:
    return weights.view(torch.int16)


@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0, 1, 2, 7, 100, 40_000]),
    share=st.sampled_from([0.0, 0.02, 1.0]),
)
def test_every_bit_comes_through(seed, numel, dtype, spread, share) -> None:
    """Any bit pattern, not a number, infinities and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
    step = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    step[torch.rand(numel, generator=generator) >= share] = 0
    new = (old.to(torch.int64) + step).to(torch.int16)
    got = through(old.view(dtype), new.view(dtype))
    assert torch.equal(bits(got), new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_pattern_to_its_neighbours_and_to_the_farthest(dtype: torch.dtype) -> None:
    old = torch.arange(-(2**15), 2**15).to(torch.int16)
    for new in (old, old + 1, old - 1, ~old, old.flip(0), torch.zeros_like(old)):
        assert torch.equal(bits(through(old.view(dtype), new.view(dtype))), new)


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on the number of threads, and a chunk in no other than its own."""
    monkeypatch.setattr(lossless, "CHUNK", 1000)
    monkeypatch.setattr(lossless, "_threads", lambda: threads)
    for numel in (999, 1000, 1001, 3500):
        old = torch.randn(numel).bfloat16()
        new = (old.float() + 1e-3 * torch.randn(numel)).bfloat16()
        assert torch.equal(bits(through(old, new)), bits(new))
        parts = zip(old.split(1000), new.split(1000), strict=True)
        assert lossless.encode(old, new).equal(torch.cat([lossless.encode(*p) for p in parts]))


def test_an_error_in_a_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "CHUNK", 1000)
    monkeypatch.setattr(lossless, "_threads", lambda: 3)
    old = torch.randn(3500).bfloat16()
    payload, first = (lossless.encode(part, part + 1e-3) for part in (old, old[:1000]))
    payload[len(first) + lossless._HEADER.size + 256] ^= 0xFF  # zstd's first byte in the second
    with pytest.raises(ValueError, match="not a change of 3500 weights"):
        lossless.decode_(old.clone(), payload)


@pytest.mark.parametrize(
    ("environment", "bound", "threads"),
    [
        ({}, 8, 8),
        ({"LOCAL_SIZE": "4"}, 8, 2),
        ({"LOCAL_WORLD_SIZE": "9"}, 8, 1),
        ({"LOCAL_SIZE": "4"}, 2, 2),  # the launcher has divided them already
    ],
)
def test_ranks_of_a_node_share_its_cores(environment, bound, threads, monkeypatch) -> None:
    for key in lossless._LOCAL_SIZE:
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(bound)), raising=False)
    assert lossless._threads() == threads


def entropy_given_exponent(old: Tensor, new: Tensor) -> float:
    """Bits an element."""
    change = bits(new).int() - bits(old).int()  # no sign changes among these
    exponent = (bits(old).int() >> 7) & 0xFF
    total = 0.0
    for e in exponent.unique():
        counts = change[exponent == e].unique(return_counts=True)[1].double()
        total += float(-(counts * (counts / counts.sum()).log2()).sum())
    return total / old.numel()


@pytest.mark.parametrize("step", [1e-5, 1e-4, 1e-3])
def test_near_the_entropy_of_the_change_given_the_exponent(step: float) -> None:
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(1 << 19, generator=generator)
    master += torch.sign(master) * 2 * step
    old = master.bfloat16()
    new = (master + step * torch.randn(master.shape, generator=generator).clamp(-2, 2)).bfloat16()
    sent = 8 * lossless.encode(old, new).numel() / old.numel()
    assert sent <= 1.2 * entropy_given_exponent(old, new)


def test_incompressible_changes_are_sent_as_they_are() -> None:
    old, new = torch.randint(-(2**15), 2**15, (2, 5000)).to(torch.int16).view(torch.bfloat16)
    assert lossless.encode(old, new).numel() <= 2 * 5000 + 8


def test_another_dtype_is_refused() -> None:
    weights = torch.zeros(3)
    with pytest.raises(TypeError, match="bf16 or fp16 weights"):
        lossless.encode(weights, weights)


def test_a_damaged_payload_is_refused() -> None:
    old = torch.randn(5000).bfloat16()
    payload = lossless.encode(old, (old.float() * 1.01).bfloat16())
    for damaged in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:5], payload[:300]):
        with pytest.raises(ValueError, match="5000 weights"):
            lossless.decode_(old.clone(), damaged)
