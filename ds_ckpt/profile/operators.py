"""What single operators are: launches, attention cores, stored attention weights. Pure.

Their FLOPs and bytes are in `planner/work.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor

_NO_KERNEL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::lift_fresh",
    "aten::_local_scalar_dense",
    "aten::is_same_size",
}
_CORES = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention")


@functools.cache
def launches(operator: Any) -> bool:
    """Whether it computes something: on an accelerator, whether it starts a kernel."""
    schema = operator._schema
    if schema.name in _NO_KERNEL or schema.name.startswith(("prim::", "profiler::")):
        return False
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    view = any(not alias.is_write for alias in aliases)
    return not view and bool(schema.returns or schema.is_mutable)


def stored_attention(operator: Any, args: Any, out: Any) -> tuple[int, int]:
    """Elements of attention weights that a softmax stores, and bytes of those that a core does not.

    A core (flash, memory-efficient, cuDNN) computes them again in its own backward.
    """
    name = operator._schema.name.removeprefix("aten::")
    if name.startswith(_CORES) and "math" not in name:
        query, key = args[0], args[1]
        if query.dim() != 4 or key.dim() != 4:
            return 0, 0
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return 0, int(pairs) * query.element_size()
    if name == "_softmax" and isinstance(out, Tensor) and out.dim() >= 3:
        return math.prod(int(n) for n in out.shape), 0
    return 0, 0
