"""Kernels over a bucket's tensors, run by Triton's interpreter, against the operators."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_accelerator import BESIDE, everything_of
from test_codecs import KINDS, SCALES
from test_codecs import gradient as gradient_of
from torch import Tensor

from ds_ckpt.compression import Codec, EntropyCoded, Feedback, Quantize, TopK, entropy_format, fused
from ds_ckpt.compression.quantize import BLOCKS
from ds_ckpt.compression.topk import blocks_for, select_in_blocks
from ds_ckpt.weights import lossless
from tests.pretended_gpu import Gpu

pytest.importorskip("triton", reason="Triton is not there: pip install -e .[kernels]")


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """Kernels for the CPU, or operators, also in a world of threads."""
    one_at_a_time = threading.Lock()  # as the interpreter needs it

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **kwargs: Any) -> Any:
            with one_at_a_time:
                return call(*args, **kwargs)

        return alone

    with pytest.MonkeyPatch.context() as patch:
        every = "pack_quantized", "unpack_add_quantized", "select_in_blocks", "take_selected"
        for name in (*every, "add_gradient", "round_residual"):
            patch.setattr(fused, name, locked(getattr(fused, name)))
        patch.setattr(fused, "is_supported", lambda *_: on)
        yield


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Count launches, and bytes that programs load, store and add to, each operation by itself."""
    from triton.runtime import interpreter

    moved, builder = Counter[str](), interpreter.InterpreterBuilder

    def counting(name: str, pointers: int, mask: int, times: int) -> Any:
        call = getattr(builder, name)

        def counted(self: Any, *args: Any) -> Any:
            size = args[pointers].get_element_ty().primitive_bitwidth // 8
            moved["bytes"] += (
                times * size * len(numpy.unique(args[pointers].data[args[mask].data != 0]))
            )
            return call(self, *args)

        return counted

    run = interpreter.InterpretedFunction.run

    def launched(*args: Any, **options: Any) -> Any:
        moved["launches"] += 1
        return run(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", launched)
        for name, *places in (
            ("create_masked_load", 0, 1, 1),
            ("create_masked_store", 0, 2, 1),
            ("create_atomic_rmw", 1, 3, 2),
        ):
            patch.setattr(builder, name, counting(name, *places))
        yield moved


exact = st.builds(Quantize, bits=st.sampled_from([8, 4, 3]), block=st.sampled_from(BLOCKS))
two_bits = st.builds(Quantize, bits=st.just(2), block=st.sampled_from(BLOCKS))
numels = st.one_of(
    st.integers(1, 70), st.integers(1, 700), st.sampled_from([1020, 1024, 1025, 2044, 2049])
)
seeds = st.integers(0, 2**31)


def gradient(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return gradient_of(KINDS[seed % len(KINDS)], numel, seed, scale)


def _packed(codec: Codec, values: Tensor, *, on: bool) -> tuple[Tensor, Tensor]:
    """Payloads, which lie apart and were full, and what is left of fp32 [rows, n]."""
    left, size = values.clone(), codec.packed_bytes(values.shape[1])
    room = torch.full((len(values), size + 8), 0xAA, dtype=torch.uint8)
    with kernels(on):
        codec.pack_rows(left, room[:, :size])
    assert (room[:, size:] == 0xAA).all()
    return room[:, :size], left


def _scales(codec: Quantize, payloads: Tensor, numel: int) -> Tensor:
    count = -(-numel // codec.block)
    return payloads[:, : 2 * count].contiguous().view(torch.bfloat16).float()


@given(exact, numels, st.integers(1, 3), seeds, st.sampled_from(SCALES))
@example(Quantize(bits=3), 2044, 2, 3, 1.0)  # what fills up lies behind the last program's bytes
def test_packing_is_bit_equal_to_the_operators(codec, numel, rows, seed, scale) -> None:
    values = torch.stack([gradient(numel, seed + r, scale) for r in range(rows)])
    wanted, wanted_left = _packed(codec, values, on=False)
    got, left = _packed(codec, values, on=True)
    assert torch.equal(left, wanted_left)
    scales = 8 * -(-2 * -(-numel // codec.block) // 8)
    assert torch.equal(_scales(codec, got, numel), _scales(codec, wanted, numel))
    assert torch.equal(got[:, scales:], wanted[:, scales:])


@given(two_bits, numels, seeds, st.sampled_from([1.0, 3e-5, 1e-15, 1e15]))
def test_two_bits_differ_by_a_rounding_of_the_scale(codec, numel, seed, scale) -> None:
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


@given(
    st.one_of(exact, two_bits), numels, st.integers(1, 4), seeds, st.sampled_from([1.0, 8.0, 1e3])
)
def test_unpacking_is_bit_equal_to_the_operators(codec, numel, rows, seed, scale) -> None:
    values = torch.stack([gradient(numel, seed + r) for r in range(rows)])
    payloads, _ = _packed(codec, values, on=False)
    start = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    found = []
    for on in (False, True):
        found.append(start.clone())
        with kernels(on):
            codec.unpack_add_rows(payloads, found[-1], scale)
    assert torch.equal(*found)


@given(
    numels,
    st.sampled_from(["bf16", "int8"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([4.0, 3000.0]),
    seeds,
)
@example(1, "bf16", torch.bfloat16, 4.0, 3895)  # a denormal number
def test_residuals_are_added_and_rounded_as_by_operators(numel, dtype, of, divisor, seed) -> None:
    """In one pass each: up to 10 bytes an entry to add a gradient, 5 or 6 to round."""
    grad = gradient(numel, seed, 1e-3).to(of)
    found = []
    for on in (False, True):
        with kernels(on), counted_bytes() as moved:
            feedback = Feedback(dtype=dtype, seed=1)
            for _ in range(2):
                working = feedback.accumulate("w", grad, 2, divisor)
                feedback.store("w", working.clone())
                feedback.commit()
            (stored,) = feedback.stored().values()
            found.append([working, *stored.tensors])
        assert moved["launches"] == (3 if on else 0)
        assert moved["bytes"] <= on * (22 * numel + 6 * -(-numel // 64))
    assert all(starmap(torch.equal, zip(*found, strict=True)))


@pytest.mark.parametrize(
    ("bits", "kind", "numel"),
    [(1.0, "normal", 16_000), (1.0, "heavy tail", 1500), (0.05, "all octaves", 1030)]
    # two segments of three parts; some of equally large ones; the code is longer than predicted
    + [(0.33, "normal", 4300), (0.33, "constant", 1500), (0.33, "in clusters", 1500)]
    + [
        pytest.param(bits, kind, 2500, marks=pytest.mark.slow)
        for bits in (0.33, 2)
        for kind in KINDS
    ],
)
def test_entropy_coding_is_bit_equal_to_the_operators_in_few_bytes_and_launches(
    bits, kind, numel, monkeypatch
) -> None:
    """A number of launches that depends on nothing, without a host wait."""
    from ds_ckpt.compression import entropy_kernels

    for name, value in (("SEGMENT", 2200), ("PART", 1024), ("SAMPLE", 512)):
        if numel < 16_000 or name == "SAMPLE":
            monkeypatch.setattr(entropy_format, name, value)
            constant = entropy_kernels.tl.constexpr(value)
            monkeypatch.setattr(entropy_kernels, name, constant, raising=False)
    codec, rows = EntropyCoded(bits=bits), 1 if numel == 16_000 else 2
    values = torch.stack([gradient_of(kind, numel, seed) for seed in range(rows)])
    values[:, 0] = torch.inf  # of a step that will be skipped
    found = []
    for on in (False, True):
        left, into = values.clone(), torch.ones(numel)
        payloads = torch.full((rows, codec.packed_bytes(numel)), 0xAA, dtype=torch.uint8)
        found.append((payloads, left, into))
        with kernels(on), counted_bytes() as moved, Gpu(plain=True).watched() as gpu:
            codec.pack_rows(left, payloads)
            codec.unpack_add_rows(payloads, into, 8.0)
    assert all(starmap(torch.equal, zip(*found, strict=True)))
    assert not gpu.waits
    assert gpu.launches.pop("copy_")  # the interpreter's
    assert (moved["launches"], gpu.launches.total()) == (7, 3)
    zeros = payloads.numel() + values.numel() + 4 * entropy_format.BINS
    assert moved["bytes"] + zeros < 40 * numel or rows > 1


@given(st.integers(1, 3000), st.sampled_from([0.004, 0.01, 0.05, 0.3]), st.integers(1, 3), seeds)
def test_maxima_of_blocks_are_those_of_the_operators(numel, density, shards, seed) -> None:
    blocks = blocks_for(numel, density)
    values = torch.stack([gradient(numel, seed + s) for s in range(shards)])
    found = []
    for on in (False, True):
        room = torch.full((shards, blocks.k, blocks.count + 3), 0xAA, dtype=torch.uint8)
        with kernels(on):
            select_in_blocks(values, blocks, room[..., : blocks.count])
        assert (room[..., blocks.count :] == 0xAA).all()
        found.append(room)
    assert torch.equal(*found)


@given(
    st.builds(TopK, density=st.sampled_from([0.01, 0.3]), values=...),
    st.integers(70, 3000),
    seeds,
    st.sampled_from(SCALES),
)
def test_selected_values_and_their_residual_are_those_of_operators(
    codec, numel, seed, scale
) -> None:
    values = torch.stack([gradient(numel, seed + r, scale) for r in range(2)])
    found = (_packed(codec, values, on=on) for on in (False, True))
    assert all(starmap(torch.equal, zip(*found, strict=True)))


@pytest.mark.parametrize("kernels", [(), (lossless._try_kernels,)])
def test_kernels_that_cannot_be_compiled_are_not_used(kernels, monkeypatch, caplog) -> None:
    fused.is_supported.cache_clear()
    device = torch.device("cuda")
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: 1 / 0)
    assert [fused.is_supported(device, *kernels) for _ in range(2)] == [False, False]
    (line,) = caplog.messages
    assert "fused kernels do not run on cuda: ZeroDivisionError" in line
    fused.is_supported.cache_clear()


NARROW = ("maxima", "lengths", "take_selected", "coded sample", "coded add")


def _compile(*what: str, cache: Path) -> Any:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    del environment["TRITON_INTERPRET"]
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.getcwd()])
    command = [sys.executable, "-m", "tests.compile_kernels", *what]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


def test_kernels_compile_for_gpus_and_are_short(tmp_path: Path) -> None:
    """They compile to machine code on any machine; only a GPU shows that it is right."""
    found = _compile("80", "90", "100", cache=tmp_path)
    assert len(found) == 54
    for name, made in found.items():
        kernel = name.rpartition(", sm_")[0]
        assert 80 < made["instructions"] <= made["most"], name
        least = 2 if kernel.startswith("round") else 4
        assert made["wide"] >= least or kernel in NARROW, name
        # a product and a sum are two roundings, as in the operators
        assert (made["fma"] > 0) == ("contracted" in name), name


def test_no_kernel_is_compiled_after_attach(tmp_path: Path) -> None:
    assert _compile("steps", cache=tmp_path) == {"at attach": 29, "in steps": 0}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("8 bits", {"local": 2}),
        (BESIDE, {}),
        ("3 bits", {"residual_dtype": "int8"}),
        ("blocks", {"residual_dtype": "bf16"}),
    ],
    ids=str,
)
def test_an_exchange_with_kernels_is_bit_equal_to_one_without(method, more) -> None:
    found = []
    for on in (False, True):
        with kernels(on):
            found.append(everything_of(method, **more))
    assert all(starmap(torch.equal, zip(*found, strict=True)))
