"""Host waits and kernels of one bucket, by method, with 2 and 8 processes, on a pretended device.

    python -m benchmarks.host_waits

A bucket of sixteen 96 x 192 gradients in bf16 with error feedback, second step, counted on process
1 by `tests/pretended_gpu.py`: no accelerator is involved, and nothing is timed. A host wait is what
blocks the host until the device is done; a kernel is an operator that is no view, so that an
operator that launches several counts once. `verdict`: host waits where the step's verdict falls.
`bytes an entry`: what kernels read and wrote, operators in place counted once.
"""

from __future__ import annotations

from collections import Counter

import torch

from ds_ckpt.compression import Compressor, EntropyCoded, Feedback, LowRank, Quantize, TopK
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.lab.validate.virtual import VirtualWorld
from tests.pretended_gpu import Gpu, in_threads

TENSORS, SHAPE = 16, (96, 192)
METHODS: dict[str, Compressor | None] = {
    "uncompressed": None,
    "4 bits": Quantize(bits=4),
    "3 bits": Quantize(bits=3),
    "2 bits": Quantize(bits=2),
    "1 bit": EntropyCoded(bits=1.0),
    "Top-K blocks 1%": TopK(density=0.01),
    "PowerSGD rank 4": LowRank(4),
}


def counts(
    method: Compressor | None, size: int, dtype: ResidualDtype = "fp32"
) -> tuple[Counter[str], Counter[str], Counter[str], float]:
    """Of process 1: host waits and kernels of a bucket, host waits of the verdict, bytes an entry
    that the bucket's kernels move."""
    world = VirtualWorld(size)
    exchanges = [
        AllToAllExchange(t, lambda name, shape: method, Feedback(dtype=dtype, seed=p), Factors())
        for p, t in enumerate(world.transports)
    ]
    gpus = [Gpu(counts=p == 1) for p in range(size)]
    gpu = gpus[1]
    for each, transport in zip(gpus, world.transports, strict=True):
        for name in ("all_to_all", "all_reduce"):
            setattr(transport, name, each.uncounted(getattr(transport, name)))

    def step(p: int) -> None:
        generator = torch.Generator().manual_seed(p)
        tensors = [
            gpus[p].tensor(torch.randn(SHAPE, generator=generator).bfloat16())
            for _ in range(TENSORS)
        ]
        gpus[p].forget()
        exchanges[p].average([f"layer.{i}" for i in range(TENSORS)], tensors, 1024.0)

    for _ in range(2):
        with gpus[0].watched():
            world.run(lambda p: in_threads(gpus[p], step)(p))
        bucket, kernels = gpu.waits.copy(), gpu.launches.copy()
        moved = gpu.moved_bytes / (TENSORS * SHAPE[0] * SHAPE[1])
        gpu.forget()
        with gpu.seeing():
            assert not exchanges[1].nonfinite_buckets
        verdict = gpu.waits.copy()
        for exchange in exchanges:
            exchange.feedback.commit()
            exchange.factors.commit()
            exchange.reset_step()
    return bucket, kernels, verdict, moved


def main() -> None:
    print(f"{TENSORS} tensors of {SHAPE[0]} x {SHAPE[1]}, bf16; fp32 residuals unless said")
    print(f"{'':24}  {'host waits':>19}  {'kernels':>15}  {'verdict':>7}  {'bytes an entry':>14}")
    print(f"{'':24}  {'W=2':>9} {'W=8':>9}  {'W=2':>7} {'W=8':>7}  {'W=8':>7}  {'W=8':>14}")
    rows: list[tuple[str, Compressor | None, ResidualDtype]] = [
        (name, method, "fp32") for name, method in METHODS.items()
    ]
    rows.append(("3 bits, int8 residuals", METHODS["3 bits"], "int8"))
    for name, method, dtype in rows:
        two, eight = counts(method, 2, dtype), counts(method, 8, dtype)
        waits = " ".join(f"{sum(of[0].values()):9}" for of in (two, eight))
        kernels = " ".join(f"{sum(of[1].values()):7}" for of in (two, eight))
        print(
            f"{name:24}  {waits}  {kernels}  {sum(eight[2].values()):7}  {eight[3]:14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
