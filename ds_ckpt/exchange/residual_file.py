"""One process's file of residuals: safetensors, no pickle.

Format 2. Tensors: `residual/NAME` as it is kept (fp32, bf16 or int8), `scales/NAME` with int8, and
`PART/KEY` of the other parts. Metadata: `format`, `method`, and `about` in JSON:

    steps    committed steps, which the rounding of the next one depends on
    members  the processes whose shards the residuals cover, in this order; null: all
    values   by part, what is not a tensor

Format 1: tensors `NAME`, fp32, whole; no `about`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ds_ckpt.compression.storage import Stored
from ds_ckpt.errors import Problem, StateError
from ds_ckpt.files import replacing

FORMATS = ("1", "2")
_RESIDUAL, _SCALES = "residual/", "scales/"


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        residuals: by parameter name.
        steps, members: see the module.
        parts: by part, its tensors and JSON values by key.
    """

    residuals: Mapping[str, Stored]
    steps: int = 0
    members: tuple[int, ...] | None = None
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write(path: Path, method: str, contents: Contents) -> None:
    """Write the file whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in contents.residuals.items():
        tensors[_RESIDUAL + name] = stored.values
        if stored.scales is not None:
            tensors[_SCALES + name] = stored.scales
    values: dict[str, dict[str, Any]] = {}
    for part, state in contents.parts.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{part}/{key}"] = value
            else:
                values.setdefault(part, {})[key] = value
    about = {"steps": contents.steps, "members": contents.members, "values": values}
    with replacing(path) as unfinished:
        save_file(
            {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()},
            str(unfinished),
            metadata={"format": FORMATS[-1], "method": method, "about": json.dumps(about)},
        )


class SavedFile:
    """A file opened for reading.

    Attributes:
        path: where it is.
        method: what the residuals are of.
        format: the file's; one of another format than `FORMATS` holds nothing that can be read.
        steps, members: see the module.

    Raises:
        StateError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(str(path), framework="pt")
            metadata = self._file.metadata() or {}
            about = json.loads(metadata.get("about", "{}"))
        except Exception as error:  # safetensors raises a type of its own for a damaged file
            raise StateError(
                Problem(
                    where=str(path),
                    found=f"a file that cannot be read ({error})",
                    why="its residuals are part of what training is still owed",
                    remedy="restore the file, or remove all ds_ckpt_residuals_* files to start "
                    "with residuals of 0",
                )
            ) from error
        self.method = str(metadata.get("method"))
        self.format = str(metadata.get("format"))
        members = about.get("members")
        self.steps = int(about.get("steps", 0))
        self.members: tuple[int, ...] | None = None if members is None else tuple(members)
        self._values: dict[str, dict[str, Any]] = about.get("values", {})
        self._prefix = "" if self.format == "1" else _RESIDUAL
        self._keys = set(self._file.keys())

    @property
    def names(self) -> list[str]:
        """Parameters with a residual."""
        start = len(self._prefix)
        return sorted(key[start:] for key in self._keys if key.startswith(self._prefix))

    def shape(self, name: str) -> list[int]:
        """Of a residual's values."""
        return list(self._file.get_slice(self._prefix + name).get_shape())

    def residual(self, name: str) -> Stored:
        """As it was kept, on the host."""
        scales = _SCALES + name
        return Stored(
            self._file.get_tensor(self._prefix + name),
            self._file.get_tensor(scales) if self._prefix and scales in self._keys else None,
        )

    def part(self, part: str) -> dict[str, Any]:
        """Tensors and JSON values by key; empty where the file has none of the part."""
        if self.format == "1":
            return {}
        start = f"{part}/"
        keys = sorted(key for key in self._keys if key.startswith(start))
        tensors = {key[len(start) :]: self._file.get_tensor(key) for key in keys}
        return {**tensors, **self._values.get(part, {})}
