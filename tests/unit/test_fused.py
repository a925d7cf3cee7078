"""Kernels over a bucket's tensors, run by Triton's interpreter, against the operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_quantize import SCALES, gradient
from torch import Tensor
from virtual import World, assemble

from ds_ckpt.compression import Compressor, Feedback, LowRank, Quantize, TopK, fused
from ds_ckpt.compression.error_feedback import add_divided, divide
from ds_ckpt.compression.fused import ToPack
from ds_ckpt.compression.quantize import BLOCKS
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.compression.topk import blocks_for, select_in_blocks
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.rules import ExchangeSettings, MethodSettings
from ds_ckpt.lab.validate.virtual import VirtualWorld

if os.environ.get("CI") != "true":  # there it is installed
    pytest.importorskip("triton", reason="Triton is not there: pip install -e .[kernels]")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Kernels for the CPU, or operators, also in a world of threads."""
    one_at_a_time = threading.Lock()  # as the interpreter needs it

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **kwargs: Any) -> Any:
            with one_at_a_time:
                return call(*args, **kwargs)

        return alone

    for owner, name in (
        (fused.QuantizeKernels, "pack"),
        (fused.QuantizeKernels, "unpack_add_all"),
        (fused, "select_in_blocks"),
    ):
        monkeypatch.setattr(owner, name, locked(getattr(owner, name)))
    return lambda on: monkeypatch.setattr(fused, "is_supported", lambda device: on)


def _on(on: bool) -> pytest.MonkeyPatch:
    patched = pytest.MonkeyPatch()
    patched.setattr(fused, "is_supported", lambda device: on)
    return patched


exact = st.builds(Quantize, bits=st.sampled_from([8, 4, 3]), block=st.sampled_from(BLOCKS))
two_bits = st.builds(Quantize, bits=st.just(2), block=st.sampled_from(BLOCKS))
numels = st.one_of(
    st.integers(1, 70), st.integers(1, 700), st.sampled_from([1020, 1024, 1025, 2044, 2049])
)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
quick = settings(max_examples=25, deadline=None)


def _packed(codec: Quantize, values: Tensor, *, on: bool) -> tuple[Tensor, Tensor]:
    """Payloads, which lie apart and were full, and what is left of fp32 [rows, n]."""
    left, size = values.clone(), codec.packed_bytes(values.shape[1])
    room = torch.full((len(values), size + 8), 0xAA, dtype=torch.uint8)
    patched = _on(on)
    codec.pack_rows(left, room[:, :size])
    patched.undo()
    assert (room[:, size:] == 0xAA).all()
    return room[:, :size], left


def _scales(codec: Quantize, payloads: Tensor, numel: int) -> Tensor:
    count = -(-numel // codec.block)
    return payloads[:, : 2 * count].contiguous().view(torch.bfloat16).float()


@quick
@given(exact, numels, st.integers(1, 3), seeds, st.sampled_from(SCALES))
@example(Quantize(bits=3), 2044, 2, 3, 1.0)  # what fills up lies behind the last program's bytes
def test_packing_is_bit_equal_to_the_operators(
    codec: Quantize, numel: int, rows: int, seed: int, scale: float
) -> None:
    values = torch.stack([gradient(numel, seed + r, scale) for r in range(rows)])
    wanted, wanted_left = _packed(codec, values, on=False)
    got, left = _packed(codec, values, on=True)
    assert torch.equal(left, wanted_left)
    scales = 8 * -(-2 * -(-numel // codec.block) // 8)
    assert torch.equal(_scales(codec, got, numel), _scales(codec, wanted, numel))
    assert torch.equal(got[:, scales:], wanted[:, scales:])


@quick
@given(two_bits, numels, seeds, st.sampled_from([1.0, 3e-5, 1e-15, 1e15]))
def test_two_bits_differ_by_a_rounding_of_the_scale(
    codec: Quantize, numel: int, seed: int, scale: float
) -> None:
    values = gradient(numel, seed, scale).unsqueeze(0)
    wanted, _ = _packed(codec, values, on=False)
    got, left = _packed(codec, values, on=True)
    ours, theirs = _scales(codec, got, numel), _scales(codec, wanted, numel)
    assert ((ours - theirs).abs() <= 2.0**-7 * theirs.abs()).all()
    # what arrives and what is left are what was there
    arrived = torch.zeros(numel)
    codec.unpack_add_rows(got, arrived)
    gap = (left[0].double() + arrived.double() - values[0].double()).abs()
    assert (gap <= 2.0**-23 * torch.maximum(left[0].abs(), arrived.abs()).double()).all()
    assert left.double().norm() <= values.double().norm() * (1 + 1e-5)


@quick
@given(
    st.one_of(exact, two_bits), numels, st.integers(1, 4), seeds, st.sampled_from([1.0, 8.0, 1e3])
)
def test_unpacking_is_bit_equal_to_the_operators(
    codec: Quantize, numel: int, rows: int, seed: int, scale: float
) -> None:
    values = torch.stack([gradient(numel, seed + r) for r in range(rows)])
    payloads, _ = _packed(codec, values, on=False)
    start = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    wanted, got = start.clone(), start.clone()
    codec.unpack_add_rows(payloads, wanted, scale)
    patched = _on(True)
    codec.unpack_add_rows(payloads, got, scale)
    patched.undo()
    assert torch.equal(got, wanted)


@quick
@given(
    exact,
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 3), dtypes), min_size=1, max_size=4),
    st.sampled_from([1.0, 2.0, 3.0, 3000.0, 8 * 65536.0]),
    st.booleans(),
    seeds,
)
def test_a_bucket_is_accumulated_and_packed_in_one_pass(
    codec: Quantize,
    tensors: list[tuple[int, int, torch.dtype]],
    divisor: float,
    residuals: bool,
    seed: int,
) -> None:
    """Tensors of several sizes and types, rows of each, and an own part."""
    patched = _on(True)
    kernels = codec.kernels(torch.device("cpu"))
    patched.undo()
    assert kernels is not None
    shards, wanted = [], []
    for i, (numel, rows, dtype) in enumerate(tensors):
        generator = torch.Generator().manual_seed(seed + i)
        grad = torch.randn(rows + 1, numel, generator=generator).to(dtype)
        source = torch.randn(rows + 1, numel, generator=generator) if residuals else None
        if source is None:
            sum_ = divide(grad, divisor, torch.empty(rows + 1, numel))
        else:
            sum_ = add_divided(source, grad, divisor, torch.empty(rows + 1, numel))
        payloads, left = _packed(codec, sum_[:rows], on=False)
        wanted.append((payloads, left, sum_[rows] * 8.0))
        values = torch.full((rows + 1, numel), torch.nan)
        room, own = torch.empty_like(payloads), torch.full((numel,), torch.nan)
        at = [None, None] if source is None else [source[:rows], source[rows:]]
        shards += [
            ToPack(values[:rows], at[0], grad[:rows], room),
            ToPack(values[rows:], at[1], grad[rows:], own=own),
        ]
    assert kernels.pack(shards, divisor, 8.0)
    for (payloads, left, own), others, mine in zip(wanted, shards[::2], shards[1::2], strict=True):
        assert others.payloads is not None
        assert mine.own is not None
        assert torch.equal(others.values, left)
        assert torch.equal(others.payloads[:, 8:], payloads[:, 8:])
        assert torch.equal(mine.own, own)
        assert not mine.values.any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["others", "own"])
def test_what_is_not_finite_is_flagged(
    bad: float, where: str, kernels: Callable[..., None]
) -> None:
    kernels(True)
    grads = torch.randn(2, 2100).bfloat16()
    for flagged in (False, True):
        made = Quantize(bits=3).kernels(grads.device)
        assert made is not None
        if flagged:
            grads[0 if where == "others" else 1, 2099] = bad
        values, room = torch.empty(2, 2100), torch.empty(1, Quantize(bits=3).packed_bytes(2100))
        shards = [
            ToPack(values[:1], None, grads[:1], room.to(torch.uint8)),
            ToPack(values[1:], None, grads[1:], own=torch.empty(2100)),
        ]
        assert bool(made.pack(shards, 2.0)) is not flagged
        assert values.isfinite().all()


@quick
@given(st.integers(1, 3000), st.sampled_from([0.004, 0.01, 0.05, 0.3]), st.integers(1, 3), seeds)
def test_maxima_of_blocks_are_those_of_the_operators(
    numel: int, density: float, shards: int, seed: int
) -> None:
    blocks = blocks_for(numel, density)
    values = torch.stack([gradient(numel, seed + s) for s in range(shards)])
    found = []
    for on in (False, True):
        room = torch.full((shards, blocks.k, blocks.count + 3), 0xAA, dtype=torch.uint8)
        patched = _on(on)
        select_in_blocks(values, blocks, room[..., : blocks.count])
        patched.undo()
        assert (room[..., blocks.count :] == 0xAA).all()
        found.append(room)
    assert torch.equal(*found)


@pytest.mark.parametrize("fault", ["raises", "disagrees"])
def test_kernels_that_cannot_be_trusted_are_not_used(
    fault: str, kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    kernels(True)
    monkeypatch.setattr(fused, "_trusted", {})

    def wrong(self: object, shards: list[ToPack], *_: float) -> Tensor:
        if fault == "raises":
            raise RuntimeError("no code for this device")
        for shard in shards:
            assert shard.payloads is not None
            shard.payloads.zero_()
        return torch.tensor(True)

    monkeypatch.setattr(fused.QuantizeKernels, "pack", wrong)
    values = gradient(300, 1).unsqueeze(0)
    for _ in range(2):
        packed = _packed(Quantize(bits=4), values, on=True)
        assert all(map(torch.equal, packed, _packed(Quantize(bits=4), values, on=False)))
    (said,) = caplog.messages
    assert "fused kernels of 4 bits in blocks of 64 are not used on cpu" in said


@pytest.mark.parametrize("method", ["topk", "quantize"])
def test_kernels_are_tried_where_residuals_are_reserved(
    method: Any, kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot be compiled on one process must not end an exchange there."""
    kernels(True)
    tried: list[object] = []
    monkeypatch.setattr(fused, "trusted", lambda what, device, agrees: tried.append(what))
    choose = ExchangeSettings(MethodSettings(method), min_numel=0).choose(frozenset())
    exchange = AllToAllExchange(VirtualWorld(2).transports[0], choose, Feedback())
    exchange.reserve([("w", torch.Size([64, 64]))], torch.device("cpu"))
    assert tried


def test_kernels_compile_for_a_gpu_and_round_products_and_sums_apart(tmp_path: Path) -> None:
    """To machine code, on any machine. That it is right is for a GPU to say."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", "90"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert len(found) == 6
    for name, made in found.items():
        assert made["code_bytes"] > 10_000
        assert (made["fma"] > 0) == ("contracted" in name)


# ---- whole exchanges

METHODS: dict[str, Compressor] = {
    "8 bits": Quantize(bits=8),
    "3 bits": Quantize(bits=3),
    "blocks": TopK(density=0.05),
}
SHAPES = ((6, 20), (16,), (11, 5), (1, 2))


def _steps(
    method: str,
    *,
    holds: bool,
    local: int,
    dtype: ResidualDtype,
    bad_step: int | None = None,
    low_rank: bool = False,
) -> list[Tensor]:
    """All that steps deliver and leave, and the flags; with a matrix of low rank among them or
    without."""
    size = 3 + (local > 1)

    def choose(name: str, shape: torch.Size) -> Compressor | None:
        if low_rank and name == "p0":
            return LowRank(2)
        return METHODS[method] if len(shape) > 1 else None

    world = World(
        size,
        choose,
        holds=holds,
        local=local,
        residual_dtype=dtype,
    )
    names, seen = [f"p{i}" for i in range(len(SHAPES))], []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        grads = [
            [torch.randn(s, generator=generator).bfloat16() for s in SHAPES] for _ in range(size)
        ]
        if holds:
            world.hold(names, grads, 64.0)
        if step == bad_step:
            grads[2][0].view(-1)[7] = torch.inf
        shards = world.reduce(names, grads, 64.0)
        seen += [assemble(shards, i) for i in range(len(SHAPES))]
        flags = [exchange.nonfinite_buckets for exchange in world.exchanges]
        seen.append(torch.tensor(flags))
        (world.rollback if step == bad_step else world.commit)()
        seen += [t for feedback in world.feedbacks for t in feedback.state_dict().values()]
    return seen


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("8 bits", {"local": 2}),
        ("3 bits", {"holds": True, "bad_step": 0}),
        ("3 bits", {"dtype": "int8", "bad_step": 1}),
        ("3 bits", {"low_rank": True}),
        ("blocks", {"dtype": "bf16"}),
    ],
    ids=str,
)
def test_an_exchange_with_kernels_is_bit_equal_to_one_without(
    method: str, more: dict[str, object], kernels: Callable[[bool], None]
) -> None:
    asked = {"holds": False, "local": 1, "dtype": "fp32", **more}
    kernels(False)
    wanted = _steps(method, **asked)  # type: ignore[arg-type]
    kernels(True)
    got = _steps(method, **asked)  # type: ignore[arg-type]
    assert all(starmap(_same, zip(got, wanted, strict=True)))


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )
