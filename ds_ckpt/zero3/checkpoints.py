"""Lets something of ours travel with an engine's checkpoints: wraps save and load.

What travels is given by `StateFiles`; this file knows when DeepSpeed saves and loads, under which
tag, and what the caller asked to be loaded.

Where there was a save under a tag, a mark stands there until the next one has ended. Broken off, it
may have left DeepSpeed's files of the one before, which must not be loaded unawares with other
state. The mark ends as files do that DeepSpeed's conversion to a universal checkpoint copies
(`*model_states.pt`) and does not read (`*_model_states.pt`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.files import replacing
from ds_ckpt.patch import Patches
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise

log = logging.getLogger("ds_ckpt")
_MARK = "ds_ckpt_saving.model_states.pt"
_MARKS = "ds_ckpt_*saving*"
"""Those of earlier versions, too."""


class StateFiles(Protocol):
    """State that is kept beside DeepSpeed's files, in the folder of a tag.

    Attributes:
        what: it is, for people.
        anew: what becomes of it where its files are removed.
        not_converted: what to say of a universal checkpoint without it; None: nothing.
    """

    what: str
    anew: str
    not_converted: str | None

    @property
    def keeps(self) -> bool:
        """Whether there is any in this run."""

    def clear(self, folder: Path) -> None:
        """Remove what an earlier save under this tag has left; one process, before all `save`."""

    def save(self, folder: Path) -> None:
        """Write this process's part."""

    def read(self, folder: Path) -> Any:
        """Read and check this process's part without putting it in force."""

    def restore(self, state: Any) -> None:
        """Put what `read` returned in force; None starts clean."""


def _tag_to_load(folder: Path, tag: Any, *, universal: bool) -> str | None:
    """The tag that DeepSpeed will load, None where it will find nothing."""
    if tag is not None:
        return str(tag)
    latest = folder / ("latest_universal" if universal else "latest")
    return latest.read_text().strip() if latest.is_file() else None


def _refuse_broken_off(folder: Path, kept: Sequence[StateFiles]) -> None:
    mark = next(folder.glob(_MARKS), None)
    if kept and mark is not None:
        why = "there was an earlier save under this tag; DeepSpeed's files may still be of it"
        remedy = "load another tag, or remove the ds_ckpt_* files: "
        remedy += " and ".join(files.anew for files in kept)
        raise StateError(Problem(str(mark), "a save that was broken off", why, remedy))


def wrap_checkpoints(
    engine: Any,
    states: Sequence[StateFiles],
    patches: Patches,
    *,
    drop_step: Callable[[], None],
    begins: bool,
) -> None:
    """Wrap `engine.save_checkpoint` and `load_checkpoint`; `patches` takes it back.

    Args:
        drop_step: forgets the step under way, which a load replaces.
        begins: whether this process removes what an earlier save left (one of the group does).
    """
    save, load = engine.save_checkpoint, engine.load_checkpoint
    save_signature, load_signature = inspect.signature(save), inspect.signature(load)
    group = engine.optimizer.dp_process_group
    kept = [files for files in states if files.keeps]
    what = " and ".join(files.what for files in kept or states)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = save_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        tag = asked.get("tag")
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = Path(asked["save_dir"]) / name

        def begin() -> None:
            if begins:
                if folder.is_dir():
                    (folder / _MARK).touch()
                for files in states:
                    files.clear(folder)

        # DeepSpeed writes `latest` when process 0 is done, and others may not be: so we do, later
        names_latest = asked["save_latest"] and not engine.checkpoint_engine.is_decoupled()
        if names_latest:
            asked["save_latest"] = False

        def write() -> None:
            for files in states:
                files.save(folder)

        def end() -> None:
            if begins:
                for mark in folder.glob(_MARKS):
                    mark.unlink()
            if names_latest and engine.global_rank == 0:
                with replacing(Path(asked["save_dir"]) / "latest") as latest:
                    latest.write_text(name)

        run_on_all_or_raise(begin, group, what="clear the checkpoint's folder")
        run_on_all_or_raise(write, group, what=f"save its {what}")
        result = save(*bound.args, **bound.kwargs)
        run_on_all_or_raise(end, group, what=f"end the save of {what}")
        return result

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = load_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        # it belongs to the run whose optimizer goes on; another one starts without
        wanted = asked["load_optimizer_states"] and not asked["load_module_only"]

        def read() -> list[Any]:
            nothing: list[Any] = [None] * len(states)
            if not wanted:
                return nothing
            universal = engine.load_universal_checkpoint()
            tag = _tag_to_load(Path(asked["load_dir"]), asked["tag"], universal=universal)
            if tag is None:
                return nothing
            folder = Path(asked["load_dir"]) / tag
            _refuse_broken_off(folder, kept)
            found = [files.read(folder) for files in states]
            for files, state in zip(states, found, strict=True):
                if universal and files.keeps and state is None and files.not_converted:
                    log.warning(files.not_converted, folder)
            return found

        found = run_on_all_or_raise(read, group, what=f"read its {what}")
        result = load(*args, **kwargs)
        if result[0] is not None:
            run_on_all_or_raise(drop_step, group, what="end the step under way")
            for files, state in zip(states, found, strict=True):
                files.restore(state)
        return result

    patches.set(engine, "save_checkpoint", save_checkpoint)
    patches.set(engine, "load_checkpoint", load_checkpoint)
