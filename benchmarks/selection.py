"""Cost of choosing and packing a gradient's top entries, one thread, against `torch.topk` alone.

    python benchmarks/selection.py [--elements 8388608] [--density 0.01] [--repeats 9]

Prints nanoseconds of the thread per element (median of the repeats) and the ratio to
`torch.topk(|x|, k)` on the same data, timed in turn with the others. Rows:

    topk                 torch.topk on magnitudes: the selection alone, nothing packed
    select blocks        the rows of the largest entries of each block, nothing packed
    accumulate           residual + gradient / world
    finite               the check that nothing is inf or NaN
    pack S/V             selection S, values V, payload written, residual left in place
    unpack S/V           the receiver's share of it
    whole S/V            accumulate + finite + pack: what a process does to a gradient it does
                         not own, from gradient to payload

Then bits an element, beside the entropy of the positions alone (bits a position costs, and could).

The last block of lines says how much of the energy (sum of squares) each way of forming blocks
sends, on a gradient whose rows differ in size by a log-normal factor.
"""

import argparse
import math
from typing import get_args

import torch
from _timing import Work, interleaved_medians_s
from torch import Tensor

from ds_ckpt.compression import Feedback, TopK, all_finite
from ds_ckpt.compression.topk import ValueFormat, blocks_for, select_in_blocks, value_bytes


def codecs(density: float) -> dict[str, TopK]:
    """By name of the row, selection/values."""
    found = {}
    for values in get_args(ValueFormat):
        found[f"blocks/{values}"] = TopK(density=density, values=values)
    return found


def timed_works(elements: int, density: float) -> dict[str, Work]:
    """Every row of the table, over one gradient of `elements` normal entries."""
    gradient = torch.randn(elements)
    blocks = blocks_for(elements, density)
    offsets = torch.empty(blocks.k, blocks.count, dtype=torch.uint8)
    feedback = Feedback()
    pending = feedback.accumulate("w", gradient, 2)
    feedback.commit()
    feedback.accumulate("w", gradient, 2)
    feedback.commit()
    kept = max(1, round(density * elements))

    works: dict[str, Work] = {
        "topk": lambda: gradient.abs().topk(kept),
        "select blocks": lambda: select_in_blocks(gradient[None], blocks, offsets[None]),
        "accumulate": lambda: feedback.accumulate("w", gradient, 2),
        "finite": lambda: all_finite(pending),
    }
    for row, codec in codecs(density).items():
        if row.endswith("bf16"):
            continue
        payload = torch.empty(codec.packed_bytes(elements), dtype=torch.uint8)
        works[f"pack {row}"] = lambda c=codec, p=payload: c.pack_rows(pending[None], p[None])  # type: ignore[misc]
        works[f"unpack {row}"] = lambda c=codec, p=payload: c.unpack_add_rows(p[None], pending)  # type: ignore[misc]

        def whole(c: TopK = codec, p: Tensor = payload) -> None:
            accumulated = feedback.accumulate("w", gradient, 2)
            assert all_finite(accumulated)
            c.pack_rows(accumulated[None], p[None])
            feedback.commit()

        works[f"whole {row}"] = whole
    return works


def energy_shares(elements: int, density: float, row_length: int = 1024) -> dict[str, float]:
    """Share of the sum of squares that is sent, at the same number of entries."""
    rows = elements // row_length
    gradient = torch.randn(rows, row_length) * torch.randn(rows, 1).exp()
    flat = gradient.view(-1)
    blocks = blocks_for(flat.numel(), density)
    index = torch.empty(blocks.k, blocks.count, dtype=torch.uint8)
    select_in_blocks(flat[None], blocks, index[None])

    def of_runs(values: Tensor) -> float:
        cut = values[: values.numel() // blocks.rows * blocks.rows].view(-1, blocks.rows)
        return float(cut.abs().topk(blocks.k, 1).values.square().sum() / flat.square().sum())

    return {
        "flat top-k": float(
            flat.abs().topk(blocks.sent).values.square().sum() / flat.square().sum()
        ),
        "these blocks": float(flat[blocks.flat_index(index)].square().sum() / flat.square().sum()),
        "random permutation": of_runs(flat[torch.randperm(flat.numel())]),
        "runs of neighbours": of_runs(flat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    elements, density = arguments.elements, arguments.density
    blocks = blocks_for(elements, density)
    medians_s = interleaved_medians_s(timed_works(elements, density), arguments.repeats)
    print(
        f"{elements} elements, density {density}: {blocks.count} blocks of {blocks.rows}, "
        f"{blocks.k} entries each; torch {torch.__version__}, 1 thread"
    )
    for name, median_s in medians_s.items():
        ratio = medians_s["topk"] / median_s
        print(f"{name:20s} {median_s / elements * 1e9:7.2f} ns/element  topk is {ratio:6.1f}x this")
    entropy = -math.log2(density) - (1 / density - 1) * math.log2(1 - density)
    for row, codec in codecs(density).items():
        nbytes, sent = codec.packed_bytes(elements), codec.sent(elements)
        bits = 8 * nbytes / elements
        position = 8 * (nbytes - value_bytes(sent, codec.values)) / sent
        print(
            f"{row:13s} {bits:6.3f} bits/element, {16 / bits:5.1f}x under bf16, "
            f"{position:5.2f} bits a position (any set: {entropy:.2f})"
        )
    for name, share in energy_shares(elements, density).items():
        print(f"energy sent, {name:20s} {share:.3f}")


if __name__ == "__main__":
    main()
