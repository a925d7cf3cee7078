"""What stands around block calls: the table of costs, synchronization, and how it is built."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation.inputs import CheckpointedInputs, Keeping, build_inputs, describe
from ds_ckpt.activation.install import CheckpointedBlocks
from ds_ckpt.activation.policies import Policy, PolicySettings, make_plan
from ds_ckpt.errors import UnsupportedError

CPU = torch.device("cpu")
WIDTH, ROWS = 8, 16


class Block(nn.Module):
    def __init__(self, note: Callable[[str], None], pause_s: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._note, self._pause_s = note, pause_s

    def forward(self, x: Tensor) -> Tensor:
        self._note("runs")
        time.sleep(self._pause_s)
        # `sin` is after the pause and saves its input: the recompute does not stop before it
        return torch.sin(self.linear(x))


class Model(nn.Module):
    def __init__(self, pauses_s: tuple[float, ...] = (0.0, 0.0, 0.0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.log: list[str] = []
        self.blocks = nn.ModuleList(Block(self.log.append, pause_s) for pause_s in pauses_s)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _on(model: nn.Module, boundaries: CheckpointedInputs) -> None:
    CheckpointedBlocks(model, ["Block"], around=boundaries.around)


def _keeping(model: nn.Module, keeping: Keeping, policy: Policy) -> CheckpointedInputs | None:
    return build_inputs(keeping, model, make_plan(model, policy), CPU)


@pytest.mark.parametrize("keeping", [Keeping(), Keeping(offload=True)])
@pytest.mark.parametrize("kind", ["block", "selective"])
def test_an_input_that_is_changed_in_place_is_refused_however_it_is_kept(
    keeping: Keeping, kind: str
) -> None:
    class Changing(Model):
        def forward(self, x: Tensor) -> Tensor:
            given = x.clone()
            y = self.blocks[0](given)
            given.add_(1)
            return self.blocks[1](y).square().mean()

    model, policy = Changing(), Policy(PolicySettings(kind), modules=("Block",))
    inputs = _keeping(model, keeping, policy)
    CheckpointedBlocks(model, policy=policy, around=inputs.around if inputs is not None else None)
    loss = model(torch.randn(ROWS, WIDTH))
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found an .* changed in place"):
        loss.backward()


@pytest.mark.parametrize(
    ("keeping", "words"),
    [
        (Keeping(), ["^$"]),
        (
            Keeping(offload=True),
            ["3 of 4 checkpointed inputs", "twice their bytes", "no memory is saved"],
        ),
    ],
)
def test_the_start_line_says_what_it_costs(keeping: Keeping, words: list[str]) -> None:
    import re

    text = describe(keeping, 4, CPU)
    assert all(re.search(word, text) for word in words)
    assert "no memory" not in describe(keeping, 4, torch.device("cuda"))


def test_the_default_leaves_small_boundaries() -> None:
    model = Model()
    built = _keeping(model, Keeping(offload=True), Policy(modules=("Block",)))
    assert built is not None
    assert built.store is not None
    _on(model, built)
    for rows, leaves in ((16, 0), (2048, 2)):  # 512 bytes and 64 KiB
        built.store.counters.reset()
        model(torch.randn(rows, WIDTH)).backward()
        assert built.store.counters.out.total() == leaves
