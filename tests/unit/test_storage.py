"""Residuals in few bits and on the host: within a unit, right on average, transactional."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.compression import Feedback
from ds_ckpt.compression.storage import BLOCK, ResidualDtype, Storage, Stored, pieces
from ds_ckpt.memory import HostPool

ROUNDED: tuple[ResidualDtype, ...] = ("bf16", "int8")
DTYPES: tuple[ResidualDtype, ...] = ("fp32", *ROUNDED)
CPU = torch.device("cpu")


def empty(storage: Storage, numel: int) -> Stored:
    return Stored(*(torch.empty(n, dtype=t) for n, t in storage.shapes(numel)))


def unit(stored: Stored, working: Tensor) -> Tensor:
    """Distance of the two values between which each entry of `working` lies."""
    if stored.scales is not None:
        return stored.scales.float().repeat_interleave(BLOCK)[: stored.numel]
    _, exponent = torch.frexp(working)
    return torch.ldexp(torch.ones(stored.numel), exponent - 8).clamp_(min=2.0**-133)


def bits(stored: dict[str, Stored]) -> dict[str, list[list[int]]]:
    return {name: [t.view(torch.uint8).tolist() for t in s.tensors] for name, s in stored.items()}


def values(numel: int, seed: int, exponent: float) -> Tensor:
    """Normal entries of very different sizes, some exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator) * 4
    kept = torch.rand(numel, generator=generator) > 0.2
    return torch.randn(numel, generator=generator) * torch.exp2(sizes + exponent) * kept


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(ROUNDED),
    st.integers(0, 300) | st.integers(65_000, 140_000),
    st.integers(0, 2**31),
    st.sampled_from([0.0, -100.0, -140.0, 100.0]),
)
def test_each_entry_is_within_one_unit(
    dtype: ResidualDtype, numel: int, seed: int, exponent: float
) -> None:
    working = values(numel, seed, exponent)
    before = working.clone()
    storage = Storage(dtype)
    stored = empty(storage, numel)
    storage.encode(working, stored, "w", seed, 0)
    assert torch.equal(working, before)
    decoded = stored.decoded()
    assert bool(torch.isfinite(decoded).all())
    one = unit(stored, working)
    assert bool(((decoded - working).abs() <= one * (1 + 1e-6)).all())
    assert not bool(decoded[working == 0].any())
    if stored.scales is not None and numel:
        largest = working.abs().view(-1)
        assert bool((one <= math.ldexp(1, -126) + largest.max() / 126).all())


@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_fits_is_kept_to_the_bit(dtype: ResidualDtype) -> None:
    """Values on the grid are not moved, whatever the random numbers."""
    storage = Storage(dtype)
    codes = torch.randint(-126, 127, (640,)).float()
    codes[::BLOCK] = 126.99
    working = values(640, 1, 0.0).bfloat16().float() if dtype == "bf16" else codes
    for step in range(50):
        stored = empty(storage, 640)
        storage.encode(working, stored, "w", step, 0)
        keep = torch.arange(640) % BLOCK != 0
        assert torch.equal(stored.decoded()[keep], working[keep])


@pytest.mark.parametrize("dtype", ROUNDED)
def test_large_values_stay_finite(dtype: ResidualDtype) -> None:
    largest = 3.4e38
    working = torch.tensor([largest, -largest, 1.0, 0.0] * 40)
    storage = Storage(dtype)
    stored = empty(storage, 160)
    for step in range(20):
        storage.encode(working, stored, "w", step, 0)
        decoded = stored.decoded()
        assert bool(torch.isfinite(decoded).all())
        assert torch.allclose(decoded, working, rtol=1e-2, atol=largest / 100)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rounding_is_right_on_average(dtype: ResidualDtype) -> None:
    """Over steps, over names and over the entries of one call."""
    numel, steps = 1024, 600
    working = values(numel, 3, 0.0)
    storage = Storage(dtype, seed=5)
    stored = empty(storage, numel)
    errors = torch.zeros(numel, dtype=torch.float64)
    names = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        storage.encode(working, stored, "w", step, 0)
        errors += (stored.decoded().double() - working.double()) / unit(stored, working)
        storage.encode(working, stored, f"layer.{step}", 0, 0)
        names += (stored.decoded().double() - working.double()) / unit(stored, working)
    # the error of one rounding has a deviation of at most half a unit
    for mean in (errors / steps, names / steps):
        assert float(mean.abs().max()) < 5 * 0.5 / math.sqrt(steps)
        assert abs(float(mean.mean())) < 5 * 0.5 / math.sqrt(steps * numel)


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 1e-4), ("bf16", 0.1), ("int8", 1e-2)])
def test_tiny_gradients_beside_a_large_residual_are_not_lost(
    dtype: ResidualDtype, share: float
) -> None:
    """Each is a small share of the storage's unit: rounding to nearest would drop every one."""
    numel, steps, unit_ = 1 << 20, 16, 2.0**-8
    feedback = Feedback(dtype=dtype)
    # the largest of a block sets the scale alone; it gets no gradient
    start = torch.full((numel,), 0.75)
    start[::BLOCK] = 1.0
    feedback.load_stored({"w": Stored(start)}, 0)
    gradient = torch.full((numel,), share * unit_)
    gradient[::BLOCK] = 0.0
    assert torch.equal((start + gradient).bfloat16().float(), start)
    for _ in range(steps):
        feedback.store("w", feedback.accumulate("w", gradient, 1))
        feedback.commit()
    grown = (feedback.state_dict()["w"] - start)[gradient > 0].double()
    expected = steps * share * unit_
    if dtype == "bf16":  # starts on the grid, each step leaves it with the probability `share`
        deviation = unit_ * math.sqrt(steps * share / grown.numel())
    else:  # the unit is 1/127, the grid changes with the scale, each step rounds anew
        deviation = 2 * unit_ * 0.5 * math.sqrt(steps / grown.numel())
    assert expected > 8 * deviation
    assert abs(float(grown.mean()) - expected) < 5 * deviation


@pytest.mark.parametrize("dtype", ROUNDED)
def test_errors_of_processes_and_entries_are_not_alike(dtype: ResidualDtype) -> None:
    """Else their sum over processes, or over neighbours, would grow as their number."""
    numel = 1 << 17
    working = torch.full((numel,), 0.7501)
    working[::BLOCK] = 1.0
    errors = []
    for seed in range(4):
        storage = Storage(dtype, seed)
        stored = empty(storage, numel)
        storage.encode(working, stored, "w", 7, 0)
        errors.append((stored.decoded() - working)[torch.arange(numel) % BLOCK != 0])
    normed = [(e - e.mean()) / e.std() for e in errors]
    limit = 5 / math.sqrt(numel)
    for i, first in enumerate(normed):
        for second in normed[:i]:
            assert abs(float((first * second).mean())) < limit
        assert abs(float((first[1:] * first[:-1]).mean())) < limit


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5_000_000), st.integers(0, 2**31))
def test_pieces_cover_every_entry_once(numel: int, seed: int) -> None:
    for device in (CPU, torch.device("meta")):
        at = 0
        for piece in pieces(numel, device):
            assert piece.start == at
            assert math.prod(piece.shape) == piece.stop - piece.start > 0
            assert piece.start % BLOCK == 0
            at = piece.stop
        assert at == numel


@pytest.mark.parametrize("dtype", ROUNDED)
def test_many_tiles_at_once_round_as_one_by_one(
    dtype: ResidualDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an accelerator does in large pieces is what a CPU does tile by tile."""
    from ds_ckpt.compression import storage as module

    numel = 5 * 65_536 + 1000
    working, storage = values(numel, 9, 0.0), Storage(dtype)
    one, many = empty(storage, numel), empty(storage, numel)
    storage.encode(working, one, "w", 3, 1)
    large = pieces(numel, torch.device("meta"))
    monkeypatch.setattr(module, "pieces", lambda n, d, large=list(large): iter(large))
    storage.encode(working, many, "w", 3, 1)
    assert bits({"w": one}) == bits({"w": many})


def build(dtype: ResidualDtype, **options: Any) -> Feedback:
    return Feedback(dtype=dtype, **options)


def step(feedback: Feedback, seed: int, names: tuple[str, ...] = ("a", "b")) -> None:
    """Two micro-steps; the first quarter of each tensor is delivered."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for name in names:
            pending = feedback.accumulate(name, torch.randn(300, generator=generator), 2)
            pending[:75] = 0.0
            feedback.store(name, pending)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["accelerator", "cpu"]),
    st.booleans(),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_a_skipped_step_leaves_bits_and_rounding_as_they_were(
    dtype: ResidualDtype, device: Any, pooled: bool, taken: list[bool]
) -> None:
    """A run with skipped steps among others is, to the bit, the run without them."""
    host = HostPool() if pooled else None
    feedback = build(dtype, device=device, host=host)
    clean = build(dtype)
    for seed, takes in enumerate(taken):
        before, steps = bits(feedback.stored()), feedback.steps
        step(feedback, seed)
        if takes:
            feedback.commit()
            step(clean, seed)
            clean.commit()
        else:
            left_in_work = feedback.accumulate("a", torch.ones(300), 1)
            left_in_work.fill_(torch.nan)
            feedback.rollback()
            assert bits(feedback.stored()) == before
            assert feedback.steps == steps
        assert bits(feedback.stored()) == bits(clean.stored())
        assert feedback.steps == clean.steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_goes_on_to_the_bit(dtype: ResidualDtype) -> None:
    whole, first = build(dtype, seed=3), build(dtype, seed=3)
    for seed in range(3):
        for feedback in (whole, first):
            step(feedback, seed)
            feedback.commit()
    resumed = build(dtype, seed=3, device="cpu", host=HostPool())
    step(resumed, 99, ("other",))
    resumed.load_stored(copy.deepcopy(first.stored()), first.steps)
    assert not resumed.holds("other")
    for seed in range(3, 6):
        for feedback in (whole, resumed):
            step(feedback, seed)
            feedback.commit()
        assert bits(whole.stored()) == bits(resumed.stored())


@pytest.mark.parametrize("loaded", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_dtype_is_taken_over_exactly_and_rounded_by_the_next_step(
    dtype: ResidualDtype, loaded: ResidualDtype
) -> None:
    source = build(loaded)
    step(source, 0)
    source.commit()
    host = HostPool()
    feedback = build(dtype, host=host)
    feedback.load_stored(source.stored(), source.steps)
    expected = source.state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in feedback.state_dict().items())
    pending = feedback.accumulate("a", torch.zeros(300), 1)
    assert torch.equal(pending, expected["a"])
    feedback.store("a", pending)
    feedback.commit()
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[dtype]
    assert feedback.stored()["a"].values.dtype == kept
    assert source.stored()["a"].values.dtype != torch.int8 or loaded == "int8"


@pytest.mark.parametrize(("dtype", "entry_bytes"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
@pytest.mark.parametrize("pooled", [True, False])
def test_bytes_held_are_two_of_what_is_stored(
    dtype: ResidualDtype, entry_bytes: int, pooled: bool
) -> None:
    numel, table = 6400, 4 * (2 * 65_536 + 257 * 255)
    host = HostPool() if pooled else None
    feedback = build(dtype, device="cpu", host=host)
    for _ in range(4):
        working = feedback.accumulate("w", torch.randn(numel), 2)
        in_work = feedback.nbytes
        feedback.store("w", working)
        feedback.commit()
    one = numel * entry_bytes + (2 * numel // BLOCK if dtype == "int8" else 0)
    tables = 0 if dtype == "fp32" else table
    assert feedback.nbytes == 2 * one + tables
    assert in_work == feedback.nbytes + (0 if dtype == "fp32" else 4 * numel)
    if host is not None:
        assert 2 * one <= host.nbytes_in_use <= 2 * one * 1.125 + 4 * 4096
        feedback.load_stored({}, 0)
        assert host.nbytes_in_use == 0
    else:
        feedback.load_stored({}, 0)
    assert feedback.nbytes == tables


def test_loads_give_their_memory_back() -> None:
    host = HostPool()
    feedback = build("int8", host=host)
    for _ in range(3):
        step(feedback, 0)
        feedback.commit()
        feedback.load_stored({name: Stored(torch.randn(300)) for name in ("a", "b")}, 0)
        step(feedback, 1)
    feedback.commit()
    feedback.accumulate("c", torch.zeros(10), 1)
    feedback.load_stored({}, 0)
    assert host.nbytes_in_use == 0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_nothing_is_lost(dtype: ResidualDtype, micro_steps: int, steps: int, seed: int) -> None:
    """Law 3: what went in is delivered or still there, to one unit a rounding."""
    generator = torch.Generator().manual_seed(seed)
    feedback = build(dtype)
    gap = torch.zeros(200, dtype=torch.float64)
    allowed = torch.zeros(200, dtype=torch.float64)
    for _ in range(steps):
        for _ in range(micro_steps):
            gradient = torch.randn(200, generator=generator)
            pending = feedback.accumulate("w", gradient, 1)
            gap += gradient
            gap[:50] -= pending[:50]
            pending[:50] = 0.0
            kept = pending.clone()
            feedback.store("w", pending)
            stored = feedback._residuals["w"].pending
            assert stored is not None
            allowed += 0 if dtype == "fp32" else unit(stored, kept).double()
        feedback.commit()
    gap -= feedback.state_dict()["w"]
    assert bool((gap.abs() <= allowed + 1e-5).all())


def test_the_choices_are_named() -> None:
    with pytest.raises(ValueError, match=r"'fp32', 'bf16', 'int8'.*not 'fp16'"):
        Feedback(dtype="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'accelerator' or 'cpu', not 'cuda'"):
        Feedback(device="cuda")  # type: ignore[arg-type]
