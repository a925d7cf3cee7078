"""Saves the plugin's state in an engine's checkpoints: wraps save and load.

`exchange.state.ResidualFiles` reads and writes the state. This file calls it when DeepSpeed saves
or loads, with the tag and the caller's choice of what to load.

A save first removes the state of an earlier save under its tag. Then it runs DeepSpeed's save,
writes the state, and names the tag in `latest`. If it is interrupted, the tag holds no state or an
incomplete one, which is refused. One save's state is never beside another's DeepSpeed files.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ds_ckpt.files import replacing
from ds_ckpt.patch import Patches
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise


def wrap_checkpoints(
    engine: Any,
    files: Any,
    patches: Patches,
    *,
    drop_step: Callable[[], None],
    loading: Callable[[], AbstractContextManager[None]],
) -> None:
    """Wrap `engine.save_checkpoint` and `load_checkpoint`; `patches` undoes it.

    `drop_step` drops the step in progress, which a load replaces; `loading` surrounds a load.
    """
    save, load = engine.save_checkpoint, engine.load_checkpoint
    save_signature, load_signature = inspect.signature(save), inspect.signature(load)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = save_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tag = given.get("tag")
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = Path(given["save_dir"]) / name

        def begin() -> None:
            if engine.global_rank == 0:
                files.clear(folder)

        # DeepSpeed writes `latest` once rank 0 is done; here it is written once all ranks are
        writes_latest = given["save_latest"] and not engine.checkpoint_engine.is_decoupled()
        if writes_latest:
            given["save_latest"] = False

        def end() -> None:
            if writes_latest and engine.global_rank == 0:
                with replacing(Path(given["save_dir"]) / "latest") as latest:
                    latest.write_text(name)

        run_on_all_or_raise(begin, what="clear the checkpoint's folder")
        result = save(*bound.args, **bound.kwargs)
        run_on_all_or_raise(lambda: files.save(folder), what="save its residuals")
        run_on_all_or_raise(end, what="name the checkpoint in `latest`")
        return result

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = load_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments

        def read_if_loaded() -> Any:
            # the state belongs to the optimizer's run; another run starts without it
            if given["load_module_only"] or not given["load_optimizer_states"]:
                return None
            is_universal, folder = engine.load_universal_checkpoint(), Path(given["load_dir"])
            tag, latest = given["tag"], folder / f"latest{'_universal' * is_universal}"
            if tag is None and latest.is_file():
                tag = latest.read_text().strip()
            if tag is None:
                return None
            return files.read(folder / str(tag), is_universal=is_universal)

        state = run_on_all_or_raise(read_if_loaded, what="read its residuals")
        with loading():
            result = load(*args, **kwargs)
            if result[0] is not None:
                run_on_all_or_raise(drop_step, what="end the step in progress")
                files.restore(state)
        return result

    patches.set(engine, "save_checkpoint", save_checkpoint)
    patches.set(engine, "load_checkpoint", load_checkpoint)
