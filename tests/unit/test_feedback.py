"""Residuals: units, transactions, state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Feedback, all_finite
from ds_ckpt.compression.storage import QuantizedTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load(feedback: Feedback, state: dict[str, Tensor]) -> None:
    feedback.load_stored({name: QuantizedTensor(residual) for name, residual in state.items()}, 0)


def bits(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: t.view(torch.int32).tolist() for name, t in state.items()}


@given(
    st.integers(1, 5),
    st.sampled_from([1.0, 2.0, 65536.0, 1000.0]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_the_units_are_those_of_the_mean(
    world: int, loss_scale: float, dtype: torch.dtype, seed: int
) -> None:
    feedback = Feedback()
    first, second = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = first.float() / (world * loss_scale)
    assert torch.equal(feedback.accumulate("w", first, world, loss_scale), expected)
    expected = expected + second.float() / (world * loss_scale)
    assert torch.equal(feedback.accumulate("w", second, world, loss_scale), expected)


def test_a_large_loss_scale_does_not_underflow_half_precision() -> None:
    gradient = torch.full((4,), 1.0, dtype=torch.float16)
    accumulated = Feedback().accumulate("w", gradient, 3, 2.0**20)
    assert torch.equal(accumulated, torch.full((4,), 1.0) / (3 * 2.0**20))


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=6))
def test_a_skipped_step_leaves_every_bit(steps: list[tuple[int, bool]]) -> None:
    """(micro-steps, taken) for each step; after each the residual is that of the taken ones."""
    generator = torch.Generator().manual_seed(len(steps))
    feedback = Feedback()
    expected: dict[str, Tensor] = {}
    for micro_steps, taken in steps:
        left = {name: t.clone() for name, t in expected.items()}
        for _ in range(micro_steps):
            for name in ("a", "b"):
                gradient = torch.randn(9, generator=generator)
                pending = feedback.accumulate(name, gradient, 2)
                left[name] = left.get(name, torch.zeros(9)) + gradient / 2
                assert torch.equal(pending, left[name])
                pending[:4] = 0.0
                left[name][:4] = 0.0
        if taken:
            feedback.commit()
            expected = left
        else:
            pending.fill_(torch.nan)  # the state after an overflow
            feedback.rollback()
        assert bits(feedback.state_dict()) == bits(expected)


def test_state_is_that_of_committed_steps_and_does_not_alias() -> None:
    feedback = Feedback()
    assert feedback.state_dict() == {}
    feedback.accumulate("w", torch.ones(3), 1)
    assert feedback.state_dict() == {}
    assert feedback.holds("w")
    feedback.commit()
    saved = feedback.state_dict()
    for _ in range(3):
        feedback.accumulate("w", torch.ones(3), 1)
        feedback.commit()
    assert torch.equal(saved["w"], torch.ones(3))
    assert torch.equal(feedback.state_dict()["w"], torch.full((3,), 4.0))


def test_loading_replaces_everything() -> None:
    feedback = Feedback()
    for name in ("old", "w"):
        feedback.accumulate(name, torch.ones(3), 1)
    feedback.commit()
    feedback.accumulate("w", torch.ones(3), 1)
    source = {"w": torch.tensor([1.0, -0.0, 1e-42])}
    load(feedback, source)
    assert bits(feedback.state_dict()) == bits(source)
    assert not feedback.holds("old")
    feedback.accumulate("w", torch.ones(3), 1)
    feedback.commit()
    assert source["w"].tolist() == torch.tensor([1.0, -0.0, 1e-42]).tolist()
    other = Feedback()
    load(other, feedback.state_dict())
    assert bits(other.state_dict()) == bits(feedback.state_dict())


def test_another_length_is_refused() -> None:
    feedback = Feedback()
    load(feedback, {"layer.weight": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"layer\.weight.* 4 entries.* 5"):
        feedback.accumulate("layer.weight", torch.zeros(5), 2)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_bad_entry_is_seen(bad: float, at: int) -> None:
    values = torch.randn(1000)
    values[at] = bad
    assert not all_finite(values)
    assert all_finite(torch.full((100,), torch.finfo(torch.float32).max))
    assert not all_finite(torch.tensor([torch.inf, -torch.inf]))


def test_a_fully_delivered_residual_is_freed() -> None:
    feedback = Feedback()
    load(feedback, {"w": torch.ones(4)})
    feedback.accumulate("w", torch.ones(4), 1).zero_()
    feedback.clear("w")
    feedback.rollback()
    assert feedback.state_dict()["w"].tolist() == [1.0] * 4
    feedback.accumulate("w", torch.ones(4), 1).zero_()
    feedback.clear("w")
    feedback.commit()
    assert not feedback.holds("w")
