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
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.telemetry.timings import BlockProfile

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


def test_the_profile_tells_which_block_is_slow() -> None:
    model = Model((0.0, 0.03, 0.0))
    profile = BlockProfile()
    _on(model, CheckpointedInputs(profile=profile))
    for _ in range(2):
        model(torch.randn(ROWS, WIDTH)).backward()
        profile.step_ended()
    costs = profile.costs
    assert list(costs) == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(c.calls == c.recomputes == 2 for c in costs.values())
    assert all(c.kept_bytes == 2 * ROWS * WIDTH * 4 for c in costs.values())
    assert 0.06 <= costs["blocks.1"].recompute_s < 0.06 + 0.5
    assert costs["blocks.1"].recompute_s > 3 * costs["blocks.0"].recompute_s
    rows = profile.table().splitlines()
    assert rows[0] == "means of 2 steps"
    columns = ("block", "calls", "kept MiB", "forward ms", "recomputes", "recompute ms")
    assert rows[1].split() == " ".join(columns).split()
    name, calls, kept_mib, _, recomputes, recompute_ms = rows[3].split()
    assert (name, calls, recomputes) == ("blocks.1", "1.0", "1.0")
    assert float(kept_mib) == pytest.approx(ROWS * WIDTH * 4 / 2**20, abs=5e-4)
    assert float(recompute_ms) >= 30
    assert rows[-1].startswith("all blocks")
    assert rows[-1].split()[2] == "3.0"
    profile.reset()
    assert profile.costs == {}


@pytest.mark.parametrize("keeping", [Keeping(), Keeping(profile=True), Keeping(offload=True)])
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


def test_the_clock_is_read_after_the_device_has_ended() -> None:
    waited = []
    model = Model()
    _on(model, CheckpointedInputs(profile=BlockProfile(lambda: waited.append(1))))
    model(torch.randn(ROWS, WIDTH)).backward()
    assert len(waited) == 2 * 2 * 3


def test_a_block_whose_forward_is_a_function_has_its_name() -> None:
    model, profile = Model(), BlockProfile()
    for block in model.blocks:
        block.forward = (lambda forward: lambda x: forward(x))(block.forward)
    _on(model, CheckpointedInputs(profile=profile))
    model(torch.randn(ROWS, WIDTH)).backward()
    assert profile.costs.keys() == {"blocks.0", "blocks.1", "blocks.2"}


def test_synchronize_surrounds_every_forward_and_recompute() -> None:
    model = Model()
    _on(model, CheckpointedInputs(synchronize=lambda: model.log.append("waits")))
    model(torch.randn(ROWS, WIDTH)).backward()
    # a recompute stops early, and is waited for all the same
    assert model.log == ["waits", "runs", "waits"] * 6


@pytest.mark.parametrize(
    ("keeping", "has"),
    [
        (Keeping(), None),
        (Keeping(offload=True), "pool"),
        (Keeping(contiguous=True), "arena"),
        (Keeping(offload=True, contiguous=True), "pool"),
        (Keeping(profile=True), ""),
        (Keeping(synchronize=True), ""),
    ],
)
def test_what_is_built(keeping: Keeping, has: str | None) -> None:
    model = Model()
    built = _keeping(model, keeping, Policy(modules=("Block",)))
    assert (built is None) == (has is None)
    if built is not None:
        assert (built.store is not None) == bool(has)
        assert (built.profile is not None) == keeping.profile
    if built is not None and built.store is not None:
        assert (built.store._pool is not None) == (has == "pool")
        assert (built.store._arena is not None) == (has == "arena")


@pytest.mark.parametrize(
    ("settings", "recomputes"),
    [(PolicySettings(), 3), (PolicySettings("segments", segment_size=2), 2)],
)
def test_the_count_is_checked_against_the_recomputes(
    settings: PolicySettings, recomputes: int
) -> None:
    model, policy = Model(), Policy(settings, modules=("Block",))
    for count in (recomputes, recomputes + 5, None):
        _keeping(model, Keeping(contiguous=True, contiguous_count=count), policy)
    with pytest.raises(ConfigError, match=f"makes {recomputes} recomputes.*\n.*write {recomputes}"):
        _keeping(model, Keeping(contiguous=True, contiguous_count=recomputes - 1), policy)


@pytest.mark.parametrize(
    ("keeping", "words"),
    [
        (Keeping(), ["^$"]),
        (Keeping(offload=True), ["3 of 4 checkpointed inputs", "twice their bytes", "stand-in"]),
        (Keeping(contiguous=True), ["one buffer, one copy each"]),
        (Keeping(synchronize=True), ["no overlap"]),
        (Keeping(profile=True), ["timed"]),
    ],
)
def test_the_start_line_says_what_it_costs(keeping: Keeping, words: list[str]) -> None:
    import re

    text = describe(keeping, 4, CPU)
    assert all(re.search(word, text) for word in words)
    assert "stand-in" not in describe(keeping, 4, torch.device("cuda"))


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
