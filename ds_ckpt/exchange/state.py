"""Residuals beside DeepSpeed's checkpoint: one file a rank (law 5).

The same ranks in the same places resume to the bit. With one level, another world size keeps the
sum over ranks of every entry. Residuals are in units of the averaged gradient. So the sum is what
training has not delivered yet, whatever the number of ranks. With two levels, another world size or
another division over nodes starts residuals at zero, with a warning.

With tensor parallelism each slice of the model has its own files, with `mp00of02` in their names.
Slices have different entries under one parameter name. Another number of slices is refused.

A file is safetensors with a digest (`sealed.py`). Tensors: `residual/NAME` as it is kept (fp32,
bf16 or int8), `scales/NAME` with int8, and `PART/KEY` of other state. Metadata: `format`, `method`,
and `about` in JSON:

    process, world  rank of the file
    slice           slice of the model, as in the name; "": all of it
    steps           committed steps, which the rounding of the next one depends on
    members         ranks whose shards the residuals cover, in this order; null: all
    values          by part, values that are no tensors

Names end so that DeepSpeed's conversion to a universal checkpoint, which copies
`*model_states.pt` and reads `*_model_states.pt`, copies residuals.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.compression.base import methods
from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.storage import QuantizedTensor
from ds_ckpt.errors import Problem, StateError, log
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.sealed import DamagedError, SealedFile, write

FORMAT = "3"
_RESIDUAL, _SCALES = "residual/", "scales/"
_ANY = "ds_ckpt_residuals_*_of_*.safetensors*"
_UNFINISHED = "ds_ckpt_residuals_*.unfinished"
_PATTERN = "ds_ckpt_residuals_{prefix}{process:05d}_of_{world:05d}.safetensors.model_states.pt"
_NAME = re.compile(r"ds_ckpt_residuals_(?:(mp\d+of\d+)_)?(\d+)_of_(\d+)\.safetensors.*")
_WHY = "residuals of all ranks are needed: their sum is not delivered yet"
_START_AT_0 = "remove the ds_ckpt_residuals_* files to start with residuals of 0"
Parts = Mapping[str, Mapping[str, Any]]
"""State beside the residuals: tensors and JSON values by part and key."""


@dataclass(frozen=True)
class Contents:
    """A rank's part of a checkpoint: residuals by name, committed steps, and other state."""

    residuals: Mapping[str, QuantizedTensor]
    steps: int = 0
    parts: Parts = field(default_factory=dict)


class SavedFile:
    """A file opened for reading; `steps` and `members` as in the module, `world` from its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model_slice, rank, self.world = _place(path)
        try:
            self._file = SealedFile(path)
            metadata = self._file.metadata
            self.method, self.format = str(metadata.get("method")), str(metadata.get("format"))
            about = json.loads(metadata.get("about", "{}"))
            members = about.get("members")
            self.steps = int(about.get("steps", 0))
            self.members: tuple[int, ...] | None = None if members is None else tuple(members)
            self._values: dict[str, dict[str, Any]] = about.get("values", {})
            if (about.get("process", rank), about.get("world", self.world)) != (rank, self.world):
                raise DamagedError("the file of another rank")
            if about.get("slice", "") != model_slice:
                raise DamagedError(f"the file of slice {about.get('slice')!r} under this name")
        except (ValueError, TypeError, AttributeError) as error:
            raise _refused(path, str(error)) from error
        keys = self._file.keys
        self.names = [k.removeprefix(_RESIDUAL) for k in keys if k.startswith(_RESIDUAL)]

    def check(self) -> None:
        """Read all of the file and raise `StateError` if it is damaged."""
        try:
            self._file.check()
        except DamagedError as error:
            raise _refused(self.path, str(error)) from error

    def numel(self, name: str) -> int:
        """Return the number of entries of a residual."""
        return math.prod(self._file.shape(_RESIDUAL + name))

    def residual(self, name: str) -> QuantizedTensor:
        """Return a residual as it was kept, on the host."""
        keys = [key for key in (_RESIDUAL + name, _SCALES + name) if key in self._file.keys]
        return QuantizedTensor(*map(self._file.tensor, keys))

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return the state beside the residuals."""
        found = {part: dict(values) for part, values in self._values.items()}
        for key in self._file.keys:
            part, _, rest = key.partition("/")
            if f"{part}/" not in (_RESIDUAL, _SCALES):
                found.setdefault(part, {})[rest] = self._file.tensor(key)
        return found


@dataclass
class ResidualFiles:
    """Saves and restores one rank's residuals, and the state of the step.

    A checkpoint of another `method` or other `numels` (by parameter) is refused. `feedback` is None
    if this run has no residuals. `peers` are, by place in a node, the ranks whose shards residuals
    there cover; empty with one level. `model_slice` is this rank's slice of the model as in the
    file's name, "" for all of it. `step` is an `engine.step.StepState`, equal on all ranks at one
    place of their nodes. Ranks of another world load rank 0's.
    """

    feedback: Feedback | None
    method: str
    numels: dict[str, int]
    dp_rank: int
    world: int
    peers: Sequence[tuple[int, ...]] = ()
    step: Any = None
    model_slice: str = ""

    def __post_init__(self) -> None:
        if list(self.peers) == [tuple(range(self.world))]:
            self.peers = ()

    def _members(self, rank: int) -> tuple[int, ...] | None:
        return next((members for members in self.peers if rank in members), None)

    def clear(self, folder: Path) -> None:
        """Remove every residual file of an earlier save under the same tag, unfinished ones too."""
        for path in (*_found(folder), *folder.glob(_UNFINISHED)):
            path.unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        """Write this rank's file; `folder` is the checkpoint's tag folder."""
        if self.feedback is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, stored in self.feedback.stored().items():
            tensors[_RESIDUAL + name] = stored.values
            if stored.scales is not None:
                tensors[_SCALES + name] = stored.scales
        values: dict[str, dict[str, Any]] = {}
        for part, state in (self.step.state_dict() if self.step else {}).items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{part}/{key}"] = value
                else:
                    values.setdefault(part, {})[key] = value
        place = {"process": self.dp_rank, "world": self.world}
        members = self._members(self.dp_rank)
        about: dict[str, Any] = {**place, "slice": self.model_slice, "steps": self.feedback.steps}
        about |= {"members": members, "values": values}
        metadata = {"format": FORMAT, "method": self.method, "about": json.dumps(about)}
        write(folder / _name(self.model_slice, **place), tensors, metadata)

    def read(self, folder: Path, *, is_universal: bool = False) -> Contents | None:
        """Return this rank's part of a checkpoint; None if it has no residuals.

        Each file is checked in full by a rank that takes residuals from it. Raises StateError,
        before anything is loaded, if files are missing, damaged, of several saves, or of another
        method or shape.
        """
        found = _found(folder)
        if self.feedback is None:
            self._warn_without(folder, found)
            return None
        if not found:
            level = logging.WARNING if is_universal else logging.INFO
            log.log(level, "ds_ckpt: %s holds no residuals; they start at 0", folder)
            return None
        slices = {_place(path)[0] for path in found}
        counts = {name[-4:] for name in slices}  # "of02"
        if counts != {self.model_slice[-4:]} or self.model_slice not in slices:
            what = f"residuals of model slices {', '.join(sorted(slices)) or 'none'}"
            remedy = "restore the files of one save, use its tensor-parallel size"
            why = f"this rank holds {self.model_slice or 'whole tensors'}"
            raise _refused(folder, what, why, remedy)
        paths = _complete(folder, [path for path in found if _place(path)[0] == self.model_slice])
        first = self._fitting(paths[0])
        is_same = self._is_same_world(paths, first)
        mine = paths[self.dp_rank :: self.world]  # every file is checked by one rank
        files = [self._fitting(path) for path in mine]
        for file in files:
            if file.steps != first.steps:
                found_steps = f"residuals after {file.steps} steps, in others after {first.steps}"
                raise _refused(file.path, found_steps)
            file.check()
        residuals: dict[str, QuantizedTensor] = {}
        if is_same:
            residuals = {name: files[0].residual(name) for name in files[0].names}
        elif not self.peers and first.members is None:
            residuals = self._summed(files, first)
        else:
            self._warn(
                "%s: with two levels, residuals of other ranks or another division over nodes "
                "are dropped and start at 0",
                folder,
            )
        if residuals and not self.feedback.accumulates:
            residuals = {}
            self._warn("%s holds residuals; without error feedback they drop", folder)
        parts = (files[0] if is_same else first).parts()
        return Contents(residuals, steps=first.steps, parts=parts)

    def restore(self, state: Contents | None) -> None:
        """Apply the result of `read`; None starts every residual at 0."""
        if self.feedback is None:
            return
        state = state or Contents({})
        self.feedback.load_stored(state.residuals, state.steps)
        if self.step is not None:
            self.step.load_state_dict(state.parts)

    def _is_same_world(self, paths: list[Path], first: SavedFile) -> bool:
        """Return whether every rank's residuals cover what its file covers; agreed across ranks."""
        if len(paths) != self.world:
            return False
        if not self.peers and first.members is None:
            return True
        return all(SavedFile(path).members == self._members(i) for i, path in enumerate(paths))

    def _summed(self, files: list[SavedFile], first: SavedFile) -> dict[str, QuantizedTensor]:
        """Return the sum of the files' residuals, by the names of the first file: fp32."""
        total = {
            name: torch.zeros(self.numels[name], dtype=torch.float32, device="cpu")
            for name in first.names
        }
        for file in files:
            if more := set(file.names) - total.keys():
                raise _refused(file.path, f"residuals of {min(more)} too")
            for name in file.names:
                total[name].add_(file.residual(name).decoded())
        return {name: QuantizedTensor(tensor) for name, tensor in total.items()}

    def _fitting(self, path: Path) -> SavedFile:
        """Return the file if it is of this run's method and shapes."""
        file = SavedFile(path)
        if (file.method, file.format) != (self.method, FORMAT):
            found = f"method {file.method}, format {file.format}"
            why = f"this run uses method {self.method}, format {FORMAT}"
            remedy = f"set ds_ckpt.compression.method to {file.method}"
            if file.format != FORMAT:
                remedy = "load it with the version of ds_ckpt that wrote it"
            raise _refused(path, found, why, remedy)
        for name in file.names:
            shards = ShardLayout(self.numels.get(name, 0), file.world)
            wanted = LocalShard(shards, file.members or tuple(range(file.world))).numel
            if name not in self.numels or file.numel(name) != wanted:
                found = f"a saved residual of {name} with {file.numel(name)} elements"
                why = f"the model has {wanted} trainable elements of this name there"
                remedy = "load the checkpoint into the model that it was saved from"
                raise _refused(path, found, why, remedy)
        return file

    def _warn_without(self, folder: Path, found: list[Path]) -> None:
        """Warn that residuals are dropped: this run is plain DeepSpeed, or sends everything."""
        kind = methods().get(self.method)
        if kind is not None and kind.lossless:
            own = [path for path in found if _place(path)[0] == self.model_slice]
            found = [path for path in own if self._fitting(path).names]
        if found:
            self._warn(f"%s holds residuals; method {self.method} drops them", folder)

    def _warn(self, message: str, folder: Path) -> None:
        if self.dp_rank == 0 and self.model_slice[:4] in ("", "mp00"):
            log.warning(f"ds_ckpt: {message}", folder)


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(_ANY) if _NAME.fullmatch(path.name))


def _place(path: Path) -> tuple[str, int, int]:
    """Return slice, rank and world of a file's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return match[1] or "", int(match[2]), int(match[3])


def _name(model_slice: str, process: int, world: int) -> str:
    prefix = model_slice and f"{model_slice}_"
    return _PATTERN.format(prefix=prefix, process=process, world=world)


def _complete(folder: Path, found: list[Path]) -> list[Path]:
    """Return the files of all ranks of one save, by rank."""
    files = {_place(path)[1:]: path for path in found}
    worlds = sorted({world for _, world in files})
    places = [(process, worlds[0]) for process in range(worlds[0])]
    missing = [_name(_place(found[0])[0], p, w) for p, w in places if (p, w) not in files]
    if missing or len(worlds) > 1:
        what = f"residuals of {len(found)} ranks, worlds {worlds}"
        what += f", without {', '.join(missing)}" if missing else ""
        raise _refused(folder, what)
    return [files[place] for place in places]


def _refused(
    where: Path, found: str, why: str = _WHY, remedy: str = "restore the files of one save"
) -> StateError:
    return StateError(Problem(str(where), found, why, f"{remedy}, or {_START_AT_0}"))
