"""PowerSGD's parts: orthonormal for any input, the subspace kept, products in part and in whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.powersgd import (
    back_project,
    initial_factor,
    matrix_shape,
    orthogonalize,
    product_entries,
    project,
    subtract_product_,
)

FP32 = torch.finfo(torch.float32)
ORTHONORMAL = 3e-7
SCALES = (1.0, 1e-20, 1e-38, 1e-42, 1e20, 1e38)

seeds = st.integers(0, 2**31)


@st.composite
def thin(draw: st.DrawFn) -> tuple[int, int]:
    rows = draw(st.one_of(st.integers(1, 40), st.sampled_from([256, 1000])))
    return rows, draw(st.integers(1, min(rows, 32)))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def degenerate(shape: tuple[int, int], seed: int, kind: str) -> Tensor:
    """Columns that depend on each other, or are zero, or differ in size by all that fp32 has."""
    factor = normal(*shape, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    pick = torch.randint(0, shape[1], (shape[1],), generator=generator)
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "equal":
        return factor[:, :1].expand(shape).clone()
    if kind == "repeated":
        return factor[:, pick]
    if kind == "combined":
        half = max(1, shape[1] // 2)
        return factor[:, :half] @ normal(half, shape[1], seed=seed + 2)
    if kind == "some zero":
        factor[:, pick] = 0.0
    elif kind == "one entry":
        factor = torch.zeros(shape)
        factor[seed % shape[0], pick] = -1.0
    elif kind == "nearly equal":
        factor = factor[:, :1] + 1e-6 * factor
    elif kind == "uneven":
        factor *= torch.tensor(SCALES)[pick % len(SCALES)].clamp(max=1e37)
    elif kind == "extreme":
        factor = torch.where(factor < 0, -FP32.max, FP32.max)
    elif kind == "denormal":
        factor = torch.where(factor < 0, -1e-45, 3e-45)
    return factor


KINDS = (
    "normal", "zero", "equal", "repeated", "combined", "some zero", "one entry", "nearly equal",
    "uneven", "extreme", "denormal",
)  # fmt: skip


def gap_from_orthonormal(factor: Tensor) -> float:
    wide = factor.double()
    return float((wide.T @ wide - torch.eye(factor.shape[1], dtype=torch.float64)).abs().max())


@given(thin(), seeds, st.sampled_from(KINDS))
@example((1000, 32), 0, "zero")
@example((1, 1), 0, "zero")
@example((32, 32), 3, "equal")
@example((1000, 4), 3, "denormal")
@example((8, 8), 8, "combined")
def test_any_finite_input_becomes_orthonormal(shape: tuple[int, int], seed: int, kind: str) -> None:
    factor = degenerate(shape, seed, kind)
    before = factor.clone()
    unit = orthogonalize(factor)
    assert unit.dtype == torch.float32
    assert unit.shape == shape
    assert gap_from_orthonormal(unit) < ORTHONORMAL
    assert torch.equal(factor, before)
    elsewhere = torch.zeros(shape[0] + 1, shape[1])[1:].copy_(factor)
    for same in (factor, elsewhere, factor.t().contiguous().t()):
        assert torch.equal(orthogonalize(same), unit)


@given(thin(), seeds, st.sampled_from(["normal", "some zero", "uneven"]))
def test_the_first_columns_span_the_first_columns(
    shape: tuple[int, int], seed: int, kind: str
) -> None:
    factor = degenerate(shape, seed, kind)
    unit, wide = orthogonalize(factor).double(), factor.double()
    for count in range(1, shape[1] + 1):
        kept, column = unit[:, :count], wide[:, count - 1]
        left = column - kept @ (kept.T @ column)
        assert left.norm() <= 1e-4 * column.norm()


@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from([1, 4, 100]), seeds)
def test_rounding_errors_do_not_choose_a_direction(
    independent: int, dependent: int, times: int, seed: int
) -> None:
    """Machines whose arithmetic differs in the last bit must agree on dependent columns too."""
    rows, count = times * (independent + dependent), independent + dependent
    base = orthogonalize(normal(rows, independent, seed=seed)).double()
    mixed = base @ normal(independent, dependent, seed=seed + 1).double()
    # a dependent column may come anywhere behind what it depends on
    tail = base[:, independent // 2 :].repeat(1, 2)[:, : count - independent]
    for factor in (torch.cat([base, mixed], 1), torch.cat([base, tail, 0 * mixed], 1)[:, :count]):
        noise = normal(*factor.shape, seed=seed + 3).double() * 2.0**-27
        gap = orthogonalize(factor * (1 + noise)) - orthogonalize(factor)
        assert gap.abs().max() < 1e-5


@given(st.lists(thin(), min_size=1, max_size=4), seeds)
def test_factors_together_are_those_alone(shapes: list[tuple[int, int]], seed: int) -> None:
    factors = [normal(*shape, seed=seed + i) for i, shape in enumerate([*shapes, *shapes])]
    for factor, unit in zip(factors, powersgd.orthogonalize_all(factors), strict=True):
        assert torch.equal(unit, orthogonalize(factor))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_a_tensor_is_split_where_the_factors_are_smallest(shape: list[int]) -> None:
    rows, columns = matrix_shape(torch.Size(shape))
    assert rows * columns == math.prod(shape)
    for at in range(1, len(shape)):
        assert rows + columns <= math.prod(shape[:at]) + math.prod(shape[at:])
    assert any(rows == math.prod(shape[:at]) for at in range(1, len(shape)))


def test_matrices_are_what_they_are() -> None:
    assert matrix_shape(torch.Size([3, 1000])) == (3, 1000)
    assert matrix_shape(torch.Size([64, 128, 3, 3])) == (64, 1152)  # a convolution
    assert matrix_shape(torch.Size([4, 4, 4])) == (4, 16)  # the first of equals
    assert matrix_shape(torch.Size([])) == (1, 1)


def test_first_factors_are_orthonormal_and_follow_from_the_name() -> None:
    first = initial_factor("a", 300, 8, "cpu")
    assert torch.equal(first, initial_factor("a", 300, 8, torch.device("cpu")))
    assert not torch.equal(first, initial_factor("b", 300, 8, "cpu"))
    assert gap_from_orthonormal(first) < ORTHONORMAL
    # Written down: a change would make processes of different versions disagree.
    generator = torch.Generator().manual_seed(0xE8B7BE43)  # the CRC-32 of "a"
    expected = torch.randn(3, 1, generator=generator)
    assert torch.allclose(initial_factor("a", 3, 1, "cpu"), expected / expected.norm())


@given(st.integers(1, 40), st.integers(1, 40), st.data(), seeds)
def test_projections_and_products(rows: int, columns: int, data: st.DataObject, seed: int) -> None:
    rank = data.draw(st.integers(1, min(rows, columns)))
    matrix = normal(rows, columns, seed=seed)
    q = normal(columns, rank, seed=seed + 1)
    p = project(matrix, q)
    torch.testing.assert_close(p.double(), matrix.double() @ q.double(), rtol=1e-5, atol=1e-5)
    unit = orthogonalize(p)
    back = back_project(matrix, unit)
    wide = matrix.double().T @ unit.double()
    torch.testing.assert_close(back.double(), wide, rtol=1e-5, atol=1e-5)

    left = matrix.clone()
    assert subtract_product_(left, unit, back) is left
    # sent plus left is what was there; a projection leaves no more energy than there was
    sent = product_entries(unit, back, 0, matrix.numel(), columns)
    torch.testing.assert_close(left.view(-1) + sent, matrix.view(-1), rtol=1e-6, atol=2e-6)
    assert left.norm() <= matrix.norm() * (1 + 1e-6)
    start = data.draw(st.integers(0, matrix.numel()))
    stop = data.draw(st.integers(start, matrix.numel()))
    part = product_entries(unit, back, start, stop, columns)
    assert part.shape == (stop - start,)
    assert part.is_contiguous()
    torch.testing.assert_close(part, sent[start:stop], rtol=1e-5, atol=1e-6)


class _Precisions(TorchDispatchMode):
    """Settings of products while they run: a CPU without bf16 products computes in fp32 anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.strip("_").endswith(("mm", "mm_", "mv", "bmm")):
            self.seen.add(torch.backends.mkldnn.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_in_fp32_and_the_programs_setting_is_put_back(precision: str) -> None:
    matrix, q, p = normal(300, 200), normal(200, 5), normal(300, 5)
    wide = matrix.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    chosen = torch.backends.mkldnn.matmul.fp32_precision
    try:
        with _Precisions() as precisions:
            found = project(matrix, q), back_project(matrix, p)
            found += (subtract_product_(matrix.clone(), p, q),)
        assert precisions.seen == {"ieee"}
        exact = wide @ q.double(), wide.T @ p.double(), wide - p.double() @ q.double().T
        for product, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=3e-5)
        assert torch.backends.mkldnn.matmul.fp32_precision == chosen
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
