"""Files of tensors with checksums: read as they were written, or refused.

The format is safetensors. Its metadata have two digests (BLAKE2b, 16 bytes each). One is of the
other metadata, one of all tensors' names, types, shapes and bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_ckpt.files import replacing

_DIGEST = "digest"
_CHANGED = "other bytes than were written: the checksum does not match"


class DamagedError(ValueError):
    """A file is not readable, or not what was written; the message completes "found ..."."""


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the file completely, or leave the former file at `path`."""
    on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    digest = hashlib.blake2b(digest_size=16)
    for key, tensor in sorted(on_host.items()):
        _add(digest, key, tensor)
    sealed = {**metadata, _DIGEST: _metadata_digest(metadata) + digest.hexdigest()}
    with replacing(path) as unfinished:
        save_file(on_host, str(unfinished), metadata=sealed)


class SealedFile:
    """Open file whose `metadata` are verified, else DamagedError; `check` verifies the tensors."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(str(path), framework="pt")
            self.metadata: dict[str, str] = dict(self._file.metadata() or {})
            self.keys = sorted(self._file.keys())
        except Exception as error:  # safetensors raises a type of its own
            raise DamagedError(f"a file that cannot be read ({error})") from error
        self._digest = self.metadata.pop(_DIGEST, "")
        if not self._digest:
            raise DamagedError("a file without its checksum")
        if not self._digest.startswith(_metadata_digest(self.metadata)):
            raise DamagedError(_CHANGED)

    def shape(self, key: str) -> list[int]:
        """Return a tensor's shape without reading it."""
        return list(self._file.get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        """Read a tensor into host memory."""
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def check(self) -> None:
        """Read all tensors; DamagedError if they are not what was written, or not finite."""
        digest = hashlib.blake2b(digest_size=16)
        not_finite = ""
        for key in self.keys:
            tensor = self.tensor(key)
            _add(digest, key, tensor)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                not_finite = not_finite or key
        if self._digest != _metadata_digest(self.metadata) + digest.hexdigest():
            raise DamagedError(_CHANGED)
        if not_finite:
            raise DamagedError(f"NaN or infinity in {not_finite}")


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    text = json.dumps(sorted(metadata.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _add(digest: Any, key: str, tensor: Tensor) -> None:
    digest.update(json.dumps([key, str(tensor.dtype), [*tensor.shape]]).encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
