"""One checkpointed forward: `torch.utils.checkpoint`, and what torch leaves to its caller.

torch runs a call again (non-reentrant checkpointing; Chen et al., arXiv 1604.06174) when its one
saved tensor is unpacked. Tensors that autograd saves inside are numbered here, and the first number
that backward unpacks unpacks torch's tensor. The contexts that torch enters restore state
(`snapshot.py`), keep results of operators (`selective.py`), and compare values. They link calls
that have one recomputation. They never hold weights, whose storage ZeRO-3 changes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ds_ckpt.activation.fingerprints import FingerprintCache
from ds_ckpt.activation.selective import Recording, Replaying, SavedTensors, Tracker
from ds_ckpt.activation.snapshot import (
    CHANGED,
    LEAVE_OUT,
    CheckpointedModule,
    Snapshot,
    change_error,
    refusal,
)
from ds_ckpt.errors import Problem, RecomputeError
from ds_ckpt.sharded import full_shape
from ds_ckpt.telemetry.memory import in_words, version_of

Scope = Callable[[], AbstractContextManager[Any]]
# ms-swift wraps torch's function to set use_reentrant everywhere; torch's own decorator stays
checkpoint = inspect.unwrap(
    torch_checkpoint.checkpoint,
    stop=lambda f: getattr(f, "__globals__", {}).get("__name__") == "torch._compile",
)


@dataclass
class RecomputeContext:
    """Surroundings of a model's blocks: scopes around recomputations, random states, removal."""

    recompute: Sequence[Scope] = ()
    trackers: Sequence[Tracker] = ()
    is_removed: bool = False


def _place(value: Any) -> tuple[Any, ...] | None:
    """Return memory, version and geometry of a tensor; equal for ZeRO-3's copies of the object."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_inference():
        return None
    geometry = (value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj())
    return (value.untyped_storage()._cdata, value._version, *geometry)


_Link = tuple["Call", Callable[[Any], Any], int]
"""Call that has made an input, the hook of its graph, as a tensor would hold, and the output."""


_group_of_backwards: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


def _running_backward() -> Any:
    """Return torch's id of the backward that shares one recomputation; -1 outside of any."""
    return _group_of_backwards() or torch._C._current_graph_task_id()


def _innermost_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the saved-tensor hooks of the torch checkpoint that is being entered."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert hooks is not None, "torch.utils.checkpoint enters its hooks before the contexts"
    return hooks


_Saved = tuple[torch.Size, torch.dtype, torch.device, Tensor | None]
"""Kind of a tensor that autograd saved in the forward, and its fingerprint if it is compared."""


class _Stop(BaseException):
    """Ends a recomputation that has all saved tensors. No `Exception`: a block may catch those."""


@dataclass
class _Comparison:
    """Tensors that one recomputation saves, compared with those of the forward."""

    block: str
    saved: Sequence[_Saved]
    runs_on: bool
    """The recomputation runs to its end, for its outputs."""
    fingerprints: FingerprintCache
    values: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    differing: list[Tensor] = field(default_factory=list)
    """Number of each compared tensor, 0 if fingerprints are equal; read once, at the end."""
    difference: Problem | None = None

    def pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        index = len(self.values)
        if index == len(self.saved):
            self.differs(f"it saves more than the {index} tensors of the forward")
        shape, dtype, device, before = self.saved[index]
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            self.differs(
                f"saved tensor {index + 1} is {in_words(tensor.shape, tensor.dtype)}, "
                f"in the forward it was {in_words(shape, dtype)}"
            )
        if before is not None:
            now = self.fingerprints(tensor)
            assert now is not None, "the same shape and device have a fingerprint"
            self.differing.append(torch.ne(now, before) * (index + 1))
        # counts versions with the original
        value = tensor.detach() if tensor.requires_grad else tensor
        self.values.append(value)
        self.versions.append(value._version)
        if len(self.values) == len(self.saved) and not self.runs_on:
            raise _Stop
        return value

    def finish(self) -> None:
        if self.difference is not None:  # the block has caught the error
            raise RecomputeError(self.difference)
        expected, count = len(self.saved), len(self.values)
        if count != expected:
            self.differs(f"it saves {count} tensors, the forward saved {expected}")
        if self.differing:
            numbers = torch.stack([n.to(self.differing[0].device) for n in self.differing])
            if bool(numbers.any()):
                number = int(numbers[numbers > 0].min())
                kind = in_words(*self.saved[number - 1][:2])
                self.differs(f"saved tensor {number} ({kind}) has other values")
        for number, (value, version) in enumerate(zip(self.values, self.versions, strict=True), 1):
            if value._version != version:
                self.differs(f"it changes saved tensor {number} in place")

    def differs(self, what: str) -> NoReturn:
        """Raise the first difference between forward and recomputation."""
        why = "backward needs the forward's values; its gradients would be wrong"
        remedy = (
            "remove what differs from run to run (state kept between calls, random numbers from "
            "outside torch), enter contexts of the forward (sdpa_kernel) around the backward, too, "
            f'or leave the block out: "rules": [{{"match": "{self.block}", "policy": "none"}}]'
        )
        problem = Problem(self.block, what, why, remedy)
        self.difference = self.difference or problem
        raise RecomputeError(self.difference)


class Call:
    """One forward of one block, and its recomputation.

    The autograd graph references it through torch's hooks; it references nothing of the graph.
    With `check`, saved values are compared with those of the recomputation.
    """

    def __init__(
        self, target: CheckpointedModule, context: RecomputeContext, *, check: bool
    ) -> None:
        self._target, self._context, self._check = target, context, check
        self._finished = False
        self._own: tuple[Any, Any] | None = None
        """The caller's own arguments, for the forward."""
        self._saved: list[_Saved] = []
        self._links: dict[int, _Link] = {}
        self._recording: Recording | None = None
        self._results = SavedTensors(())
        self._hooks: weakref.ref[Callable[[Any], Any]] | None = None
        self._outputs: dict[int, tuple[tuple[Any, ...], StorageWeakRef]] = {}
        self._marker: Any = None
        """Torch's substitute for its saved tensor."""
        self._values: dict[Any, dict[int, Tensor]] = {}
        """Recomputed tensors that were not unpacked yet, by backward and number."""
        self._is_followed = False
        """Another call's input is linked to an output of this one."""
        self._made: list[Any] = []
        """Outputs of the recomputation, until that call has taken them."""
        self._inputs: dict[int, Tensor] = {}

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
        """Return the result of `function(*args, **kwargs)`, checkpointed.

        Outputs of `before` may be inputs of this call. Unless it is the `last`, its outputs may be
        inputs of the next call.
        """
        target, self._last = self._target, last
        self._function, self._own = function, (args, kwargs)
        leaves, self._spec = tree_flatten((args, kwargs))
        # parameters are taken as they are: ZeRO-3 exchanges their storage
        self._is_tensor = [
            isinstance(v, Tensor) and not isinstance(v, nn.Parameter) for v in leaves
        ]
        pairs = list(zip(leaves, self._is_tensor, strict=True))
        # tensors from inference mode count no versions and cannot be saved, copies can
        tensors = [v.clone() if v.is_inference() else v for v, is_tensor in pairs if is_tensor]
        versions = [t._version for t in tensors]
        self._snapshot = Snapshot(target, [v for v, is_tensor in pairs if not is_tensor])
        self._random = [(t, dict(t.get_states())) for t in self._context.trackers]
        if before is not None:
            self._links = before.links_of(tensors)
        if target.choice is not None:
            # given the list's method, not the call's: a call goes with its graph, uncollected
            self._recording = Recording(target.choice, self._saved.__len__, self._context.trackers)
        self._needs_gradient = [t.requires_grad for t in tensors]
        # without their graphs, which may lead back here after in-place operators. Recomputed ones
        # are empty: torch saves the random states of their devices
        kept = [t.new_empty(0) if i in self._links else t.detach() for i, t in enumerate(tensors)]
        if all(t.is_cpu for t in kept):
            devices = {p.device for p in target.module.parameters() if not p.is_cpu}
            kept += [torch.empty(0, device=device) for device in devices]
        contexts = (self._forward(), self)
        result = checkpoint(
            self._run_block,
            *kept,
            use_reentrant=False,
            context_fn=lambda: contexts,
            determinism_check="none",
            early_stop=False,
        )
        if [t._version for t in tensors] != versions:
            found, remedy = "its forward changes an argument in place", "write x = x + y for x += y"
            raise refusal(target.name, found, CHANGED, f"{remedy}, {LEAVE_OUT}")
        self._snapshot.after()
        if self._recording is not None:
            outside = self._snapshot.reachable((result, args, kwargs))
            self._results = SavedTensors(self._recording.finish(outside, whole=not last))
        if not last:
            for number, leaf in enumerate(tree_leaves(result)):
                if (place := _place(leaf)) is not None:
                    self._outputs[number] = (place, StorageWeakRef(leaf.untyped_storage()))
        self._finished = True
        return result

    def _run_block(self, *tensors: Tensor) -> Any:
        function = self._function
        if self._own is not None:  # with the caller's own lists and dicts, into which it may write
            (args, kwargs), self._own = self._own, None
            return function(*args, **kwargs)
        given = (
            (self._inputs.pop(i) if i in self._links else t).detach().requires_grad_(needs)
            for i, (t, needs) in enumerate(zip(tensors, self._needs_gradient, strict=False))
        )
        others = iter(self._snapshot.copied_arguments())
        leaves = [next(given) if is_tensor else next(others) for is_tensor in self._is_tensor]
        args, kwargs = tree_unflatten(leaves, self._spec)
        target = self._target
        own = target.module.parameters(recurse=False)
        is_split = any(full_shape(p) is not None for p in own)
        if is_split and (self._links or not self._last):
            # ZeRO-3 gathers its own weights by its hooks, and only the last call's are here
            outcome: list[Any] = []
            target.replaying = lambda: outcome.append(function(*args, **kwargs)) or outcome[0]  # type: ignore[func-returns-value]
            target.module(*args, **kwargs)
            result = outcome[0]
        else:
            result = function(*args, **kwargs)
        if self._is_followed:  # without the graph, which leads back here
            leaves = tree_leaves(result)
            self._made = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        return None

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Number the tensors that autograd saves. Torch enters it inside its own hooks."""
        torch_pack, torch_unpack = _innermost_hooks()
        self._marker = torch_pack(torch.empty(0, device="cpu"))
        name, saved = self._target.name, self._saved
        fingerprints = FingerprintCache() if self._check else lambda tensor: None

        def packed(tensor: Tensor) -> int | tuple[nn.Parameter, int]:
            if isinstance(tensor, nn.Parameter):
                return tensor, version_of(tensor)
            saved.append((tensor.shape, tensor.dtype, tensor.device, fingerprints(tensor)))
            return len(saved) - 1

        def unpacked(holder: int | tuple[nn.Parameter, int]) -> Tensor:
            if isinstance(holder, tuple):  # autograd does not check versions behind hooks
                parameter, version = holder
                if version_of(parameter) != version:
                    kind = in_words(parameter.shape, parameter.dtype)
                    raise change_error(name, f"the weight {kind}")
                return parameter
            backward = _running_backward()
            if backward == -1 or backward not in self._values:
                self._recompute(torch_unpack)
            values = self._values[backward]
            if holder not in values:
                found = "a saved tensor that is unpacked twice"
                why = "torch.utils.checkpoint returns each recomputed value once"
                raise refusal(name, found, why, f"read ctx.saved_tensors once, {LEAVE_OUT}")
            return values.pop(holder)

        try:
            with saved_tensors_hooks(packed, unpacked), self._recording or nullcontext():
                yield
        except BaseException:
            self._own = None
            if self._recording is not None:
                self._recording.entries.clear()  # they hold the graph, which holds the recording
            raise
        if not self._last:
            self._hooks = weakref.ref(torch_unpack)

    # another call that goes on from this one

    def links_of(self, tensors: Sequence[Tensor]) -> dict[int, _Link]:
        """Return links of those tensors that are outputs of this call, by index."""
        unpack = self._hooks() if self._hooks is not None else None
        if unpack is None:
            return {}
        links = {
            index: (self, unpack, number)
            for index, tensor in enumerate(tensors)
            for number, (place, storage) in self._outputs.items()
            if not storage.expired() and _place(tensor) == place
        }
        self._is_followed = self._is_followed or bool(links)
        return links

    def recomputed_outputs(self, unpack: Callable[[Any], Any]) -> list[Any]:
        """Return the leaves of the recomputation's result; it runs now if it has not run yet."""
        if not self._made:
            self._recompute(unpack)
        return self._made

    # recompute

    def _recompute(self, unpack: Callable[[Any], Any]) -> None:
        try:
            unpack(self._marker)
        except RuntimeError as error:
            if "inplace operation" not in str(error) or type(error) is not RuntimeError:
                raise
            raise change_error(self._target.name, "an argument") from error

    def __enter__(self) -> None:
        """Enter the state before the forward. Torch does so around each recomputation."""
        self._running = self._recomputation()
        self._running.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        """Return to the present state and check the recomputation."""
        try:
            return self._running.__exit__(*error)
        finally:
            del self._running
            self._inputs, self._target.replaying = {}, None

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        target = self._target
        if not self._finished:
            found = "a backward through a forward that has not ended, or ended with an exception"
            why = "the recomputation needs a forward that has returned"
            raise refusal(target.name, found, why, f"compute gradients behind it, {LEAVE_OUT}")
        if self._context.is_removed:
            found = "checkpointing that was removed after the block's forward"
            why = "the recomputation would find another module than its forward"
            raise refusal(target.name, found, why, "remove it when no backward is outstanding")
        comparison = _Comparison(target.name, self._saved, self._is_followed, FingerprintCache())
        with ExitStack() as stack:
            for scope in self._context.recompute:
                stack.enter_context(scope())
            links = self._links.items()
            self._inputs = {i: call.recomputed_outputs(unpack)[n] for i, (call, unpack, n) in links}
            for call, *_ in self._links.values():
                call._made = []
            for tracker, states in self._random:
                stack.callback(tracker.set_states, dict(tracker.get_states()))
                tracker.set_states(dict(states))
            before = self._snapshot.unrestored() if self._check else {}
            stack.enter_context(self._snapshot.restored())
            torch_pack, _ = _innermost_hooks()
            stack.enter_context(saved_tensors_hooks(comparison.pack, lambda tensor: tensor))
            if self._recording is not None:
                assert target.choice is not None
                entries, results = self._recording.entries, self._results.get()
                stack.enter_context(Replaying(target.choice, entries, results, comparison.differs))
            with suppress(_Stop):
                yield
        comparison.finish()
        after = self._snapshot.unrestored() if self._check else {}
        changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        if changed:
            comparison.differs(f"it changes {changed[0]}, which is not restored")
        self._values[_running_backward()] = dict(enumerate(comparison.values))
        torch_pack(torch.empty(0, device="cpu"))
