"""The exchange in worlds of virtual processes: identity, laws 3 and 4, one collective a bucket."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_codecs import codecs
from torch import Tensor
from virtual import Operators, World, assemble

from ds_ckpt.compression import Codec, Compressor, Dense, LowRank, TopK
from ds_ckpt.compression.storage import QuantizedTensor
from ds_ckpt.compression.wire import PACKET_HEADER_BYTES
from ds_ckpt.engine.step import StepState
from ds_ckpt.errors import UnsupportedError
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


several_hosts = hosts.filter(lambda c: c.world > c.local and any(map(math.prod, c.shapes)))


@given(
    several_hosts,
    st.sampled_from([None, Dense(), TopK(density=1.0, values="fp32")]),
    st.sampled_from([1.0, 1024.0]),
    st.integers(0, 1),
)
def test_sending_everything_is_the_mean_on_one_level_and_two(case, codec, loss_scale, step) -> None:
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
        # in fp64, rounded once to the gradients' type
        wanted, got = mean(gradients, i).to(case.dtype), assemble(shards, i)
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


def check_law_3(case, codec, micro_steps, steps, loss_scale, *, holds=False) -> None:
    """Delivered plus left equals given; `holds`: in one exchange a step.

    The last step is sent uncompressed and leaves nothing.
    """
    world = World(case.world, matrices(codec), local=case.local, holds=holds)
    # a factorization rounds by the matrix's norm, not by its entries
    roundings = 4 if not isinstance(codec, LowRank) else 4 * 40
    counted = [i for i, shape in enumerate(case.shapes) if len(shape) > 1 or holds]
    unsent = {i: torch.zeros(math.prod(case.shapes[i]), dtype=torch.float64) for i in counted}
    format_ = torch.finfo(case.dtype)
    half_unit = format_.eps / 2 if case.dtype != torch.float32 else 0.0
    largest = 0.0
    for step in range(steps + 1):
        uncompressed = step == steps
        delivered, cast = ({i: torch.zeros_like(t) for i, t in unsent.items()} for _ in range(2))
        for micro_step in range(micro_steps):
            gradients = case.gradients(1000 * step + micro_step)
            before, held = world.transports[0].calls, holds and micro_step < micro_steps - 1
            if held:
                shards = world.hold(case.names, gradients, loss_scale)
                assert world.transports[0].calls == before
                assert not any(shard.any() for process in shards for shard in process)
            else:
                choose = matrices(None) if uncompressed else None
                shards = world.reduce(case.names, gradients, loss_scale, choose=choose)
            entries = torch.cat([g.reshape(-1).abs().double() for p in gradients for g in p])
            largest += float(entries.max()) / loss_scale if entries.numel() else 0.0
            for i in unsent:
                unsent[i] += mean(gradients, i) / loss_scale
                arrived = assemble(shards, i).double()
                delivered[i] += arrived / loss_scale
                if uncompressed:  # rounded to the gradients' type by each rank, and the sum
                    cast[i] += half_unit * 2 * largest
                else:
                    cast[i] += half_unit * arrived.abs().clamp(min=format_.tiny) / loss_scale
        world.commit()
        for i, total in unsent.items():
            left = world.residual_sum(case.names[i], total.numel())
            lost = (total - delivered[i] - left).abs()
            if lost.numel():
                # a few roundings of what one process can have accumulated, times the processes
                # that are summed; what arrives in 16 bits was rounded to them, once
                assert (lost - cast[i]).max() <= roundings * EPS * largest * micro_steps
            unsent[i] = left
            # what has waited in fp32 keeps what its rounding to 16 bits leaves
            if case.dtype == torch.float32 or not holds:
                assert not left.any() or not (uncompressed or len(case.shapes[i]) == 1)
    if not holds:
        assert not any(feedback.has_residual(n) for feedback in world.feedbacks for n in case.names)


@given(hosts, compressors, st.integers(1, 3), st.sampled_from([1.0, 1024.0, 1000.0]), st.booleans())
def test_nothing_is_lost(case, codec, micro_steps, loss_scale, holds) -> None:
    check_law_3(case, codec, micro_steps, 2, loss_scale, holds=holds)


@given(cases, compressors)
def test_the_owners_part_is_exact_and_leaves_no_residual(case, codec) -> None:
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


@given(
    hosts.filter(lambda c: c.world > 1),
    compressors,
    st.sampled_from([torch.inf, -torch.inf, torch.nan]),
    st.integers(0, 10**6),
    st.integers(0, 2),
)
def test_a_non_finite_value_is_seen_and_leaves_no_trace(case, codec, bad, where, bad_step) -> None:
    clean, dirty = (World(case.world, matrices(codec), local=case.local) for _ in range(2))
    for world in (clean, dirty):
        world.reduce(case.names, case.gradients())
        world.commit()
    before = [f.state_dict() for f in dirty.feedbacks]

    seen = False
    for micro_step in range(3):
        gradients = case.gradients(10 + micro_step)
        if micro_step == bad_step:
            filled = [(p, g) for p in gradients for g in p if g.numel()]
            if not filled:
                return
            _, victim = filled[where % len(filled)]
            victim.view(-1)[where % victim.numel()] = bad
        shards = dirty.reduce(case.names, gradients)
        found = any(not torch.isfinite(s).all() for process in shards for s in process)
        seen = seen or found
        assert found or micro_step != bad_step
    assert seen
    dirty.rollback()
    for was, feedback in zip(before, dirty.feedbacks, strict=True):
        now = feedback.state_dict()
        assert now.keys() == was.keys()
        for name in was:
            assert torch.equal(now[name].view(torch.int32), was[name].view(torch.int32))

    after = case.gradients(99)
    both = (itertools.chain(*world.reduce(case.names, after)) for world in (dirty, clean))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*both, strict=True))


@given(cases, codecs)
def test_one_collective_a_bucket_of_the_announced_size(case: Case, codec: Codec) -> None:
    world = World(case.world, matrices(codec))
    world.reduce(case.names, case.gradients())
    for me, transport in enumerate(world.transports):
        assert transport.calls == (case.world > 1)
        expected = 0
        for dest in set(range(case.world)) - {me}:
            packet = PACKET_HEADER_BYTES
            for shape in case.shapes:
                size = ShardLayout(math.prod(shape), case.world).size(dest)
                packet += (
                    codec.packed_bytes(size)
                    if len(shape) > 1
                    else math.ceil(size * case.dtype.itemsize / 8) * 8
                )
            expected += math.ceil(packet / 16) * 16  # what NCCL moves at a time
        assert transport.sent_bytes == expected


@pytest.mark.parametrize("size", [4, 32])
def test_sizes_are_computed_once_whatever_the_ranks(size: int) -> None:
    """Not in each step, in autograd's thread between kernels."""
    case = Case(size, [(64, 64), (256,)], torch.float32, 0)
    world = World(size, matrices(TopK(density=0.06)))
    for step in range(2):
        with patch.object(TopK, "packed_bytes", side_effect=TopK.packed_bytes, autospec=True) as of:
            world.reduce(case.names, case.gradients(step))
        world.commit()
        assert bool(of.call_count) == (step == 0)


def test_a_squared_norm_is_of_fewer_entries_at_a_time_than_cuda_counts() -> None:
    numel, dots = 2**31 + 5, list[int]()
    with Operators(lambda name, args: name == "aten::dot" and dots.append(args[0].numel())):
        _energy(torch.empty(numel, dtype=torch.float32, device="meta"))
    assert max(dots) < 2**31
    assert sum(dots) == numel


def test_an_empty_bucket_needs_no_collective() -> None:
    world = World(2, lambda n, s: None)
    assert world.reduce([], [[], []]) == [[], []]
    assert world.transports[0].calls == 0


NAMES = ["p0", "p1", "p2"]
_topk = matrices(TopK(density=0.1, values="int8"))


def _gradients(world: int, seed: int) -> list[list[Tensor]]:
    return Case(world, [(7, 5), (13,), (3, 4)], torch.float32, seed).gradients()


def test_a_parameter_absent_at_the_boundary_is_sent_in_the_next_step() -> None:
    processes = World(2, _topk, holds=True)
    gradients = _gradients(2, 0)
    processes.hold(NAMES, gradients)
    processes.reduce(NAMES[:1], [g[:1] for g in _gradients(2, 1)])
    processes.commit()
    unsent = processes.residual_sum("p1", 13)
    expected = torch.stack([g[1].double() for g in gradients]).mean(0)
    assert torch.allclose(unsent, expected, atol=1e-6)
    zeros = [[torch.zeros(13)] for _ in range(2)]
    delivered = assemble(processes.reduce(["p1"], zeros), 0)
    assert torch.allclose(delivered.double(), expected, atol=1e-6)


def test_the_schedule_asks_for_the_boundary_at_every_bucket() -> None:
    processes = World(1, _topk, holds=True)
    ends = False
    schedule = StepState(
        processes.exchanges[0], warmup_steps=1, current_step=lambda: step, at_boundary=lambda: ends
    )
    gradients = _gradients(1, 0)[0]

    def deepspeed(tensors: list[Tensor]) -> Any:
        return ["deepspeed"]

    def run() -> list[Tensor]:
        copies = [g.clone() for g in gradients]
        return (schedule.choose_reduction(NAMES, loss_scale=1.0) or deepspeed)(copies)

    step = 0
    assert run() == ["deepspeed"]  # the warm-up exchanges every micro-step, as DeepSpeed does
    step = 1
    assert not any(bool(part.any()) for part in run())
    ends = True
    for part, gradient in zip(run(), gradients, strict=True):
        assert torch.allclose(part, 2 * gradient.flatten(), rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_step_that_no_micro_step_ends_is_an_error_and_leaves_nothing(warmup_steps) -> None:
    processes = World(1, _topk, holds=True)
    schedule = StepState(
        processes.exchanges[0],
        warmup_steps=warmup_steps,
        current_step=lambda: 0,
        at_boundary=lambda: at_boundary,
    )

    def micro_step() -> None:
        gradients = [g.clone() for g in _gradients(1, 0)[0]]
        reduce = schedule.choose_reduction(NAMES, loss_scale=1.0) or list
        reduce(gradients)

    at_boundary = False
    micro_step()
    with pytest.raises(UnsupportedError, match="last backward"):
        schedule.commit()
    assert not any(bool(r.any()) for r in processes.feedbacks[0].state_dict().values())
    micro_step()
    schedule.rollback()  # an overflow that DeepSpeed has found, or dropped gradients
    micro_step()
    at_boundary = True
    micro_step()
    schedule.commit()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("present", [True, False])
def test_a_nonfinite_accumulated_micro_step_is_flagged_on_every_rank(dtype, present) -> None:
    """Also where the residual's type cannot hold an inf, or its parameter misses the last one."""
    processes = World(2, _topk, holds=True, residual_dtype=dtype)
    names, good = ["a", "b"], [[torch.ones(40, 40), torch.ones(40, 40)] for _ in range(2)]
    processes.reduce(names, good)
    processes.commit()
    before = [f.state_dict() for f in processes.feedbacks]
    bad = [[t.clone() for t in process] for process in good]
    bad[1][1][3, 3] = torch.inf
    processes.hold(names, bad)
    last = slice(0, 2) if present else slice(0, 1)
    shards = processes.reduce(names[last], [process[last] for process in good])
    assert all(torch.isnan(part).all() for process in shards for part in process)
    processes.rollback()
    for was, feedback in zip(before, processes.feedbacks, strict=True):
        for name, residual in feedback.state_dict().items():
            assert torch.equal(was[name], residual)
    again = processes.reduce(names, good)
    assert all(torch.isfinite(part).all() for process in again for part in process)


@given(
    hosts=st.integers(1, 3),
    local=st.integers(1, 2),
    micro_steps=st.integers(2, 4),
    largest=st.booleans(),
    scale=st.sampled_from([1.0, 1024.0]),
)
def test_without_error_feedback_a_step_goes_as_one_gradient(
    hosts: int, local: int, micro_steps: int, largest: bool, scale: float
) -> None:
    """Each step delivers the same as an exchange of the sum of its micro-steps."""
    world, choose = hosts * local, matrices(TopK(density=0.1, values="fp32") if largest else None)
    given_ = World(world, choose, error_feedback=False, holds=True, local=local)
    at_once = World(world, choose, error_feedback=False, local=local)
    for step in range(3):
        micros = [_gradients(world, 10 * step + micro) for micro in range(micro_steps)]
        scaled = [[[t * scale for t in process] for process in micro] for micro in micros]
        for micro in scaled[:-1]:
            held = given_.hold(NAMES, micro, scale)
            assert not any(bool(part.any()) for process in held for part in process)
        out = given_.reduce(NAMES, scaled[-1], scale)
        sums = [
            [torch.stack(parts).sum(0) for parts in zip(*process, strict=True)]
            for process in zip(*scaled, strict=True)
        ]
        expected = at_once.reduce(NAMES, sums, scale)
        for i in range(3):
            assert torch.allclose(assemble(out, i), assemble(expected, i), rtol=1e-4, atol=1e-5)
        given_.commit()
        assert all(not feedback.state_dict() for feedback in given_.feedbacks)
    for p, feedback in enumerate(given_.feedbacks):
        held = sum(given_.column(p, numel).numel for numel in (35, 13, 12))
        assert feedback.nbytes == 4 * held == feedback.entry_bytes * held
