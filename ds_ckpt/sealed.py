"""Files of tensors that are taken as they were written, or not at all.

Two digests stand in the file's own metadata (BLAKE2b, 16 bytes each): of the rest of the metadata,
and of all tensors' names, types, shapes and bytes. safetensors, no pickle.
"""

from __future__ import annotations

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
_CHANGED = "other bytes than were written: its checksum is not theirs"


class DamagedError(ValueError):
    """What was found in place of a whole file, in words."""


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write all of it, or leave what was at `path`."""
    held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    digest = _new()
    for key, tensor in sorted(held.items()):
        _add(digest, key, tensor)
    sealed = {**metadata, _DIGEST: _of(metadata) + str(digest.hexdigest())}
    with replacing(path) as unfinished:
        save_file(held, str(unfinished), metadata=sealed)


class SealedFile:
    """A file that is opened for reading; nothing but its metadata is verified before `check`.

    Attributes:
        metadata: without the digest.
        keys: of its tensors.

    Raises:
        DamagedError: it cannot be opened, has no digest, or its metadata are not those that were
            written.
    """

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
        if not self._digest.startswith(_of(self.metadata)):
            raise DamagedError(_CHANGED)

    def shape(self, key: str) -> list[int]:
        return list(self._file.get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """By safetensors' name of it."""
        return str(self._file.get_slice(key).get_dtype())

    def tensor(self, key: str) -> Tensor:
        """On the host."""
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def check(self) -> None:
        """Read all of it.

        Raises:
            DamagedError: it is not what was written, or has a value that is not finite.
        """
        digest = _new()
        spoiled = ""
        for key in self.keys:
            tensor = self.tensor(key)
            _add(digest, key, tensor)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                spoiled = spoiled or key
        if self._digest != _of(self.metadata) + str(digest.hexdigest()):
            raise DamagedError(_CHANGED)
        if spoiled:
            raise DamagedError(f"NaN or infinity in {spoiled}")


def _new() -> Any:
    return hashlib.blake2b(digest_size=16)


def _of(metadata: Mapping[str, str]) -> str:
    digest = _new()
    digest.update(json.dumps(sorted(metadata.items())).encode())
    return str(digest.hexdigest())


def _add(digest: Any, key: str, tensor: Tensor) -> None:
    digest.update(json.dumps([key, str(tensor.dtype), [*tensor.shape]]).encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
