"""The exchange in worlds of virtual processes: identity, laws 3 and 4, one collective a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from virtual import World, assemble

from ds_ckpt.compression import Codec, Compressor, Dense, EntropyCoded, LowRank, Quantize, TopK
from ds_ckpt.compression.quantize import BITS, BLOCKS
from ds_ckpt.compression.storage import QuantizedTensor
from ds_ckpt.compression.topk import VALUE_FORMATS
from ds_ckpt.compression.wire import HEADER_BYTES
from ds_ckpt.exchange.exchange import _energy
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.method_rules import Choose

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = torch.finfo(torch.float32).eps

shapes = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 30)),
    st.tuples(st.integers(1, 50)),
    st.tuples(st.integers(0, 9), st.integers(1, 8), st.integers(1, 6)),
    st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
)
codecs: st.SearchStrategy[Codec] = st.one_of(
    st.builds(
        TopK,
        density=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]),
        values=st.sampled_from(VALUE_FORMATS),
    ),
    st.builds(Dense, st.sampled_from([torch.float32, torch.bfloat16])),
    st.builds(Quantize, bits=st.sampled_from(BITS), block=st.sampled_from(BLOCKS)),
    st.builds(EntropyCoded, bits=st.sampled_from([0.33, 1.0, 2.0])),
)
low_ranks = st.builds(LowRank, st.integers(1, 6))
compressors: st.SearchStrategy[Compressor | None] = st.one_of(codecs, low_ranks)


@dataclass(frozen=True)
class Case:
    """A world, a bucket, and the numbers in it."""

    world: int
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    seed: int
    local: int = 1
    """Processes of a host."""

    @property
    def names(self) -> list[str]:
        return [f"p{i}" for i in range(len(self.shapes))]

    def gradients(self, step: int = 0) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + step)

        def one(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        return [[one(shape) for shape in self.shapes] for _ in range(self.world)]


cases = st.builds(
    Case,
    st.integers(1, 5),
    st.lists(shapes, min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 2**20),
)
hosts = st.builds(
    lambda of, shapes, dtype, seed: Case(of[0] * of[1], shapes, dtype, seed, of[1]),
    st.sampled_from([(h, local) for h in range(1, 6) for local in range(1, 4) if h * local <= 9]),
    st.lists(shapes, min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 2**20),
)


def matrices(codec: Compressor | None) -> Choose:
    """Tensors of two dimensions by `codec`, others whole."""
    return lambda name, shape: codec if len(shape) > 1 else None


def mean(gradients: Sequence[Sequence[Tensor]], tensor: int) -> Tensor:
    return torch.stack([g[tensor].reshape(-1).double() for g in gradients]).mean(0)


def assert_same_shards(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for a_process, b_process in zip(got, expected, strict=True):
        for a, b in zip(a_process, b_process, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a, b)


# ---- identity


def exact_mean(gradients: Sequence[Sequence[Tensor]], tensor: int) -> Tensor:
    """fp64, rounded once to the gradients' type."""
    return mean(gradients, tensor).to(gradients[0][tensor].dtype)


several_hosts = hosts.filter(
    lambda case: case.world > case.local and any(map(math.prod, case.shapes))
)


@given(
    several_hosts,
    st.sampled_from([None, Dense(), TopK(density=1.0, values="fp32")]),
    st.sampled_from([1.0, 1024.0]),
    st.integers(0, 1),
)
def test_sending_everything_is_the_mean_on_one_level_and_two(
    case: Case, codec: Codec | None, loss_scale: float, step: int
) -> None:
    """Within the rounding of another order of summation: a few units of the largest entry.

    Args:
        step: how many steps went before: with one the residual exists and is zero.
    """
    world = World(case.world, lambda name, shape: codec, local=case.local)
    for earlier in range(step):
        world.reduce(case.names, case.gradients(1 + earlier), loss_scale)
        world.commit()
    gradients = case.gradients()
    shards = world.reduce(case.names, gradients, loss_scale)
    world.commit()
    assert all(transport.calls == step + 1 for transport in world.transports)
    for i, name in enumerate(case.names):
        bound = 4 * torch.finfo(case.dtype).eps
        largest = max((float(p[i].abs().max()) for p in gradients if p[i].numel()), default=0.0)
        wanted, got = exact_mean(gradients, i), assemble(shards, i)
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * largest)
        left = [feedback.state_dict().get(name) for feedback in world.feedbacks]
        # only what a codec has packed has a residual, and what Dense sends in fp32 gives it up
        assert all((residual is None) == (codec in (None, Dense())) for residual in left)
        assert not any(residual.any() for residual in left if residual is not None)


def test_a_world_of_one_returns_the_gradient_itself() -> None:
    world = World(1, lambda n, s: TopK(density=0.01))
    gradient = torch.randn(8, 8)
    (shard,) = world.exchanges[0].average(["w"], [gradient])
    assert shard.data_ptr() == gradient.data_ptr()
    assert shard.shape == (64,)


def test_a_world_of_one_delivers_what_a_larger_one_left() -> None:
    world = World(1, lambda n, s: TopK(density=0.01))
    world.feedbacks[0].load_stored({"w": QuantizedTensor(torch.full((4,), 0.5))}, 0)
    for expected in (2.0 + 0.5 * 8, 2.0):
        ((shard,),) = world.reduce(["w"], [[torch.full((2, 2), 2.0)]], loss_scale=8.0)
        assert shard.tolist() == [expected] * 4
        world.commit()


# ---- law 3: nothing is lost


def check_law_3(
    case: Case, codec: Compressor | None, micro_steps: int, steps: int, loss_scale: float
) -> None:
    world = World(case.world, matrices(codec), local=case.local)
    # a factorization rounds by the matrix's norm, not by its entries
    roundings = 4 if not isinstance(codec, LowRank) else 4 * 40
    unsent = {name: torch.zeros(math.prod(s), dtype=torch.float64) for name, s in _matrices(case)}
    format_ = torch.finfo(case.dtype)
    half_unit = format_.eps / 2 if case.dtype != torch.float32 else 0.0
    largest = 0.0
    for step in range(steps):
        delivered = {name: torch.zeros_like(t) for name, t in unsent.items()}
        cast = {name: torch.zeros_like(t) for name, t in unsent.items()}
        for micro_step in range(micro_steps):
            gradients = case.gradients(1000 * step + micro_step)
            shards = world.reduce(case.names, gradients, loss_scale)
            entries = torch.cat([g.reshape(-1).abs().double() for p in gradients for g in p])
            largest += float(entries.max()) / loss_scale if entries.numel() else 0.0
            for i, name in enumerate(case.names):
                if name in unsent:
                    unsent[name] += mean(gradients, i) / loss_scale
                    arrived = assemble(shards, i).double()
                    delivered[name] += arrived / loss_scale
                    cast[name] += half_unit * arrived.abs().clamp(min=format_.tiny) / loss_scale
        world.commit()
        for name, total in unsent.items():
            left = world.residual_sum(name, total.numel())
            lost = (total - delivered[name] - left).abs()
            if lost.numel():
                # a few roundings of what one process can have accumulated, times the processes
                # that are summed; what arrives in 16 bits was rounded to them, once
                assert (lost - cast[name]).max() <= roundings * EPS * largest * micro_steps
            unsent[name] = left


def _matrices(case: Case) -> list[tuple[str, tuple[int, ...]]]:
    return [(n, s) for n, s in zip(case.names, case.shapes, strict=True) if len(s) > 1]


@given(hosts, compressors, st.integers(1, 3), st.sampled_from([1.0, 1024.0, 1000.0]))
def test_nothing_is_lost(
    case: Case, codec: Compressor | None, micro_steps: int, loss_scale: float
) -> None:
    check_law_3(case, codec, micro_steps, 2, loss_scale)


# ---- the owner's part


@given(cases, compressors)
def test_the_owners_part_is_exact_and_leaves_no_residual(
    case: Case, codec: Compressor | None
) -> None:
    world = World(case.world, matrices(codec))
    gradients = case.gradients()
    for me in range(case.world):  # only `me` has a gradient: its own shard must arrive whole
        alone = [
            [g if p == me else torch.zeros_like(g) for g in gradients[p]] for p in range(case.world)
        ]
        world = World(case.world, matrices(codec))
        shards = world.reduce(case.names, alone)
        world.commit()
        for i, gradient in enumerate(gradients[me]):
            layout = ShardLayout(gradient.numel(), case.world)
            own = gradient.reshape(-1)[layout.shard(me)]
            whole = len(gradient.shape) == 1
            expected = own.div(case.world) if whole else own.float() / case.world
            assert torch.equal(shards[me][i], expected.to(case.dtype))
            residual = world.feedbacks[me].state_dict().get(case.names[i])
            if residual is not None:
                assert not residual[layout.shard(me)].any()


# ---- law 4: non-finite values pass through


@given(
    hosts.filter(lambda c: c.world > 1),
    compressors,
    st.sampled_from([torch.inf, -torch.inf, torch.nan]),
    st.integers(0, 10**6),
    st.integers(0, 2),
)
def test_a_non_finite_value_is_seen_and_leaves_no_trace(
    case: Case, codec: Compressor | None, bad: float, where: int, bad_micro_step: int
) -> None:
    clean, dirty = (World(case.world, matrices(codec), local=case.local) for _ in range(2))
    for world in (clean, dirty):
        world.reduce(case.names, case.gradients())
        world.commit()
    before = [f.state_dict() for f in dirty.feedbacks]

    seen = False
    for micro_step in range(3):
        gradients = case.gradients(10 + micro_step)
        if micro_step == bad_micro_step:
            filled = [(p, g) for p in gradients for g in p if g.numel()]
            if not filled:
                return
            _, victim = filled[where % len(filled)]
            victim.view(-1)[where % victim.numel()] = bad
        shards = dirty.reduce(case.names, gradients)
        found = any(not torch.isfinite(s).all() for process in shards for s in process)
        seen = seen or found
        assert found or micro_step != bad_micro_step
    assert seen
    dirty.rollback()
    for was, feedback in zip(before, dirty.feedbacks, strict=True):
        now = feedback.state_dict()
        assert now.keys() == was.keys()
        for name in was:
            assert torch.equal(now[name].view(torch.int32), was[name].view(torch.int32))

    after = case.gradients(99)
    assert_same_shards(dirty.reduce(case.names, after), clean.reduce(case.names, after))


@pytest.mark.parametrize("sender", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 5, 11])
def test_every_receiver_answers_nan_for_compressed_tensors(sender: int, at: int) -> None:
    names, world = ["w", "b", "v"], World(3, matrices(TopK(density=0.1)))
    gradients = [[torch.ones(3, 4), torch.ones(6), torch.ones(5, 5)] for _ in range(3)]
    gradients[sender][0].view(-1)[at] = torch.inf
    for process, shards in enumerate(world.reduce(names, gradients)):
        assert shards[0].isnan().all()
        assert shards[2].isnan().all()
        assert torch.equal(shards[1], torch.ones(2))
        assert world.exchanges[process].nonfinite_buckets == 1


# ---- the wire


@given(cases, codecs)
def test_one_collective_a_bucket_of_the_announced_size(case: Case, codec: Codec) -> None:
    world = World(case.world, matrices(codec))
    world.reduce(case.names, case.gradients())
    for me, transport in enumerate(world.transports):
        assert transport.calls == (case.world > 1)
        expected = 0
        for dest in set(range(case.world)) - {me}:
            packet = HEADER_BYTES
            for shape in case.shapes:
                size = ShardLayout(math.prod(shape), case.world).size(dest)
                packet += (
                    codec.packed_bytes(size)
                    if len(shape) > 1
                    else math.ceil(size * case.dtype.itemsize / 8) * 8
                )
            expected += math.ceil(packet / 16) * 16  # what NCCL moves at a time
        assert transport.sent_bytes == expected


class _Dots(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::dot":
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_squared_norm_is_of_fewer_entries_at_a_time_than_cuda_counts() -> None:
    numel = 2**31 + 5
    with _Dots() as dots:
        _energy(torch.empty(numel, dtype=torch.float32, device="meta"))
    assert max(dots.numels) < 2**31
    assert sum(dots.numels) == numel


def test_an_empty_bucket_needs_no_collective() -> None:
    world = World(2, lambda n, s: None)
    assert world.reduce([], [[], []]) == [[], []]
    assert world.transports[0].calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("local", [1, 2])
def test_an_uncompressed_bucket_sends_the_residual_and_then_has_none(
    dtype: torch.dtype, local: int
) -> None:
    world = World(2 * local, matrices(TopK(density=0.1)), local=local)
    gradients = [[torch.randn(20, 30).to(dtype)] for _ in range(2 * local)]

    def average(*, uncompressed: bool) -> Tensor:
        shards = world.virtual.run(
            lambda p: world.exchanges[p].average(
                ["w"],
                [gradients[p][0].clone()],
                choose=(lambda name, shape: None) if uncompressed else None,
            )
        )
        world.commit()
        return assemble(shards, 0)

    total = average(uncompressed=False)
    assert world.residual_sum("w", 600).abs().sum() > 0
    total += average(uncompressed=True)
    # delivered values are rounded to the gradients' type, twice; residuals are not
    atol = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert torch.allclose(total.double(), 2 * mean(gradients, 0), atol=atol)
    assert not any(feedback.holds("w") for feedback in world.feedbacks)
