"""Momentum correction: what optimizers step by, and which are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings
from ds_ckpt.zero3.momentum import corrected, why_not_corrected


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
