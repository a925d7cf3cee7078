"""Compression methods, their error feedback and their wire format.

Arithmetic on tensors, and the settings of each method; no processes, networks or DeepSpeed.
"""

from __future__ import annotations

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
