"""A recompute: the calls that it repeats, and what autograd had saved in their forward.

In the forward, saved-tensor hooks put a numbered holder in the place of every tensor that autograd
saves inside a call. When backward asks for the first of them, the calls run again with the tensors
that were kept of their arguments (`kept.py`), and the numbers give each saved tensor its value.
This is non-reentrant checkpointing (Chen et al., arXiv 1604.06174, as torch.utils.checkpoint does
it): autograd's graph is that of the forward, so gradients are what they are without it.

Here a frame may hold several calls. The input of a call that is the output of the one before is not
kept: the recompute runs through. Parameters are never held, and a recompute ends as soon as it has
every saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.arguments import TakenApart
from ds_ckpt.activation.calls import Around, Call, Site, outputs_of, plans, recomputing
from ds_ckpt.activation.fingerprints import Printer
from ds_ckpt.activation.guards import (
    broken_off,
    in_words,
    inner_gradient,
    refuse_changed,
    weight_changed,
)
from ds_ckpt.activation.holders import tensors_in
from ds_ckpt.activation.kept import Kept
from ds_ckpt.activation.operators import Recording
from ds_ckpt.activation.replay import Replay, Saved, Stop
from ds_ckpt.activation.state import State, StateOfSite, version_of
from ds_ckpt.activation.surroundings import Buffers, Surroundings, entered


class _Holder:
    """Stands in autograd's graph for saved tensor number `index` of a frame."""

    __slots__ = ("frame", "index")

    def __init__(self, frame: Frame, index: int) -> None:
        self.frame = frame
        self.index = index


class _Weight:
    """Stands for a saved parameter: autograd looks at no versions where there are hooks."""

    __slots__ = ("block", "parameter", "version")

    def __init__(self, parameter: nn.Parameter, version: int, block: str) -> None:
        self.parameter, self.version, self.block = parameter, version, block


def _unpack(packed: _Holder | _Weight) -> Tensor:
    if isinstance(packed, _Holder):
        return packed.frame.value(packed.index)
    if version_of(packed.parameter) != packed.version:
        raise weight_changed(packed.block, in_words(packed.parameter.shape, packed.parameter.dtype))
    return packed.parameter


class Frame:
    """One recompute. It lives as long as autograd's graph holds one of its tensors.

    Args:
        around: scopes and random states.
        check: compare the values that the forward saves with those of the recompute.
    """

    def __init__(self, around: Around, *, check: bool) -> None:
        self._around = around
        # in a recompute, what was there for the forward that is repeated
        self._newest = plans.count if recomputing.newest is None else recomputing.newest
        self._check = check
        self._printer = Printer()
        self._calls: list[Call] = []
        self._saved = Saved([], [])
        self._values: dict[int, Tensor] = {}
        self._task = -2
        self._running: Site | None = None
        self._broken_off = ""
        """The block of this frame that was left by an exception."""

    def continues(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of the tensors is an output of the last call, so that a call can be added."""
        outputs = self._calls[-1].outputs if self._calls else []
        return any(o is not None and o.is_(t) for o in outputs for t in tensors)

    # forward

    def run(self, site: Site, arguments: TakenApart, *, last: bool) -> Any:
        """The call's result; autograd's saved tensors become holders.

        Args:
            site: the module.
            arguments: its function and arguments, the tensors still in it.
            last: no call will be added to this frame.
        """
        # what comes from inference mode counts no versions and cannot be saved, a copy can
        tensors = [t.clone() if t.is_inference() else t for t in arguments.release()]
        versions = [t._version for t in tensors]
        parts = list(site.module.modules())
        site.state = site.state or StateOfSite(site.name)
        function, args, kwargs = arguments.own()
        state = State(site.state, parts, (*args, *kwargs.values()))
        near = [*tensors, *state.tensors]
        surroundings = Surroundings(near, self._around.trackers, parts)
        call = Call(site, arguments, surroundings, state, len(self._saved.kinds))
        outputs = self._calls[-1].outputs if self._calls else []
        for index, tensor in enumerate(tensors):
            for number, output in enumerate(outputs):
                if output is not None and output.is_(tensor):
                    call.links[index] = number
                    call.needs_gradient[index] = tensor.requires_grad
        if site.buffers is None:
            site.buffers = Buffers(site.name, site.module)
        copies, states = site.buffers.before(), site.buffers.versions()
        if site.choice is not None:
            # asks the list, not the frame: a frame goes with its graph, without a collection
            packs = self._saved.kinds.__len__
            call.recording = Recording(site.choice, packs, self._around.trackers)
        call.kept = Kept([t for i, t in enumerate(tensors) if i not in call.links])
        recording = call.recording or nullcontext()
        if self._check:
            plain = (t for t in tensors if t.layout == torch.strided)
            self._printer.given = frozenset(t.untyped_storage()._cdata for t in plain)
        self._running = site
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packing(call), _unpack), recording:
                result = function(*args, **kwargs)
        except BaseException:
            self._broken_off = site.name
            if call.recording is not None:
                call.recording.entries.clear()  # they hold the graph, which holds the recording
            raise
        finally:
            self._running = None
            self._printer.forget()
        refuse_changed(site.name, tensors, versions)
        call.buffers, call.read = site.buffers.after(copies, states), site.buffers.read()
        state.after()
        if call.recording is not None:
            assert site.choice is not None
            outside = [*tensors_in(tree_leaves(result)), *state.left_behind()]
            whole = not last or bool(self._calls)
            call.results = Kept(call.recording.finish(outside, whole=whole))
            site.choice.require_hits(call.recording.seen)
            call.recording.seen.clear()
        if last and not self._saved.kinds:  # a frozen block whose input needs no gradient
            call.kept = call.results = Kept(())
        if not last:
            call.outputs = outputs_of(result)
        self._calls.append(call)
        return result

    def _packing(self, call: Call) -> Callable[[Tensor], Any]:
        def pack(tensor: Tensor) -> Any:
            if isinstance(tensor, nn.Parameter):
                # held by the model anyway, and ZeRO-3 changes what it points to
                return _Weight(tensor, version_of(tensor), call.site.name)
            self._saved.kinds.append((tensor.shape, tensor.dtype, tensor.device))
            if self._check:
                with call.recording.paused() if call.recording else nullcontext():
                    self._saved.prints.append(self._printer(tensor))
            return _Holder(self, len(self._saved.kinds) - 1)

        return pack

    # backward

    def value(self, index: int) -> Tensor:
        """Saved tensor number `index`, given out once: a second time it is computed again."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._task or index not in self._values:
            self._recompute()
            self._task = task
        return self._values.pop(index)

    def _recompute(self) -> None:
        if self._running is not None:
            raise inner_gradient(self._running.name)
        if not self._calls:
            raise broken_off(self._broken_off)
        replay = Replay(self._calls, self._saved)
        first = self._calls[0].take()
        before, recomputing.newest = recomputing.newest, self._newest
        try:
            with entered(self._around.recompute), torch.enable_grad():
                outputs: list[Any] = []
                for number, call in enumerate(self._calls):
                    kept = call.take() if number else first
                    outputs = replay.run(call, *kept, outputs, several=len(self._calls) > 1)
        except Stop:
            pass
        finally:
            recomputing.newest = before
            for call in self._calls:
                call.site.replaying, call.site.raw = None, None
        self._values = replay.finish()
