"""The engine hook: wraps the methods of an engine that a program calls, also save and load.

`exchange.state.ResidualFiles` reads and writes the plugin's state. This file calls it when
DeepSpeed saves or loads, with the tag and the caller's choice of what to load.

A save first removes the state of an earlier save under its tag. Then it runs DeepSpeed's save,
writes the state, and names the tag in `latest`. If it is interrupted, the tag holds no state or an
incomplete one, which is refused. One save's state is never beside another's DeepSpeed files.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ds_ckpt.files import replacing
from ds_ckpt.patch import Patches
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise


def wrap_engine(
    engine: Any,
    patches: Patches,
    in_forward: Callable[[], AbstractContextManager[Any]],
    after_step: Iterable[Callable[[int], None]],
    before_destroy: Callable[[], None],
) -> None:
    """Wrap `forward`, `step` (`after_step` get its number) and `destroy`; `patches` undoes it."""
    forward, step, destroy = engine.forward, engine.step, engine.destroy

    @functools.wraps(forward)
    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        with in_forward():
            return forward(*args, **kwargs)

    @functools.wraps(step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        before = int(engine.global_steps)
        result = step(*args, **kwargs)
        for act in after_step if int(engine.global_steps) > before else ():
            act(int(engine.global_steps))
        return result

    @functools.wraps(destroy)
    def detach_and_destroy() -> None:
        try:
            before_destroy()
        finally:
            destroy()

    patches.set(engine, "forward", timed_forward)
    patches.set(engine, "step", counted_step)
    patches.set(engine, "destroy", detach_and_destroy)


def stop_training(engine: Any, refuse: Callable[..., Any]) -> None:
    """Refuse to train for good. DeepSpeed's hooks would fill a bucket that no step empties."""
    for name in ("backward", "step"):
        Patches().set(engine, name, refuse)  # never undone: the hooks are not restored either
    for name in ("_grad_acc_hooks", "_leaf_module_hooks"):
        for hook in getattr(engine.optimizer, name, ()):
            hook.remove()


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
