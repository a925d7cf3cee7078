"""The second run of a frame's calls, in backward: the values of everything that was saved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.calls import Call
from ds_ckpt.activation.fingerprints import Printer
from ds_ckpt.activation.guards import in_words, saved_changed
from ds_ckpt.activation.operators import Replaying
from ds_ckpt.activation.surroundings import read_again, swapped
from ds_ckpt.errors import Problem, RecomputeError


class Stop(BaseException):
    """Every saved tensor has been computed again: ends a recompute early and is no error.

    No `Exception`, which a block may catch for purposes of its own.
    """


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Saved:
    """What autograd saved in a forward, tensor by tensor, without the tensors.

    Attributes:
        kinds: shape, dtype and device of each.
        prints: fingerprints of each where values are compared, else empty.
    """

    kinds: list[tuple[torch.Size, torch.dtype, torch.device]]
    prints: list[Tensor | None]


class Replay:
    """One run of a frame's calls in backward.

    Args:
        calls: of the frame.
        saved: what their forward saved.
    """

    def __init__(self, calls: Sequence[Call], saved: Saved) -> None:
        self._calls, self._saved = calls, saved
        self._values: dict[int, Tensor] = {}
        self._versions: list[int] = []
        self._count = 0
        self._call = calls[0]
        self._modes: Replaying | None = None
        self._printer = Printer()
        self._doubts: list[tuple[int, Tensor]] = []
        self._complete = False
        self._difference: Problem | None = None
        """The first one: a block may catch the error that it was raised as."""

    def run(
        self,
        call: Call,
        kept: list[Tensor],
        saved: list[Tensor],
        outputs: list[Any],
        *,
        several: bool,
    ) -> list[Any]:
        """The call once more; returns its result's leaves."""
        self._call = call
        given = iter(kept)
        tensors = [
            outputs[call.links[i]].detach().requires_grad_(call.needs_gradient[i])
            if i in call.links
            else next(given)
            for i in range(len(kept) + len(call.links))
        ]
        function, args, kwargs = call.arguments.together(tensors)
        self._modes = None
        with ExitStack() as stack:
            stack.enter_context(call.surroundings.again())
            stack.enter_context(call.state.again())
            stack.enter_context(read_again(call.site.name, call.read))
            stack.enter_context(swapped(call.buffers))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _as_it_is))
            if call.recording is not None:
                assert call.site.choice is not None
                entries = call.recording.entries
                stack.enter_context(call.site.choice.standing())
                self._modes = Replaying(call.site.choice, entries, saved, self.differs)
                stack.enter_context(self._modes)
            if several and _partitioned(call.site.module):
                # its own weights are gathered by its hooks, and only the last call's are here
                call.site.replaying = (function, args, kwargs)
                call.site.module(*args, **kwargs)
                if call.site.replaying is not None:
                    raise _taken_off(call.site.name)
                result, call.site.raw = call.site.raw, None
            else:
                result = function(*args, **kwargs)
        return tree_leaves(result)

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if self._difference is not None:
            raise RecomputeError(self._difference)
        if self._complete:
            raise Stop
        saved, index = self._saved, self._count
        if index == len(saved.kinds):
            self.differs(f"it saves more than the {index} tensors of the forward")
        shape, dtype, device = saved.kinds[index]
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            self.differs(
                f"saved tensor {self._place(index)} is {in_words(tensor.shape, tensor.dtype)}, "
                f"in the forward it was {in_words(shape, dtype)}"
            )
        if saved.prints and (before := saved.prints[index]) is not None:
            with self._modes.paused() if self._modes is not None else nullcontext():
                now = self._printer(tensor)
                assert now is not None, "the same shape and device have a fingerprint"
                if before.device.type != "cpu":
                    self._doubts.append((index, now != before))
                elif int(now) != int(before):
                    self._wrong_value(index)
        value = tensor.detach()  # counts versions with the original
        self._values[index] = value
        self._versions.append(value._version)
        self._count += 1
        if self._count == len(saved.kinds):
            self._complete = True
            raise Stop
        return value

    def finish(self) -> dict[int, Tensor]:
        """The values by number.

        On an accelerator one synchronization tells here whether any of them differs.

        Raises RecomputeError: they do, or did and the block has caught the error.
        """
        self._modes = None
        if self._difference is not None:
            raise RecomputeError(self._difference)
        if self._count != len(self._saved.kinds):
            expected = len(self._saved.kinds)
            self.differs(f"it saves {self._count} tensors, the forward saved {expected}")
        if self._doubts and bool(torch.stack([d for _, d in self._doubts]).any()):
            self._wrong_value(next(i for i, d in self._doubts if bool(d)))
        for (index, value), version in zip(self._values.items(), self._versions, strict=True):
            if value._version != version:
                name = self._call_of(index).site.name
                raise saved_changed(name, value.shape, value.dtype)
        return self._values

    def _place(self, index: int) -> str:
        return f"{index - self._call_of(index).first + 1}"

    def _call_of(self, index: int) -> Call:
        return [c for c in self._calls if c.first <= index][-1]

    def _wrong_value(self, index: int) -> None:
        self._call = self._call_of(index)
        shape, dtype, _ = self._saved.kinds[index]
        self.differs(
            f"saved tensor {self._place(index)} ({in_words(shape, dtype)}) has other values"
        )

    def differs(self, what: str) -> None:
        problem = Problem(
            where=self._call.site.name,
            found=what,
            why="backward needs the forward's values, and this block does not repeat them: "
            "its gradients would be wrong",
            remedy="remove what differs from run to run (state kept between calls, random "
            "numbers from outside torch, operators that are not deterministic), or leave the "
            'block out: "rules": [{"match": "' + self._call.site.name + '", "policy": "none"}]',
        )
        self._difference = self._difference or problem
        raise RecomputeError(self._difference)


def _taken_off(name: str) -> RecomputeError:
    return RecomputeError(
        Problem(
            where=name,
            found="checkpointing that was taken off or switched off after the block's forward",
            why="the recompute calls the module for the hooks that gather its weights, and its "
            "forward no longer comes here",
            remedy="change checkpointing only when no backward is outstanding",
        )
    )


def _partitioned(module: nn.Module) -> bool:
    """Whether ZeRO-3 has split parameters that stand directly on the module."""
    return any(hasattr(p, "ds_id") for p in module._parameters.values() if p is not None)
