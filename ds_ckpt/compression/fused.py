"""Fused Triton kernels over the shards of a tensor, and when they are used.

Operator by operator, packing a tensor reads and writes each entry many times. On CUDA devices with
Triton one kernel of `triton_kernels` packs its shards, one a row, and another adds what arrived.
The operators of each codec run elsewhere, and the kernels are tested against them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")
TILE = 1024
"""Entries of one program: a multiple of four blocks of any length."""
# without fusion a product and a sum stay two roundings, as they are in the operators
_OPTIONS = {"TILE": TILE, "enable_fp_fusion": False}


def _select(device: torch.device) -> None:
    values = torch.zeros(1, TILE, dtype=torch.float32, device=device)
    offsets = torch.zeros(1, 1, 8, dtype=torch.uint8, device=device)
    select_in_blocks(values, offsets, count=8, k=1)


@cache
def is_supported(device: torch.device, kernels: Callable[[torch.device], None] = _select) -> bool:
    """Return whether `kernels` run on `device`. They are tried once, when residuals are reserved.

    If they cannot be compiled, a warning is logged, and the operators are used.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        kernels(device)
    except Exception as error:  # whatever a compiler raises
        log.warning(
            "ds_ckpt: fused kernels do not run on %s: %s: %s. Steps are slower",
            *(device, type(error).__name__, error),
        )
        return False
    return True


def pack_quantized(values: Tensor, out: Tensor, options: dict[str, Any]) -> None:
    """Quantize fp32 [rows, n] to uint8 [rows, bytes], entries of a row contiguous.

    For 8, 4 and 3 bits this writes the bits that the operators of `Quantize` write. For 2 bits sums
    over a block are taken in another order. So a scale may be one bf16 unit off, and with it the
    code of an entry on a border. `options` are constants of the kernel.
    """
    from ds_ckpt.compression import triton_kernels

    rows, numel = values.shape
    if values.numel():
        triton_kernels.pack_quantized[(-(-numel // TILE), rows)](
            *(values, out, numel, values.stride(0), out.stride(0)),
            ALIGNED=numel % 16 == 0 and _aligned(values),
            **options,
            **_OPTIONS,
        )


def unpack_add_quantized(
    payloads: Tensor, into: Tensor, scale: float, options: dict[str, Any]
) -> None:
    """Add `decoded * scale` of each row of payloads to fp32 [n], row after row."""
    from ds_ckpt.compression import triton_kernels

    if into.numel():
        triton_kernels.unpack_add_quantized[(-(-into.numel() // TILE),)](
            *(payloads, into, len(payloads), into.numel(), payloads.stride(0), float(scale)),
            ALIGNED=into.numel() % 16 == 0 and _aligned(into),
            **options,
            **_OPTIONS,
        )


def add_gradient(
    stored: Tensor, scales: Tensor | None, gradient: Tensor, divisor: float, out: Tensor, block: int
) -> None:
    """Write `stored * scales + gradient / divisor`, all [n]: bf16 or int8, any dtype, fp32."""
    from ds_ckpt.compression import triton_kernels

    tensors, numel = [t if t is None else _in_bits(t) for t in (stored, scales)], out.numel()
    if numel:
        triton_kernels.add_gradient[(-(-numel // TILE),)](
            *(*tensors, _in_bits(gradient), out, numel, float(divisor)),
            BLOCK=block,
            ALIGNED=numel % 16 == 0 and all(map(_aligned, (stored, gradient, out))),
            **_OPTIONS,
        )


def round_residual(
    working: Tensor, values: Tensor, scales: Tensor | None, seed: int, options: dict[str, Any]
) -> None:
    """Round fp32 [n] to bf16 or int8 with scales, as the operators of `storage` do."""
    from ds_ckpt.compression import triton_kernels

    tensors, numel = [t if t is None else _in_bits(t) for t in (values, scales)], working.numel()
    if numel:
        triton_kernels.round_residual[(-(-numel // TILE),)](
            *(working, *tensors, numel, seed),
            ALIGNED=numel % 16 == 0 and _aligned(working) and _aligned(values),
            **options,
            **_OPTIONS,
        )


def _in_bits(values: Tensor) -> Tensor:
    """View bf16 as int16: Triton's interpreter computes without bf16."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def _aligned(values: Tensor) -> bool:
    """Return whether all rows begin at multiples of 16 bytes."""
    starts = [values.data_ptr(), *(n * values.itemsize for n in values.stride()[:-1])]
    return all(start % 16 == 0 for start in starts)


def select_in_blocks(values: Tensor, offsets: Tensor, count: int, k: int) -> None:
    """Run `block_maxima` on fp32 [shards, n] in `count` blocks: the same offsets as `topk`'s."""
    from ds_ckpt.compression.triton_kernels import block_maxima

    (shards, numel), columns = values.shape, 32
    rows = -(-numel // count)
    block_maxima[(-(-count // columns), shards)](
        *(values, offsets, numel, count, rows, values.stride(0), *offsets.stride()[:2]),
        K=k,
        ROWS=max(2, 1 << (rows - 1).bit_length()),
        COLUMNS=columns,
    )


def take_selected(values: Tensor, out: Tensor, count: int, start: int, sent: int, fmt: str) -> None:
    """Write the values of `sent` entries, whose offsets are in `out` from byte `start` on.

    fp32 [shards, n], of which the residual is left, to uint8 [shards, bytes] of zeros.
    """
    from ds_ckpt.compression.triton_kernels import take_selected

    take_selected[(-(-sent // TILE), len(values))](
        *(values, out, sent, count, start, values.stride(0), out.stride(0)),
        FORMAT=fmt,
        BLOCK=64,
        **_OPTIONS,
    )
