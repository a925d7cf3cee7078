"""Virtual workers: warm-up, skipped steps, bytes of a step; the loop of a run."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.compression import EntropyCoded, LowRank, Quantize
from ds_ckpt.compression.topk import TopK
from ds_ckpt.exchange import exchange
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings
from ds_ckpt.exchange.metric import EVERY
from ds_ckpt.lab.validate.runs import train
from ds_ckpt.lab.validate.world import DENSE_SETTINGS as DENSE
from ds_ckpt.lab.validate.world import (
    InProcessWorld,
    Recipe,
    VirtualWorkers,
    sixteen_bit_step_bytes,
)


def lossy(method: Any, warmup_steps: int = 0, **options: Any) -> Any:
    return ExchangeSettings(
        MethodSettings(method, **options), warmup_steps=warmup_steps, min_numel=0
    )


FOUR_BITS = lossy("quantize", bits=4)


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(6, 40), torch.nn.Linear(40, 3)
        self.idle = torch.nn.Linear(2, 1)  # no loss reaches it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y


def training(settings: ExchangeSettings, **recipe: Any) -> tuple[_Net, InProcessWorld]:
    model = _Net()

    def loss(step: int, micro: int, worker: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + worker)
        x = torch.randn(5, 6, generator=generator)
        return torch.nn.functional.mse_loss(model(x), x[:, :3].sin())

    given = Recipe(steps=8, learning_rate=1e-2, **recipe)
    return model, InProcessWorld(model, loss, given, settings, workers=2)


def test_the_warm_up_is_the_dense_run_which_can_have_a_correction() -> None:
    settings = dataclasses.replace(lossy("topk", 3, density=0.1), momentum=0.3)
    dense_model, dense = training(DENSE)
    model, ours = training(settings)
    corrected_model, corrected = training(DENSE, momentum_correction=0.3, correction_start=3)
    for _ in range(3):
        for world in (dense, ours, corrected):
            world.train_step()
    weights = [list(each.parameters()) for each in (dense_model, model, corrected_model)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*weights, strict=True))
    feedback = ours.workers.feedbacks[0]
    assert feedback is not None
    assert feedback.steps == 3  # as in real processes: the rounding of residuals depends on it
    for world in (dense, ours, corrected):
        world.train_step()
    up = [each.up.weight for each in (dense_model, model, corrected_model)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(up, 2))


def test_a_step_that_is_not_finite_is_skipped() -> None:
    model, ours = training(lossy("topk", density=0.1))
    ours.train_step()
    with torch.no_grad():
        model.down.bias[0] = torch.inf
    before = model.up.weight.clone()
    assert ours.train_step().skipped
    assert ours.workers.step == 2
    assert torch.equal(before, model.up.weight)


def test_large_embeddings_go_as_in_a_session() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8192, 16), torch.nn.Linear(16, 16))
    world = InProcessWorld(
        model, lambda *_: torch.zeros(()), Recipe(1), lossy("powersgd", rank=2), workers=2
    )
    choose = world.workers.states[0].exchange._choose
    shape = torch.Size((8192, 16))
    assert isinstance(choose("0.weight", shape), TopK)
    assert isinstance(choose("other.weight", shape), LowRank)


def test_a_fallback_ends_a_warm_up_in_few_bits() -> None:
    settings = dataclasses.replace(lossy("entropy_coded", 5), warmup_bits=4)
    sent = [0]
    virtual = VirtualWorkers(settings, 2, ["w"])
    for step in range(4):
        for state in virtual.states:
            state.is_disabled = step >= 2
        virtual.average([[torch.randn(64, 64)] for _ in range(2)])
        virtual.step_ended(skipped=False)
        sent.append(virtual.sent_bytes)
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert steps[0] == steps[1] < 0.2 * steps[2] == 0.2 * steps[3]
    assert not any(bool(r.any()) for state in virtual.residuals() for r in state.values())


def test_kernels_of_the_warm_up_are_tried_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(exchange, "on_host", lambda device: False)
    for codec in (EntropyCoded, Quantize):
        monkeypatch.setattr(codec, "pack_rows", lambda self, *_: tried.append(self.describe()))
        monkeypatch.setattr(codec, "unpack_add_rows", lambda *_: None)
    settings = dataclasses.replace(lossy("entropy_coded", 5), warmup_bits=4)
    (state, _) = VirtualWorkers(settings, 2, ["w", "norm"]).states
    shapes = [("w", torch.Size([64, 64])), ("norm", torch.Size([64]))]
    state.reserve(shapes, torch.device("cpu"))
    # each at an address that is a multiple of 16, and at one that is not
    assert tried == [EntropyCoded().describe()] * 2 + [Quantize(bits=4).describe()] * 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_uncompressed_tensors_are_not_sampled(accumulation: int) -> None:
    """Also if they accumulate with the others."""
    settings = dataclasses.replace(lossy("entropy_coded"), momentum=0.3, min_numel=1000)
    torch.manual_seed(0)
    whole = [[torch.randn(64, 64), 9 * torch.randn(900)] for _ in range(4)]
    kept = []
    for names in (["w"], ["w", "whole"]):
        virtual = VirtualWorkers(settings, 4, names, accumulation=accumulation)
        virtual.sample(True)
        for micro in range(accumulation):
            parts = [[g / accumulation for g in of[: len(names)]] for of in whole]
            virtual.average(parts, at_boundary=micro + 1 == accumulation)
        energies = virtual.take_energies()
        virtual.step_ended(skipped=False)
        kept.append((energies, virtual.momentum_correction))
    assert kept[0] == kept[1]
    assert kept[0][1] == 0.3


def test_a_run_ends_or_stops_if_it_is_not_finite() -> None:
    rates = [Recipe(steps=100, learning_rate=1.0).rate(step) for step in (0, 9, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.525, 0.05])
    model, world = training(lossy("topk", 2, density=0.1))
    evaluated: Any = SimpleNamespace(evaluate=lambda model: model.up.weight.norm().item())
    reported: list[int] = []
    found = train(evaluated, model, world.train_step, 8, lambda done, _: reported.append(done))
    assert [step for step, _ in found.heldout] == [0, 8]
    assert found.heldout[-1][1] == model.up.weight.norm().item()
    assert not found.diverged
    assert reported == [8]
    model, world = training(DENSE)
    with torch.no_grad():
        model.up.weight.fill_(torch.nan)
    assert train(evaluated, model, world.train_step, 8).diverged
    assert world.workers.step == 1


def test_sixteen_bit_bytes() -> None:
    world = 4
    shapes = [("a", torch.Size([64, 64])), ("b", torch.Size([64]))]
    dense = sixteen_bit_step_bytes(DENSE, shapes, world)
    share = (world - 1) / world
    assert dense == pytest.approx(2 * (64 * 64 + 64) * share + 8 * (world - 1), rel=0.01)
    four = dataclasses.replace(FOUR_BITS, warmup_steps=9)
    expected = 64 * 64 * 4.25 / 8 * share + 128 * share + 8 * (world - 1)
    sent = sixteen_bit_step_bytes(four, shapes, world)
    assert sent == pytest.approx(expected, rel=0.02)
    # accumulated steps send less often only where they wait
    assert sixteen_bit_step_bytes(DENSE, shapes[:1], 2, accumulation=3) == 3 * (
        sixteen_bit_step_bytes(DENSE, shapes[:1], 2)
    )
    once = sixteen_bit_step_bytes(four, shapes[:1], world, accumulation=3)
    assert once == sixteen_bit_step_bytes(four, shapes[:1], world)
    each = dataclasses.replace(four, when="micro_step")
    assert sixteen_bit_step_bytes(each, shapes[:1], world, accumulation=3) == 3 * once
    energy, steps = (
        sixteen_bit_step_bytes(lossy("entropy_coded", metric=metric), shapes[:1], 2)
        for metric in ("energy", "steps")
    )
    assert steps - energy == pytest.approx(4 * (64 + 64) / EVERY)  # rows and columns
