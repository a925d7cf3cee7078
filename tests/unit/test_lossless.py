"""Lossless changes of 16-bit weights: every bit pattern comes through, and few bytes do it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused import counted_bytes
from torch import Tensor

from ds_ckpt.weights import lossless, transfer
from ds_ckpt.weights.changes import NodeLayout

DTYPES = (torch.bfloat16, torch.float16)


def through(old: Tensor, new: Tensor) -> Tensor:
    weights = old.clone()
    lossless.decode_(weights, lossless.encode(old, new))
    return weights


def bits(weights: Tensor) -> Tensor:
    return weights.view(torch.int16)


def any_change(seed: int, numel: int, spread: int, share: float) -> tuple[Tensor, Tensor]:
    """Return bits of old and new weights, of which a share differs by up to `spread`."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
    step = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    step[torch.rand(numel, generator=generator) >= share] = 0
    return old, (old.to(torch.int64) + step).to(torch.int16)


@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0, 1, 2, 7, 100, 40_000]),
    share=st.sampled_from([0.0, 0.02, 1.0]),
)
def test_every_bit_comes_through(seed, numel, dtype, spread, share) -> None:
    """Any bit pattern, not a number, infinities and both zeros among them."""
    old, new = any_change(seed, numel, spread, share)
    got = through(old.view(dtype), new.view(dtype))
    assert torch.equal(bits(got), new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_pattern_to_its_neighbours_and_to_the_farthest(dtype: torch.dtype) -> None:
    old = torch.arange(-(2**15), 2**15).to(torch.int16)
    for new in (old, old + 1, old - 1, ~old, old.flip(0), torch.zeros_like(old)):
        assert torch.equal(bits(through(old.view(dtype), new.view(dtype))), new)


@pytest.mark.parametrize("numel", [1023, 1024, 1025, 3500])
def test_bytes_do_not_depend_on_chunks_and_threads(numel, monkeypatch) -> None:
    old = torch.randn(numel).bfloat16()
    new = (old.float() + 1e-3 * torch.randn(numel)).bfloat16()
    payload = lossless.encode(old, new)
    monkeypatch.setattr(lossless, "CPU_CHUNK", 1024)
    monkeypatch.setattr(lossless, "_threads", lambda: 3)
    assert torch.equal(bits(through(old, new)), bits(new))
    assert torch.equal(lossless.encode(old, new), payload)


def test_an_error_in_a_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "CPU_CHUNK", 1024)
    monkeypatch.setattr(lossless, "_threads", lambda: 3)
    old = torch.randn(3500).bfloat16()
    payload = lossless.encode(old, old + 1e-3)
    payload[-200:] = 0
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
    before, after = (b ^ (b >> 31 & 0x7FFF) for b in (bits(old).int(), bits(new).int()))
    change = after - before
    exponent = (bits(old).int() >> 7) & 0xFF
    total = 0.0
    for e in exponent.unique():
        counts = change[exponent == e].unique(return_counts=True)[1].double()
        total += float(-(counts * (counts / counts.sum()).log2()).sum())
    return total / old.numel()


def step_of(rate: float, numel: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(numel, generator=generator)
    moved = rate * torch.randn(numel, generator=generator).clamp(-2, 2)
    return master.bfloat16(), (master + moved).bfloat16()


@pytest.mark.parametrize("rate", [1e-5, 3e-5, 1e-4, 3e-4, 1e-3])
def test_near_the_entropy_of_the_change_given_the_exponent(rate: float) -> None:
    old, new = step_of(rate, 1 << 19)
    sent = 8 * lossless.encode(old, new).numel() / old.numel()
    assert sent <= 1.15 * entropy_given_exponent(old, new) + 0.3


def test_incompressible_changes_are_sent_as_they_are() -> None:
    old, new = torch.randint(-(2**15), 2**15, (2, 5000)).to(torch.int16).view(torch.bfloat16)
    assert lossless.encode(old, new).numel() <= 2 * 5000 + 8 + 4 * 5


def test_another_dtype_is_refused() -> None:
    weights = torch.zeros(3)
    with pytest.raises(TypeError, match="bf16 or fp16 weights"):
        lossless.encode(weights, weights)


def test_a_damaged_payload_is_refused() -> None:
    old = torch.randn(5000).bfloat16()
    payload = lossless.encode(old, (old.float() * 1.01).bfloat16())
    for damaged in (payload[:-1], torch.cat([payload, payload[:4]]), payload[:4], payload[:300]):
        with pytest.raises(ValueError, match="5000 weights"):
            lossless.decode_(old.clone(), damaged)


def kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lossless.fused, "is_supported", lambda *_: True)


def check_kernels(old: Tensor, new: Tensor) -> None:
    """Compare kernels with the CPU's code, each reading what the other has written."""
    payload, weights = lossless.encode(old, new), old.clone()
    with pytest.MonkeyPatch.context() as patch:
        kernels(patch)
        room = lossless.encode(old, new)
        lossless.decode_(weights, payload)
    assert torch.equal(bits(weights), bits(new))
    (length,) = room[:8].view(torch.int64).tolist()
    assert torch.equal(room[:length], payload)
    assert not room[length:].any()


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 2100),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0, 1, 7, 100, 40_000]),
    share=st.sampled_from([0.02, 0.4, 1.0]),
)
def test_kernels_and_cpus_write_and_read_the_same_bytes(seed, numel, dtype, spread, share) -> None:
    old, new = (t.view(dtype) for t in any_change(seed, numel, spread, share))
    check_kernels(old, new)


def test_only_bytes_to_send_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "IN_FLIGHT", 0)
    alone = NodeLayout(1, 1, 0, None), None, lambda *_, **__: None, lambda: torch.device("cpu")
    sender, packet = transfer.ReplicaTransfer(*alone), lossless.encode(*step_of(1e-3, 3000))
    sender.start([torch.nn.functional.pad(packet, (0, 100))] * 2, is_fixed_size=False)
    kept = [waiting.untyped_storage().nbytes() for waiting, _ in sender._waiting]
    assert kept == [len(packet)] * 2


@pytest.mark.parametrize("held", [0.0, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize("rate", [1e-5, 3e-4, 1e-2])
def test_kernels_read_no_other_block_if_weights_differ(rate, held, monkeypatch) -> None:
    from triton.runtime import interpreter

    old, new = step_of(rate, 1024)
    payload, reach = lossless.encode(old, new), 4096  # bytes beside it, of no other tensor
    payload = torch.nn.functional.pad(payload, (reach, reach))[reach:-reach]
    kernels(monkeypatch)
    load, begin = interpreter.InterpreterBuilder.create_masked_load, payload.data_ptr()

    def watched(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        at = pointers.data[mask.data].astype("int64") - begin
        beside = (-reach < at) & (at < 8) | (at >= len(payload)) & (at < len(payload) + reach)
        found.extend(at[beside].tolist())
        return load(self, pointers, mask, *args)

    found: list[int] = []
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched)
    lossless.decode_(torch.full_like(old, held), payload)
    assert not found


@pytest.mark.parametrize("rate", [1e-2, 1e-3, 1e-4, 1e-5])
def test_kernels_read_and_write_few_bytes(rate: float) -> None:
    """Bytes of memory: those that loads, stores and sums in place touch, and the first zeros."""
    old, new = step_of(rate, 5000)
    check_kernels(old, new)
    with pytest.MonkeyPatch.context() as patch:
        kernels(patch)
        with counted_bytes() as encoding:
            payload = lossless.encode(old, new)
        with counted_bytes() as decoding:
            lossless.decode_(old.clone(), payload)
    assert 8 < (encoding["bytes"] + payload.numel()) / old.numel() < 40, encoding
    assert 4 < decoding["bytes"] / old.numel() < 40, decoding
