"""Pure maths over tensors: which entries travel, in how many bits, and what stays behind.

Imports torch alone. Nothing here knows of processes, networks or DeepSpeed.
"""

from __future__ import annotations

from ds_ckpt.compression.codec import Codec, Cost, Dense, ValueFormat
from ds_ckpt.compression.feedback import Feedback, all_finite
from ds_ckpt.compression.quantize import Quantize
from ds_ckpt.compression.topk import Selection, TopK

__all__ = [
    "Codec",
    "Cost",
    "Dense",
    "Feedback",
    "Quantize",
    "Selection",
    "TopK",
    "ValueFormat",
    "all_finite",
]
