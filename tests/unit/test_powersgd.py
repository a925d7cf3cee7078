"""PowerSGD: orthonormal for any input, the subspace kept, products; and its exchange."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_exchange import matrices
from torch import Tensor
from virtual import Operators, World, assemble

from ds_ckpt.compression import Compressor, LowRank, TopK, powersgd
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.exchange.low_rank import RowBlocks

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


DEGENERATE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "normal": lambda f, pick, seed: f,
    "zero": lambda f, pick, seed: torch.zeros_like(f),
    "equal": lambda f, pick, seed: f[:, :1].repeat(1, f.shape[1]),
    "repeated": lambda f, pick, seed: f[:, pick],
    "combined": lambda f, pick, seed: f[:, ::2] @ normal(f[:, ::2].shape[1], f.shape[1], seed=seed),
    "some zero": lambda f, pick, seed: f.index_fill(1, pick, 0.0),
    "one entry": lambda f, pick, seed: torch.zeros_like(f).index_put(
        (torch.tensor(seed % len(f)), pick), torch.tensor(-1.0)
    ),
    "nearly equal": lambda f, pick, seed: f[:, :1] + 1e-6 * f,
    "uneven": lambda f, pick, seed: f * torch.tensor(SCALES)[pick % len(SCALES)].clamp(max=1e37),
    "extreme": lambda f, pick, seed: torch.where(f < 0, -FP32.max, FP32.max),
    "denormal": lambda f, pick, seed: torch.where(f < 0, -1e-45, 3e-45),
}
"""Columns that depend on each other, or are zero, or differ in size by all that fp32 has."""


def degenerate(shape: tuple[int, int], seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    pick = torch.randint(0, shape[1], (shape[1],), generator=generator)
    return DEGENERATE[kind](normal(*shape, seed=seed), pick, seed + 2)


def gap_from_orthonormal(factor: Tensor) -> float:
    wide = factor.double()
    return float((wide.T @ wide - torch.eye(factor.shape[1], dtype=torch.float64)).abs().max())


@given(thin(), seeds, st.sampled_from(sorted(DEGENERATE)))
@example((1000, 32), 0, "zero")
@example((1, 1), 0, "zero")
@example((32, 32), 3, "equal")
@example((1000, 4), 3, "denormal")
@example((8, 8), 8, "combined")
def test_any_finite_input_becomes_orthonormal(shape: tuple[int, int], seed: int, kind: str) -> None:
    factor = degenerate(shape, seed, kind)
    before = factor.clone()
    unit = powersgd.orthogonalize(factor)
    assert unit.dtype == torch.float32
    assert unit.shape == shape
    assert gap_from_orthonormal(unit) < ORTHONORMAL
    assert torch.equal(factor, before)
    elsewhere = torch.zeros(shape[0] + 1, shape[1])[1:].copy_(factor)
    for same in (factor, elsewhere, factor.t().contiguous().t()):
        assert torch.equal(powersgd.orthogonalize(same), unit)


@given(thin(), seeds, st.sampled_from(["normal", "some zero", "uneven"]))
def test_the_first_columns_span_the_first_columns(shape, seed, kind) -> None:
    factor = degenerate(shape, seed, kind)
    unit, wide = powersgd.orthogonalize(factor).double(), factor.double()
    for count in range(1, shape[1] + 1):
        kept, column = unit[:, :count], wide[:, count - 1]
        left = column - kept @ (kept.T @ column)
        assert left.norm() <= 1e-4 * column.norm()


@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from([1, 4, 100]), seeds)
def test_rounding_errors_do_not_choose_a_direction(independent, dependent, times, seed) -> None:
    """Machines whose arithmetic differs in the last bit must agree on dependent columns too."""
    rows, count = times * (independent + dependent), independent + dependent
    base = powersgd.orthogonalize(normal(rows, independent, seed=seed)).double()
    mixed = base @ normal(independent, dependent, seed=seed + 1).double()
    # a dependent column may come anywhere behind what it depends on
    tail = base[:, independent // 2 :].repeat(1, 2)[:, : count - independent]
    for factor in (torch.cat([base, mixed], 1), torch.cat([base, tail, 0 * mixed], 1)[:, :count]):
        noise = normal(*factor.shape, seed=seed + 3).double() * 2.0**-27
        gap = powersgd.orthogonalize(factor * (1 + noise)) - powersgd.orthogonalize(factor)
        assert gap.abs().max() < 1e-5


@given(st.lists(thin(), min_size=1, max_size=4), seeds)
def test_factors_together_are_those_alone(shapes: list[tuple[int, int]], seed: int) -> None:
    factors = [normal(*shape, seed=seed + i) for i, shape in enumerate([*shapes, *shapes])]
    for factor, unit in zip(factors, powersgd.orthogonalize_all(factors), strict=True):
        assert torch.equal(unit, powersgd.orthogonalize(factor))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_a_tensor_is_split_where_the_factors_are_smallest(shape: list[int]) -> None:
    rows, columns = powersgd.matrix_shape(torch.Size(shape))
    assert rows * columns == math.prod(shape)
    for at in range(1, len(shape)):
        assert rows + columns <= math.prod(shape[:at]) + math.prod(shape[at:])
    assert any(rows == math.prod(shape[:at]) for at in range(1, len(shape)))


def test_matrices_are_what_they_are() -> None:
    assert powersgd.matrix_shape(torch.Size([3, 1000])) == (3, 1000)
    assert powersgd.matrix_shape(torch.Size([64, 128, 3, 3])) == (64, 1152)  # a convolution
    assert powersgd.matrix_shape(torch.Size([4, 4, 4])) == (4, 16)  # the first of equals
    assert powersgd.matrix_shape(torch.Size([])) == (1, 1)


def test_first_factors_are_orthonormal_and_follow_from_the_name() -> None:
    first = powersgd.initial_factor("a", 300, 8, "cpu")
    assert torch.equal(first, powersgd.initial_factor("a", 300, 8, torch.device("cpu")))
    assert not torch.equal(first, powersgd.initial_factor("b", 300, 8, "cpu"))
    assert gap_from_orthonormal(first) < ORTHONORMAL
    # Written down: a change would make processes of different versions disagree.
    generator = torch.Generator().manual_seed(0xE8B7BE43)  # the CRC-32 of "a"
    expected = torch.randn(3, 1, generator=generator)
    assert torch.allclose(powersgd.initial_factor("a", 3, 1, "cpu"), expected / expected.norm())


@given(st.integers(1, 40), st.integers(1, 40), st.data(), seeds)
def test_projections_and_products(rows: int, columns: int, data: st.DataObject, seed: int) -> None:
    rank = data.draw(st.integers(1, min(rows, columns)))
    matrix = normal(rows, columns, seed=seed)
    q = normal(columns, rank, seed=seed + 1)
    p = powersgd.project(matrix, q)
    torch.testing.assert_close(p.double(), matrix.double() @ q.double(), rtol=1e-5, atol=1e-5)
    unit = powersgd.orthogonalize(p)
    back = powersgd.back_project(matrix, unit)
    wide = matrix.double().T @ unit.double()
    torch.testing.assert_close(back.double(), wide, rtol=1e-5, atol=1e-5)

    left = matrix.clone()
    assert powersgd.subtract_product_(left, unit, back) is left
    # sent plus left is what was there; a projection leaves no more energy than there was
    sent = powersgd.product_entries(unit, back, 0, matrix.numel(), columns)
    torch.testing.assert_close(left.view(-1) + sent, matrix.view(-1), rtol=1e-6, atol=2e-6)
    assert left.norm() <= matrix.norm() * (1 + 1e-6)
    start = data.draw(st.integers(0, matrix.numel()))
    stop = data.draw(st.integers(start, matrix.numel()))
    part = powersgd.product_entries(unit, back, start, stop, columns)
    assert part.shape == (stop - start,)
    assert part.is_contiguous()
    torch.testing.assert_close(part, sent[start:stop], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_in_fp32_and_the_programs_setting_is_put_back(precision: str) -> None:
    matrix, q, p = normal(300, 200), normal(200, 5), normal(300, 5)
    wide = matrix.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    chosen, seen = torch.backends.mkldnn.matmul.fp32_precision, set[str]()

    def see(name: str, _: Any) -> None:
        """Note the setting: a CPU without bf16 products computes in fp32 anyway."""
        if name.strip("_").endswith(("mm", "mm_", "mv", "bmm")):
            seen.add(torch.backends.mkldnn.matmul.fp32_precision)

    try:
        with Operators(see):
            found = powersgd.project(matrix, q), powersgd.back_project(matrix, p)
            found += (powersgd.subtract_product_(matrix.clone(), p, q),)
        assert seen == {"ieee"}
        exact = wide @ q.double(), wide.T @ p.double(), wide - p.double() @ q.double().T
        for product, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=3e-5)
        assert torch.backends.mkldnn.matmul.fp32_precision == chosen
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("holds", [False, True])
def test_a_bucket_with_norms_and_biases(holds: bool) -> None:
    """Two sums of factors and one exchange of the rest; what was held of it is sent whole."""
    world = World(3, matrices(LowRank(4)), holds=holds)
    names = ["w", "bias", "v", "norm"]
    shapes = [(64, 48), (48,), (32, 64), (16,)]
    held, last = ([[torch.randn(s) for s in shapes] for _ in range(3)] for _ in range(2))
    if holds:
        world.hold(names, held, 8.0)
    shards = world.reduce(names, last, 8.0)
    assert [t.calls for t in world.transports] == [3] * 3
    world.commit()
    for i in (1, 3):
        wanted = torch.stack([g[i].double() for g in last]).mean(0)
        if holds:
            wanted += torch.stack([g[i].double() for g in held]).mean(0)
        assert torch.allclose(assemble(shards, i).double(), wanted, atol=1e-6)
        assert not any(names[i] in feedback.state_dict() for feedback in world.feedbacks)


@pytest.mark.parametrize("hosts", [2, 3, 4])
@pytest.mark.parametrize("local", [1, 2, 4])
def test_the_plan_has_the_bytes_that_a_host_sends(hosts: int, local: int) -> None:
    shape = torch.Size([96, 48])  # shards are whole rows, or a row would be sent by two processes
    low = matrices(LowRank(4))
    planned = Assignment.of(low, [("w", shape, 2)], hosts, local)
    world = World(hosts * local, low, local=local)
    world.reduce(["w"], [[torch.randn(shape)] for _ in range(hosts * local)])
    sent = sum(transport.sent_bytes for transport in world.transports[:local])
    # headers and verdicts
    assert sent == pytest.approx(planned.sent_bytes * (hosts - 1) / hosts, abs=64 * local * hosts)


def last_of_four(gradient: Tensor, rank: int, *, remembered: bool) -> float:
    """The relative error of a fourth step with `gradient` on both of two processes."""
    world = World(2, matrices(LowRank(rank)))
    shards: list[list[Tensor]] = []
    for _ in range(4):
        shards = world.reduce(["w"], [[gradient], [gradient]])
        for feedback in world.feedbacks:
            feedback.rollback()  # no residual: the factors alone decide
        for factors in world.factors:
            (factors.commit if remembered else factors.rollback)()
    return float((assemble(shards, 0) - gradient.flatten()).norm() / gradient.norm())


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_warm_start_follows_a_gradient_that_stays(seed: int) -> None:
    """The error falls to that of the best factors, far below that of a first step."""
    gradient = normal(60, 2, seed=seed) @ normal(2, 50, seed=seed + 50)
    gradient += 0.3 * normal(60, 50, seed=seed + 100)
    values = torch.linalg.svdvals(gradient)
    best = float(values[2:].norm() / values.norm()) / 2  # half of the mean is the owner's, exact
    warm = last_of_four(gradient, 2, remembered=True)
    cold = last_of_four(gradient, 2, remembered=False)
    assert warm < 1.1 * best
    assert warm < 0.8 * cold


def test_a_nonfinite_tensor_beside_finite_factors_is_flagged_on_every_rank() -> None:
    def choose(name: str, shape: torch.Size) -> Compressor | None:
        return LowRank(2) if name == "w" else TopK(density=0.1)

    world = World(3, choose)
    gradients = [[torch.randn(20, 30), torch.randn(16, 16)] for _ in range(3)]
    gradients[1][1][0, 0] = torch.inf
    for exchange in world.exchanges:
        exchange.errors.sampling = True
    for shards in world.reduce(["w", "v"], gradients):
        assert all(shard.isnan().all() for shard in shards)
    for exchange in world.exchanges:
        assert exchange.nonfinite_buckets == 1
        assert set(exchange.errors.take_sums().values()) == {(0.0, 0.0)}


def test_a_saved_factor_of_another_rank_is_drawn_anew() -> None:
    gradients = [[torch.randn(20, 30)] for _ in range(3)]
    arrived = []
    for rank in (None, 2, 3):
        world = World(3, matrices(LowRank(3)))
        for factors in world.factors if rank else []:
            factors.load_state_dict({"right:w": torch.randn(30, rank)})
        arrived.append(assemble(world.reduce(["w"], gradients), 0))
    assert torch.equal(arrived[0], arrived[1])
    assert not torch.equal(arrived[0], arrived[2])


@given(
    st.integers(1, 40), st.integers(1, 30), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)
)
def test_a_column_as_a_matrix_keeps_rows_and_entries(rows, columns, hosts, local, place) -> None:
    place %= local
    world = hosts * local
    layout = LocalShard(ShardLayout(rows * columns, world), tuple(range(place, world, local)))
    tensor = torch.arange(1.0, rows * columns + 1)
    column = torch.cat([tensor[layout.source(m)] for m in range(hosts)])
    blocks = RowBlocks.of(layout, columns)
    matrix = blocks.matrix(column.clone())
    assert matrix.shape == (blocks.rows, columns)
    flat = matrix.reshape(-1)
    for member in range(hosts):
        entries = blocks.entries[member]
        assert torch.equal(flat[entries], tensor[layout.source(member)])
        for at in range(entries.start, entries.stop):
            # an entry keeps its column
            assert at % columns == (int(flat[at]) - 1) % columns
    assert math.isclose(float(flat.sum()), float(column.sum()), rel_tol=1e-6)
    back = torch.empty_like(column) if not blocks.is_local else column.clone()
    blocks.write_back(matrix, back)
    assert torch.equal(back, column)
