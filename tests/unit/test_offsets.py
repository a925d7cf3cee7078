"""Sets of positions: what is packed comes back, in the announced bytes, near the entropy."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression.offsets import Ascending, PerBlock

seeds = st.integers(0, 2**31)
quick = settings(max_examples=150, deadline=None)


def filled(nbytes: int, filler: int) -> Tensor:
    return torch.full((nbytes,), filler, dtype=torch.uint8)


def offsets_of(rows: int, k: int, count: int, seed: int) -> Tensor:
    """uint8 [k, count], different in each column, in no order."""
    noise = torch.rand(rows, count, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(0)[:k].to(torch.uint8)


@quick
@given(st.integers(1, 3000), st.data(), seeds)
@example(1, None, 0)
def test_ascending_positions_come_back(numel: int, data: st.DataObject | None, seed: int) -> None:
    count = data.draw(st.integers(0, numel)) if data else 1
    shuffled = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))
    ends = torch.arange(numel)
    code = Ascending.of(numel, count)
    for index in (shuffled[:count].sort().values, ends[:count], ends[numel - count :]):
        packed = [filled(code.nbytes, filler) for filler in (0x00, 0xFF)]
        for out in packed:
            code.pack(index, out)
        assert torch.equal(*packed)
        assert torch.equal(code.unpack(packed[0]), index)


@quick
@given(st.integers(2, 256), st.data(), st.integers(1, 70), seeds)
def test_offsets_of_blocks_come_back(rows: int, data: st.DataObject, count: int, seed: int) -> None:
    k = data.draw(st.integers(1, min(8, rows - 1)))
    code = PerBlock.of(rows, k, count)
    offsets = offsets_of(rows, k, count, seed)
    ascending = offsets.sort(dim=0).values
    packed = [filled(code.nbytes, filler) for filler in (0x00, 0xFF)]
    for out in packed:
        assert torch.equal(code.pack(offsets, out), ascending)
    assert torch.equal(*packed)
    assert torch.equal(code.unpack(packed[0]), ascending.long())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_set_has_a_number_of_its_own(k: int) -> None:
    sets = torch.tensor(list(itertools.combinations(range(9), k)), dtype=torch.uint8).t()
    code = PerBlock.of(9, k, sets.shape[1])
    for order in (sets, sets.flip(0), sets.flip(1)):
        out = filled(code.nbytes, 0)
        code.pack(order.contiguous(), out)
        assert torch.equal(code.unpack(out), order.sort(dim=0).values.long())


def test_the_highest_numbers_fit_their_words() -> None:
    for rows, k in ((256, 8), (255, 8), (256, 7), (200, 2), (256, 3), (2, 1)):
        offsets = torch.arange(rows - k, rows, dtype=torch.uint8).unsqueeze(1).repeat(1, 50)
        code = PerBlock.of(rows, k, 50)
        out = filled(code.nbytes, 0xFF)
        code.pack(offsets, out)
        assert torch.equal(code.unpack(out), offsets.long())


def test_bits_stay_near_the_entropy() -> None:
    for rows, k in ((256, 1), (200, 2), (250, 3), (256, 3), (160, 8), (80, 8), (16, 8)):
        bits = 8 * PerBlock.of(rows, k, 10_000).nbytes / 10_000
        entropy = math.log2(math.comb(rows, k))
        assert entropy <= bits < entropy + 0.15 * k
        assert bits <= 8 * k
    numel = 1 << 20
    for density in (1e-4, 1e-3, 0.01, 0.03, 0.1):
        count = int(density * numel)
        bits = 8 * Ascending.of(numel, count).nbytes / count
        entropy = -math.log2(density) - (1 / density - 1) * math.log2(1 - density)
        assert entropy - 0.01 <= bits < entropy + 0.6
