"""Compression methods, their error feedback and their wire format.

Arithmetic on tensors, and the settings of each method; no processes, networks or DeepSpeed.
"""

from __future__ import annotations

import warnings
from typing import Any

from ds_ckpt.compression.base import (
    Codec,
    Compressor,
    Method,
    add_rows,
    methods,
    register,
    unregister,
)
from ds_ckpt.compression.dense import Dense, DenseMethod
from ds_ckpt.compression.entropy_coded import EntropyCoded
from ds_ckpt.compression.error_feedback import Feedback, all_finite
from ds_ckpt.compression.powersgd import LowRank, PowerSGD
from ds_ckpt.compression.quantize import Quantize
from ds_ckpt.compression.topk import TopK
from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.fields import Expects, Removed

for _method in (DenseMethod, TopK, PowerSGD, Quantize, EntropyCoded):
    register(_method)

__all__ = [
    "Codec",
    "Compressor",
    "Dense",
    "EntropyCoded",
    "Expects",
    "Feedback",
    "LowRank",
    "Method",
    "Quantize",
    "Removed",
    "TopK",
    "add_rows",
    "aligned",
    "all_finite",
    "methods",
    "register",
    "section",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """Return the object of a deprecated name, with a warning."""
    former: dict[str, tuple[Any, str]] = {
        "Gone": (Removed, "Removed"),
        "RowCodec": (Codec, "Codec"),
        "add_scaled": (lambda into, add, scale: into.add_(add, alpha=scale), "Tensor.add_"),
    }
    if name not in former:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value, instead = former[name]
    message = (
        f"ds_ckpt.compression.{name} is deprecated, and removed in the next release: use {instead}"
    )
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return value
