"""One exchange an accumulated step: micro-steps are held back and nothing of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from virtual import World, assemble

from ds_ckpt.compression import Codec, TopK
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.engine.step import StepState
from ds_ckpt.errors import UnsupportedError

SHAPES = ((7, 5), (13,), (3, 4))
NAMES = ["matrix", "bias", "small"]


def _gradients(world: int, seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(world)]


def _topk(name: str, shape: torch.Size) -> Codec | None:
    return TopK(density=0.1, values="int8") if len(shape) > 1 else None


@given(
    world=st.integers(1, 5),
    micro_steps=st.integers(1, 4),
    steps=st.integers(1, 3),
    scale=st.sampled_from([1.0, 1024.0]),
)
def test_nothing_of_the_held_micro_steps_is_lost(
    world: int, micro_steps: int, steps: int, scale: float
) -> None:
    processes = World(world, _topk, holds=True)
    put_in = [torch.zeros(torch.Size(s).numel(), dtype=torch.float64) for s in SHAPES]
    taken = [torch.zeros_like(t) for t in put_in]
    for step in range(steps):
        for micro in range(micro_steps):
            gradients = _gradients(world, 100 * step + micro)
            for i in range(len(SHAPES)):
                put_in[i] += torch.stack([g[i].flatten().double() for g in gradients]).mean(0)
            scaled = [[t * scale for t in process] for process in gradients]
            last = micro == micro_steps - 1
            calls = processes.transports[0].calls
            out = (processes.reduce if last else processes.hold)(NAMES, scaled, scale)
            sent = processes.transports[0].calls - calls
            assert sent == (1 if last and world > 1 else 0)
            for i in range(len(SHAPES)):
                part = assemble(out, i)
                taken[i] += part.double() / scale
                assert last or not part.any()
        processes.commit()
    for i, name in enumerate(NAMES):
        left = processes.residual_sum(name, put_in[i].numel())
        gap = (taken[i] + left - put_in[i]).abs().max()
        assert gap <= 1e-5 * put_in[i].abs().max().clamp(min=1.0)
    # tensors without codec are sent uncompressed at the boundary
    assert processes.residual_sum("bias", 13).abs().max() == 0


def test_a_parameter_absent_at_the_boundary_is_sent_in_the_next_step() -> None:
    processes = World(2, _topk, holds=True)
    gradients = _gradients(2, 0)
    processes.hold(NAMES, gradients)
    processes.reduce(NAMES[:1], [g[:1] for g in _gradients(2, 1)])
    processes.commit()
    unsent = processes.residual_sum("bias", 13)
    expected = torch.stack([g[1].double() for g in gradients]).mean(0)
    assert torch.allclose(unsent, expected, atol=1e-6)
    zeros = [[torch.zeros(13)] for _ in range(2)]
    delivered = assemble(processes.reduce(["bias"], zeros), 0)
    assert torch.allclose(delivered.double(), expected, atol=1e-6)


def test_the_schedule_asks_for_the_boundary_at_every_bucket() -> None:
    processes = World(1, _topk, holds=True)
    at_boundary = False
    schedule = StepState(
        processes.exchanges[0],
        warmup_steps=1,
        current_step=lambda: step,
        at_boundary=lambda: at_boundary,
    )
    gradients = _gradients(1, 0)[0]

    def deepspeed(tensors: list[Tensor]) -> Any:
        return ["deepspeed"]

    def run() -> list[Tensor]:
        copies = [g.clone() for g in gradients]
        return schedule.reduce(NAMES, copies, loss_scale=1.0, deepspeed_reduce=deepspeed)

    step = 0
    assert run() == ["deepspeed"]  # the warm-up exchanges every micro-step, as DeepSpeed does
    step = 1
    assert not any(bool(part.any()) for part in run())
    at_boundary = True
    for part, gradient in zip(run(), gradients, strict=True):
        assert torch.allclose(part, 2 * gradient.flatten(), rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_step_that_none_of_its_micro_steps_ends_is_an_error_and_leaves_nothing(
    warmup_steps: int,
) -> None:
    processes = World(1, _topk, holds=True)
    schedule = StepState(
        processes.exchanges[0],
        warmup_steps=warmup_steps,
        current_step=lambda: 0,
        at_boundary=lambda: at_boundary,
    )

    def micro_step() -> None:
        gradients = [g.clone() for g in _gradients(1, 0)[0]]
        schedule.reduce(NAMES, gradients, loss_scale=1.0, deepspeed_reduce=lambda tensors: tensors)

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
def test_a_nonfinite_accumulated_micro_step_is_flagged_on_every_rank(
    dtype: ResidualDtype, present: bool
) -> None:
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


def _whole(name: str, shape: torch.Size) -> Codec | None:
    return None


def _largest(name: str, shape: torch.Size) -> Codec | None:
    return TopK(density=0.1, values="fp32") if len(shape) > 1 else None


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
    world, choose = hosts * local, _largest if largest else _whole
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
        for i in range(len(SHAPES)):
            assert torch.allclose(assemble(out, i), assemble(expected, i), rtol=1e-4, atol=1e-5)
        given_.commit()
        assert all(not feedback.state_dict() for feedback in given_.feedbacks)
    for p, feedback in enumerate(given_.feedbacks):
        held = sum(given_.column(p, torch.Size(s).numel()).numel for s in SHAPES)
        assert feedback.nbytes == 4 * held == feedback.entry_bytes * held
