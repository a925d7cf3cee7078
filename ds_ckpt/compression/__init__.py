"""Compression methods, their error feedback and their wire format.

Arithmetic on tensors, and the settings of each method; no processes, networks or DeepSpeed.
"""

from ds_ckpt.compression.base import Codec as Codec
from ds_ckpt.compression.base import Compressor as Compressor
from ds_ckpt.compression.base import Method as Method
from ds_ckpt.compression.base import add_rows as add_rows
from ds_ckpt.compression.base import methods as methods
from ds_ckpt.compression.base import register as register
from ds_ckpt.compression.base import unregister as unregister
from ds_ckpt.compression.dense import Dense as Dense
from ds_ckpt.compression.dense import DenseMethod
from ds_ckpt.compression.entropy_coded import EntropyCoded as EntropyCoded
from ds_ckpt.compression.error_feedback import Feedback as Feedback
from ds_ckpt.compression.error_feedback import all_finite as all_finite
from ds_ckpt.compression.powersgd import LowRank as LowRank
from ds_ckpt.compression.powersgd import PowerSGD
from ds_ckpt.compression.quantize import Quantize as Quantize
from ds_ckpt.compression.topk import TopK as TopK
from ds_ckpt.compression.wire import aligned as aligned
from ds_ckpt.compression.wire import section as section
from ds_ckpt.deprecation import former_names
from ds_ckpt.fields import Expects as Expects
from ds_ckpt.fields import Removed as Removed

for _method in (DenseMethod, TopK, PowerSGD, Quantize, EntropyCoded):
    register(_method)

__getattr__ = former_names(
    __name__,
    {
        "Gone": (Removed, "Removed"),
        "RowCodec": (Codec, "Codec"),
        "add_scaled": (lambda into, add, scale: into.add_(add, alpha=scale), "Tensor.add_"),
    },
)
