"""Method `dense`, which sends everything, and the codec of floating-point values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ckpt.compression.base import Codec, Compressor, Method, add_rows
from ds_ckpt.compression.wire import aligned, saturating_cast, section, write_section


class DenseMethod(Method):
    """Lossless: tensors are sent uncompressed, in their own dtype."""

    name = "dense"
    about = (
        "every entry sent once by all-to-all and summed at its owner: lossless, half the bytes of "
        "gloo's reduce-scatter, 16-bit gradients summed in fp32"
    )
    lossless = True

    def build(self) -> Compressor | None:
        """Return None: tensors are sent uncompressed."""
        return None


@dataclass(frozen=True)
class Dense(Codec):
    """Every entry in one floating-point dtype; the rounding error of 16 bits is the residual.

    It sends residuals and held gradients of tensors that are sent uncompressed.
    """

    dtype: torch.dtype = torch.float32

    def describe(self) -> str:
        """Return its name."""
        return "Dense"

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of the values."""
        return aligned(numel * self.dtype.itemsize)

    def pack_rows(self, values: Tensor, out: Tensor) -> None:
        """Cast each row."""
        sent = saturating_cast(values, self.dtype)
        write_section(out, 0, sent)
        if self.dtype == torch.float32:
            values.zero_()
        else:
            values.sub_(sent.float())

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add the values of each payload."""
        add_rows(into, section(payloads, 0, into.numel(), self.dtype).float(), scale)
