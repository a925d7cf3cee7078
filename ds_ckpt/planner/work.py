"""What one operator costs: floating-point operations and bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop


def _grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Rows of every group times that group's matrix: 2 m k n over all rows together."""
    return 2 * a.numel() * b[-1]


def _packet(name: str) -> Any:
    return getattr(torch.ops.aten, name, None)


_MORE: dict[Any, Any] = {
    # torch's registry knows the attention cores of GPUs
    _packet("_scaled_dot_product_flash_attention_for_cpu"): lambda q, k, v, *_, **__: sdpa_flop(
        q, k, v
    ),
    _packet("_scaled_dot_product_flash_attention_for_cpu_backward"): (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop(g, q, k, v)
    ),
    _packet("_grouped_mm"): _grouped_flops,
}


NO_WORK = frozenset({torch.ops.prim.device.default})
"""What dispatch modes are asked and no operator is."""


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Multiplications and additions of a product, convolution or attention core; others: 0."""
    packet = func.overloadpacket
    if packet in _MORE:
        return int(_MORE[packet](*map(_shape, args), **kwargs))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def moved_bytes(given: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Bytes of all tensors that go in and come out, each object once."""
    tensors = {id(t): t for t in (*given, *results)}
    return sum(t.numel() * t.element_size() for t in tensors.values())
