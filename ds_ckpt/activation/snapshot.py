"""Snapshot of the state in which a block's forward begins, for its recomputation.

Restored are parameters, buffers, generators, attributes of modules and the containers in them.
Objects among the arguments are restored with their contents, three levels deep. A recomputation
works on copies. Not restored are objects on modules, `random` and NumPy's random numbers. Nor are
globals, class attributes and closures that the block's functions reach by name. If
`check_determinism` is on, a recomputation that changes any of these is refused.
"""

import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.selective import Choice
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.sharded import is_bookkeeping
from ds_ckpt.telemetry.memory import version_of

COPIED_LEVELS = 3
"""Depth of copies: a cache, its list of layers, and their attributes."""
COPIED_BYTES = 1 << 22
MAX_OBJECTS = 1000
_LIBRARIES = {"torch", "numpy", "transformers", "deepspeed", "ds_ckpt"}
UNSEARCHED_PACKAGES = _LIBRARIES | sys.stdlib_module_names
"""Packages whose functions and classes are not searched for names."""
_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that normalizations write without counting versions."""
_CONTAINERS = (list, dict, set, deque)
_LEAVES = (Tensor, nn.Module, types.FunctionType, types.MethodType, types.ModuleType, type)
_MODULES_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"forward"}  # set by patches
CHANGED = "the recomputation would begin with the changed values"
LEAVE_OUT = "or leave the block out of checkpointing"


def refusal(name: str, found: str, why: str, remedy: str) -> UnsupportedError:
    """Return the error for something that block `name` does."""
    return UnsupportedError(Problem(where=name, found=found, why=why, remedy=remedy))


def change_error(name: str, what: str) -> UnsupportedError:
    """Return the error for a value that changed between a block's forward and its backward."""
    found = f"{what} that was changed in place after the block's forward"
    remedy = "change it after the backward of every forward that used it (x = x + y for x += y)"
    return refusal(name, found, CHANGED, f"{remedy}, {LEAVE_OUT}")


def saved_change_error(name: str) -> UnsupportedError:
    """Return the error for a saved tensor of an offloaded block that changed since."""
    found = "a saved tensor that was changed in place after it was saved"
    remedy = 'write x = x + y for x += y, or give the block the policy "none"'
    return refusal(name, found, "backward needs the values of the forward", remedy)


# containers and objects


@functools.cache
def _is_holder(cls: Any) -> bool:
    """Return whether objects of a class are containers or plain objects with attributes."""
    if issubclass(cls, (*_CONTAINERS, types.SimpleNamespace)):
        return True
    foreign = {"torch", "numpy", *sys.stdlib_module_names}
    is_plain = hasattr(cls, "__dict__") and cls.__module__.partition(".")[0] not in foreign
    return is_plain and not issubclass(cls, _LEAVES)


def _children(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a container, or names and values of an object's attributes."""
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, (*_CONTAINERS, tuple)):
        return list(enumerate(holder))
    return list(getattr(holder, "__dict__", {}).items())


class CopiedObjects:
    """Copies of containers and objects, `COPIED_LEVELS` deep. Tensors are shared, without graphs.

    Originals are not referenced afterwards: a forward may write results into them, whose graphs
    would lead back here. `tensors` are listed with the class of their holder and their version.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, str, int]] = []
        self.generators: list[torch.Generator] = []
        self._copies: dict[int, Any] = {}

    def copy(self, value: Any, levels: int = COPIED_LEVELS, holder: Any = None) -> Any:
        """Return the value's copy; equal for the same value."""
        if isinstance(value, Tensor):
            value = without_graph(value)
            if holder is not None and not isinstance(value, nn.Parameter):
                self.tensors.append((value, type(holder).__name__, version_of(value)))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif type(value) is tuple:
            return tuple(self.copy(item, levels, value) for item in value)
        elif levels and _is_holder(value.__class__):
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
        children = {key: self.copy(child, levels - 1, value) for key, child in _children(value)}
        if isinstance(new, list | deque):
            for index, child in children.items():
                new[index] = child
        elif isinstance(new, dict):
            dict.update(new, children)
        elif not isinstance(new, set):
            vars(new).update(children)
        return new

    def changed(self) -> list[str]:
        """Describe the tensors that were changed in place since."""
        return [f"a tensor in a {h}" for t, h, version in self.tensors if version_of(t) != version]


def without_graph(value: Any) -> Any:
    """Return the value detached from its graph, which would keep that of a former step alive."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


State = dict[str, tuple[Any, ...]]
"""By path, a plain value or identity, a tensor's version, and the object, to keep its identity."""


def _held_by(module: nn.Module) -> dict[str, Any]:
    """Return attributes, buffers and modules of a module, without torch's and DeepSpeed's own."""
    held = {**vars(module), **module._buffers, **module._modules}
    return {name: value for name, value in held.items() if _is_blocks_own(name)}


def _add_to(state: State, seen: set[int], path: str, value: Any) -> None:
    is_tensor = isinstance(value, Tensor)
    identity = value if isinstance(value, int | float | str) else id(value)
    version: Any = version_of(value) if is_tensor else 0
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        version = hash(value.tobytes()) if value.nbytes <= COPIED_BYTES else 0
    state[path] = (identity, version, value)
    if id(value) in seen or len(seen) > MAX_OBJECTS:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        children: Iterable[tuple[Any, Any]] = _held_by(value).items()
    elif type(value) is tuple or (not is_tensor and _is_holder(value.__class__)):
        children = _children(value)
    else:
        return
    for key, child in children:
        _add_to(state, seen, f"{path}.{key}", child)


# names that functions reach


Getter = Callable[[], Any]
"""Returns what a name is bound to at the time."""


def _is_searched(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in UNSEARCHED_PACKAGES


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the global and attribute names that a code object and those inside it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def _content(cell: Any) -> Any:
    with suppress(ValueError):  # empty
        return cell.cell_contents


def _reached(value: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield what a value leads to: names with their getters, and other values without a name."""
    others: Iterable[Any] = ()
    if isinstance(value, types.FunctionType) and _is_searched(value.__module__):
        names = _names(value.__code__)
        places = [("the global ", value.__globals__)]
        for module in map(value.__globals__.get, names):
            if isinstance(module, types.ModuleType) and _is_searched(module.__name__):
                places.append((f"the global {module.__name__}.", vars(module)))
        for words, place in places:
            for name in names & place.keys():
                yield words + name, functools.partial(place.get, name)
        closure, called = value.__closure__ or (), value.__name__
        for name, cell in zip(value.__code__.co_freevars, closure, strict=True):
            yield f"{name} in the closure of {called}", functools.partial(_content, cell)
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            yield f"{called}.{name}", functools.partial(getattr, value, name)
    elif isinstance(value, type) and _is_searched(value.__module__):
        others = value.__bases__
        for name in (n for n in vars(value) if not n.startswith("__") or n == "__call__"):
            words = f"the class attribute {value.__name__}.{name}"
            yield words, functools.partial(vars(value).get, name)
    elif isinstance(value, (types.MethodType, classmethod, staticmethod)):
        others = value.__func__, getattr(value, "__self__", None)
    elif isinstance(value, property):
        others = value.fget, value.fset
    elif isinstance(value, functools.partial):
        others = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, nn.Module):
        others = type(value), *_held_by(value).values()
    elif isinstance(value, (*_CONTAINERS, tuple)) or (
        _is_searched(type(value).__module__) and _is_holder(value.__class__)
    ):
        others = type(value), *(child for _, child in _children(value))
    yield from ((None, other) for other in others)


def reachable_names(parts: Iterable[nn.Module]) -> dict[str, Getter]:
    """Return getters of the globals, cells and class attributes that the parts' functions use."""
    found, seen, todo = dict[str, Getter](), dict[int, Any](), deque[Any](parts)
    while todo and len(seen) < MAX_OBJECTS:
        value = todo.popleft()
        if id(value) not in seen:
            seen[id(value)] = value
            for path, reached in _reached(value):
                if path is not None:
                    found[f"{path} #{len(found)}" if path in found else path] = reached
                todo.append(reached if path is None else reached())
    return found


# modules


class CheckpointedModule:
    """A module whose forwards are checkpointed; `index` is its place in its unit.

    `replaying` is run by the module's forward if a recomputation calls the module with its hooks.
    """

    def __init__(
        self, name: str, module: nn.Module, choice: Choice | None = None, index: int = 0
    ) -> None:
        self.name, self.module, self.choice, self.index = name, module, choice, index
        self.parts = list(module.modules())
        self.replaying: Callable[[], Any] | None = None

    @functools.cached_property
    def names(self) -> dict[str, Getter]:
        """See `reachable_names`."""
        return reachable_names(self.parts)


@functools.cache
def _is_blocks_own(name: str) -> bool:
    """Return whether a module's attribute is neither torch's nor DeepSpeed's."""
    return name not in _MODULES_OWN and not is_bookkeeping(name)


Holder = tuple[str, dict[str, Any], dict[str, Any]]
"""A dict with attributes, parameters or buffers: its description, itself, and its values."""


def holders(parts: Sequence[nn.Module]) -> list[Holder]:
    """Return the dicts of some modules, with their present values."""
    found: list[Holder] = []
    for part in parts:
        kinds = ("a tensor in", "the weight", "the buffer")
        dicts: tuple[dict[str, Any], ...] = (vars(part), part._parameters, part._buffers)
        for kind, held in zip(kinds, dicts, strict=True):
            # dict's own method: that of ZeRO-3's class gathers parameters
            values = {name: value for name, value in dict.items(held) if _is_blocks_own(name)}
            found.append((f"{kind} {type(part).__name__}", held, values))
    return found


def _restore(held: dict[str, Any], values: dict[str, Any]) -> None:
    now = dict(dict.items(held))
    for name in now.keys() - values.keys():
        if _is_blocks_own(name):
            del held[name]
    for name, value in values.items():
        if name not in now or now[name] is not value:
            held[name] = value


@dataclass
class _ModuleTensor:
    what: str
    name: str
    values: dict[str, Any]
    tensor: Tensor
    version: int
    saved: Tensor | None

    @property
    def is_changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def __str__(self) -> str:
        return f"{self.what}.{self.name}"


class Snapshot:
    """State in which a block's forward begins; `arguments` are those that are not tensors."""

    def __init__(self, target: CheckpointedModule, arguments: Sequence[Any]) -> None:
        self._target = target
        self._copied = copied = CopiedObjects()
        self.arguments = [copied.copy(argument) for argument in arguments]
        """Copies, of which every recomputation gets copies."""
        self._holders, self._tensors = holders(target.parts), list[_ModuleTensor]()
        for what, _, values in self._holders:
            for name, value in values.items():
                if isinstance(value, Tensor):
                    is_large = value.numel() * value.element_size() > COPIED_BYTES
                    is_copied = not (is_large or isinstance(value, nn.Parameter))
                    saved = value.detach().clone() if is_copied else None
                    version = version_of(value)
                    self._tensors.append(_ModuleTensor(what, name, values, value, version, saved))
                elif isinstance(value, (*_CONTAINERS, torch.Generator)):
                    values[name] = copied.copy(value)
        self._random = [generator.get_state() for generator in copied.generators]

    def _changed(self) -> list[str]:
        """Describe the tensors without a copy that were changed in place."""
        own = [str(h) for h in self._tensors if h.saved is None and h.is_changed]
        return self._copied.changed() + own

    def reachable(self, values: Any) -> list[Tensor]:
        """Return tensors in values, in what they hold, and on the module."""
        now = CopiedObjects()
        own = [value for *_, held in holders(self._target.parts) for value in held.values()]
        for value in (*tree_leaves(values), *own):
            now.copy(value, holder=self)
        return [tensor for tensor, *_ in now.tensors]

    def after(self) -> None:
        """Refuse tensors that the forward has changed in place without a copy."""
        for what in self._changed():
            found = f"{what}, changed in place by its forward"
            remedy = f"assign a new tensor instead, {LEAVE_OUT}"
            raise refusal(self._target.name, found, CHANGED, remedy)
        for held in self._tensors:
            if not held.is_changed and held.name not in _UNCOUNTED:
                held.saved = None
            held.tensor = held.values[held.name] = without_graph(held.tensor)

    def copied_arguments(self) -> list[Any]:
        """Return copies of the arguments for one recomputation."""
        copied = CopiedObjects()
        return [copied.copy(argument) for argument in self.arguments]

    def unrestored(self) -> State:
        """Return the present state of everything that a recomputation might change for good."""
        state: State = {"random.getstate()": (random.getstate(),)}
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy.random.get_state()"] = (str(numpy.random.get_state()),)
        seen: set[int] = set()
        for part in self._target.parts:
            for name, value in vars(part).items():
                if _is_blocks_own(name):
                    _add_to(state, seen, f"{type(part).__name__}.{name}", value)
        for number, value in enumerate(self.arguments, 1):
            _add_to(state, seen, f"argument {number}", value)
        for path, get in self._target.names.items():
            _add_to(state, seen, path, get())
        return state

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state before the forward; afterwards the present state."""
        for what in self._changed():
            raise change_error(self._target.name, what)
        now, generators = holders(self._target.parts), self._copied.generators
        states = [generator.get_state() for generator in generators]
        copied = CopiedObjects()
        before = {
            id(values): {
                n: copied.copy(v) if isinstance(v, _CONTAINERS) else v for n, v in values.items()
            }
            for *_, values in self._holders
        }
        for held in self._tensors:
            if held.saved is not None:  # a copy of it: there may be another backward
                value = held.saved.clone().requires_grad_(held.tensor.requires_grad)
                before[id(held.values)][held.name] = value
        try:
            for _, owner, values in self._holders:
                _restore(owner, before[id(values)])
            for generator, state in zip(generators, self._random, strict=True):
                generator.set_state(state)
            yield
        finally:
            for _, owner, values in now:
                _restore(owner, values)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
