"""Which entries of a gradient travel, in how many bits, and what stays behind.

Maths over tensors, and the settings of each method. Nothing here knows of processes, networks or
DeepSpeed. `register` adds a method; docs/add_a_compressor.md shows how.
"""

from __future__ import annotations

from ds_ckpt.compression.base import (
    Codec,
    Compressor,
    Method,
    RowCodec,
    add_rows,
    add_scaled,
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
    "RowCodec",
    "TopK",
    "add_rows",
    "add_scaled",
    "aligned",
    "all_finite",
    "methods",
    "register",
    "section",
    "unregister",
]
