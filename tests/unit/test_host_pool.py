"""The host pool: what is handed out is nobody else's, bytes are stated, blocks are used again."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.memory import HostPool, pool
from ds_ckpt.memory.pool import PAGE_BYTES, block_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES)),
        max_size=30,
    )
)
def test_tensors_in_use_never_overlap(
    steps: list[tuple[bool, list[int], torch.dtype]],
) -> None:
    """Each step takes a tensor and fills it with a mark, or gives the oldest back."""
    host = HostPool()
    in_use: list[tuple[torch.Tensor, int]] = []
    for mark, (takes, shape, dtype) in enumerate(steps):
        if takes:
            tensor = host.take(shape, dtype)
            assert tensor.shape == torch.Size(shape)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            in_use.append((tensor.fill_(mark), mark))
        elif in_use:
            host.give_back(in_use.pop(0)[0])
        for tensor, expected in in_use:
            assert bool((tensor == expected).all())
        asked = [t.numel() * t.element_size() for t, _ in in_use]
        assert host.nbytes_in_use == sum(block_bytes(n) for n in asked if n)
        assert host.nbytes_held >= host.nbytes_in_use
    for tensor, _ in in_use:
        host.give_back(tensor)
    assert host.nbytes_in_use == 0


@given(st.integers(1, 1 << 40))
def test_a_block_is_at_most_an_eighth_or_a_page_larger(wanted: int) -> None:
    size = block_bytes(wanted)
    assert wanted <= size < wanted + max(PAGE_BYTES, wanted / 8 + 1)
    assert block_bytes(size) == size


def test_blocks_are_used_again() -> None:
    host = HostPool()
    first = host.take((1000, 1000), torch.float32)
    address = first.data_ptr()
    host.give_back(first.view(-1))
    again = host.take((1_000_001,), torch.float32)
    assert again.data_ptr() == address
    assert host.nbytes_held == block_bytes(4_000_004)


def test_what_is_not_the_pools_is_refused() -> None:
    host = HostPool()
    tensor = host.take((8,), torch.float32)
    with pytest.raises(ValueError, match=r"shape \[3\].*not handed out"):
        host.give_back(torch.zeros(3))
    host.give_back(tensor)
    with pytest.raises(ValueError, match="given back before"):
        host.give_back(tensor)


def test_threads_share_it() -> None:
    host = HostPool()
    wrong: list[int] = []

    def work(mark: int) -> None:
        for i in range(200):
            tensor = host.take((64 + i % 7,), torch.int64).fill_(mark)
            if not bool((tensor == mark).all()):
                wrong.append(mark)
            host.give_back(tensor)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert host.nbytes_in_use == 0
    assert host.nbytes_held <= 4 * PAGE_BYTES


class _Pinning:
    """torch's allocator where CUDA is; refuses from `limit_bytes` on."""

    def __init__(self, limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit_bytes, self._empty = limit_bytes, torch.empty
        self.pinned: dict[int, int] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(pool.torch, "empty", self.empty)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() in self.pinned)

    def empty(
        self, size: int, *, dtype: torch.dtype, device: str, pin_memory: bool = False
    ) -> torch.Tensor:
        tensor = self._empty(size, dtype=dtype, device=device)
        if pin_memory:
            if sum(self.pinned.values()) + size > self.limit_bytes:
                raise RuntimeError("CUDA error: out of memory")
            self.pinned[tensor.data_ptr()] = size
        return tensor


def test_pinned_blocks_are_torchs_and_plain_ones_come_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning = _Pinning(3 * PAGE_BYTES, monkeypatch)
    host = HostPool()
    tensors = [host.take((PAGE_BYTES,), torch.uint8).fill_(i) for i in range(3)]
    assert sum(pinning.pinned.values()) == host.nbytes_in_use == 3 * PAGE_BYTES
    plain = host.take((8,), torch.int64).fill_(9)
    assert "refused to pin 4096 bytes" in caplog.text
    assert [int(t.sum()) for t in (*tensors, plain)] == [0, PAGE_BYTES, 2 * PAGE_BYTES, 72]
    for tensor in (*tensors, plain):
        host.give_back(tensor)
    assert host.nbytes_in_use == 0
    assert host.nbytes_held == PAGE_BYTES  # the plain one: torch keeps its own


def test_plain_memory_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.torch.cuda, "is_available", lambda: False)
    assert not HostPool().take((8,), torch.int64).is_pinned()
    with pytest.raises(ValueError, match="needs CUDA"):
        HostPool(pinned=True)


def test_random_lengths_hold_no_more_than_twice_what_is_used_at_once() -> None:
    """Another length in every step leaves blocks of sizes that nobody asks for again."""
    host, generator, most = HostPool(pinned=False), torch.Generator().manual_seed(0), 0
    for _ in range(60):
        length = int(torch.randint(1, 1000, (), generator=generator))
        taken = [host.take((length, 1000), torch.uint8) for _ in range(4)]
        most = max(most, host.nbytes_in_use)
        assert host.nbytes_held <= 2 * most
        for tensor in taken:
            host.give_back(tensor)
    short = [host.take((10, 1000), torch.uint8) for _ in range(4)]
    for _ in range(3):  # steps that need little: what long ones have left goes
        for tensor in short:
            host.give_back(tensor)
        short = [host.take((10, 1000), torch.uint8) for _ in range(4)]
    assert host.nbytes_held <= 2 * host.nbytes_in_use
