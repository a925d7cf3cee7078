"""Hashes of tensor values, as int64 scalars on the tensor's device.

A fingerprint is the sum of a tensor's memory read as 64-bit integers, modulo 2**64, equal for equal
bits. Above `WHOLE_BYTES` 256 bytes of every 2,048 are read. It misses changes that cancel in the
sum or lie between the samples of every tensor. A checksum reads all bytes and their places.
"""

import torch
from torch import Tensor, nn

WHOLE_BYTES = 1 << 16
_LINE = 32  # words of 8 bytes
_EVERY = 8


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as int64, padded with zeros. Expanded dimensions are read once."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.contiguous()
    # a single entry may have any stride, which a view of bytes refuses
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if (flat.storage_offset() | flat.numel()) % 8:
        flat = nn.functional.pad(flat, (0, -flat.numel() % 8))
    return flat.view(torch.int64)


def fingerprint(tensor: Tensor) -> Tensor | None:
    """Return the tensor's fingerprint; None if it has no memory to read."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    if not tensor.is_contiguous():  # entries in the order in which they lie
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    words = _words(tensor)
    if words.numel() * 8 > WHOLE_BYTES:
        lines = words.numel() // _LINE
        words = words[: lines * _LINE].view(lines, _LINE)[::_EVERY]
    return words.sum()


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of all words, each times an odd number for its place."""
    words = _words(tensor)
    return (words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum()


class FingerprintCache:
    """Fingerprints of saved tensors; the same tensor several times in a row is read once.

    Views of parameters have none. Bookkeeping of kernels may be uninitialized, so seeds of flash
    attention and flat uint8 work space of cuDNN have none.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None  # held, so that nothing else gets its memory
        self._key: tuple[object, ...] = ()
        self._print: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor's fingerprint, or None if it is not compared."""
        if tensor.layout != torch.strided or isinstance(tensor._base, nn.Parameter):
            return None
        is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        is_work_space = tensor.dtype == torch.uint8 and tensor.dim() == 1
        if not is_number and (is_work_space or tensor.dtype == torch.uint64 or tensor.numel() <= 2):
            return None
        place = (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype)
        if self._last is None or place != self._key:
            self._last, self._key, self._print = tensor.detach(), place, fingerprint(tensor)
        return self._print
