"""Residuals between steps: fp32, bf16, or int8 with a bf16 scale per 64 entries.

Rounding to nearest would lose every gradient below half a unit of the residual, step after step.
Rounding here is stochastic: x goes to the unit above it with the probability of its share of the
way. Each entry is within one unit, and right on average:

    bf16   add 16 random bits to the fp32 pattern and clear its lower 16: exactly unbiased
    int8   scale = max |block| / 126.99, rounded up to bf16; code = floor(x / scale + u)

The random numbers are a hash of (seed, step, name, rounding within the step, entry). They need no
state, and are the same on every device and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_ckpt.compression import fused
from ds_ckpt.compression.base import on_host

ResidualDtype = Literal["fp32", "bf16", "int8"]
TORCH_DTYPES: dict[ResidualDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
SCALE_BLOCK = 64
_BF16_MAX = torch.finfo(torch.bfloat16).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# A little below 127: the product with a rounded reciprocal must not pass 127 + u.
_REACH = 126.99
_CHUNK, _CHUNK_ACCELERATOR = 1 << 16, 1 << 24
"""Entries processed at a time: few enough for a CPU's cache; on accelerators scratch is bounded."""
_STEP, _MIX = 0x9E3779B1, 0x2C1B3C6D
"""Odd 32-bit multipliers of the hash."""
_TO_HALF = 2.0**-32 * (1 - 2.0**-16)
"""int32 to (-0.5, 0.5), in fp32 without the ends: 0 stays 0."""


@dataclass(frozen=True)
class QuantizedTensor:
    """One stored residual: fp32, bf16 or int8 [n]; with int8 bf16 scales [ceil(n / 64)]."""

    values: Tensor
    scales: Tensor | None = None

    @classmethod
    def empty(
        cls, numel: int, dtype: ResidualDtype, device: torch.device, *, pin_memory: bool = False
    ) -> QuantizedTensor:
        """Allocate `numel` entries."""
        values = torch.empty(numel, dtype=TORCH_DTYPES[dtype], device=device, pin_memory=pin_memory)
        if dtype != "int8":
            return cls(values)
        count = -(-numel // SCALE_BLOCK)
        scales = torch.empty(count, dtype=torch.bfloat16, device=device, pin_memory=pin_memory)
        return cls(values, scales)

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.values.numel()

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Values, and scales if there are any."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    def copy_(self, source: QuantizedTensor) -> None:
        """Copy `source`, asynchronously from and to pinned memory."""
        for target, tensor in zip(self.tensors, source.tensors, strict=True):
            target.copy_(tensor, non_blocking=True)

    def decoded(self, out: Tensor | None = None) -> Tensor:
        """Return all entries in fp32 [n], written to `out`, which may be on another device."""
        if out is None:
            out = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        values, *rest = (t.to(out.device, non_blocking=True) for t in self.tensors)
        for start, stop in _chunks(self.numel, out.device):
            part = out[start:stop].copy_(values[start:stop])
            for scales in rest:
                _multiply_blocks_(
                    part, scales[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)].float()
                )
        return out

    def encode(self, working: Tensor, key: str) -> None:
        """Round fp32 [n], on the same device; `key` seeds the random numbers."""
        if self.values.dtype == torch.float32:
            self.values.copy_(working)
            return
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
        numel, device = working.numel(), working.device
        if fused.is_supported(device):
            constants = {"STEP": _signed(_STEP), "MIX": _MIX, "REACH": _REACH, "TO_HALF": _TO_HALF}
            options = {"BLOCK": SCALE_BLOCK, **constants}
            fused.round_residual(working, self.values, self.scales, _signed(seed), options)
            return
        chunk = min(numel, _CHUNK if on_host(device) else _CHUNK_ACCELERATOR)
        counter = torch.arange(chunk, dtype=torch.int32, device=device).mul_(_signed(_STEP))
        for start, stop in _chunks(numel, device):
            x = working[start:stop]
            random = counter[: stop - start] + _signed(seed + start * _STEP)
            random.bitwise_xor_(random >> 15).mul_(_MIX)
            if self.scales is None:
                y = x.clamp(-_BF16_MAX, _BF16_MAX)
                random = random.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
                y.view(torch.int32).add_(random).bitwise_and_(-(1 << 16))
            else:
                blocks = _blocks(x)
                scales = _round_up(torch.maximum(blocks.amax(1), -blocks.amin(1)).div_(_REACH))
                self.scales[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)].copy_(scales)
                y = blocks.mul(scales.reciprocal_().unsqueeze(1)).view(-1)[: stop - start]
                y.add_(random, alpha=_TO_HALF).add_(0.5).floor_()
            self.values[start:stop].copy_(y)


def entry_bytes(dtype: ResidualDtype) -> float:
    """Return the bytes of one entry, scales included."""
    scale_bytes = torch.bfloat16.itemsize / SCALE_BLOCK if dtype == "int8" else 0.0
    return TORCH_DTYPES[dtype].itemsize + scale_bytes


def _chunks(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    size = _CHUNK if on_host(device) else _CHUNK_ACCELERATOR
    return ((start, min(start + size, numel)) for start in range(0, numel, size))


def _blocks(values: Tensor) -> Tensor:
    """Return [blocks, SCALE_BLOCK]; the last block is filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)


def _multiply_blocks_(values: Tensor, scales: Tensor) -> None:
    whole = values.numel() // SCALE_BLOCK * SCALE_BLOCK
    values[:whole].view(-1, SCALE_BLOCK).mul_(scales[: whole // SCALE_BLOCK].unsqueeze(1))
    values[whole:].mul_(scales[-1:])


def _round_up(scales: Tensor) -> Tensor:
    """Round to the next bf16 value, in place; at least the smallest whose inverse is finite."""
    bits = scales.clamp_(min=_SMALLEST_SCALE).view(torch.int32)
    bits.add_((1 << 16) - 1).bitwise_and_(-(1 << 16))
    return scales


def _signed(number: int) -> int:
    """Return the int32 with the lower 32 bits of `number`."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
