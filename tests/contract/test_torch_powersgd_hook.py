"""torch's PowerSGD hook keeps a non-finite value in its error memory; the exchange does not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook
from torch.nn.parallel import DistributedDataParallel

from ds_ckpt.compression import LowRank
from tests.unit.virtual import World, assemble

pytestmark = pytest.mark.timeout(60)

ROWS, COLUMNS, RANK = 48, 40, 2
BAD_STEP, STEPS = 2, 8


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # DDP's threads end while there is a group
        dist.destroy_process_group()


def gradients(bad: float) -> list[Tensor]:
    """By step; one entry of one of them is `bad`."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(STEPS)]
    drawn[BAD_STEP][7, 3] = bad
    return drawn


def finite(arrived: list[Tensor]) -> list[bool]:
    return [bool(torch.isfinite(t).all()) for t in arrived]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_torchs_hook_is_not_finite_again_after_one_bad_step(bad: float) -> None:
    model = DistributedDataParallel(nn.Linear(COLUMNS, ROWS, bias=False))
    start = 2  # the hook sends two steps whole at least
    state = hook.PowerSGDState(None, RANK, start_powerSGD_iter=start)
    model.register_comm_hook(state, hook.powerSGD_hook)
    arrived = []
    for gradient in [torch.ones(ROWS, COLUMNS)] * start + gradients(bad):
        model.zero_grad()
        # the gradient of <W, G> by W is G
        model(torch.eye(COLUMNS)).mul(gradient.t()).sum().backward()
        arrived.append(model.module.weight.grad.clone())
    assert finite(arrived[start:]) == [step < BAD_STEP for step in range(STEPS)]
    assert not all(torch.isfinite(error).all() for error in state.error_dict.values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_exchange_is_finite_after_one_bad_step(bad: float) -> None:
    """The bad step is seen by everybody and skipped; those after it are as without it."""
    treatment = LowRank(RANK)
    worlds = [World(2, lambda name, shape: treatment) for _ in range(2)]
    arrived: list[list[Tensor]] = [[], []]
    for step, gradient in enumerate(gradients(bad)):
        for which, world in enumerate(worlds):
            if which == 1 and step == BAD_STEP:
                continue  # this world never meets it
            shards = world.reduce(["w"], [[gradient], [torch.ones(ROWS, COLUMNS)]])
            overflow = not all(finite([s for process in shards for s in process]))
            if overflow:
                world.rollback()
            else:
                world.commit()
            arrived[which].append(assemble(shards, 0))
    dirty, clean = arrived
    assert finite(dirty) == [step != BAD_STEP for step in range(STEPS)]
    for after, wanted in zip(dirty[BAD_STEP + 1 :], clean[BAD_STEP:], strict=True):
        assert torch.equal(after, wanted)
    for feedback in worlds[0].feedbacks:
        assert finite(list(feedback.state_dict().values())) == [True]
