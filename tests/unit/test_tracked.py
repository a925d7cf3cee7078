"""Weights in few bits, tracked: owner and receiver hold the same bits, close to the master."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.weights.tracked import LIMIT, Tracked

BITS = (4, 3)


def steps_of(master: Tensor, size: float, generator: torch.Generator, count: int) -> list[Tensor]:
    """`master` after each of so many steps, each `size` times its root mean square."""
    found = []
    for _ in range(count):
        noise = torch.randn(master.numel(), generator=generator)
        master = master + size * master.square().mean().sqrt() * noise
        found.append(master)
    return found


def error(held: Tensor, master: Tensor) -> float:
    """Over that of rounding to bf16."""
    return float((held.float() - master).norm() / (master.bfloat16().float() - master).norm())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bits=st.sampled_from(BITS),
    step=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    zeros=st.integers(0, 7),
)
def test_receivers_hold_what_the_owner_holds_and_no_tensor_is_coarse(
    seed: int, sizes: list[int], dtype: torch.dtype, bits: int, step: float, zeros: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(sum(sizes), generator=generator)
    master.split(sizes)[zeros % len(sizes)].zero_()
    held = master.to(dtype)
    received = held.clone()
    owner, receiver = Tracked(bits), Tracked(bits)
    for goal in steps_of(master, step, generator, 4):
        receiver.decode_(received, owner.encode(held, goal, sizes), sizes)
        assert torch.equal(received, held)
        worst = 0.0
        for have, want in zip(held.split(sizes), goal.split(sizes), strict=True):
            energy = (have.float() - want).norm()
            rounding = max((want.to(t).float() - want).norm() for t in (torch.bfloat16, dtype))
            assert energy <= LIMIT * rounding * 1.0001
            if energy > 0:
                worst = max(worst, float(energy / (want.bfloat16().float() - want).norm()))
        if not owner.last.whole:
            assert owner.last.worst == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize(("bits", "most"), [(4, 0.017), (3, 0.008)])
def test_a_step_within_the_bound_is_held_finer_than_bf16(bits: int, most: float) -> None:
    """Errors do not add up: after many steps the bound is as after one."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(20_000, generator=generator)
    held, tracked, sizes = master.clone(), Tracked(bits), [20_000]
    for goal in steps_of(master, most, generator, 60):
        tracked.encode(held, goal, sizes)
        assert tracked.last.whole == 0
        assert error(held, goal) < 1
    assert tracked.last.worst == pytest.approx(error(held, goal), rel=1e-3)


def test_what_stands_still_is_reached() -> None:
    """What a step rounds off travels with the next ones."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(5_000, generator=generator)
    held, tracked = torch.zeros_like(master), Tracked(4)
    held.copy_(master + 0.01 * torch.randn(5_000, generator=generator))
    errors = []
    for _ in range(4):
        tracked.encode(held, master, [5_000])
        errors.append(float((held - master).norm()))
    assert all(later < earlier / 5 for earlier, later in itertools.pairwise(errors))


def test_few_bytes() -> None:
    master = torch.randn(64_000)
    held = master.clone()
    for bits in BITS:
        payload = Tracked(bits).encode(held.clone(), master * 1.001, [64_000])
        assert payload.numel() * 8 / 64_000 < bits + 0.26


def test_what_the_user_writes_travels_whole_and_alone() -> None:
    sizes = [6_400, 640]
    before = torch.randn(sum(sizes))
    held, master = before.clone(), before * 1.0005
    master[6_400:] = torch.randn(640)  # another tensor altogether
    tracked = Tracked(4)
    payload = tracked.encode(held, master, sizes)
    assert tracked.last.whole == 1
    assert torch.equal(held[6_400:], master[6_400:])
    assert payload.numel() < 6_400 * 0.54 + 640 * 4 + 100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_arrive_as_they_are(value: float) -> None:
    before = torch.randn(200)
    held, received, master = before.clone(), before.clone(), before * 1.001
    master[150] = value
    tracked = Tracked(3)
    tracked.decode_(received, tracked.encode(held, master, [100, 100]), [100, 100])
    assert tracked.last.whole == 1
    assert torch.equal(received.view(torch.int32), held.view(torch.int32))
    assert torch.equal(held[100:].view(torch.int32), master[100:].view(torch.int32))
    assert torch.isfinite(held[:100]).all()
