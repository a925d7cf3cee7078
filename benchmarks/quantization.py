"""Cost, error and bytes of few-bit values, one thread, against torch's own cast to bf16.

    python benchmarks/quantization.py [--elements 8388608] [--repeats 9]

Three tables. Nanoseconds of the thread per element (median of the repeats, rows timed in turn;
`cast to bf16` is one call on the same data).
RMS of the rounding error over RMS of the data, by bits and block: normal entries; Student's t with
3 degrees of freedom, the heavy tail; rows of 1024 normal entries whose sizes differ by a log-normal
factor; one entry in 20 not zero. Bytes that one process sends to
all others for each gradient of a Llama of hidden size 1024 in a bucket of its own, packet headers
and dense norms in them, against 16 bits an element for the same shards.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
from _timing import Work, interleaved_medians_s
from torch import Tensor

from ds_ckpt.compression import Feedback, Quantize, all_finite
from ds_ckpt.compression.base import aligned
from ds_ckpt.compression.quantize import BITS, BLOCKS
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.rules import MethodSettings, Rules
from ds_ckpt.exchange.transport import HEADER_BYTES


def timed_works(elements: int) -> dict[str, Work]:
    """Every row of the first table, over one gradient of `elements` normal entries."""
    gradient = torch.randn(elements)
    feedback = Feedback()
    for _ in range(2):
        pending = feedback.accumulate("w", gradient, 2)
        feedback.commit()
    works: dict[str, Work] = {"cast to bf16": lambda: gradient.to(torch.bfloat16)}
    for row in BITS:
        codec = Quantize(bits=row)
        payload = torch.empty(codec.packed_bytes(elements), dtype=torch.uint8)

        def pack(c: Quantize = codec, p: Tensor = payload) -> None:
            c.pack(pending.copy_(gradient), p)

        def unpack(c: Quantize = codec, p: Tensor = payload) -> None:
            c.unpack_add(p, pending)

        def whole(c: Quantize = codec, p: Tensor = payload) -> None:
            accumulated = feedback.accumulate("w", gradient, 2)
            assert all_finite(accumulated)
            c.pack(accumulated, p)
            feedback.commit()

        works |= {f"copy + pack {row}": pack, f"unpack {row}": unpack, f"whole {row}": whole}
    works["copy"] = lambda: pending.copy_(gradient)
    return works


def samples(elements: int) -> dict[str, Tensor]:
    rows = elements // 1024
    return {
        "normal": torch.randn(elements),
        "t with 3": torch.distributions.StudentT(3.0).sample(torch.Size([elements])),
        "uneven rows": (torch.randn(rows, 1024) * torch.randn(rows, 1).exp()).view(-1),
        "mostly zero": torch.randn(elements) * (torch.rand(elements) < 0.05),
    }


def relative_error(codec: Quantize, values: Tensor) -> float:
    left = values.clone()
    codec.pack(left, torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8))
    return float(left.norm() / values.norm())


def llama_shapes(hidden: int, layers: int = 24, vocabulary: int = 32_000) -> list[torch.Size]:
    """Weights of a Llama without grouped queries, MLP 2.75 times as wide, head not tied."""
    mlp = hidden * 11 // 4
    block = [(hidden, hidden)] * 4 + [(mlp, hidden)] * 2 + [(hidden, mlp)] + [(hidden,)] * 2
    outside = [(vocabulary, hidden)] * 2 + [(hidden,)]
    return [torch.Size(s) for s in block * layers + outside]


def sent_bytes(settings: MethodSettings, shapes: list[torch.Size], world: int) -> tuple[int, int]:
    """(sent, the same entries in 16 bits) of process 0, dense tensors in bf16."""
    rules = Rules(settings)
    sent = sixteen_bit = 0
    for shape in shapes:
        compressor = rules("", shape)
        codec = compressor.codec if compressor is not None else None
        for owner in range(1, world):
            size = ShardLayout(shape.numel(), world).size(owner)
            sixteen_bit += 2 * size
            packed = aligned(2 * size) if codec is None else codec.packed_bytes(size)
            sent += HEADER_BYTES + packed
    return sent, sixteen_bit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    elements = arguments.elements
    medians_s = interleaved_medians_s(timed_works(elements), arguments.repeats, time.thread_time)
    print(f"{elements} elements, blocks of 64; torch {torch.__version__}, 1 thread")
    for name, median_s in medians_s.items():
        ratio = median_s / medians_s["cast to bf16"]
        print(f"{name:22s} {median_s / elements * 1e9:6.2f} ns/element  {ratio:5.1f} casts")

    data = samples(1 << 20)
    print(f"\n{'RMS error / RMS':28s}" + "".join(f"{name:>13s}" for name in data))
    for bits, block in itertools.product(BITS, BLOCKS):
        errors = [relative_error(Quantize(bits=bits, block=block), x) for x in data.values()]
        row = "".join(f"{error:13.4f}" for error in errors)
        print(f"{bits} bits, block {block:4d}           " + row)

    print("\nLlama, hidden 1024: bytes of one process against 16 bits an element")
    for bits in BITS:
        for block in BLOCKS:
            settings = MethodSettings("quantize", bits=bits, block=block)
            ratios = []
            for world in (2, 8, 64):
                sent, sixteen_bit = sent_bytes(settings, llama_shapes(1024), world)
                ratios.append(f"{world:3d} processes {sixteen_bit / sent:6.3f}x")
            print(f"{bits} bits, block {block:4d}  " + "  ".join(ratios))


if __name__ == "__main__":
    main()
