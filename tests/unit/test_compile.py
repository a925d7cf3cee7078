"""Under torch.compile a policy is still in force: blocks with more than torch's own stay eager."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.policies import Policy, PolicySettings
from ds_ckpt.errors import RecomputeError


class Block(nn.Module):
    """Gives other values the second time where `drifts`."""

    def __init__(self, *, drifts: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.drifts = drifts
        self.calls = itertools.count()  # a number would be put back for the recompute

    @torch.compiler.disable
    def drift(self) -> float:
        return 1.0 + next(self.calls) * self.drifts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.up(x) * self.drift())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(2, 3, 8)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def stack(*, drifts: bool) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(drifts=drifts) for _ in range(3)))


@pytest.mark.parametrize("kind", ["block", "attention", "selective", "segments"])
def test_gradients_under_a_compiler_are_those_without(kind: str) -> None:
    torch._dynamo.reset()
    plain = gradients(stack(drifts=False))
    model = stack(drifts=False)
    CheckpointedBlocks(model, policy=Policy(PolicySettings(kind), modules=("Block",)))
    compiled = torch.compile(model, backend="eager")
    for expected, got in zip(plain, gradients(compiled), strict=True):
        assert torch.equal(expected, got)


def test_the_check_of_values_is_in_force_under_a_compiler() -> None:
    torch._dynamo.reset()
    model = stack(drifts=True)
    CheckpointedBlocks(model, policy=Policy(modules=("Block",), check_determinism=1))
    with pytest.raises(RecomputeError):
        gradients(torch.compile(model, backend="eager"))
