"""PowerSGD in the exchange: collectives, warm start, what it delivers, its place in a column."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from virtual import World, assemble

from ds_ckpt.compression import Compressor, LowRank, TopK
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.exchange.low_rank import RowBlocks
from ds_ckpt.exchange.method_rules import Choose


def matrices(compressor: Compressor | None) -> Choose:
    return lambda name, shape: compressor if len(shape) > 1 else None


def low_rank(rows: int, columns: int, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator)
    return left @ torch.randn(rank, columns, generator=generator)


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


@given(st.integers(2, 5), st.integers(0, 2**20))
def test_rounded_factors_lose_nothing(size: int, seed: int) -> None:
    """The rounding error of a rank's factors stays in its residual, so the sum is bit-equal: one
    step of rank 1, far from exact, on numbers that bf16 does not hold."""
    generator = torch.Generator().manual_seed(seed)
    world = World(size, matrices(LowRank(1)))
    gradients = [[torch.randn(40, 30, generator=generator)] for _ in range(size)]
    wanted = sum(g[0].double() for g in gradients).div(size).flatten()
    delivered = assemble(world.reduce(["w"], gradients), 0).double()
    world.commit()
    left = world.residual_sum("w", 1200)
    assert float((delivered + left - wanted).norm() / wanted.norm()) < 1e-6


def last_of_four(gradient: Tensor, rank: int, *, remembered: bool) -> float:
    """The relative error of a fourth step with `gradient` on both of two processes."""
    world = World(2, matrices(LowRank(rank)))
    shards: list[list[Tensor]] = []
    for _ in range(4):
        shards = world.reduce(["w"], [[gradient], [gradient]])
        for feedback in world.feedbacks:
            feedback.rollback()  # no residual: the factors alone decide
        for factors in world.factors:
            if remembered:
                factors.commit()
            else:
                factors.rollback()
    return float((assemble(shards, 0) - gradient.flatten()).norm() / gradient.norm())


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_warm_start_follows_a_gradient_that_stays(seed: int) -> None:
    """To the error of the best factors, which those of a first step are far from."""
    noise = torch.randn(60, 50, generator=torch.Generator().manual_seed(100 + seed))
    gradient = low_rank(60, 50, 2, seed) + 0.3 * noise
    values = torch.linalg.svdvals(gradient)
    best = float(values[2:].norm() / values.norm()) / 2  # half of the mean is the owner's, exact
    warm = last_of_four(gradient, 2, remembered=True)
    cold = last_of_four(gradient, 2, remembered=False)
    assert warm < 1.1 * best
    assert warm < 0.8 * cold


@pytest.mark.parametrize("overflows", [False, True])
def test_a_skipped_step_leaves_the_factors(overflows: bool) -> None:
    """This bucket overflowed or another one did; the next step is as without the skipped one."""
    plain, skipping = (World(2, matrices(LowRank(2))) for _ in range(2))
    first, skipped, after = ([[torch.randn(20, 30)] for _ in range(2)] for _ in range(3))
    for world in (plain, skipping):
        world.reduce(["w"], first)
        world.commit()
    before = [{k: t.clone() for k, t in f.state_dict().items()} for f in skipping.factors]
    if overflows:
        skipped[0][0].fill_(torch.inf)
    skipping.reduce(["w"], skipped)
    skipping.rollback()
    for was, factors in zip(before, skipping.factors, strict=True):
        now = factors.state_dict()
        assert was.keys() == now.keys() == {"right:w"}
        assert all(torch.equal(was[k], now[k]) for k in was)
    shards, wanted = skipping.reduce(["w"], after), plain.reduce(["w"], after)
    assert torch.equal(assemble(shards, 0), assemble(wanted, 0))


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
def test_a_column_as_a_matrix_keeps_rows_and_entries(
    rows: int, columns: int, hosts: int, local: int, place: int
) -> None:
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
