"""From settings to a working exchange: which codec a parameter gets, and its transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as torch_dist

from ds_ckpt.compression.codec import Codec
from ds_ckpt.compression.feedback import Feedback
from ds_ckpt.compression.quantize import Bits, Block, Quantize
from ds_ckpt.compression.topk import TopK
from ds_ckpt.exchange.exchange import AllToAllExchange, ascending
from ds_ckpt.exchange.ring_order import ring_pieces
from ds_ckpt.exchange.schedule import ScheduledExchange
from ds_ckpt.exchange.transport import TorchTransport


@dataclass(frozen=True)
class ExchangeSettings:
    """What the configuration's `compression` section says, in plain values."""

    method: Literal["dense", "topk", "quantize"]
    density: float = 0.01
    values: Literal["fp32", "bf16", "int8"] = "int8"
    selection: Literal["exact", "blocks"] = "blocks"
    bits: Bits = 4
    block: Block = 64
    error_feedback: bool = True
    start_step: int = 0
    min_numel: int = 4096


class CodecRule:
    """Biases, norms and small tensors travel whole; everything else by the method's codec."""

    def __init__(self, settings: ExchangeSettings) -> None:
        self._settings = settings
        self._codec: Codec | None = None
        if settings.method == "topk":
            self._codec = TopK(settings.density, settings.values, settings.selection)
        elif settings.method == "quantize":
            self._codec = Quantize(settings.bits, settings.block)

    def __call__(self, name: str, shape: torch.Size) -> Codec | None:
        if len(shape) < 2 or shape.numel() < self._settings.min_numel:
            return None
        return self._codec


def build_exchange(
    settings: ExchangeSettings,
    *,
    group: Any,
    all_to_all_single: Callable[..., Any],
    current_step: Callable[[], int],
    at_boundary: Callable[[], bool] | None = None,
) -> tuple[ScheduledExchange, Feedback | None]:
    """The exchange for one data-parallel group, and the residuals that it carries.

    Args:
        group: the process group whose mean is taken.
        all_to_all_single: `torch.distributed`'s function or one that counts around it.
        current_step: optimizer steps so far.
        at_boundary: see `ScheduledExchange`.
    """
    feedback = None
    if settings.method != "dense":
        feedback = Feedback(enabled=settings.error_feedback)
    # stock reduction on gloo adds in its ring's order; adding alike makes `dense` bit-equal to it
    on_gloo = torch_dist.get_backend(group) == "gloo"
    exchange = AllToAllExchange(
        TorchTransport(group, all_to_all_single),
        CodecRule(settings),
        feedback,
        order=ring_pieces if on_gloo else ascending,
        holds=at_boundary is not None,
    )
    scheduled = ScheduledExchange(
        exchange,
        feedback,
        start_step=settings.start_step,
        current_step=current_step,
        at_boundary=at_boundary,
    )
    return scheduled, feedback


def describe(settings: ExchangeSettings, shapes: Iterable[tuple[str, torch.Size, int]]) -> str:
    """One clause on what travels how, from codecs' own sizes.

    Args:
        shapes: name, shape and bytes an element of every trainable parameter.
    """
    rule = CodecRule(settings)
    dense_bytes = packed_bytes = tensors = compressed = 0
    for name, shape, itemsize in shapes:
        codec = rule(name, shape)
        tensors += 1
        compressed += codec is not None
        dense_bytes += shape.numel() * itemsize
        packed_bytes += (
            shape.numel() * itemsize if codec is None else codec.packed_bytes(shape.numel())
        )
    if settings.method == "dense":
        return "gradients whole by all-to-all, summed at the owner"
    share = packed_bytes / max(dense_bytes, 1)
    what, lost = f"{settings.bits}-bit values in blocks of {settings.block}", "rounding errors"
    if settings.method == "topk":
        what = f"Top-K {settings.density:.3g} ({settings.values}, {settings.selection})"
        lost = "dropped entries"
    feedback = "on" if settings.error_feedback else f"off: {lost} are lost"
    return (
        f"{what} on {compressed} of {tensors} tensors from step {settings.start_step}: "
        f"{share:.2%} of the dense gradient bytes, error feedback {feedback}"
    )
