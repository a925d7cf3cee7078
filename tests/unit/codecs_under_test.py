"""What the tests of every codec do with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ckpt.compression import Codec, Feedback


def round_trip(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(payload, what was left, what arrived)."""
    left = values.clone()
    payload = torch.full((codec.packed_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.pack_rows(left[None], payload[None])
    arrived = torch.zeros_like(values)
    codec.unpack_add_rows(payload[None], arrived)
    return payload, left, arrived


def every_byte_is_written(codec: Codec, values: Tensor) -> bool:
    """Whatever the buffer held before, the payload is the same."""
    packed = []
    for filler in (0x00, 0xFF):
        payload = torch.full((codec.packed_bytes(values.numel()),), filler, dtype=torch.uint8)
        codec.pack_rows(values.clone()[None], payload[None])
        packed.append(payload)
    return torch.equal(*packed)


def feedback_delivers(codec: Codec, values: Tensor, steps: int) -> None:
    """The same gradient step after step: its mean arrives, and with what is left all of it."""
    feedback, total = Feedback(), torch.zeros_like(values)
    payload = torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8)
    for _ in range(steps):
        pending = feedback.accumulate("w", values, 1)
        codec.pack_rows(pending[None], payload[None])
        codec.unpack_add_rows(payload[None], total)
        feedback.commit()
    residual = feedback.state_dict()["w"]
    assert (total + residual - steps * values).norm() < 1e-4 * steps * values.norm()
    assert (total / steps - values).norm() < 0.15 * values.norm()
