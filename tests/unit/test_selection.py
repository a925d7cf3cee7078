"""How entries fall into blocks; the largest by a sampled threshold, whatever the sample saw."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import selection
from ds_ckpt.compression.selection import MAX_BLOCK, blocks_for, largest, largest_by_sample

densities = st.one_of(
    st.sampled_from([1e-4, 0.01, 1 / 256, 0.1, 0.5, 0.9, 1.0]), st.floats(1e-4, 1.0)
)
quick = settings(max_examples=150, deadline=None)


@pytest.fixture(autouse=True)
def samples_pay_early() -> Iterator[None]:
    """Sampling starts where hypothesis looks; not monkeypatch, which it refuses."""
    few, selection._FEW = selection._FEW, 64
    yield
    selection._FEW = few


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


KINDS = ("normal", "uneven", "ties", "one size", "mostly zero", "zero", "sorted")


def awkward(numel: int, seed: int, kind: str) -> Tensor:
    """Inputs for which a sample misleads, or a threshold separates nothing."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if kind == "uneven":
        values[seed % numel :: 97] *= 1e6
    elif kind == "ties":
        values = values.round()
    elif kind == "one size":
        values = values.sign()
    elif kind == "mostly zero":
        values[: numel - numel // 50] = 0.0
    elif kind == "zero":
        values = torch.zeros(numel)
    elif kind == "sorted":
        values = values.abs().sort().values
    return values


@quick
@given(st.integers(64, 20_000), st.floats(1e-4, 0.9), st.integers(0, 2**31), st.sampled_from(KINDS))
@example(16_384, 0.5, 0, "mostly zero")
@example(5_000, 0.001, 1, "one size")
def test_a_sample_finds_the_largest_whatever_it_saw(
    numel: int, density: float, seed: int, kind: str
) -> None:
    values, count = awkward(numel, seed, kind), math.ceil(density * numel)
    index = largest_by_sample(values, count)
    assert index.shape == (count,)
    assert (index.diff() > 0).all()
    expected = values[largest(values, count)].abs().sort().values
    assert torch.equal(values[index].abs().sort().values, expected)
    if kind == "normal":  # no ties: the very same
        assert torch.equal(index, largest(values, count))
    assert torch.equal(largest_by_sample(values.clone(), count), index)


@pytest.mark.parametrize("kind", ["normal", "uneven", "mostly zero"])
def test_one_look_at_the_threshold_is_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    search = selection._at_least

    def counted(values: Tensor, threshold: float) -> Tensor:
        index = search(values, threshold)
        found.append(index.numel())
        return index

    monkeypatch.setattr(selection, "_at_least", counted)
    for seed in range(10):
        largest_by_sample(awkward(300_000, seed, kind), 3_000)
    assert len(found) == 10
    assert max(found) < 2 * 3_000


def test_tiles_of_the_search_leave_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    values = awkward(20_011, 5, "ties")
    whole = largest_by_sample(values, 500)
    monkeypatch.setattr(selection, "_TILE_ELEMENTS", 4 * 1001)
    assert torch.equal(largest_by_sample(values, 500), whole)
