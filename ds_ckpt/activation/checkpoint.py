"""One checkpointed forward: `torch.utils.checkpoint`, and what torch leaves to its caller.

torch saves a call's positional tensors, random states and autocast, and runs the call again, once
in a backward, when its saved tensor is unpacked (non-reentrant checkpointing; Chen et al., arXiv
1604.06174). It is given one empty tensor; what autograd saves inside is numbered here, and the
first number that backward unpacks unpacks torch's tensor. The graph is that of the forward, so
gradients are equal to those without checkpointing.

Added by the contexts that torch enters around the forward and around the recomputation:

1. every tensor of the call is a positional one (`Arguments`), so that hooks see all of them;
2. module state, objects, generators and other random states are those of the forward;
3. chosen results of operators are kept (`selective.py`);
4. several calls have one recomputation: an input made by the call before is not kept, but taken
   from that call's own recomputation;
5. hooks: weights are never held (ZeRO-3 changes their storage), values can be compared, a
   recomputation ends once it has every saved tensor, and errors name the block.
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

from ds_ckpt.activation.fingerprints import FingerprintCache
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
)
from ds_ckpt.errors import Problem, RecomputeError
from ds_ckpt.telemetry.memory import in_words, version_of

Scope = Callable[[], AbstractContextManager[Any]]


class Arguments:
    """A call, taken apart into its tensors and the rest.

    Containers that torch's pytree knows (tuples, lists, dicts, named tuples, model outputs) are
    taken apart. Parameters count as the rest: a recomputation needs the parameter itself, because
    ZeRO-3 exchanges its storage.

    Attributes:
        tensors: the tensors, each once.
        others: everything else.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function, args, kwargs = opened(function, args, kwargs)
        leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = []
        self.others: list[Any] = []
        self._leaves: list[tuple[bool, int]] = []
        """For each leaf: is it in `tensors`, and its index there or in `others`."""
        seen: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
                self._leaves.append((False, len(self.others)))
                self.others.append(leaf)
                continue
            if id(leaf) not in seen:
                seen[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            self._leaves.append((True, seen[id(leaf)]))

    def put_together(
        self, tensors: Sequence[Tensor], others: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors and other values."""
        leaves = [tensors[i] if is_tensor else others[i] for is_tensor, i in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def release(self) -> tuple[list[Tensor], list[Any]]:
        """Return tensors and others, and reference them no longer."""
        taken, self.tensors, self.others = (self.tensors, self.others), [], []
        return taken


def opened(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the same call without any `functools.partial` around the function."""
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs


class _Recomputing(threading.local):
    is_linked = False
    """The recomputation in this thread makes the input of another one."""


_recomputing = _Recomputing()


@dataclass
class RecomputeContext:
    """Surroundings of all blocks of a model.

    Attributes:
        recompute: scopes entered around every recomputation.
        trackers: random states beside torch's own.
        removed: checkpointing was removed from the model.
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
    """Function that the module's forward runs if a recomputation calls it with its hooks."""


def _place(value: Any) -> tuple[Any, ...] | None:
    """Return memory, version and geometry of a tensor, or None if it has no memory of its own.

    Equal for another tensor object over the same values, as ZeRO-3's hooks make them.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_inference():
        return None
    geometry = (value.storage_offset(), value.shape, value.stride(), value.dtype)
    flags = (value.is_conj(), value.is_neg())
    return (value.untyped_storage()._cdata, value._version, *geometry, *flags)


@dataclass(frozen=True)
class _Link:
    """Input that the call before has made; holds that call's graph, as its tensor would."""

    call: Call
    unpack: Callable[[Any], Any]
    output: int

    def tensor(self) -> Tensor:
        """Return the output, from that call's recomputation."""
        output: Tensor = self.call.outputs_again(self.unpack)[self.output]
        return output


_group_of_backwards: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


def _running_backward() -> Any:
    """Return torch's id of the backward that shares one recomputation; -1 outside of any."""
    return _group_of_backwards() or torch._C._current_graph_task_id()


class _Stop(BaseException):
    """Ends a recomputation that has all saved tensors. No `Exception`: a block may catch those."""


class _Weight:
    """Saved parameter with its version, which autograd does not check behind hooks."""

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
    """Return the saved-tensor hooks of the torch checkpoint that is being entered."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert hooks is not None, "torch.utils.checkpoint enters its hooks before the contexts"
    return hooks


class Call:
    """One forward of one block, and its recomputation.

    The autograd graph references it through torch's hooks; it references nothing of the graph.

    Args:
        target: the module.
        context: scopes and random states.
        check: compare the saved values with those of the recomputation.
    """

    def __init__(
        self, target: CheckpointedModule, context: RecomputeContext, *, check: bool
    ) -> None:
        self._target, self._context, self._check = target, context, check
        self._finished = False
        self._own: tuple[Any, Any] | None = None
        """The caller's own arguments, for the forward."""
        self._saved: list[tuple[torch.Size, torch.dtype, torch.device, Tensor | None]] = []
        """Kinds of the tensors that autograd saves, and their fingerprints."""
        self._links: dict[int, _Link] = {}
        self._recording: Recording | None = None
        self._results = SavedTensors(())
        self._hooks: weakref.ref[Callable[[Any], Any]] | None = None
        self._outputs: dict[int, tuple[tuple[Any, ...], StorageWeakRef]] = {}
        self._marker: Any = None
        """Torch's substitute for its saved tensor."""
        self._values: dict[Any, dict[int, Tensor]] = {}
        """Recomputed tensors that were not unpacked yet, by backward and number."""
        self._again: dict[int, Tensor] = {}
        """The same, of the recomputation that runs."""
        self._is_followed = False
        """Another call's input is linked to an output of this one."""
        self._made: list[Any] = []
        self._inputs: dict[int, Tensor] = {}
        self._doubts: list[tuple[int, Tensor]] = []
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
        """Return the result of the checkpointed call.

        Args:
            function: forward of the block.
            args: positional arguments.
            kwargs: keyword arguments.
            before: call whose outputs may be inputs of this one.
            last: no call follows that may be linked to this one.
        """
        target, self._last = self._target, last
        function, args, kwargs = opened(function, args, kwargs)
        self._arguments, self._own = Arguments(function, args, kwargs), (args, kwargs)
        tensors, others = self._arguments.release()
        # what comes from inference mode counts no versions and cannot be saved, a copy can
        tensors = [t.clone() if t.is_inference() else t for t in tensors]
        versions = [t._version for t in tensors]
        self._snapshot = Snapshot(target.memory, others)
        self._random = [(t, dict(t.get_states())) for t in self._context.trackers]
        if before is not None:
            self._links = before.links_of(tensors)
        if target.choice is not None:
            # given the list's method, not the call's: a call goes with its graph, uncollected
            self._recording = Recording(target.choice, self._saved.__len__, self._context.trackers)
        plain = (t for t in tensors if t.layout == torch.strided)
        given = frozenset(t.untyped_storage()._cdata for t in plain) if self._check else frozenset()
        self._fingerprints = FingerprintCache(given)
        self._needs_gradient = [t.requires_grad for t in tensors]
        # without their graphs, which may lead back here where something works in place; empty
        # ones where the recomputation makes its own: torch reads their devices
        kept = [t.new_empty(0) if i in self._links else t.detach() for i, t in enumerate(tensors)]
        if all(t.is_cpu for t in kept):  # torch saves random states of their devices
            kept += [torch.empty(0, device=d) for d in self._snapshot.accelerators()]
        contexts = (self._forward(), self)
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
            outside = self._snapshot.reachable((result, args, kwargs))
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
        """Run the block, in the forward and in the recomputation."""
        function = self._arguments.function
        if self._own is not None:  # with the caller's own lists and dicts, into which it may write
            (args, kwargs), self._own = self._own, None
            return function(*args, **kwargs)
        given = [
            (self._inputs.pop(i) if i in self._links else t).detach().requires_grad_(needs)
            for i, (t, needs) in enumerate(zip(tensors, self._needs_gradient, strict=False))
        ]
        others = self._snapshot.copied_arguments()
        args, kwargs = self._arguments.put_together(given, others)
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
                raise self._is_removed()
            result = outcome[0]
        else:
            result = function(*args, **kwargs)
        if self._is_followed:  # without the graph, which leads back here
            leaves = tree_leaves(result)
            self._made = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        return None

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Entered by torch inside its own hooks."""
        torch_pack, torch_unpack = _innermost_hooks()
        self._marker = torch_pack(torch.empty(0, device="cpu"))
        name, saved = self._target.name, self._saved

        def packed(tensor: Tensor) -> int | _Weight:
            if isinstance(tensor, nn.Parameter):
                return _Weight(tensor, name)
            fingerprint = self._fingerprint(tensor) if self._check else None
            saved.append((tensor.shape, tensor.dtype, tensor.device, fingerprint))
            return len(saved) - 1

        def unpacked(holder: int | _Weight) -> Tensor:
            if isinstance(holder, _Weight):
                return holder.get()
            backward = _running_backward()
            if backward == -1 or backward not in self._values:
                self._recompute(torch_unpack)
            values = self._values[backward]
            if holder not in values:
                raise RecomputeError(
                    Problem(
                        where=name,
                        found="a saved tensor that backward asks for twice",
                        why="torch.utils.checkpoint returns each recomputed value once",
                        remedy="read ctx.saved_tensors once in the backward of your autograd "
                        f"function, {LEAVE_OUT}",
                    )
                )
            return values.pop(holder)

        try:
            with saved_tensors_hooks(packed, unpacked), self._recording or nullcontext():
                yield
        except BaseException:
            self._own = None
            if self._recording is not None:
                self._recording.entries.clear()  # they hold the graph, which holds the recording
            raise
        finally:
            self._fingerprints.forget()
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
        """Return links of those tensors that are outputs of this call, by index."""
        unpack = self._hooks() if self._hooks is not None else None
        if unpack is None:
            return {}
        links = {
            index: _Link(self, unpack, number)
            for index, tensor in enumerate(tensors)
            for number, (place, storage) in self._outputs.items()
            if not storage.expired() and _place(tensor) == place
        }
        self._is_followed = self._is_followed or bool(links)
        return links

    def outputs_again(self, unpack: Callable[[Any], Any]) -> list[Any]:
        """Return the leaves of the recomputation's result; it runs now if it has not run yet."""
        if not self._made:
            _recomputing.is_linked = True
            try:
                self._recompute(unpack)
            finally:
                _recomputing.is_linked = False
        return self._made

    # recompute

    def _recompute(self, unpack: Callable[[Any], Any]) -> None:
        try:
            unpack(self._marker)
        except RuntimeError as error:
            if "inplace operation" not in str(error) or type(error) is not RuntimeError:
                raise
            raise input_changed(self._target.name) from error

    def __enter__(self) -> None:
        """Enter the state before the forward. Torch does so around each recomputation."""
        with ExitStack() as stack:
            self._enter(stack)
            self._entered = stack.pop_all()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        """Return to the present state and check the recomputation."""
        try:
            self._entered.__exit__(kind, error, trace)
            if error is None or kind is _Stop:
                self._finish()
                return True
            return False
        finally:
            self._again, self._doubts, self._inputs = {}, [], {}
            self._fingerprints.forget()
            self._target.replaying = None
            del self._entered

    def _enter(self, stack: ExitStack) -> None:
        name = self._target.name
        if not self._finished:
            raise refusal(
                name,
                "a backward through a forward that has not ended, or ended with an exception",
                "the recomputation needs a forward that has returned",
                f"ask for gradients behind the block, return instead of raising, {LEAVE_OUT}",
            )
        if self._context.removed:
            raise self._is_removed()
        linked, _recomputing.is_linked = _recomputing.is_linked, False
        stack.callback(setattr, _recomputing, "is_linked", linked)
        for scope in () if linked else self._context.recompute:
            stack.enter_context(scope())
        self._inputs = {index: link.tensor() for index, link in self._links.items()}
        for link in self._links.values():
            link.call._made = []
        for tracker, states in self._random:
            stack.callback(tracker.set_states, dict(tracker.get_states()))
            tracker.set_states(dict(states))
        self._unrestored = self._snapshot.unrestored() if self._check else None
        stack.enter_context(self._snapshot.restored())
        self._torch_pack, _ = _innermost_hooks()
        self._versions: list[int] = []
        self._difference = None
        self._doubts = []
        self._fingerprints = FingerprintCache()
        stack.enter_context(saved_tensors_hooks(self._pack_again, lambda tensor: tensor))
        if self._recording is not None:
            assert self._target.choice is not None
            entries, results = self._recording.entries, self._results.get()
            replaying = Replaying(self._target.choice, entries, results, self.differs)
            stack.enter_context(replaying)

    def _fingerprint(self, tensor: Tensor) -> Tensor | None:
        with _disable_current_modes() if self._recording else nullcontext():
            return self._fingerprints(tensor)

    def _pack_again(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if self._difference is not None:
            raise RecomputeError(self._difference)
        index = len(self._versions)
        if index == len(self._saved):
            if self._is_followed:
                self.differs(f"it saves more than the {index} tensors of the forward")
            raise _Stop
        shape, dtype, device, before = self._saved[index]
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            self.differs(
                f"saved tensor {index + 1} is {in_words(tensor.shape, tensor.dtype)}, "
                f"in the forward it was {in_words(shape, dtype)}"
            )
        if before is not None:
            now = self._fingerprint(tensor)
            assert now is not None, "the same shape and device have a fingerprint"
            if device.type != "cpu":  # read once, at the end
                self._doubts.append((index, torch.ne(now, before)))
            elif int(now) != int(before):
                self._wrong_value(index)
        # counts versions with the original
        self._again[index] = value = tensor.detach() if tensor.requires_grad else tensor
        self._versions.append(value._version)
        if len(self._versions) == len(self._saved) and not self._is_followed:
            raise _Stop
        return value

    def _finish(self) -> None:
        if self._difference is not None:
            raise RecomputeError(self._difference)
        expected, count = len(self._saved), len(self._versions)
        if count != expected:
            self.differs(f"it saves {count} tensors, the forward saved {expected}")
        if self._doubts and bool(torch.stack([d for _, d in self._doubts]).any()):
            self._wrong_value(next(i for i, d in self._doubts if bool(d)))
        if self._unrestored is not None:
            changed = self._unrestored.changed(self._snapshot.unrestored())
            if changed is not None:
                self.differs(f"it changes {changed}, which is not restored")
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

    def _is_removed(self) -> RecomputeError:
        return RecomputeError(
            Problem(
                where=self._target.name,
                found="checkpointing that was removed or switched off after the block's forward",
                why="the recomputation would find a module that runs otherwise than in its forward",
                remedy="change checkpointing only when no backward is outstanding",
            )
        )

    def _wrong_value(self, index: int) -> None:
        shape, dtype, *_ = self._saved[index]
        self.differs(f"saved tensor {index + 1} ({in_words(shape, dtype)}) has other values")

    def differs(self, what: str) -> None:
        """Raise the first difference between forward and recomputation."""
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


def _partitioned(module: nn.Module) -> bool:
    """Return whether ZeRO-3 has split parameters directly on the module."""
    return any(hasattr(p, "ds_id") for p in module._parameters.values() if p is not None)
