"""Fused Triton kernels over all tensors of a bucket: their arguments and when they are used.

Operator by operator, packing a bucket reads and writes each entry many times, and launches kernels
tensor by tensor. On CUDA devices with Triton one kernel of `triton_kernels` packs all tensors of a
bucket and another adds what arrived, whatever the number of tensors and ranks. The operators of
each codec run elsewhere, and the kernels are tested against them.

A tensor is described by addresses, one row of a table that is copied to the device ahead of the
kernel: nothing is gathered into one buffer, and the host waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")
TILE = 1024
"""Entries of one program: a multiple of four blocks of any length."""


@cache
def is_supported(device: torch.device) -> bool:
    """Return whether kernels run on `device`. They are tried once, when residuals are reserved.

    If they cannot be compiled, a warning is logged, and the operators are used.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        values = torch.zeros(1, TILE, dtype=torch.float32, device=device)
        offsets = torch.zeros(1, 1, 8, dtype=torch.uint8, device=device)
        select_in_blocks(values, offsets, count=8, k=1)
    except Exception as error:  # whatever a compiler raises
        log.warning(
            "ds_ckpt: fused kernels do not run on %s: %s: %s. Steps are slower",
            *(device, type(error).__name__, error),
        )
        return False
    return True


def pack_quantized(shards: Sequence[tuple[Tensor, Tensor]], options: dict[str, Any]) -> None:
    """Quantize values, fp32 [rows, n], to payloads, uint8 [rows, bytes]; leave the residual.

    For 8, 4 and 3 bits this writes the bits that the operators of `Quantize` write. For 2 bits sums
    over a block are taken in another order, so a scale may be one bf16 unit off, and with it the
    code of an entry on a border.

    Args:
        shards: (values, payloads), entries of a row contiguous.
        options: constants of the kernel.
    """
    from ds_ckpt.compression import triton_kernels

    rows = [
        [*values.shape, values.stride(0), values.data_ptr(), out.stride(0), out.data_ptr()]
        for values, out in shards
        if values.numel()
    ]
    _launch(triton_kernels.pack_quantized, rows, shards, (), options)


def unpack_add_quantized(
    shards: Sequence[tuple[Tensor, Tensor]], scale: float, options: dict[str, Any]
) -> None:
    """Add `decoded * scale` of each row of payloads to fp32 [n], row after row.

    Args:
        shards: (payloads, into); all with the same number of payloads.
        scale: factor.
        options: constants of the kernel.
    """
    from ds_ckpt.compression import triton_kernels

    rows = [
        [1, into.numel(), payloads.stride(0), payloads.data_ptr(), into.data_ptr()]
        for payloads, into in shards
        if into.numel()
    ]
    count = shards[0][0].shape[0] if shards else 0
    _launch(triton_kernels.unpack_add_quantized, rows, shards, (count, float(scale)), options)


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


def _launch(
    kernel: Any,
    rows: list[list[int]],
    shards: Sequence[tuple[Tensor, Tensor]],
    arguments: tuple[float, ...],
    options: dict[str, Any],
) -> None:
    """Run a kernel on a table, int64 [columns, tensors], with a row for each tensor.

    A row begins with (rows, entries of a row); the tensor's first program is put in front.
    """
    if not rows:
        return
    programs, table_rows, device = 0, [], shards[0][0].device
    for row in rows:
        table_rows.append([programs, *row])
        programs += row[0] * -(-row[1] // TILE)
    table = torch.tensor(table_rows, dtype=torch.int64, device="cpu").t().contiguous()
    if device.type == "cuda":  # torch frees a pinned block when its copy has ended
        table = table.pin_memory().to(device, non_blocking=True)
    kernel[(programs,)](
        *(table, len(rows), *arguments),
        **options,
        TILE=TILE,
        TENSORS=max(2, 1 << (len(rows) - 1).bit_length()),
        # a product and a sum stay two roundings, as they are in the operators
        enable_fp_fusion=False,
    )
