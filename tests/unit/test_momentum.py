"""First moments that fit what is left behind: the rule, the measurement, what optimizers read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks._own_share import OwnShareToo
from ds_ckpt.exchange import build as exchange_build
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.momentum import EVERY, LARGEST, FirstMoments, matched
from ds_ckpt.exchange.rules import MethodSettings
from ds_ckpt.lab.validate.world import VirtualWorkers
from ds_ckpt.zero3.momentum import why_no_lead

shares = st.floats(0, 1)


@given(shares, shares)
def test_the_more_is_kept_the_more_it_leads_and_nothing_asks_for_none(
    one: float, other: float
) -> None:
    less, more = sorted((one, other))
    assert 0 == matched(0.0) <= matched(less) <= matched(more) <= LARGEST


@given(st.floats(0.01, 0.28))
def test_the_zero_of_the_lead_is_at_the_pole_of_the_feedback(kept: float) -> None:
    b1, a = 0.5, matched(kept)
    newest, before = (1 - a) * (1 - b1) + a, a * b1  # u = (newest - before / z) / (1 - b1 / z) g
    assert before / newest == pytest.approx(kept)


def alone(tensor: Tensor) -> None:
    """One process is all there are."""


def measured(choice: Any, step: int, kept: dict[str, float], *, skipped: bool = False) -> Any:
    found = FirstMoments(choice, {"w": 0, "v": 0, "norm": 1}, alone)
    measure(found, step, kept, skipped=skipped)
    return found


def measure(
    moments: FirstMoments,
    step: int,
    kept: dict[str, float],
    *,
    skipped: bool = False,
    exchanges: int = 1,
) -> None:
    for _ in range(exchanges):
        for bucket in (list(kept), ["in the step's other bucket"]):
            moments.exchanging(step, bucket, torch.device("cpu"))
        if moments.errors.sampling:
            for name, share in kept.items():
                moments.errors.add("method", before=8.0, after=8.0 * share, name=name)
    moments.step_ended(skipped=skipped)


def test_each_group_has_its_own() -> None:
    found = measured(0.4, 0, {"w": 0.75, "v": 0.25, "norm": 0.0})
    assert found.kept == {0: 0.5}
    assert found.lead(0) == 0.4
    assert found.lead(1) == 0.0


@pytest.mark.parametrize(
    ("left", "kept"), [(float("nan"), {}), (float("inf"), {}), (0.0, {}), (2.0, {0: 1.0})]
)
def test_what_is_left_is_a_share_or_nothing(left: float, kept: dict[int, float]) -> None:
    assert measured("matched", 0, {"w": left}).kept == kept


def test_it_is_measured_every_so_many_steps_and_not_in_skipped_ones() -> None:
    found = measured("matched", 0, {"w": 0.5})
    measure(found, 1, {"w": 0.25})
    assert found.kept == {0: 0.5}
    measure(found, EVERY, {"w": 0.25}, skipped=True)
    assert found.kept == {0: 0.5}
    measure(found, EVERY, {"w": 0.25})
    assert found.kept == {0: 0.25}
    measure(found, 2 * EVERY, {})  # nothing travelled compressed
    assert found.kept == {}


@given(st.floats(0.05, 0.95), st.integers(1, 8))
def test_of_several_exchanges_a_step_the_lag_is_counted_in_steps(
    kept: float, exchanges: int
) -> None:
    found = FirstMoments("matched", {"w": 0}, alone)
    for step in (0, EVERY):  # each measurement counts anew
        measure(found, step, {"w": kept}, exchanges=exchanges)
    of_steps = found.kept[0]
    assert of_steps / (1 - of_steps) == pytest.approx(kept / (1 - kept) / exchanges)


@given(st.dictionaries(st.integers(0, 3), st.floats(0.001, 1)))
def test_state_is_whole(kept: dict[int, float]) -> None:
    import json

    one, other = (FirstMoments("matched", {"w": 3}, alone) for _ in range(2))
    one.kept = kept
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.kept == kept
    other.load_state_dict({})
    assert other.kept == {}


def test_a_groups_betas_are_given_back_whatever_happens() -> None:
    found, own = measured(0.4, 0, {"w": 0.5}), [0.9, 0.95]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    (group,) = optimizer.param_groups
    group["betas"] = own
    seen = []

    def fails() -> None:
        with found.leading(optimizer, 0, group["params"]):
            seen.append(group["betas"])
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [(0.6 * 0.9, 0.95)]
    assert group["betas"] is own


def test_all_workers_measure_the_same() -> None:
    settings = ExchangeSettings(
        MethodSettings("topk", density=0.1), min_numel=0, momentum="matched"
    )
    workers = VirtualWorkers(settings, 3, ["w"])
    torch.manual_seed(0)
    workers.average([[torch.randn(40, 30) * worker] for worker in range(1, 4)])
    workers.step_ended(skipped=False)
    states = [worker.scheduled.moments.state_dict() for worker in workers._workers]
    assert states[0]["kept"]
    assert states[0] == states[1] == states[2]


def test_a_warm_up_that_a_resume_makes_longer_has_no_lead() -> None:
    settings = ExchangeSettings(
        MethodSettings("topk", density=0.1), min_numel=0, momentum="matched", warmup_steps=1
    )
    workers = VirtualWorkers(settings, 2, ["w"])
    moments = [worker.scheduled.moments for worker in workers._workers]
    for of in moments:
        of.load_state_dict({"kept": [[0, 0.6]]})
    workers.average([[torch.randn(40, 30)] for _ in range(2)])
    workers.step_ended(skipped=False)
    assert [of.lead(0) for of in moments] == [0, 0]
    workers.average([[torch.randn(40, 30)] for _ in range(2)])
    workers.step_ended(skipped=False)
    assert all(of.lead(0) > 0 for of in moments)


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
def test_who_has_no_lead_is_told_why(optimizer: Any, groups: list[Any], why: str) -> None:
    steps = optimizer([{"params": [torch.nn.Parameter(torch.zeros(2))], **of} for of in groups])
    found = why_no_lead(SimpleNamespace(optimizer=steps))
    assert why in found
    assert bool(why) == bool(found)


@pytest.mark.parametrize("method", ["entropy_coded", "topk", "quantize"])
def test_the_benchmark_compresses_own_shares_too_and_loses_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_build, "AllToAllExchange", OwnShareToo)
    workers = VirtualWorkers(ExchangeSettings(MethodSettings(method), min_numel=0), 3, ["w"])
    torch.manual_seed(0)
    given_ = [torch.randn(90, 40) for _ in range(3)]
    (arrived,) = workers.average([[g.clone()] for g in given_])
    workers.step_ended(skipped=False)
    left = [state["w"] for state in workers.residuals()]
    assert all((shard.abs() > 0).any() for state in left for shard in state.chunk(3))
    total = arrived.view(-1) + torch.stack(left).sum(0)
    assert torch.allclose(total, torch.stack(given_).mean(0).view(-1), atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        ExchangeSettings(MethodSettings("topk")),
        ExchangeSettings(MethodSettings("dense"), momentum="matched"),
        ExchangeSettings(MethodSettings("topk"), error_feedback=False, momentum="matched"),
    ],
)
def test_nothing_is_matched_where_nothing_is_carried_over(settings: ExchangeSettings) -> None:
    assert settings.moments({"w": 0}, alone) is None


# What DeepSpeed's own optimizers hand to their kernels, which this machine need not have


class _Kernel:
    """Stands for a compiled module; keeps the b1 of every call."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def load(self) -> _Kernel:
        return self

    def create_adam(self, *_: Any) -> None: ...

    def destroy_adam(self, *_: Any) -> None: ...

    def adam_update(self, number: int, step: int, lr: float, b1: float, *_: Any) -> None:
        self.seen.append(b1)

    def multi_tensor_adam(
        self, chunk: int, flag: Any, tensors: Any, lr: float, b1: float, *_: Any
    ) -> None:
        self.seen.append(b1)


@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "FusedAdam"])
def test_deepspeeds_adams_read_their_betas_in_every_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops import adam

    kernel = _Kernel()
    module = adam.cpu_adam if name == "DeepSpeedCPUAdam" else adam.fused_adam
    builder = name.removeprefix("DeepSpeed") + "Builder"
    monkeypatch.setattr(module, builder, lambda: kernel)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = getattr(adam, name)([weight], betas=(0.9, 0.95))
    found = measured(0.4, 0, {"w": 0.5})
    for _ in range(2):
        weight.grad = torch.ones(4)
        with found.leading(optimizer, 0, [weight]):
            optimizer.step()
    weight.grad = torch.ones(4)
    optimizer.step()
    assert kernel.seen == [0.6 * 0.9, 0.6 * 0.9, 0.9]


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_steps_by_the_lead_and_keeps_its_first_moment(fused: bool) -> None:
    """Against the formulas, in float64."""
    b1, b2, lead, rate, eps = 0.8, 0.9, 0.3, 0.1, 1e-8
    found = measured(lead, 0, {"w": 0.5})
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = torch.optim.AdamW([weight], rate, (b1, b2), eps, weight_decay=0.1, fused=fused)
    generator = torch.Generator().manual_seed(0)
    w, m, v = weight.detach().double(), torch.zeros(3).double(), torch.zeros(3).double()
    for step in range(1, 6):
        gradient = torch.randn(3, generator=generator)
        weight.grad = gradient.clone()
        with found.leading(optimizer, 0, [weight]):
            optimizer.step()
        g = gradient.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = (1 - lead) * m + lead * g
        u, scale = u / (1 - ((1 - lead) * b1) ** step), (v / (1 - b2**step)).sqrt() + eps
        w = w * (1 - rate * 0.1) - rate * u / scale
        torch.testing.assert_close(weight.detach().double(), w, rtol=1e-5, atol=1e-6)
        moment = optimizer.state[weight]["exp_avg"]
        torch.testing.assert_close(moment.double(), m, rtol=1e-5, atol=1e-6)
