"""The metric of the optimizer's steps, law 3 with it, and the correction of its momentum."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks._own_share import OwnShareToo
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings
from ds_ckpt.exchange.metric import EVERY, PreconditionerEstimate
from ds_ckpt.lab.validate import world as validation_world
from ds_ckpt.lab.validate.world import VirtualWorkers
from ds_ckpt.zero3.momentum import corrected, why_not_corrected

IN_STEPS = ExchangeSettings(MethodSettings("entropy_coded", metric="steps"), min_numel=0)
SHAPE, CPU = torch.Size([37, 50]), torch.device("cpu")


def sums_of(metric: PreconditionerEstimate) -> dict[str, Tensor]:
    return {f"{name} {i}": t for name, both in metric._sums.items() for i, t in enumerate(both)}


def alone(tensor: Tensor) -> None:
    """One process is all there are."""


def layout(world: int, members: tuple[int, ...] | None = None) -> LocalShard:
    return LocalShard(ShardLayout(SHAPE.numel(), world), members or tuple(range(world)))


def estimate(total: Tensor, *layouts: LocalShard) -> PreconditionerEstimate:
    """Return a rank's estimate after ranks with these shards have added `total`."""
    metric = PreconditionerEstimate(alone)
    metric.begin_step(0)
    for of in layouts or (layout(1),):
        here = torch.cat([total.view(-1)[of.source(m)] for m in range(len(of.members))])
        metric.add_gradient("w", total.shape, of, here * 8, 8.0)
    metric.end_step(skipped=False)
    return metric


def uneven() -> Tensor:
    """Gradients whose size depends on row and column, by factors of up to 2^16 in squares."""
    torch.manual_seed(0)
    rows, columns = torch.arange(SHAPE[0]) % 5, torch.arange(SHAPE[1]) % 5
    return torch.randn(SHAPE) * 2.0 ** (rows.unsqueeze(1) + columns)


@given(st.integers(1, 9))
def test_parts_add_up_to_the_squares_of_rows_and_columns(world: int) -> None:
    total = uneven()
    parts = [layout(2 * world, tuple(range(first, 2 * world, 2))) for first in (0, 1)]
    rows, columns = estimate(total, *parts)._sums["w"]
    torch.testing.assert_close(rows, total.square().sum(1))
    torch.testing.assert_close(columns, total.square().sum(0))


def test_weights_are_powers_of_two_near_the_fourth_root_of_the_second_moment() -> None:
    total = uneven()
    found = estimate(total).weights("w", SHAPE, layout(1), CPU)
    assert found is not None
    mantissas, _ = torch.frexp(found)
    assert (mantissas == 0.5).all()
    assert found.min() >= 1
    ideal = total.square().mean(1, keepdim=True) * total.square().mean(0)
    off = (found.view(SHAPE) / ideal**0.25).log2()
    assert off.max() - off.min() <= 1.1  # half a power of two either way


def test_rows_of_nothing_and_all_of_nothing_have_finite_weights() -> None:
    total = uneven()
    total[3] = 0
    for of in (total, torch.zeros(SHAPE)):
        found = estimate(of).weights("w", SHAPE, layout(1), CPU)
        assert found is not None
        assert torch.isfinite(found).all()
        assert found.min() >= 1


def test_skipped_and_nonfinite_gradients_do_not_count() -> None:
    metric = estimate(uneven())
    before = {key: value.clone() for key, value in sums_of(metric).items()}
    for value, skipped in ((torch.nan, False), (torch.inf, False), (1.0, True)):
        metric.begin_step(EVERY)
        metric.add_gradient("w", SHAPE, layout(1), torch.full([SHAPE.numel()], value), 1.0)
        metric.end_step(skipped=skipped)
        after = sums_of(metric)
        assert after.keys() == before.keys()
        assert all(torch.equal(before[key], value) for key, value in after.items())


def test_a_tensor_whose_squares_overflow_leaves_others_alone() -> None:
    """Other tensor-parallel ranks have other slices, and the same replicated parameters."""
    metric = PreconditionerEstimate(alone)
    metric.begin_step(0)
    for name, value in (("slice", 1e30), ("replicated", 2.0)):
        metric.add_gradient(name, SHAPE, layout(1), torch.full([SHAPE.numel()], value), 1.0)
    metric.end_step(skipped=False)
    assert metric._sums.keys() == {"replicated"}


@pytest.mark.parametrize("own_too", [False, True])
def test_nothing_is_lost_and_less_is_kept_back_in_the_metric(own_too, monkeypatch) -> None:
    if own_too:
        monkeypatch.setattr(validation_world, "AllToAllExchange", OwnShareToo)
    kept = {}
    for metric in ("energy", "steps"):
        settings = ExchangeSettings(MethodSettings("entropy_coded", metric=metric), min_numel=0)
        workers, shape = VirtualWorkers(settings, 3, ["w"]), torch.Size([60, 90])
        scale = 2.0 ** -(torch.arange(60) % 8).unsqueeze(1)
        torch.manual_seed(0)
        unsent = torch.zeros(shape.numel())
        for _ in range(3):
            gradients = [torch.randn(shape) * scale for _ in range(3)]
            (arrived,) = workers.average([[g.clone()] for g in gradients])
            workers.step_ended(skipped=False)
            left = torch.stack([f.state_dict()["w"] for f in workers.feedbacks if f]).sum(0)
            given_ = torch.stack(gradients).mean(0).view(-1) + unsent
            torch.testing.assert_close(arrived.view(-1) + left, given_, rtol=1e-5, atol=1e-6)
            unsent = left
        kept[metric] = float((left.view(shape) / scale**0.5).square().sum())
    assert kept["steps"] < 0.9 * kept["energy"]


def test_all_workers_compute_the_same() -> None:
    workers = VirtualWorkers(IN_STEPS, 3, ["w"])
    workers.average([[uneven() * worker] for worker in range(1, 4)])
    workers.step_ended(skipped=False)
    first, *others = (sums_of(state.exchange.metric) for state in workers.states)  # type: ignore[arg-type]
    assert first
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(other[key], value) for key, value in first.items())


@pytest.mark.parametrize(
    ("optimizer", "groups", "why"),
    [
        (torch.optim.AdamW, [{}], ""),
        (torch.optim.Adam, [{"weight_decay": 0.0}], ""),
        (torch.optim.Adam, [{"weight_decay": 0.1}], "weight decay"),
        (torch.optim.Adam, [{"weight_decay": 0.1, "decoupled_weight_decay": True}], ""),
        (torch.optim.AdamW, [{}, {"decoupled_weight_decay": False}], "weight decay"),
        (torch.optim.AdamW, [{}, {"decoupled_weight_decay": False, "weight_decay": 0.0}], ""),
        (torch.optim.AdamW, [{"maximize": True}], "maximizes"),
        (torch.optim.SGD, [{}], "SGD"),
    ],
)
def test_why_an_optimizer_is_not_corrected(optimizer: Any, groups: list[Any], why: str) -> None:
    steps = optimizer([{"params": [torch.nn.Parameter(torch.zeros(2))], **of} for of in groups])
    found = why_not_corrected(SimpleNamespace(optimizer=steps))
    assert why in found
    assert bool(why) == bool(found)


@pytest.mark.parametrize(
    ("settings", "correction"),
    [
        (ExchangeSettings(MethodSettings("topk"), momentum=0.3), 0.3),
        (ExchangeSettings(MethodSettings("topk")), 0.0),
        (ExchangeSettings(MethodSettings("dense"), momentum=0.3), 0.0),
        (ExchangeSettings(MethodSettings("topk"), error_feedback=False, momentum=0.3), 0.0),
    ],
)
def test_only_residuals_are_corrected_for(settings: ExchangeSettings, correction: float) -> None:
    assert settings.momentum_correction == correction


class _Kernel:
    """A compiled module of DeepSpeed's; keeps the b1 of every call."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def load(self) -> "_Kernel":
        return self

    def create_adam(self, *_: Any) -> None: ...

    def destroy_adam(self, *_: Any) -> None: ...

    def adam_update(self, number: int, step: int, lr: float, b1: float, *_: Any) -> None:
        self.seen.append(b1)

    def multi_tensor_adam(self, chunk, flag, tensors, lr, b1, *_) -> None:
        self.seen.append(b1)


@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "FusedAdam"])
def test_deepspeeds_adams_read_their_betas_in_every_step(name, monkeypatch) -> None:
    from deepspeed.ops import adam

    kernel = _Kernel()
    module = adam.cpu_adam if name == "DeepSpeedCPUAdam" else adam.fused_adam
    builder = name.removeprefix("DeepSpeed") + "Builder"
    monkeypatch.setattr(module, builder, lambda: kernel)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = getattr(adam, name)([weight], betas=(0.9, 0.95))
    for _ in range(2):
        weight.grad = torch.ones(4)
        with corrected(optimizer, 0, [weight], 0.4):
            optimizer.step()
    weight.grad = torch.ones(4)
    optimizer.step()
    assert kernel.seen == [0.6 * 0.9, 0.6 * 0.9, 0.9]


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_steps_by_the_correction_and_keeps_its_first_moment(fused: bool) -> None:
    """Against the formulas, in float64."""
    b1, b2, a, rate, eps = 0.8, 0.9, 0.3, 0.1, 1e-8
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = torch.optim.AdamW([weight], rate, (b1, b2), eps, weight_decay=0.1, fused=fused)
    generator = torch.Generator().manual_seed(0)
    w, m, v = weight.detach().double(), torch.zeros(3).double(), torch.zeros(3).double()
    for step in range(1, 6):
        gradient = torch.randn(3, generator=generator)
        weight.grad = gradient.clone()
        with corrected(optimizer, 0, [weight], a):
            optimizer.step()
        g = gradient.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = (1 - a) * m + a * g
        u, scale = u / (1 - ((1 - a) * b1) ** step), (v / (1 - b2**step)).sqrt() + eps
        w = w * (1 - rate * 0.1) - rate * u / scale
        torch.testing.assert_close(weight.detach().double(), w, rtol=1e-5, atol=1e-6)
        moment = optimizer.state[weight]["exp_avg"]
        torch.testing.assert_close(moment.double(), m, rtol=1e-5, atol=1e-6)
