"""One checkpointed forward: `torch.utils.checkpoint`, and what torch leaves to its caller.

torch saves a call's positional tensors, random states and autocast, and runs the call again, once
in a backward, when its saved tensor is asked for (non-reentrant checkpointing; Chen et al., arXiv
1604.06174). It is given one, an empty one: what autograd saves inside is numbered here, and the
first number that backward asks for asks for torch's. autograd's graph is that of the forward, so
gradients are what they are without checkpointing.

Added here, by what torch enters around the forward and around the recompute:

1. every tensor of the call is a positional one (`Arguments`), so that hooks see all of them;
2. module state, objects, generators and other random states are as in the forward (`snapshot.py`);
3. chosen results of operators are kept (`selective.py`);
4. several calls are one recompute: an input that the call before made is not kept, but taken from
   that call's own recompute;
5. hooks of its own: weights are never held (ZeRO-3 changes what they point to), values
   can be compared, a recompute ends when it has every saved tensor even in a block that catches
   exceptions, and errors name the block.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation.fingerprints import Printer
from ds_ckpt.activation.selective import (
    Choice,
    Recording,
    Replaying,
    SavedTensors,
    Tracker,
)
from ds_ckpt.activation.snapshot import (
    CHANGED,
    LEAVE_OUT,
    BlockMemory,
    Snapshot,
    changed_between,
    input_changed,
    refusal,
    without_graph,
)
from ds_ckpt.errors import Problem, RecomputeError
from ds_ckpt.telemetry.memory import in_words, version_of

Scope = Callable[[], AbstractContextManager[Any]]


class Arguments:
    """A call without its tensors.

    Containers that torch's pytree knows (tuples, lists, dicts, named tuples, model outputs) are
    looked into; the recompute gets copies of them. Other objects stay as they are, with the tensors
    that they hold. So do parameters: a recompute must be given the parameter itself, since ZeRO-3
    exchanges what it points to.

    Attributes:
        tensors: what was taken out, each object once.
        others: what is no tensor.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function, args, kwargs = opened(function, args, kwargs)
        leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = []
        self.others: list[Any] = []
        self._leaves: list[tuple[bool, Any]] = []
        """Whether it is a tensor; its index in `tensors`, or the value."""
        seen: dict[int, int] = {}
        for leaf in leaves:
            taken = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
            if not taken:
                self.others.append(leaf)
            elif id(leaf) not in seen:
                seen[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            self._leaves.append((taken, seen[id(leaf)] if taken else leaf))

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors` in the places of those that were taken out."""
        leaves = [tensors[value] if taken else value for taken, value in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def release(self) -> list[Tensor]:
        """Hand the tensors out and hold them no longer."""
        tensors, self.tensors = self.tensors, []
        return tensors


def opened(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same call with every `functools.partial` around the function taken off."""
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs


class _Recomputing(threading.local):
    """The recompute that runs in this thread."""

    linked = False
    """It runs for the input of another."""


_recomputing = _Recomputing()


@dataclass
class RecomputeContext:
    """What surrounds calls: the same for every block of a model.

    Attributes:
        recompute: scopes entered around every recompute.
        trackers: random states beside torch's own.
        removed: checkpointing was taken off the model.
    """

    recompute: Sequence[Scope] = ()
    trackers: Sequence[Tracker] = ()
    removed: bool = False


@dataclass
class CheckpointedModule:
    """A module whose forwards are checkpointed."""

    name: str
    module: nn.Module
    memory: BlockMemory
    choice: Choice | None = None
    replaying: Callable[[], Any] | None = None
    """What the module's forward has to run when it is called with its hooks in a recompute."""


def _place(value: Any) -> tuple[Any, ...] | None:
    """The memory and version of a tensor, the same for another tensor object (ZeRO-3's hooks);
    None where it has none of its own: a sparse one, one from inference mode."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_inference():
        return None
    geometry = (value.storage_offset(), value.shape, value.stride(), value.dtype)
    reads = (value.is_conj(), value.is_neg())  # the same bytes as other values
    return (value.untyped_storage()._cdata, value._version, *geometry, *reads)


@dataclass(frozen=True)
class _Link:
    """An input that the call before made; holds that call's graph, as its tensor would."""

    call: Call
    unpack: Callable[[Any], Any]
    output: int

    def tensor(self) -> Tensor:
        """The output anew, from that call's recompute."""
        output: Tensor = self.call.outputs_again(self.unpack)[self.output]
        return output


_group_of_backwards: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


def _running_backward() -> Any:
    """What torch counts as one backward, with one recompute; -1 outside of any."""
    return _group_of_backwards() or torch._C._current_graph_task_id()


class _Stop(BaseException):
    """Every saved tensor has been computed again: ends a recompute early and is no error.

    No `Exception`, which a block may catch for purposes of its own.
    """


class _Weight:
    """Stands for a saved parameter: autograd looks at no versions where there are hooks."""

    __slots__ = ("block", "parameter", "version")

    def __init__(self, parameter: nn.Parameter, block: str) -> None:
        self.parameter, self.block = parameter, block
        self.version = version_of(parameter)

    def get(self) -> Tensor:
        if version_of(self.parameter) != self.version:
            kind = in_words(self.parameter.shape, self.parameter.dtype)
            raise changed_between(self.block, f"the weight {kind}")
        return self.parameter


def _innermost_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """torch's own saved-tensor hooks of the checkpoint that is being entered."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert hooks is not None, "torch.utils.checkpoint enters its hooks before the contexts"
    return hooks


class Call:
    """One forward of one block, and its recompute.

    autograd's graph holds it, through torch's hooks; it holds nothing of the graph.

    Args:
        target: the module.
        context: scopes and random states.
        check: compare the values that the forward saves with those of the recompute.
    """

    def __init__(
        self, target: CheckpointedModule, context: RecomputeContext, *, check: bool
    ) -> None:
        self._target, self._context, self._check = target, context, check
        self._finished: bool | None = None
        """None before and in the forward; False where an exception has ended it."""
        self._own: tuple[Any, Any] | None = None
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._prints: list[Tensor | None] = []
        self._tags: dict[int, dict[str, Any]] = {}
        """What callers have put on arguments (`x.scale = 2`), by their number."""
        self._links: dict[int, _Link] = {}
        self._recording: Recording | None = None
        self._results = SavedTensors(())
        self._hooks: weakref.ref[Callable[[Any], Any]] | None = None
        self._outputs: dict[int, tuple[tuple[Any, ...], StorageWeakRef]] = {}
        """Where tensors lie that it has returned, and what tells whether they still do."""
        self._marker: Any = None
        """What torch put in the place of its saved tensor."""
        self._values: dict[Any, dict[int, Tensor]] = {}
        """By backward: what its recompute has made and it has not yet asked for, by number."""
        self._again: dict[int, Tensor] = {}
        """The same of the recompute that runs."""
        self._followed = False
        """Whether another call goes on from here."""
        self._made: list[Any] = []
        self._difference: Problem | None = None
        """The first one: a block may catch the error that it was raised as."""

    # forward

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        before: Call | None,
        last: bool,
    ) -> Any:
        """The call's result.

        Args:
            before: the call that this one may go on from.
            last: no call goes on from this one.
        """
        target, self._last = self._target, last
        function, args, kwargs = opened(function, args, kwargs)
        self._arguments = arguments = Arguments(function, args, kwargs)
        self._own = (args, kwargs)
        del args, kwargs
        # what comes from inference mode counts no versions and cannot be saved, a copy can
        tensors = [t.clone() if t.is_inference() else t for t in arguments.release()]
        versions = [t._version for t in tensors]
        self._snapshot = Snapshot(target.memory, arguments.others)
        self._random = [(t, dict(t.get_states())) for t in self._context.trackers]
        if before is not None:
            self._links = before.links_of(tensors)
        if target.choice is not None:
            # asks the list, not the call: a call goes with its graph, without a collection
            self._recording = Recording(target.choice, self._kinds.__len__, self._context.trackers)
        self._printer = Printer()
        if self._check:
            plain = (t for t in tensors if t.layout == torch.strided)
            self._printer.given = frozenset(t.untyped_storage()._cdata for t in plain)
        self._needs_gradient = [t.requires_grad for t in tensors]
        self._tags = {
            i: {key: without_graph(value) for key, value in vars(t).items()}
            for i, t in enumerate(tensors)
            if type(t) is Tensor and vars(t)
        }
        # without their graphs, which may lead back here where something works in place; empty
        # ones where the recompute makes its own: torch looks at their devices
        kept = [t.new_empty(0) if i in self._links else t.detach() for i, t in enumerate(tensors)]
        # and saves the random states of those; of what a parameter or an object lies on, for these
        if all(t.is_cpu for t in kept):
            kept += [torch.empty(0, device=d) for d in self._snapshot.accelerators()]
        contexts = (self._forward(), _Again(self))
        result = checkpoint(
            self._function,
            *kept,
            use_reentrant=False,
            context_fn=lambda: contexts,
            determinism_check="none",
            early_stop=False,
        )
        self._refuse_changed(tensors, versions)
        self._snapshot.after()
        if self._recording is not None:
            assert target.choice is not None
            outside = self._snapshot.reachable(tree_leaves(result))
            self._results = SavedTensors(self._recording.finish(outside, whole=not last))
            target.choice.require_hits(self._recording.seen)
            self._recording.seen.clear()
        if not last:
            for number, leaf in enumerate(tree_leaves(result)):
                if (place := _place(leaf)) is not None:
                    self._outputs[number] = (place, StorageWeakRef(leaf.untyped_storage()))
        self._finished = True
        return result

    def _function(self, *tensors: Tensor) -> Any:
        """What torch runs, in the forward and in the recompute."""
        function = self._arguments.function
        if self._own is not None:  # with the caller's own lists and dicts, into which it may write
            (args, kwargs), self._own = self._own, None
            return function(*args, **kwargs)
        given = [
            (self._inputs.pop(i) if i in self._links else t).detach().requires_grad_(needs)
            for i, (t, needs) in enumerate(zip(tensors, self._needs_gradient, strict=False))
        ]
        for i, tags in self._tags.items():
            vars(given[i]).update(tags)
        args, kwargs = self._arguments.with_tensors(given)
        target = self._target
        if (self._links or not self._last) and _partitioned(target.module):
            # its own weights are gathered by its hooks, and only the last call's are here
            outcome: list[Any] = []

            def again() -> Any:
                outcome.append(function(*args, **kwargs))
                return outcome[0]

            target.replaying = again
            target.module(*args, **kwargs)
            if not outcome:
                raise _taken_off(target.name)
            result = outcome[0]
        else:
            result = function(*args, **kwargs)
        if self._followed:  # without the graph, which leads back here
            leaves = tree_leaves(result)
            self._made = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        return None

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Entered by torch inside its own hooks."""
        torch_pack, torch_unpack = _innermost_hooks()
        self._marker = torch_pack(torch.empty(0, device="cpu"))
        name, kinds = self._target.name, self._kinds

        def packed(tensor: Tensor) -> int | _Weight:
            if isinstance(tensor, nn.Parameter):
                return _Weight(tensor, name)
            kinds.append((tensor.shape, tensor.dtype, tensor.device))
            if self._check:
                with _disable_current_modes() if self._recording else nullcontext():
                    self._prints.append(self._printer(tensor))
            return len(kinds) - 1

        def unpacked(holder: int | _Weight) -> Tensor:
            if isinstance(holder, _Weight):
                return holder.get()
            backward = _running_backward()
            if backward == -1 or backward not in self._values:
                self.recompute(torch_unpack)
            values = self._values[backward]
            if holder not in values:
                raise _unpacked_twice(name)
            return values.pop(holder)

        try:
            with saved_tensors_hooks(packed, unpacked), self._recording or nullcontext():
                yield
        except BaseException:
            self._finished, self._own = False, None
            if self._recording is not None:
                self._recording.entries.clear()  # they hold the graph, which holds the recording
            raise
        finally:
            self._printer.forget()
        if not self._last:
            self._hooks = weakref.ref(torch_unpack)

    def _refuse_changed(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
        for index, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if tensor._version != version:
                raise refusal(
                    self._target.name,
                    f"its forward changes its argument tensor {index + 1} "
                    f"({in_words(tensor.shape, tensor.dtype)}) in place",
                    CHANGED,
                    f"write x = x + y for x += y, {LEAVE_OUT}",
                )

    # another call that goes on from this one

    def links_of(self, tensors: Sequence[Tensor]) -> dict[int, _Link]:
        """Those of the tensors that are outputs of this call, by index."""
        unpack = self._hooks() if self._hooks is not None else None
        if unpack is None:
            return {}
        links = {
            index: _Link(self, unpack, number)
            for index, tensor in enumerate(tensors)
            for number, (place, storage) in self._outputs.items()
            if not storage.expired() and _place(tensor) == place
        }
        self._followed = self._followed or bool(links)
        return links

    def outputs_again(self, unpack: Callable[[Any], Any]) -> list[Any]:
        """What the recompute returns. It runs now if it has not run in this backward."""
        if not self._made:
            _recomputing.linked = True
            try:
                self.recompute(unpack)
            finally:
                _recomputing.linked = False
        return self._made

    # recompute

    def recompute(self, unpack: Callable[[Any], Any]) -> None:
        """Run again, in torch's hook `unpack`."""
        try:
            unpack(self._marker)
        except RuntimeError as error:
            if "inplace operation" not in str(error) or type(error) is not RuntimeError:
                raise
            raise input_changed(self._target.name) from error

    def enter(self, stack: ExitStack) -> None:
        """Everything as it was before the forward, on `stack`."""
        name = self._target.name
        if self._finished is None:
            raise refusal(
                name,
                "a gradient that is asked for inside a forward",
                "the block cannot be computed again before its forward has ended",
                "leave the block out of checkpointing",
            )
        if not self._finished:
            raise refusal(
                name,
                "a backward through a forward that an exception has ended",
                "the recompute cannot tell how far it had come",
                f"return tensors from the block instead of raising, {LEAVE_OUT}",
            )
        if self._context.removed:
            raise _taken_off(name)
        linked, _recomputing.linked = _recomputing.linked, False
        stack.callback(setattr, _recomputing, "linked", linked)
        for scope in () if linked else self._context.recompute:
            stack.enter_context(scope())
        self._inputs = {index: link.tensor() for index, link in self._links.items()}
        for link in self._links.values():
            link.call._made = []
        for tracker, states in self._random:
            stack.callback(tracker.set_states, dict(tracker.get_states()))
            tracker.set_states(dict(states))
        stack.enter_context(self._snapshot.again())
        self._torch_pack, _ = _innermost_hooks()
        self._versions: list[int] = []
        self._difference = None
        self._doubts: list[tuple[int, Tensor]] = []
        self._reprinter = Printer()
        stack.enter_context(saved_tensors_hooks(self._pack_again, lambda tensor: tensor))
        if self._recording is not None:
            assert self._target.choice is not None
            entries, results = self._recording.entries, self._results.get()
            replaying = Replaying(self._target.choice, entries, results, self.differs)
            stack.enter_context(replaying)

    def _pack_again(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if self._difference is not None:
            raise RecomputeError(self._difference)
        index = len(self._versions)
        if index == len(self._kinds):
            if self._followed:
                self.differs(f"it saves more than the {index} tensors of the forward")
            raise _Stop
        shape, dtype, device = self._kinds[index]
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            self.differs(
                f"saved tensor {index + 1} is {in_words(tensor.shape, tensor.dtype)}, "
                f"in the forward it was {in_words(shape, dtype)}"
            )
        if index < len(self._prints) and (before := self._prints[index]) is not None:
            with _disable_current_modes() if self._recording else nullcontext():
                now = self._reprinter(tensor)
                assert now is not None, "the same shape and device have a fingerprint"
                if before.device.type != "cpu":
                    self._doubts.append((index, now != before))
                elif int(now) != int(before):
                    self._wrong_value(index)
        # counts versions with the original
        self._again[index] = value = tensor.detach() if tensor.requires_grad else tensor
        self._versions.append(value._version)
        if len(self._versions) == len(self._kinds) and not self._followed:
            raise _Stop
        return value

    def finish(self) -> None:
        """The recompute has ended. On an accelerator one synchronization tells here whether any
        of its values differs.

        Raises RecomputeError: they do, or did and the block has caught the error.
        """
        if self._difference is not None:
            raise RecomputeError(self._difference)
        expected, count = len(self._kinds), len(self._versions)
        if count != expected:
            self.differs(f"it saves {count} tensors, the forward saved {expected}")
        if self._doubts and bool(torch.stack([d for _, d in self._doubts]).any()):
            self._wrong_value(next(i for i, d in self._doubts if bool(d)))
        for value, version in zip(self._again.values(), self._versions, strict=True):
            if value._version != version:
                raise refusal(
                    self._target.name,
                    f"a tensor ({in_words(value.shape, value.dtype)}) that the block changes in "
                    "place after autograd has saved it",
                    "backward needs the values from before",
                    "do not work in place there: torch refuses it without checkpointing, too",
                )
        self._values[_running_backward()] = self._again
        self._torch_pack(torch.empty(0, device="cpu"))

    def forget(self) -> None:
        """Let go of what one recompute has used."""
        self._again, self._doubts, self._inputs = {}, [], {}
        self._reprinter.forget()
        self._target.replaying = None

    def _wrong_value(self, index: int) -> None:
        shape, dtype, _ = self._kinds[index]
        self.differs(f"saved tensor {index + 1} ({in_words(shape, dtype)}) has other values")

    def differs(self, what: str) -> None:
        name = self._target.name
        problem = Problem(
            where=name,
            found=what,
            why="backward needs the forward's values, and this block does not repeat them: "
            "its gradients would be wrong",
            remedy="remove what differs from run to run (state kept between calls, random "
            "numbers from outside torch, operators that are not deterministic), have a context "
            "around the forward (sdpa_kernel) around the backward, too, or leave the block out: "
            f'"rules": [{{"match": "{name}", "policy": "none"}}]',
        )
        self._difference = self._difference or problem
        raise RecomputeError(self._difference)


class _Again:
    """What torch enters around a recompute, as often as there is one."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        stack = ExitStack()
        try:
            self._call.enter(stack)
        except BaseException:
            stack.close()
            raise
        self._stack = stack

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        try:
            self._stack.__exit__(kind, error, trace)
            if error is None or kind is _Stop:
                self._call.finish()
                return True
            return False
        finally:
            self._call.forget()
            del self._stack


def _taken_off(name: str) -> RecomputeError:
    return RecomputeError(
        Problem(
            where=name,
            found="checkpointing that was taken off or switched off after the block's forward",
            why="the recompute would find a module that runs in another way than in its forward",
            remedy="change checkpointing only when no backward is outstanding",
        )
    )


def _unpacked_twice(name: str) -> RecomputeError:
    return RecomputeError(
        Problem(
            where=name,
            found="a saved tensor that backward asks for twice",
            why="torch.utils.checkpoint gives each value of a recompute out once",
            remedy="read ctx.saved_tensors once in the backward of your autograd function, "
            f"{LEAVE_OUT}",
        )
    )


def _partitioned(module: nn.Module) -> bool:
    """Whether ZeRO-3 has split parameters that stand directly on the module."""
    return any(hasattr(p, "ds_id") for p in module._parameters.values() if p is not None)
