"""Host waits, kernels and memory traffic by method, on a pretended device, with 2 and 8 ranks.

    TRITON_INTERPRET=1 PYTHONPATH=.:tests:tests/unit python benchmarks/host_waits.py

A bucket is the second one of rank 1. A host wait blocks the host until the device is done. A kernel
is an operator that is no view: one that launches several counts once. Changes of weights are those
of the third step, with the forward behind it; bytes are of the compute stream at the step's end.
"""

from typing import Any

import test_accelerator  # type: ignore[import-not-found]
import test_streams  # type: ignore[import-not-found]

from ds_ckpt.compression import LowRank, Quantize, TopK, fused
from ds_ckpt.weights import changes, lossless_kernels

SHAPES = ((96, 192),) * 16
CHUNK = 1 << 11


def bucket(method: str, size: int, dtype: str) -> tuple[int, int, float, int]:
    """Return host waits, kernels, bytes per entry, and host waits of the step's commit."""
    ranks = test_accelerator.OnGpus(size, method, residual_dtype=dtype)
    gpu = ranks.gpus[1]
    for step in range(2):
        ranks.reduce(test_accelerator._gradients(size, step, SHAPES), 1024.0)
        moved = gpu.moved.total() / sum(rows * columns for rows, columns in SHAPES)
        counted = gpu.waits.total(), gpu.launches.total(), moved
        ranks.verdict()
    return *counted, gpu.waits.total()


def show(name: str, two: tuple[Any, ...], eight: tuple[Any, ...]) -> None:
    """Print a row."""
    pairs = [f"{a:6} {b:6}" for a, b in list(zip(two, eight, strict=True))[:2]]
    print(f"{name:24} {pairs[0]}  {pairs[1]} {eight[3]:9} {eight[2]:15.1f}", flush=True)


print("16 tensors of 96 x 192, bf16; fp32 residuals unless said. W: ranks")
print(f"{'':24}    host waits        kernels  at commit  bytes per entry")
print(f"{'':24}    W=2    W=8     W=2    W=8        W=8              W=8")
methods: dict[str, Any] = {
    "uncompressed": None,
    **{f"{bits} bits": Quantize(bits=bits) for bits in (4, 3, 2)},
}
methods |= {"Top-K blocks 1%": TopK(density=0.01), "PowerSGD rank 4": LowRank(4)}
test_accelerator.METHODS |= methods
for method, dtype in [*((name, "fp32") for name in methods), ("3 bits", "int8")]:
    show(f"{method}, {dtype}", *(bucket(method, size, dtype) for size in (2, 8)))
print("Changes of weights, four chunks per rank")
changes.CHUNK = CHUNK
for name in ("encode", "find_ones", "decode"):
    kernel = test_streams.InterpretedKernel(getattr(lossless_kernels, name))
    setattr(lossless_kernels, name, kernel)
for kind, (codec, has_kernels) in test_streams.KINDS.items():
    fused.is_supported = lambda *_, found=has_kernels: found  # type: ignore[assignment]
    hosts = [test_streams.trained_hosts(codec, [CHUNK] * 4, size)[1] for size in (2, 8)]
    counted = [(h.gpu.waits, h.gpu.launches, h.moved / (4 * CHUNK)) for h in hosts]
    show(kind, *((waits.total(), kernels.total(), moved, 0) for waits, kernels, moved in counted))
