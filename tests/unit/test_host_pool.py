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
            assert tensor.numel() == 0 or tensor.data_ptr() % PAGE_BYTES == 0
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
    held = host.nbytes_held
    assert host.trim() == held
    assert host.nbytes_held == 0


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


class _Copy:
    """Stands for an event behind a copy that is under way until `done`."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_a_block_waits_for_the_copies_of_its_last_owner() -> None:
    host, copy = HostPool(), _Copy()
    first = host.take((10,), torch.float32)
    host.give_back(first, copy)
    second = host.take((10,), torch.float32)
    assert second.data_ptr() != first.data_ptr()
    copy.done = True
    assert host.take((10,), torch.float32).data_ptr() == first.data_ptr()
    late = _Copy()
    host.give_back(second, late)
    host.trim()
    assert late.done


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


class _Cudart:
    """Counts registered memory; refuses from `limit_bytes` on."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if sum(self.registered.values()) + size > self.limit_bytes:
            self.last_error = 2
            return 2
        assert address % PAGE_BYTES == 0
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def launch(self) -> None:
        """As a kernel's: what went wrong before is raised, and forgotten."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")


def test_blocks_are_pinned_until_they_are_released(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = _Cudart(limit_bytes=3 * PAGE_BYTES)
    monkeypatch.setattr(pool.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pool.torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pool, "_launch", cudart.launch)
    host = HostPool()
    tensors = [host.take((PAGE_BYTES,), torch.uint8) for _ in range(3)]
    assert sum(cudart.registered.values()) == host.nbytes_held == 3 * PAGE_BYTES
    assert host.pinned
    unpinned = host.take((1,), torch.uint8)
    assert not host.pinned
    assert "refused to pin 4096 bytes" in caplog.text
    host.give_back(tensors[0])
    host.give_back(unpinned)
    host.trim()
    assert len(cudart.registered) == 2
    host.close()
    assert not cudart.registered
    assert host.nbytes_held == 0
    host = HostPool()
    kept = host.take((1,), torch.uint8)
    assert cudart.registered
    del host  # dropped, not closed
    assert not cudart.registered
    kept.fill_(1)


def test_a_refusal_leaves_no_error_behind_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = _Cudart(limit_bytes=PAGE_BYTES)
    monkeypatch.setattr(pool.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pool.torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pool, "_launch", cudart.launch)
    host = HostPool()
    pinned = host.take((8,), torch.int64).fill_(7)
    plain = host.take((8,), torch.int64).fill_(9)
    cudart.launch()  # the model's next kernel
    assert (int(pinned.sum()), int(plain.sum())) == (56, 72)
    for tensor in (pinned, plain):
        host.give_back(tensor)
    assert host.nbytes_in_use == 0
    again = [host.take((8,), torch.int64) for _ in range(2)]
    assert {t.data_ptr() for t in again} == {pinned.data_ptr(), plain.data_ptr()}


def test_an_error_that_stays_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    cudart = _Cudart(limit_bytes=0)
    monkeypatch.setattr(pool.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pool.torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pool, "_launch", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        HostPool().take((8,), torch.int64)


def test_plain_memory_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.torch.cuda, "is_available", lambda: False)
    assert not HostPool().pinned
    with pytest.raises(ValueError, match="needs CUDA"):
        HostPool(pinned=True)
