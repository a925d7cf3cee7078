"""The arena: parts that do not overlap, one allocation, growth only while it is empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.activation.inputs import CheckpointedInputs
from ds_ckpt.activation.install import CheckpointedBlocks
from ds_ckpt.activation.offload import InputStore
from ds_ckpt.activation.policies import Policy
from ds_ckpt.memory.copies import HostCopies
from ds_ckpt.memory.pool import ALIGNMENT_BYTES, Arena, device_arena
from tests.unit.offload_models import CPU, build, equal, gradients


class Counted:
    """Allocates, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, nbytes: int) -> Tensor:
        self.asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.integers(1, 5),
    actions=st.lists(st.one_of(st.integers(1, 3000), st.none()), max_size=40),
    data=st.data(),
)
def test_parts_never_overlap(parts: int, actions: list[int | None], data: st.DataObject) -> None:
    arena = Arena(parts, Counted())
    out: list[tuple[Tensor, int]] = []
    for number, size in enumerate(actions):
        if size is None:
            if out:
                arena.give_back(out.pop(data.draw(st.integers(0, len(out) - 1)))[0])
            continue
        part = arena.room(size)
        if part is not None:
            assert part.numel() == size
            assert (part.data_ptr() - arena._buffer.data_ptr()) % ALIGNMENT_BYTES == 0
            part.fill_(number % 251)
            out.append((part, number % 251))
    assert all(bool((part == value).all()) for part, value in out)
    for part, _ in out:
        arena.give_back(part)
    assert arena.nbytes_in_use == 0


def test_the_first_request_says_how_large_it_is() -> None:
    memory = Counted()
    arena = Arena(3, memory)
    parts = [arena.room(1000) for _ in range(4)]
    assert memory.asked == [3 * 1024]
    assert [p is None for p in parts] == [False, False, False, True]
    assert arena.refused == 1
    for part in parts[:3]:
        assert part is not None
        arena.give_back(part)
    # the most that was wanted at one time, the refused one with it
    again = [arena.room(1000) for _ in range(4)]
    assert memory.asked == [3 * 1024, 4 * 1024]
    assert all(p is not None for p in again)


def test_longer_sequences_get_a_larger_buffer_once_it_is_empty() -> None:
    memory = Counted()
    arena = Arena(2, memory)
    short = arena.room(256)
    assert short is not None
    assert arena.room(1024) is None
    arena.give_back(short)
    assert arena.room(1024) is not None
    assert memory.asked == [512, 256 + 1024]


def test_giving_back_what_is_not_out_is_an_error() -> None:
    arena = Arena(2, Counted())
    part = arena.room(10)
    assert part is not None
    arena.give_back(part)
    with pytest.raises(ValueError, match="no part of this arena"):
        arena.give_back(part)


def _on(model: torch.nn.Module, **options: Any) -> InputStore:
    store = InputStore(CPU, HostCopies(), owned=[*model.parameters(), *model.buffers()], **options)
    boundaries = CheckpointedInputs(store)
    CheckpointedBlocks(model, policy=Policy(), around=boundaries.around)
    return store


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_boundaries_lie_in_one_buffer(kind: str) -> None:
    model = build(kind)
    CheckpointedBlocks(model)
    theirs = gradients(model)
    model = build(kind)
    arena = device_arena(4, CPU)
    store = _on(model, arena=arena)
    for _ in range(3):
        assert equal(theirs, gradients(model))
        store.collect()
        assert arena.nbytes_in_use == 0
        assert store.counters.device_bytes == 0
        refused, arena.refused = arena.refused, 0
    assert refused == 0  # what did not fit the first time has a place since
    assert store.counters.out.total() == 0
    torch.manual_seed(7)
    loss = model(input_ids=torch.ones(2, 10, dtype=torch.long), labels=torch.ones(2, 10).long())
    assert arena.nbytes_in_use >= store.counters.device_bytes > 0
    assert loss.loss.requires_grad
