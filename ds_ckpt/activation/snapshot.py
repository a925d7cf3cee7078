"""Snapshot of the state in which a block's forward begins, for its recomputation.

Restored are parameters, buffers (the running statistics of BatchNorm), attributes of modules and
the containers in them, `training` flags, generators, and objects among the arguments (caches, data
classes) with what they hold, three levels deep. The recomputation works on copies of containers and
objects, so nothing that it writes stays: a counter counts once, and a loss that a forward leaves on
its module is the forward's. A tensor that was changed in place and has no copy is refused by name.

Other state is not restored: objects on modules, globals, closures, `random` and NumPy. If
`check_determinism` is on, `UnrestoredState` finds a recomputation that changes objects or random
states.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry.memory import version_of

LEVELS = 3
"""Depth of copies: a cache, its list of layers, and their attributes."""
MAX_OBJECTS = 1000
_CONTAINERS = (list, dict, set, deque)
_LEAVES = (Tensor, nn.Module, types.FunctionType, types.MethodType, types.ModuleType, type)
_MODULES_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {
    "forward",  # set by whoever patches it
    "_original_parameters",  # the rest is DeepSpeed's bookkeeping, in step with its own hooks
    "_external_params",
    "pre_bwd_fn",
    "post_bwd_fn",
}
CHANGED = "the recomputation would begin with the changed values"
LEAVE_OUT = "or leave the block out of checkpointing"


def refusal(name: str, found: str, why: str, remedy: str) -> UnsupportedError:
    """Return the error for something that block `name` does."""
    return UnsupportedError(Problem(where=name, found=found, why=why, remedy=remedy))


def changed_between(name: str, what: str) -> UnsupportedError:
    """Return the error for a value that changed between a block's forward and its backward."""
    return refusal(
        name,
        f"{what}, changed in place between the block's forward and its backward",
        CHANGED,
        f"change it after the backward of every forward that used it, {LEAVE_OUT}",
    )


def input_changed(name: str, what: str = "argument") -> UnsupportedError:
    """Return the error for an input of block `name` that changed since it was saved."""
    return refusal(
        name,
        f"an {what} that was changed in place after the block's forward",
        CHANGED,
        f"write x = x + y for x += y where this block's input is used again, {LEAVE_OUT}",
    )


# containers and objects


@functools.cache
def _holds_others(cls: Any) -> bool:
    """Return whether objects of a class are containers or plain objects with attributes."""
    if issubclass(cls, (*_CONTAINERS, UserDict, UserList, types.SimpleNamespace)):
        return True
    root = cls.__module__.partition(".")[0]
    foreign = root in ("torch", "numpy") or root in sys.stdlib_module_names
    return not (issubclass(cls, _LEAVES) or foreign) and hasattr(cls, "__dict__")


def _children(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a container, or names and values of an object's attributes."""
    if isinstance(holder, dict):
        return holder.items()
    if isinstance(holder, (*_CONTAINERS, tuple)):
        return enumerate(holder)
    return getattr(holder, "__dict__", {}).items()


class CopiedObjects:
    """Copies of containers and objects, `LEVELS` deep. Tensors are shared, without their graphs.

    Originals must exist while they are copied, and are not referenced afterwards: a forward may
    write results into them, whose graphs would lead back here.

    Attributes:
        tensors: the tensors, the class that holds each, and its version.
        generators: generators found on the way.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, str, int]] = []
        self.generators: list[torch.Generator] = []
        self._copies: dict[int, Any] = {}

    def copy(self, value: Any, levels: int = LEVELS, holder: Any = None) -> Any:
        """Return the value's copy; equal for the same value."""
        cls: Any = type(value)
        if isinstance(value, Tensor):
            value = without_graph(value)
            if holder is not None and not isinstance(value, nn.Parameter):
                self.tensors.append((value, type(holder).__name__, version_of(value)))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif cls is tuple:
            return tuple(self.copy(item, levels, value) for item in value)
        elif levels and _holds_others(cls):
            if id(value) not in self._copies:
                self._copies[id(value)] = self._copied(value, levels)
            return self._copies[id(value)]
        return value

    def _copied(self, value: Any, levels: int) -> Any:
        try:
            new = copy.copy(value)
        except (TypeError, ValueError, RuntimeError):  # classes that forbid it
            return value
        self._copies[id(value)] = new  # before its children, which may lead back
        copies = {key: self.copy(child, levels - 1, value) for key, child in _children(value)}
        if isinstance(new, dict):
            dict.update(new, copies)
        elif isinstance(new, set):
            new.clear()
            new.update(copies.values())
        elif isinstance(new, list | deque):
            for index, child in copies.items():
                new[index] = child
        else:
            vars(new).update(copies)
        return new

    def changed(self) -> str | None:
        """Describe the first tensor that was changed in place since."""
        for tensor, holder, version in self.tensors:
            if version_of(tensor) != version:
                return f"a tensor in a {holder}"
        return None


def without_graph(value: Any) -> Any:
    """Return the value detached from its graph, which would keep that of a former step alive."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _equal(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # sparse tensors
        return True


class UnrestoredState:
    """Identities of everything reachable from a block, to find what its recomputation changes.

    Args:
        parts: modules of the block.
        arguments: values of which the recomputation was given copies.
    """

    def __init__(self, parts: Sequence[nn.Module], arguments: Sequence[Any]) -> None:
        self._state: dict[str, Any] = {"random.getstate()": random.getstate()}
        if (numpy := sys.modules.get("numpy")) is not None:
            self._state["numpy.random.get_state()"] = str(numpy.random.get_state())
        self._seen: dict[int, Any] = {}
        for part in parts:
            for name, value in vars(part).items():
                if _is_blocks_own(name):
                    self._add(f"{type(part).__name__}.{name}", value)
        for number, value in enumerate(arguments, 1):
            self._add(f"argument {number}", value)

    def _add(self, path: str, value: Any) -> None:
        is_tensor, cls = isinstance(value, Tensor), cast(Any, type(value))
        self._state[path] = (
            (value if isinstance(value, int | float | str) else id(value)),
            (version_of(value) if is_tensor else 0),
        )
        if id(value) in self._seen or len(self._seen) > MAX_OBJECTS:
            return
        self._seen[id(value)] = value  # so that no other object gets its id
        if cls is tuple or (not is_tensor and _holds_others(cls)):
            for key, child in list(_children(value)):
                self._add(f"{path}.{key}", child)

    def changed(self, now: UnrestoredState) -> str | None:
        """Return the path of the first difference."""
        paths = [*self._state, *now._state]
        return next((p for p in paths if self._state.get(p) != now._state.get(p)), None)


# modules


@functools.cache
def _is_blocks_own(name: str) -> bool:
    """Return whether a module's attribute is neither torch's nor DeepSpeed's."""
    return name not in _MODULES_OWN and not name.startswith(("ds_", "applied_"))


@dataclass
class _Owner:
    """A dict of a module with attributes, parameters or buffers, and its values.

    `dict`'s own methods read it: those of ZeRO-3's class gather parameters.
    """

    what: str
    held: dict[str, Any]
    values: dict[str, Any]

    def restore(self, values: dict[str, Any]) -> None:
        """Hold `values`."""
        now, is_own = dict(dict.items(self.held)), _is_blocks_own
        for name in now.keys() - values.keys():
            if is_own(name):
                del self.held[name]
        for name, value in values.items():
            if name not in now or now[name] is not value:
                self.held[name] = value


def _owners(parts: Sequence[nn.Module]) -> list[_Owner]:
    owners = []
    for part in parts:
        own, name = vars(part), type(part).__name__
        attributes = {key: value for key, value in own.items() if _is_blocks_own(key)}
        owners.append(_Owner(f"a tensor in {name}", own, attributes))
        for what, key in (("weight", "_parameters"), ("buffer", "_buffers")):
            if held := own[key]:
                owners.append(_Owner(f"the {what} {name}", held, dict(dict.items(held))))
            else:
                owners.append(_Owner(f"the {what} {name}", held, {}))
    return owners


class BlockMemory:
    """Knowledge about one block, from forward to forward.

    The first forward in each mode (`training`) is compared with copies of all buffers and plain
    tensors of the module. The tensors that it changed in place are copied before later forwards.

    Args:
        name: name of the block, for messages.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.parts = name, list(module.modules())
        self._modes: set[bool] = set()
        self.written: set[tuple[int, str]] = set()
        """Tensors that forwards change in place: id of the owner, and name."""
        for part in self.parts:
            if isinstance(part, _NormBase):  # its operators count no version
                self.written |= {(id(part._buffers), name) for name in part._buffers}

    def begin(self) -> bool:
        """Start a forward; return whether it is the first one in this mode."""
        mode = self.parts[0].training
        first = mode not in self._modes
        self._modes.add(mode)
        return first


@dataclass
class _ModuleTensor:
    owner: _Owner
    name: str
    tensor: Tensor
    version: int
    saved: Tensor | None = None
    """Copy of the values."""

    @property
    def place(self) -> tuple[int, str]:
        return id(self.owner.held), self.name

    @property
    def is_changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def __str__(self) -> str:
        return f"{self.owner.what}.{self.name}"


class Snapshot:
    """State in which a block's forward begins.

    Args:
        memory: knowledge about the block.
        arguments: arguments of the call that are not tensors.

    Raises:
        UnsupportedError: an argument is an iterator, which can be consumed only once.
    """

    def __init__(self, memory: BlockMemory, arguments: Sequence[Any]) -> None:
        self._memory = memory
        iterator = next((a for a in arguments if isinstance(a, Iterator)), None)
        if iterator is not None:
            raise refusal(
                memory.name,
                f"a {type(iterator).__name__} among the block's arguments",
                "it can be run through once, and the recomputation runs the block a second time",
                f"give the block a list, {LEAVE_OUT}",
            )
        self._copied = copied = CopiedObjects()
        self.arguments = [copied.copy(argument) for argument in arguments]
        """Copies, of which every recomputation gets copies."""
        self._owners, self._tensors = _owners(memory.parts), list[_ModuleTensor]()
        self._generators = copied.generators
        self._first = memory.begin()
        for owner in self._owners:
            for name, value in owner.values.items():
                if isinstance(value, Tensor):
                    self._tensors.append(_ModuleTensor(owner, name, value, version_of(value)))
                elif isinstance(value, (*_CONTAINERS, torch.Generator)):
                    owner.values[name] = copied.copy(value)
        for held in self._tensors:
            if not isinstance(held.tensor, nn.Parameter) and (
                self._first or held.place in memory.written
            ):
                held.saved = held.tensor.detach().clone()
        self._trained = [held.tensor.requires_grad for held in self._tensors]
        self._random = [generator.get_state() for generator in self._generators]

    def accelerators(self) -> list[torch.device]:
        """Return the devices of tensors on the module and among its arguments, but the CPU."""
        given = [t for t in self.arguments if isinstance(t, Tensor)]
        given += [tensor for tensor, *_ in self._copied.tensors]
        devices = {t.device for t in given} | {held.tensor.device for held in self._tensors}
        return [device for device in devices if device.type != "cpu"]

    def reachable(self, values: Any) -> list[Tensor]:
        """Return tensors in values, in what they hold, and on the module."""
        now = CopiedObjects()
        own = [value for owner in _owners(self._memory.parts) for value in owner.values.values()]
        for value in (*tree_leaves(values), *own):
            now.copy(value, holder=self)
        return [tensor for tensor, *_ in now.tensors]

    def after(self) -> None:
        """Check what the forward has changed.

        Raises:
            UnsupportedError: a tensor that was changed in place has no copy.
        """
        name, written = self._memory.name, self._memory.written
        if (what := self._copied.changed()) is not None:
            remedy = f"assign a new tensor instead, {LEAVE_OUT}"
            raise refusal(name, f"{what}, changed in place by its forward", CHANGED, remedy)
        for held in self._tensors:
            if held.saved is not None and self._first:
                # also operators that count no version
                if held.is_changed or not _equal(held.saved, held.tensor):
                    written.add(held.place)
                elif held.place not in written:
                    held.saved = None
            elif (
                held.is_changed and held.saved is None and not isinstance(held.tensor, nn.Parameter)
            ):
                raise refusal(
                    name,
                    f"{held}, changed by this forward and not by the first one",
                    "the recomputation needs its former value, which was not copied",
                    "assign a new tensor instead, change it in every training forward or "
                    "outside of the block, or leave the block out of checkpointing",
                )
            held.tensor = held.owner.values[held.name] = without_graph(held.tensor)

    def copied_arguments(self) -> list[Any]:
        """Return copies of the arguments for one recomputation."""
        copied = CopiedObjects()
        return [copied.copy(argument) for argument in self.arguments]

    def unrestored(self) -> UnrestoredState:
        """Return the present state of everything that a recomputation might change for good."""
        return UnrestoredState(self._memory.parts, self.arguments)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state before the forward; afterwards the present state.

        Raises:
            UnsupportedError: a tensor was changed in place since.
        """
        what = self._copied.changed()
        changed = [str(h) for h in self._tensors if h.saved is None and h.is_changed]
        for found in ([what] if what else []) + changed:
            raise changed_between(self._memory.name, found)
        now = _owners(self._memory.parts)
        states = [generator.get_state() for generator in self._generators]
        copied = CopiedObjects()
        before = [
            {n: copied.copy(v) if isinstance(v, _CONTAINERS) else v for n, v in o.values.items()}
            for o in self._owners
        ]
        places = {
            id(owner.held): values for owner, values in zip(self._owners, before, strict=True)
        }
        frozen = []
        for held, trained in zip(self._tensors, self._trained, strict=True):
            if held.saved is not None:  # a copy of it: there may be another backward
                value = held.saved.clone().requires_grad_(trained)
                places[id(held.owner.held)][held.name] = value
            elif held.tensor.requires_grad != trained and isinstance(held.tensor, nn.Parameter):
                frozen.append(held.tensor)
        try:
            for parameter in frozen:
                parameter.requires_grad_(not parameter.requires_grad)
            for owner, values in zip(self._owners, before, strict=True):
                owner.restore(values)
            for generator, state in zip(self._generators, self._random, strict=True):
                generator.set_state(state)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(not parameter.requires_grad)
            for owner in now:
                owner.restore(owner.values)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
