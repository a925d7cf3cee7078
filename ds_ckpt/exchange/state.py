"""Residuals beside DeepSpeed's checkpoint: one safetensors file a process, no pickle (law 5).

The same world resumes bit-exactly. Another world size keeps the sum over processes: old process `j`
goes to new process `j mod world`. Residuals are in units of the averaged gradient, so their sum is
what training is still owed whatever the number of processes.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ds_ckpt.compression.feedback import Feedback
from ds_ckpt.errors import Problem, StateError

log = logging.getLogger("ds_ckpt")
_FORMAT = "1"
_ANY = "ds_ckpt_residuals_*_of_*.safetensors"
_PATTERN = "ds_ckpt_residuals_{process:05d}_of_{world:05d}.safetensors"


class ResidualFiles:
    """Saves and restores one process's residuals.

    Args:
        feedback: holds the residuals; None where this run has none, and then a save only clears
            and a load only says what it leaves behind.
        method: goes into the file; a checkpoint of another method is refused.
        numels: elements of each trainable parameter, by name.
    """

    def __init__(
        self,
        feedback: Feedback | None,
        *,
        method: str,
        numels: dict[str, int],
        dp_rank: int,
        world: int,
    ) -> None:
        self._feedback = feedback
        self._method = method
        self._numels = numels
        self._dp_rank = dp_rank
        self._world = world

    def clear(self, folder: Path) -> None:
        """Remove every residual file of an earlier save under the same tag."""
        for path in folder.glob(_ANY):
            path.unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        """Write this process's file; `folder` is the checkpoint's tag folder."""
        if self._feedback is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _PATTERN.format(process=self._dp_rank, world=self._world)
        saved = self._feedback.state_dict(copy=False)
        state = {n: t.detach().cpu().contiguous() for n, t in saved.items()}
        about = {"format": _FORMAT, "method": self._method, "names": json.dumps(sorted(state))}
        unfinished = path.with_suffix(".unfinished")
        save_file(state, str(unfinished), metadata=about)
        os.replace(unfinished, path)

    def read(self, folder: Path) -> dict[str, torch.Tensor] | None:
        """This process's share of the saved residuals; None where the checkpoint has none.

        Raises:
            StateError: files are missing, or are of another method or of other shapes. Nothing
                has been loaded then.
        """
        found = sorted(folder.glob(_ANY))
        if self._feedback is None:
            if found and self._dp_rank == 0:
                method = self._method
                log.warning("ds_ckpt: %s holds residuals; method %s drops them", folder, method)
            return None
        if not found:
            log.info("ds_ckpt: %s holds no residuals (plain DeepSpeed?); they start at 0", folder)
            return None
        worlds = {int(p.stem.rsplit("_", 1)[1]) for p in found}
        world = min(worlds)
        expected = [folder / _PATTERN.format(process=j, world=world) for j in range(world)]
        missing = [p.name for p in expected if not p.is_file()]
        if missing or len(worlds) > 1:
            raise StateError(
                Problem(
                    where=str(folder),
                    found=f"residuals of {len(found)} processes, worlds {sorted(worlds)}"
                    + (f", without {', '.join(missing)}" if missing else ""),
                    why="the sum of residuals over all processes is what training is still owed",
                    remedy="restore the missing files, or remove all ds_ckpt_residuals_* files to "
                    "start with residuals of 0",
                )
            )
        # every process holds the same names: an exchange lays its packets out by them
        with _open(expected[0]) as file:
            names = list(file.keys())
        total: dict[str, torch.Tensor] = {}
        for old in range(self._dp_rank, world, self._world):
            self._add(expected[old], total)
        for name in names:
            if name not in total and name in self._numels:
                total[name] = torch.zeros(self._numels[name])
        return total

    def _add(self, path: Path, total: dict[str, torch.Tensor]) -> None:
        problems = []
        with _open(path) as file:
            about = file.metadata() or {}
            if about.get("method") != self._method or about.get("format") != _FORMAT:
                problems.append(
                    Problem(
                        where=str(path),
                        found=f"method {about.get('method')}, format {about.get('format')}",
                        why=f"this run uses method {self._method}, format {_FORMAT}",
                        remedy="set ds_ckpt.compression.method to the saved one, or remove the "
                        "ds_ckpt_residuals_* files to start with residuals of 0",
                    )
                )
            names = list(file.keys())
            sizes = {n: file.get_slice(n).get_shape() for n in names}
            for name in names:
                want = self._numels.get(name)
                if want is None or list(sizes[name]) != [want]:
                    problems.append(
                        Problem(
                            where=name,
                            found=f"a saved residual of {sizes[name]} elements in {path.name}",
                            why=f"the model's parameter has {want} elements"
                            if want is not None
                            else "the model has no trainable parameter of this name",
                            remedy="load the checkpoint into the model that it was saved from, or "
                            "remove the ds_ckpt_residuals_* files to start with residuals of 0",
                        )
                    )
            if problems:
                raise StateError(problems)
            for name in names:
                residual = file.get_tensor(name)
                total[name] = total[name] + residual if name in total else residual

    def restore(self, state: dict[str, torch.Tensor] | None) -> None:
        """Put `read`'s result in force; None starts every residual at 0."""
        if self._feedback is not None:
            self._feedback.load_state_dict(state or {})


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # safetensors raises a type of its own for a damaged file
        raise StateError(
            Problem(
                where=str(path),
                found=f"a file that cannot be read ({error})",
                why="its residuals are part of what training is still owed",
                remedy="restore the file, or remove all ds_ckpt_residuals_* files to start with "
                "residuals of 0",
            )
        ) from error
