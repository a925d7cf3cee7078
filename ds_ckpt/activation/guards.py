"""What a block must not do to its tensors: errors that name it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError


def in_words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {str(dtype).removeprefix('torch.')}"


def refuse_changed(name: str, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    changed = [i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if t._version != v]
    if changed:
        index = changed[0]
        raise UnsupportedError(
            Problem(
                where=name,
                found=f"its forward changes its argument tensor {index + 1} "
                f"({in_words(tensors[index].shape, tensors[index].dtype)}) in place",
                why="the recompute would begin with the changed values",
                remedy="write x = x + y for x += y, or leave the block out of checkpointing",
            )
        )


def changed_later(name: str, what: str = "argument") -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found=f"an {what} that was changed in place after the block's forward",
            why="the recompute would begin with the changed values",
            remedy="write x = x + y for x += y where this block's input is used again, or leave "
            "the block out of checkpointing",
        )
    )


def inner_gradient(name: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found="a gradient that is asked for inside a forward",
            why="the block cannot be computed again before its forward has ended",
            remedy="leave the block out of checkpointing",
        )
    )


def weight_changed(name: str, weight: str) -> UnsupportedError:
    return _changed_between(
        name,
        f"the weight {weight}",
        "change weights after the backward of every forward that used them, or leave the block "
        "out of checkpointing",
    )


def buffer_changed(name: str, buffer: str) -> UnsupportedError:
    return _changed_between(
        name,
        f"the buffer {buffer}",
        "change it after the backward of every forward that used it or inside the block's "
        "forward, or leave the block out of checkpointing",
    )


def _changed_between(name: str, what: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found=f"{what}, changed in place between the block's forward and its backward",
            why="the recompute would begin with the changed values",
            remedy=remedy,
        )
    )


def broken_off(name: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found="a backward through a forward that an exception has ended",
            why="the recompute cannot tell how far it had come",
            remedy="return tensors from the block instead of raising, or leave it out of "
            "checkpointing",
        )
    )


def attribute_changed(name: str, attribute: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found=f"a tensor in {attribute}, changed in place by this forward",
            why="the recompute needs its value from before, which is no longer there",
            remedy="assign a new tensor instead, register it as a buffer, or leave the block out "
            "of checkpointing",
        )
    )


def object_changed(name: str, kind: str, when: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found=f"a tensor in a {kind}, changed in place {when}",
            why="the recompute would begin with the changed values",
            remedy="assign a new tensor instead, or leave the block out of checkpointing",
        )
    )


def one_way(name: str, kind: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found=f"a {kind} among the block's arguments",
            why="it can be run through once, and the recompute runs the block a second time",
            remedy="give the block a list, or leave it out of checkpointing",
        )
    )


def saved_changed(name: str, shape: torch.Size, dtype: torch.dtype) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            where=name,
            found=f"a tensor ({in_words(shape, dtype)}) that the block changes in place after "
            "autograd has saved it",
            why="backward needs the values from before",
            remedy="do not work in place there: torch refuses it without checkpointing, too",
        )
    )
