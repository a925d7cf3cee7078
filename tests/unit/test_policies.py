"""Every policy on many architectures: gradients to the bit, and what each one holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings, Rule
from ds_ckpt.telemetry.memory import SavedActivations
from tests.architectures import ARCHITECTURES, OFTEN, batch, build

SLOW = pytest.mark.slow
POLICIES: dict[str, Policy] = {
    "block": Policy(),
    "attention": Policy(PolicySettings("attention")),
    "mlp": Policy(PolicySettings("mlp")),
    "every_n": Policy(PolicySettings("every_n", every_n=3)),
    "segments": Policy(PolicySettings("segments", segment_size=3)),
    "selective": Policy(PolicySettings("selective")),
    "rules": Policy(
        PolicySettings("block"),
        (
            Rule("0", PolicySettings("none")),
            Rule("1", PolicySettings("selective", save_ops=("matmuls",))),
            Rule("2-3", PolicySettings("segments")),
        ),
    ),
}


def step(model: nn.Module, kind: str) -> tuple[dict[str, torch.Tensor], float, int]:
    """Gradients by name, the loss, and bytes held between forward and backward."""
    torch.manual_seed(5)
    model.zero_grad()
    with SavedActivations(model) as held:
        loss = model(**batch(kind)).loss
    loss.backward()
    named = model.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return gradients, float(loss.detach()), held.bytes


def _attributes(model: nn.Module) -> list[dict[str, Any]]:
    names = ("forward", "gradient_checkpointing", "_gradient_checkpointing_func")
    names += ("_set_gradient_checkpointing",)
    return [{n: vars(m)[n] for n in names if n in vars(m)} for m in model.modules()]


@functools.cache
def plain(kind: str) -> tuple[dict[str, torch.Tensor], float, int]:
    return step(build(kind), kind)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(k, p, marks=() if k in OFTEN or p in ("block", "selective") else SLOW)
        for k in ARCHITECTURES
        for p in POLICIES
    ],
)
def test_gradients_are_bitwise_those_of_no_checkpointing(kind: str, policy: str) -> None:
    expected, loss, held = plain(kind)
    model = build(kind)
    before = _attributes(model)
    checkpointed = CheckpointedBlocks(model, policy=POLICIES[policy])
    for _ in range(2):  # the second step finds everything as the first did
        got, got_loss, got_held = step(model, kind)
        assert got_loss == loss
        assert got.keys() == expected.keys()
        differing = [n for n in expected if not torch.equal(expected[n], got[n])]
        assert not differing, differing[:5]
        assert got_held < held
    checkpointed.remove()
    assert _attributes(model) == before


def _held(policy: Policy | None, kind: str = "llama") -> int:
    model = build(kind)
    if policy is not None:
        CheckpointedBlocks(model, policy=policy)
    return step(model, kind)[2]


BOUNDARY = 2 * 11 * 16 * 4
"""Bytes of a block's input in these models: batch x tokens x width x fp32."""


def test_segments_keep_one_boundary_each() -> None:
    block = _held(Policy())
    for size, segments in ((2, 2), (3, 2), (4, 1), (9, 1)):
        segmented = _held(Policy(PolicySettings("segments", segment_size=size)))
        # what the last block returns is kept by the norm behind it, checkpointed or not
        assert block - segmented == (4 - segments) * BOUNDARY


def test_every_n_keeps_the_inside_of_the_others() -> None:
    none, block = _held(None), _held(Policy())
    inside = (none - block) // 4  # of one block, without its boundary
    for n, checkpointed in ((2, 2), (3, 2), (4, 1)):
        held = _held(Policy(PolicySettings("every_n", every_n=n)))
        assert none - held == pytest.approx(checkpointed * inside, rel=0.01)  # masks are shared


def test_parts_lie_between_nothing_and_whole_blocks() -> None:
    none, block = _held(None), _held(Policy())
    for kind in ("attention", "mlp"):
        assert block < _held(Policy(PolicySettings(kind))) < none


def test_more_saved_operators_hold_more() -> None:
    wider = ("attention", "attention+qkvo", "attention+qkvo+gate", "matmuls")
    selected = [Policy(PolicySettings("selective", save_ops=(sets,))) for sets in wider]
    held = [_held(policy) for policy in (Policy(), *selected, None)]
    assert sorted(set(held)) == held
