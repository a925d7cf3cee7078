"""Fused Triton kernels over all tensors of a bucket: their arguments and when they are used.

Operator by operator, packing a bucket reads and writes each entry many times, and launches kernels
tensor by tensor. On CUDA devices with Triton two kernels (`triton_kernels`) process all tensors of
a bucket, whatever their number and that of the ranks:

    pack        residual + gradient / divisor; the finite flag; the block's scale; codes into the
                packet; the rest into the residual; the own part into its own tensor
    unpack_add  the payloads of all other ranks and the own part, added in the ranks' order

The operators of each codec run elsewhere, and the kernels are tested against them. A tensor is
described by addresses, one row of a table that is copied to the device ahead of the kernel: nothing
is gathered into one buffer, and the host waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")
TILE = 1024
"""Entries of one program: a multiple of four blocks of any length."""
GRADIENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of gradients that kernels read, and their numbers in them."""


@dataclass
class ToPack:
    """Shards of one size and one tensor, one a row.

    Attributes:
        values: fp32 [rows, n], entries of a row contiguous; receives the residual.
        source: summand of the shape and strides of `values`, maybe `values`; None: zeros.
        grad: second summand, fp32, bf16 or fp16, divided by `divisor`.
        payloads: uint8 [rows, packed_bytes(n)]. None: `own` is written and `values` are set to 0.
        own: fp32 [n], for one row: receives the sum times the loss scale.
    """

    values: Tensor
    source: Tensor | None = None
    grad: Tensor | None = None
    payloads: Tensor | None = None
    own: Tensor | None = None


@dataclass
class ToAdd:
    """Payloads that arrived for one shard.

    Attributes:
        payloads: uint8 [rows, packed_bytes(n)], entries of a row contiguous.
        into: fp32 [n], added to in place.
        own: fp32 [n], added between rows; None: nothing.
    """

    payloads: Tensor
    into: Tensor
    own: Tensor | None = None


class Kernels(Protocol):
    """Kernels of a codec on one device; equal for equal codecs, and hashable."""

    def pack(
        self, shards: Sequence[ToPack], divisor: float = 1.0, loss_scale: float = 1.0
    ) -> Tensor:
        """Fill packets and residuals; return whether all values are finite: bool [] there."""
        ...

    def unpack_add_all(self, shards: Sequence[ToAdd], scale: float = 1.0, before: int = 0) -> None:
        """Add `decoded * scale` of each row in order, `own` after the first `before`.

        All shards have the same number of rows.
        """
        ...


def is_supported(device: torch.device) -> bool:
    """Return whether kernels can run on `device`."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


_trusted: dict[tuple[Hashable, torch.device], bool] = {}


def trusted(what: Hashable, device: torch.device, agrees: Callable[[], bool]) -> bool:
    """Return whether kernels agree with the operators on `device`; checked once.

    If they cannot be compiled or disagree, a warning is logged, and the operators are used.
    """
    if (what, device) not in _trusted:
        try:
            wrong = "" if agrees() else "they do not compute what the operators do"
        except Exception as error:  # whatever a compiler raises
            wrong = f"{type(error).__name__}: {error}"
        _trusted[what, device] = not wrong
        if wrong:
            log.warning(
                "ds_ckpt: fused kernels of %s are not used on %s: %s. Steps are right, and slower",
                *(what, device, wrong),
            )
    return _trusted[what, device]


@dataclass(frozen=True)
class QuantizeKernels:
    """Kernels of `Quantize`.

    For 8, 4 and 3 bits they write the same bits as its operators. For 2 bits sums over a block are
    taken in another order, so a scale may be one bf16 unit off, and with it the code of an entry on
    a border.

    Attributes:
        bits: of a code.
        block: entries that share a scale.
        gaussian: constants of 2 bits: the border in units of the RMS, its least and largest value,
            and the curve and the slope of levels.
    """

    bits: int
    block: int
    gaussian: tuple[float, float, float, float, float]

    def pack(
        self, shards: Sequence[ToPack], divisor: float = 1.0, loss_scale: float = 1.0
    ) -> Tensor:
        """Run `pack_quantized`, once for each dtype of gradients."""
        from ds_ckpt.compression.triton_kernels import pack_quantized

        device = shards[0].values.device
        flagged = torch.zeros((), dtype=torch.int32, device=device)
        by_dtype: dict[torch.dtype, list[list[int]]] = {}
        for shard in shards:
            values, payloads, grad = shard.values, shard.payloads, shard.grad
            if not values.numel():
                continue
            rows, numel = values.shape
            row = [
                *(rows, numel, values.stride(0), values.data_ptr(), _address(shard.source)),
                *(_address(grad), _address(payloads)),
                *(payloads.stride(0) if payloads is not None else 0, _address(shard.own)),
            ]
            by_dtype.setdefault(torch.float32 if grad is None else grad.dtype, []).append(row)
        for dtype, rows_ in by_dtype.items():
            table, programs = _table(rows_, device)
            pack_quantized[(programs,)](
                *(table, len(rows_), flagged, float(divisor), float(loss_scale)),
                **self._options(len(rows_), GRAD=GRADIENTS[dtype]),
            )
        return flagged == 0

    def unpack_add_all(self, shards: Sequence[ToAdd], scale: float = 1.0, before: int = 0) -> None:
        """Run `unpack_add_quantized`."""
        from ds_ckpt.compression.triton_kernels import unpack_add_quantized

        rows_ = [
            [1, s.into.shape[0], s.payloads.stride(0)]
            + [_address(s.payloads), _address(s.into), _address(s.own)]
            for s in shards
            if s.into.numel()
        ]
        if not rows_:
            return
        table, programs = _table(rows_, shards[0].into.device)
        unpack_add_quantized[(programs,)](
            *(table, len(rows_), shards[0].payloads.shape[0], before, float(scale)),
            **self._options(len(rows_)),
        )

    def _options(self, tensors: int, **more: object) -> dict[str, object]:
        return {
            "BITS": self.bits,
            "BLOCK": self.block,
            "TILE": TILE,
            "TENSORS": max(2, 1 << (tensors - 1).bit_length()),
            **dict(zip(("BORDER", "LEAST", "MOST", "CURVE", "SLOPE"), self.gaussian, strict=True)),
            **more,
            # a product and a sum stay two roundings, as they are in the operators
            "enable_fp_fusion": False,
        }


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


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _table(rows: list[list[int]], device: torch.device) -> tuple[Tensor, int]:
    """Return int64 [columns, tensors] on the device, and the number of programs.

    Each row begins with (rows, entries of a row); the tensor's first program is put in front.
    """
    programs, whole = 0, []
    for row in rows:
        whole.append([programs, *row])
        programs += row[0] * -(-row[1] // TILE)
    table = torch.tensor(whole, dtype=torch.int64, device="cpu").t().contiguous()
    if device.type == "cuda":  # torch frees a pinned block when its copy has ended
        table = table.pin_memory().to(device, non_blocking=True)
    return table, programs
