"""Residuals: units, transactions, state, and their storage in few bits and on the host."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Feedback, all_finite, storage
from ds_ckpt.compression.storage import SCALE_BLOCK, QuantizedTensor, ResidualDtype

ROUNDED: tuple[ResidualDtype, ...] = ("bf16", "int8")
DTYPES: tuple[ResidualDtype, ...] = ("fp32", *ROUNDED)


def bits(stored: dict[str, QuantizedTensor]) -> dict[str, list[list[int]]]:
    return {name: [t.view(torch.uint8).tolist() for t in s.tensors] for name, s in stored.items()}


@given(
    st.integers(1, 5),
    st.sampled_from([1.0, 2.0, 1000.0, 65536.0, 2.0**20]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)
def test_the_units_are_those_of_the_mean(world, loss_scale, dtype, seed) -> None:
    """Two micro-steps and the next step agree; nothing underflows in half precision."""
    feedback = Feedback()
    gradients = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = torch.zeros(50)
    for number, gradient in enumerate(gradients):
        expected = expected + gradient.float() / (world * loss_scale)
        assert torch.equal(feedback.accumulate("w", gradient, world, loss_scale), expected)
        if number == 1:
            feedback.commit()


def test_state_is_that_of_committed_steps_and_does_not_alias() -> None:
    feedback = Feedback()
    assert feedback.state_dict() == {}
    feedback.accumulate("w", torch.ones(3), 1)
    assert feedback.state_dict() == {}
    assert feedback.has_residual("w")
    feedback.commit()
    saved = feedback.state_dict()
    for _ in range(3):
        feedback.accumulate("w", torch.ones(3), 1)
        feedback.commit()
    assert torch.equal(saved["w"], torch.ones(3))
    assert torch.equal(feedback.state_dict()["w"], torch.full((3,), 4.0))


def test_loading_replaces_everything_and_does_not_alias() -> None:
    feedback = Feedback()
    for name in ("old", "w"):
        feedback.accumulate(name, torch.ones(3), 1)
    feedback.commit()
    feedback.accumulate("w", torch.ones(3), 1)
    source = {"w": QuantizedTensor(torch.tensor([1.0, -0.0, 1e-42]))}
    before = bits(source)
    feedback.load_stored(source, 0)
    assert bits(feedback.stored()) == before
    assert not feedback.has_residual("old")
    feedback.accumulate("w", torch.ones(3), 1)
    feedback.commit()
    assert bits(source) == before


def test_another_length_is_refused() -> None:
    feedback = Feedback()
    feedback.load_stored({"layer.weight": QuantizedTensor(torch.zeros(4))}, 0)
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
    feedback.load_stored({"w": QuantizedTensor(torch.ones(4))}, 0)
    for end, is_held in ((feedback.rollback, True), (feedback.commit, False)):
        feedback.accumulate("w", torch.ones(4), 1).zero_()
        feedback.clear("w")
        end()
        assert feedback.has_residual("w") is is_held
        assert not is_held or feedback.state_dict()["w"].tolist() == [1.0] * 4


def encoded(dtype: ResidualDtype, working: Tensor, key: str = "0 0 0 w") -> QuantizedTensor:
    stored = QuantizedTensor.empty(working.numel(), dtype, working.device)
    stored.encode(working, key)
    return stored


def unit(stored: QuantizedTensor, working: Tensor) -> Tensor:
    """Distance of the two values between which each entry of `working` lies."""
    if stored.scales is not None:
        return stored.scales.float().repeat_interleave(SCALE_BLOCK)[: stored.numel]
    _, exponent = torch.frexp(working)
    return torch.ldexp(torch.ones(stored.numel), exponent - 8).clamp_(min=2.0**-133)


def values(numel: int, seed: int, exponent: float = 0.0) -> Tensor:
    """Normal entries of very different sizes, some exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator) * 4
    kept = torch.rand(numel, generator=generator) > 0.2
    drawn = torch.randn(numel, generator=generator).double() * torch.exp2(sizes.double() + exponent)
    return drawn.clamp(-3.4e38, 3.4e38).float() * kept


@given(
    st.sampled_from(ROUNDED),
    st.integers(0, 300) | st.integers(65_000, 140_000),
    st.integers(0, 2**31),
    st.sampled_from([0.0, -100.0, -140.0, 100.0, 127.0]),
)
def test_each_entry_is_within_one_unit(dtype, numel, seed, exponent) -> None:
    working = values(numel, seed, exponent)
    before = working.clone()
    stored = encoded(dtype, working, f"{seed}")
    assert torch.equal(working, before)
    decoded = stored.decoded()
    assert bool(torch.isfinite(decoded).all())
    one = unit(stored, working)
    assert bool(((decoded - working).abs() <= one * (1 + 1e-6)).all())
    assert not bool(decoded[working == 0].any())
    if stored.scales is not None and numel:
        assert bool((one <= math.ldexp(1, -126) + working.abs().max() / 126).all())


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("key", ["5 {} 0 w", "5 0 0 layer.{}", "5 0 {} w"])
def test_rounding_is_right_on_average(dtype: ResidualDtype, key: str) -> None:
    """Over steps, names and roundings of a step, for each entry and for all of them."""
    numel, steps = 1024, 600
    working = values(numel, 3)
    errors = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        stored = encoded(dtype, working, key.format(step))
        errors += (stored.decoded().double() - working.double()) / unit(stored, working)
    # the error of one rounding has a deviation of at most half a unit
    assert float((errors / steps).abs().max()) < 5 * 0.5 / math.sqrt(steps)
    assert abs(float((errors / steps).mean())) < 5 * 0.5 / math.sqrt(steps * numel)


@pytest.mark.parametrize("share", [1e-4, 0.1])
def test_tiny_gradients_beside_a_large_residual_are_not_lost(share: float) -> None:
    """Each is a small share of the storage's unit: rounding to nearest would drop every one."""
    numel, steps, unit_ = 1 << 20, 16, 2.0**-8
    feedback = Feedback(dtype="bf16")
    feedback.load_stored({"w": QuantizedTensor(torch.full((numel,), 0.75))}, 0)
    for _ in range(steps):
        pending = feedback.accumulate("w", torch.full((numel,), share * unit_), 1)
        feedback.store("w", pending)
        feedback.commit()
    grown = float((feedback.state_dict()["w"].double() - 0.75).mean())
    assert grown == pytest.approx(
        steps * share * unit_, abs=5 * unit_ * math.sqrt(steps * share / numel)
    )


def step(feedback: Feedback, seed: int, names: tuple[str, ...] = ("a", "b")) -> None:
    """Two micro-steps; the first quarter of each tensor is delivered."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for name in names:
            pending = feedback.accumulate(name, torch.randn(300, generator=generator), 2)
            pending[:75] = 0.0
            feedback.store(name, pending)


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["accelerator", "cpu"]),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_a_skipped_step_leaves_bits_and_rounding_as_they_were(dtype, device, taken) -> None:
    """A run with skipped steps among others is, to the bit, the run without them."""
    feedback, clean = Feedback(dtype=dtype, device=device), Feedback(dtype=dtype)
    for seed, takes in enumerate(taken):
        before, steps = bits(feedback.stored()), feedback.steps
        step(feedback, seed)
        if takes:
            feedback.commit()
            step(clean, seed)
            clean.commit()
        else:
            feedback.accumulate("a", torch.ones(300), 1).fill_(torch.nan)  # after an overflow
            feedback.rollback()
            assert bits(feedback.stored()) == before
            assert feedback.steps == steps
        assert bits(feedback.stored()) == bits(clean.stored())
        assert feedback.steps == clean.steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_goes_on_to_the_bit(dtype: ResidualDtype) -> None:
    whole, first = Feedback(dtype=dtype, seed=3), Feedback(dtype=dtype, seed=3)
    for seed in range(3):
        for feedback in (whole, first):
            step(feedback, seed)
            feedback.commit()
    resumed = Feedback(dtype=dtype, seed=3, device="cpu")
    resumed.load_stored(copy.deepcopy(first.stored()), first.steps)
    for seed in range(3, 6):
        for feedback in (whole, resumed):
            step(feedback, seed)
            feedback.commit()
        assert bits(whole.stored()) == bits(resumed.stored())


@pytest.mark.parametrize("loaded", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_dtype_loads_exactly_and_is_rounded_by_the_next_step(dtype, loaded) -> None:
    source, feedback = Feedback(dtype=loaded), Feedback(dtype=dtype)
    step(source, 0)
    source.commit()
    feedback.load_stored(source.stored(), source.steps)
    expected = source.state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in feedback.state_dict().items())
    pending = feedback.accumulate("a", torch.zeros(300), 1)
    assert torch.equal(pending, expected["a"])
    feedback.store("a", pending)
    feedback.commit()
    assert feedback.stored()["a"].values.dtype == storage.TORCH_DTYPES[dtype]
