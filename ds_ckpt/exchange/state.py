"""Residuals beside DeepSpeed's checkpoint: one file a process (law 5).

The same processes in the same places resume bit-exactly. Another world size or another division of
processes over hosts keeps the sum over processes of every entry: residuals are in units of the
averaged gradient, so that sum is what training is still owed whatever the number of processes.

With two levels a process keeps a local shard: the entries that its `members` own. The k-th member
of an old one hands its entries to the (k mod members)-th member of whichever new one they lie in.
Sums are in fp32 and stay so until the next step rounds them.

A file is safetensors with a digest (`sealed.py`). Tensors: `residual/NAME` as it is kept (fp32,
bf16 or int8), `scales/NAME` with int8, and `PART/KEY` of the other parts. Metadata: `format`,
`method`, and `about` in JSON:

    process, world  whose file it is
    steps           committed steps, which the rounding of the next one depends on
    members         the processes whose shards the residuals cover, in this order; null: all
    values          by part, what is not a tensor

Names end as those of DeepSpeed's own files with model states, but for a dot: its conversion to a
universal checkpoint copies `*model_states.pt` and reads `*_model_states.pt`. So residuals travel
with it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_ckpt.compression.base import methods
from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.storage import BLOCK, QuantizedTensor
from ds_ckpt.errors import Problem, StateError
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.sealed import DamagedError, SealedFile, write

log = logging.getLogger("ds_ckpt")
FORMAT = "3"
_RESIDUAL, _SCALES = "residual/", "scales/"
_TRAVELS = ".model_states.pt"
_ANY = "ds_ckpt_residuals_*_of_*.safetensors*"
_UNFINISHED = "ds_ckpt_residuals_*.unfinished"
_PATTERN = f"ds_ckpt_residuals_{{process:05d}}_of_{{world:05d}}.safetensors{_TRAVELS}"
_NAME = re.compile(r"ds_ckpt_residuals_(\d+)_of_(\d+)\.safetensors.*")
_OWED = "the sum of residuals over all processes is what training is still owed"
_START_AT_0 = "remove the ds_ckpt_residuals_* files to start with residuals of 0"


@dataclass(frozen=True)
class Contents:
    """What a process takes from a checkpoint.

    Attributes:
        residuals: by parameter name.
        steps: see the module.
        parts: by part, its tensors and JSON values by key.
    """

    residuals: Mapping[str, QuantizedTensor]
    steps: int = 0
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class SavedFile:
    """A file opened for reading.

    Attributes:
        process, world: by its name.
        method: what the residuals are of.
        format: another than `FORMAT` holds nothing that can be read.
        steps, members: see the module.

    Raises:
        StateError: the file is damaged, or another's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process, self.world = _place(path)
        try:
            self._file = SealedFile(path)
            metadata = self._file.metadata
            self.method, self.format = str(metadata.get("method")), str(metadata.get("format"))
            about = json.loads(metadata.get("about", "{}"))
            members = about.get("members")
            self.steps = int(about.get("steps", 0))
            self.members: tuple[int, ...] | None = None if members is None else tuple(members)
            self._values: dict[str, dict[str, Any]] = about.get("values", {})
            found = (about.get("process", self.process), about.get("world", self.world))
            if found != (self.process, self.world):
                raise DamagedError(f"the file of process {found[0]} of {found[1]} under this name")
        except (ValueError, TypeError, AttributeError) as error:
            raise self.damaged(error) from error

    def damaged(self, error: Exception) -> StateError:
        """What to do about it, too."""
        found = str(error) if isinstance(error, DamagedError) else f"a broken header ({error})"
        return _refused(self.path, found, _OWED, "restore the file")

    def check(self) -> None:
        """Read all of it.

        Raises:
            StateError: it is damaged.
        """
        try:
            self._file.check()
        except DamagedError as error:
            raise self.damaged(error) from error

    @property
    def names(self) -> list[str]:
        """Parameters with a residual."""
        return [k.removeprefix(_RESIDUAL) for k in self._file.keys if k.startswith(_RESIDUAL)]

    def shape(self, name: str) -> list[int]:
        """Of a residual's values; of its scales where they are not those of the values."""
        values, scales = self._file.shape(_RESIDUAL + name), _SCALES + name
        blocks = (
            [-(-math.prod(values) // BLOCK)] if self._file.dtype(_RESIDUAL + name) == "I8" else [0]
        )
        found = self._file.shape(scales) if scales in self._file.keys else [0]
        return values if found == blocks else found

    def residual(self, name: str) -> QuantizedTensor:
        """As it was kept, on the host."""
        scales = _SCALES + name
        return QuantizedTensor(
            self._file.tensor(_RESIDUAL + name),
            self._file.tensor(scales) if scales in self._file.keys else None,
        )

    def part(self, part: str) -> dict[str, Any]:
        """Tensors and JSON values by key; empty where the file has none of the part."""
        start = f"{part}/"
        keys = [key for key in self._file.keys if key.startswith(start)]
        tensors = {key[len(start) :]: self._file.tensor(key) for key in keys}
        return {**tensors, **self._values.get(part, {})}


class Stateful(Protocol):
    """State beside the residuals, equal on all that share a place in a host: factors, decisions."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, and values that JSON holds, by key."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is held; empty starts anew.

        From a checkpoint of other processes or places every process gets what process 0 saved:
        what does not fit there must be left out when it is used.
        """


class ResidualFiles:
    """Saves and restores one process's residuals, and what goes with them.

    Args:
        feedback: holds the residuals; None where this run has none, and then a save only clears
            and a load only says what it leaves behind.
        method: goes into the file; a checkpoint of another method is refused.
        numels: elements of each trainable parameter, by name.
        dp_rank: this process of `world`.
        members: the processes whose shards this process's residuals cover, itself among them, in
            that order. None: all, which is one level.
        parts: other state by the name that it has in the file.
    """

    what = "residuals"
    anew = "residuals then start at 0"
    not_converted: str | None = (
        "ds_ckpt: the universal checkpoint %s holds no residuals; they start at 0. If it was made "
        "from one that an earlier version of ds_ckpt saved, copy the ds_ckpt_residuals_* files of "
        "that one into it"
    )

    def __init__(
        self,
        feedback: Feedback | None,
        *,
        method: str,
        numels: dict[str, int],
        dp_rank: int,
        world: int,
        members: tuple[int, ...] | None = None,
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._feedback = feedback
        self._method = method
        self._numels = numels
        self._dp_rank = dp_rank
        self._world = world
        self._members = None if members == tuple(range(world)) else members
        self._parts = dict(parts or {})
        assert not self._parts.keys() & {"residual", "scales"}, "names of the file's own"

    @property
    def keeps(self) -> bool:
        """Whether this run has residuals."""
        return self._feedback is not None

    def clear(self, folder: Path) -> None:
        """Remove every residual file of an earlier save under the same tag, broken-off ones too."""
        for path in (*_found(folder), *folder.glob(_UNFINISHED)):
            path.unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        """Write this process's file; `folder` is the checkpoint's tag folder."""
        if self._feedback is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, stored in self._feedback.stored().items():
            tensors[_RESIDUAL + name] = stored.values
            if stored.scales is not None:
                tensors[_SCALES + name] = stored.scales
        values: dict[str, dict[str, Any]] = {}
        for part, state in self._parts.items():
            for key, value in state.state_dict().items():
                if isinstance(value, Tensor):
                    tensors[f"{part}/{key}"] = value
                else:
                    values.setdefault(part, {})[key] = value
        place = {"process": self._dp_rank, "world": self._world}
        about = {**place, "steps": self._feedback.steps, "members": self._members, "values": values}
        metadata = {"format": FORMAT, "method": self._method, "about": json.dumps(about)}
        write(folder / _PATTERN.format(**place), tensors, metadata)

    def read(self, folder: Path) -> Contents | None:
        """This process's share of what was saved; None where the checkpoint has none.

        Each file is checked as a whole by a process that takes residuals from it.

        Raises:
            StateError: files are missing or damaged, not of one save, or are of another method or
                of other shapes. Nothing has been loaded then.
        """
        found = _found(folder)
        if self._feedback is None:
            self._without(folder, found)
            return None
        if not found:
            log.info("ds_ckpt: %s holds no residuals (plain DeepSpeed?); they start at 0", folder)
            return None
        paths = _complete(folder, found)
        first = self._fitting(paths[0])
        own = self._fitting(paths[self._dp_rank]) if len(paths) == self._world else first
        if len(paths) == self._world and own.members == self._members:
            _of_one_save(own, first)
            own.check()
            residuals = {name: own.residual(name) for name in own.names}
        else:
            own = first
            residuals = {
                n: QuantizedTensor(total) for n, total in self._summed(paths, first).items()
            }
        if residuals and not self._feedback.accumulates:
            residuals = {}
            if self._dp_rank == 0:
                log.warning("ds_ckpt: %s holds residuals; without error feedback they drop", folder)
        parts = {n: own.part(n) for n in self._parts}
        return Contents(residuals, steps=own.steps, parts=parts)

    def restore(self, state: Contents | None) -> None:
        """Put `read`'s result in force; None starts every residual at 0."""
        if self._feedback is None:
            return
        state = state or Contents({})
        self._feedback.load_stored(state.residuals, state.steps)
        for name, part in self._parts.items():
            part.load_state_dict(state.parts.get(name, {}))

    def _summed(self, paths: list[Path], first: SavedFile) -> dict[str, Tensor]:
        """By name this process's part of the sum of the files' residuals: fp32."""
        world = len(paths)
        members = self._members or tuple(range(self._world))
        place = members.index(self._dp_rank)
        total: dict[str, Tensor] = {}
        # Every process must hold the same names: an exchange lays its packets out by them. Without
        # members all files have them; with, they may differ in what they have left.
        files = paths if first.members is not None else paths[:1]
        for name in sorted({name for path in files for name in self._fitting(path).names}):
            numel = self._local(name, self._world, self._members).numel
            total[name] = torch.zeros(numel, dtype=torch.float32, device="cpu")
        if first.members is None:  # process and place are the same, and only the own are opened
            paths = paths[place :: len(members)]
        for path in paths:
            file = self._fitting(path)
            _of_one_save(file, first)
            if (file.members or range(world)).index(file.process) % len(members) != place:
                continue
            file.check()
            for name in file.names:
                if name not in total:
                    found = f"a residual of {name}, which {first.path.name} has none of"
                    raise _refused(path, found, _OWED, "restore the files of one save")
                old = self._local(name, world, file.members)
                new = self._local(name, self._world, self._members)
                total[name].add_(_taken(file.residual(name).decoded(), old, new))
        return total

    def _local(self, name: str, world: int, members: tuple[int, ...] | None) -> LocalShard:
        shards = ShardLayout(self._numels[name], world)
        return LocalShard(shards, members or tuple(range(world)))

    def _fitting(self, path: Path) -> SavedFile:
        """The file, if it is of this run's method and shapes."""
        file = SavedFile(path)
        readable = file.format == FORMAT
        if file.method != self._method or not readable:
            remedy = f"set ds_ckpt.compression.method to {file.method}" if readable else ""
            found = f"method {file.method}, format {file.format}"
            why = f"this run uses method {self._method}, format {FORMAT}"
            raise _refused(path, found, why, remedy, other_tags=False)
        problems = []
        for name in file.names:
            shape, why = file.shape(name), "the model has no trainable parameter of this name"
            if name in self._numels:
                want = self._local(name, file.world, file.members).numel
                if shape == [want]:
                    continue
                why = f"the model's parameter has {self._numels[name]} elements"
                if file.members is not None:
                    why += f", {want} of them in this process's local shard"
            problems.append(
                Problem(
                    where=name,
                    found=f"a saved residual of {shape} elements in {path.name}",
                    why=why,
                    remedy="load the checkpoint into the model that it was saved from, or "
                    + _START_AT_0,
                )
            )
        if problems:
            raise StateError(problems)
        return file

    def _without(self, folder: Path, found: list[Path]) -> None:
        """This run has no residuals: as with DeepSpeed alone, or with everything sent."""
        kind = methods().get(self._method)
        if kind is not None and kind.lossless:
            found = [path for path in found if self._fitting(path).names]
        if found and self._dp_rank == 0:
            text = "ds_ckpt: %s holds residuals; method %s drops them"
            log.warning(text, folder, self._method)


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(_ANY) if _NAME.fullmatch(path.name))


def _place(path: Path) -> tuple[int, int]:
    """Process and world, by a file's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _complete(folder: Path, found: list[Path]) -> list[Path]:
    """The files of all processes of one save, by process."""
    files = {_place(path): path for path in found}
    worlds = sorted({world for _, world in files})
    places = [(process, worlds[0]) for process in range(worlds[0])]
    missing = [_PATTERN.format(process=p, world=w) for p, w in places if (p, w) not in files]
    if missing or len(worlds) > 1:
        what = f"residuals of {len(found)} processes, worlds {worlds}"
        what += f", without {', '.join(missing)}" if missing else ""
        raise _refused(folder, what, _OWED, "restore the missing files")
    return [files[place] for place in places]


def _of_one_save(file: SavedFile, first: SavedFile) -> None:
    if file.steps != first.steps:
        found = f"residuals after {file.steps} steps beside {first.path.name} after {first.steps}"
        raise _refused(file.path, found, _OWED, "restore the files of one save")


def _refused(
    where: Path, found: str, why: str, remedy: str = "", *, other_tags: bool = True
) -> StateError:
    """With what can be done instead: another checkpoint beside it, or residuals of 0."""
    folder = where if where.is_dir() else where.parent
    beside = [path for path in folder.parent.glob("*/") if path != folder and _found(path)]
    remedies = [remedy] if remedy else []
    if other_tags:
        latest = max(beside, key=lambda path: path.stat().st_mtime, default=None)
        remedies.append(f"load another tag{f', such as {latest.name}' if latest else ''}")
    return StateError(Problem(str(where), found, why, ", or ".join([*remedies, _START_AT_0])))


def _taken(local: Tensor, old: LocalShard, new: LocalShard) -> Tensor:
    """The entries of an old one that lie in a new one, at their place there; 0 elsewhere."""
    if old.numel == new.numel == old.tensor.numel:
        return local
    whole = local.new_zeros(old.tensor.numel)
    for member in range(len(old.members)):
        whole[old.source(member)] = local[old.shard(member)]
    taken = local.new_empty(new.numel)
    for member in range(len(new.members)):
        taken[new.shard(member)] = whole[new.source(member)]
    return taken
