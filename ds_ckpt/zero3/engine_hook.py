"""The engine hook: wraps the methods of an engine that a program calls."""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from ds_ckpt.patch import Patches


def wrap_engine(
    engine: Any,
    patches: Patches,
    in_forward: Callable[[], AbstractContextManager[Any]],
    after_step: Iterable[Callable[[int], None]],
    before_destroy: Callable[[], None],
) -> None:
    """Wrap `forward`, `step` and `destroy`; `patches` undoes it.

    `after_step` are called with the number of each optimizer step that has ended.
    """
    forward, step, destroy = engine.forward, engine.step, engine.destroy

    @functools.wraps(forward)
    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        with in_forward():
            return forward(*args, **kwargs)

    @functools.wraps(step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        before = int(engine.global_steps)
        result = step(*args, **kwargs)
        if int(engine.global_steps) > before:
            for act in after_step:
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
    """Replace `backward` and `step` by `refuse`, and remove DeepSpeed's gradient hooks, for good.

    The hooks would take each gradient into a bucket of an optimizer whose parameters another one
    trains, which no step empties.
    """
    never_undone = Patches()  # nor are DeepSpeed's hooks restored, so it could not train
    for name in ("backward", "step"):
        never_undone.set(engine, name, refuse)
    for name in ("_grad_acc_hooks", "_leaf_module_hooks"):
        for hook in getattr(engine.optimizer, name, ()):
            hook.remove()
