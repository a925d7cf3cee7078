"""What a block's forward finds besides tensor arguments and random numbers: a snapshot of it.

Weights, buffers (the running statistics of BatchNorm), plain attributes (`self.calls += 1`,
`self.aux_loss = ...`), `training` flags, objects and generators among the arguments. The recompute
finds all of it as the forward did, and leaves it as it was found: a counter counts once, what a
forward leaves on its module is the forward's, and what the recompute made goes with it. What was
changed in place, and of which there is no copy, is refused by name.

A look is a shallow copy of a dict, list, set, object or module, compared by identity, which can be
put back into the same object.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import operator
import sys
import types
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ds_ckpt.errors import Problem, UnsupportedError

log = logging.getLogger("ds_ckpt")
MOST = 1000
"""Objects looked into in one call; whoever hands a whole data set to a block gets a warning."""
_ITEMS = (list, dict, set, deque)
_LEAVES = (Tensor, nn.Module, types.FunctionType, types.MethodType, type, enum.Enum)
_MODULES_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {
    "forward",  # set by whoever patches it
    "_original_parameters",  # the rest is DeepSpeed's bookkeeping, in step with its own hooks
    "_external_params",
    "pre_bwd_fn",
    "post_bwd_fn",
}
CHANGED = "the recompute would begin with the changed values"
LEAVE_OUT = "or leave the block out of checkpointing"
Look = dict[Any, Any] | list[Any]


def refusal(name: str, found: str, why: str, remedy: str) -> UnsupportedError:
    """What block `name` must not do."""
    return UnsupportedError(Problem(where=name, found=found, why=why, remedy=remedy))


def changed_between(name: str, what: str) -> UnsupportedError:
    """Something that the recompute of block `name` would find with other values."""
    return refusal(
        name,
        f"{what}, changed in place between the block's forward and its backward",
        CHANGED,
        f"change it after the backward of every forward that used it, {LEAVE_OUT}",
    )


def in_words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {str(dtype).removeprefix('torch.')}"


def input_changed(name: str, what: str = "argument") -> UnsupportedError:
    """An input of block `name` that has other values now than when it was kept."""
    return refusal(
        name,
        f"an {what} that was changed in place after the block's forward",
        CHANGED,
        f"write x = x + y for x += y where this block's input is used again, {LEAVE_OUT}",
    )


def version_of(tensor: Tensor) -> int:
    """0 where none is counted: what comes from inference mode cannot be changed in training."""
    return 0 if tensor.is_inference() else int(tensor._version)


# how objects are looked into


@functools.cache
def _kind(cls: Any) -> Literal["leaf", "items", "object"]:
    if issubclass(cls, _ITEMS):
        return "items"
    root = cls.__module__.partition(".")[0]
    if issubclass(cls, types.SimpleNamespace):
        return "object"
    foreign = root in ("torch", "numpy") or root in sys.stdlib_module_names
    return "leaf" if issubclass(cls, _LEAVES) or foreign else "object"


def _can_change(value: object) -> bool:
    cls: Any = type(value)
    return _kind(cls) != "leaf"


@functools.cache
def _slots(cls: Any) -> tuple[str, ...]:
    found = (base.__dict__.get("__slots__", ()) for base in cls.__mro__)
    names = itertools.chain.from_iterable((s,) if isinstance(s, str) else s for s in found)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


@functools.cache
def _is_blocks_own(name: str) -> bool:
    """Whether a module's attribute is not torch's or DeepSpeed's."""
    return name not in _MODULES_OWN and not name.startswith(("ds_", "applied_"))


def look(holder: Any) -> Look:
    """What a list, dict, set, deque, module or object holds now."""
    if isinstance(holder, nn.Module):
        return {name: value for name, value in vars(holder).items() if _is_blocks_own(name)}
    if isinstance(holder, dict):
        return {key: value for key, value in holder.items()}  # noqa: C416 - ZeRO-3 gathers on access
    if isinstance(holder, _ITEMS):
        return list(holder)
    cls: Any = type(holder)
    slots = {n: getattr(holder, n) for n in _slots(cls) if hasattr(holder, n)}
    return {**getattr(holder, "__dict__", {}), **slots}


def members(one: Look) -> Iterable[Any]:
    return one.values() if isinstance(one, dict) else one


def same(one: Look, other: Look) -> bool:
    """The same objects in the same places."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return (
            all(map(operator.is_, map(other.get, one), one.values())) and one.keys() == other.keys()
        )
    return all(map(operator.is_, one, other))


def put_back(holder: Any, noted: Look, now: Look | None = None) -> None:
    """Make `holder` hold what it held at the look; what is the same is not touched.

    Args:
        now: a look at it, where there is one already.
    """
    now = look(holder) if now is None else now
    if same(now, noted):
        return
    if isinstance(holder, dict) and now.keys() == noted.keys():  # type: ignore[union-attr]
        changed = ((k, v) for k, v in noted.items() if now[k] is not v)  # type: ignore[union-attr]
        holder.update(changed)
    elif isinstance(holder, _ITEMS):
        holder.clear()  # also for the order of keys
        extend = holder.extend if isinstance(holder, list | deque) else holder.update
        extend(noted)  # type: ignore[arg-type]
    else:
        assert isinstance(noted, dict)
        assert isinstance(now, dict)
        for name in now.keys() - noted.keys():
            object.__delattr__(holder, name)
        for name, value in noted.items():
            if name not in now or now[name] is not value:
                object.__setattr__(holder, name, value)


class Found:
    """What can be reached from some values, the values themselves included.

    Attributes:
        holders: what can be changed.
        generators: random states of their own.
        iterators: what can be run through once.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.holders: list[Any] = []
        self.generators: list[torch.Generator] = []
        self.iterators: list[Any] = []
        seen: set[int] = set()
        left = list(values)[::-1]
        while left:
            value = left.pop()
            if value is None or isinstance(value, Tensor | bool | int | float | str):
                continue
            if isinstance(value, torch.Generator):
                self.generators.append(value)
            if isinstance(value, Iterator):
                self.iterators.append(value)
            if isinstance(value, tuple):
                left += value[::-1]
            elif _can_change(value) and id(value) not in seen:
                if len(seen) == MOST:
                    log.warning(
                        "ds_ckpt: the %s of a block call is not looked through", type(value)
                    )
                seen.add(id(value))
                if len(seen) <= MOST:
                    self.holders.append(value)
                    left += list(members(look(value)))[::-1]


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors that can be reached from some values: in containers, in objects, in what those hold.

    Modules are not entered.
    """
    values = list(values)
    inside = (v for holder in Found(values).holders for v in members(look(holder)))
    found: list[Tensor] = []
    for value in (*values, *inside):
        flat = value if isinstance(value, tuple) else (value,)
        found += [t for t in flat if isinstance(t, Tensor)]
    return found


# what is noted of one forward


def _without_graph(value: Any) -> Any:
    """The value without its graph, which would keep that of a former step alive."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


class _Noted:
    """One look at a holder, with the versions of the tensors in it.

    Args:
        holder: what is looked at.
        what: it, in words; a name is added where they end with a dot.
        copied: names of tensors that are copied, since the forward may change them in place.
            Parameters are left out where it is given.
    """

    def __init__(self, holder: Any, what: str, copied: Container[Any] | None = None) -> None:
        self.holder, self._what = holder, what
        self.look = look(holder)
        pairs = self.look.items() if isinstance(self.look, dict) else enumerate(self.look)
        tensors = [
            (key, value)
            for key, value in pairs
            if isinstance(value, Tensor)
            if copied is None or not isinstance(value, nn.Parameter)
        ]
        copied_names = () if copied is None else copied
        self.versions = {key: (value, version_of(value)) for key, value in tensors}
        self.copied = {k: t.detach().clone() for k, t in tensors if k in copied_names}

    def what(self, key: Any) -> str:
        return f"{self._what}{key}" if self._what.endswith(".") else self._what

    def written(self) -> list[Any]:
        """Names of tensors that were changed in place since."""
        return [key for key, (t, version) in self.versions.items() if version_of(t) != version]

    def keep_copies(self, names: Iterable[Any]) -> None:
        """The copies of what the forward has changed, and no others."""
        self.copied = {name: self.copied[name] for name in names}
        for name, copy in self.copied.items():
            tensor, _ = self.versions.pop(name)
            copy.requires_grad_(tensor.requires_grad)

    def loosen(self) -> None:
        """Hold no graph."""
        if all(tensor.grad_fn is None for tensor, _ in self.versions.values()):
            return
        if isinstance(self.look, dict):
            self.look = {key: _without_graph(value) for key, value in self.look.items()}
        else:
            self.look = [_without_graph(value) for value in self.look]
        self.versions = {k: (_without_graph(t), v) for k, (t, v) in self.versions.items()}

    def put_back(self, now: Look) -> None:
        noted = self.look
        if self.copied:  # of copies a copy: there may be another recompute
            assert isinstance(noted, dict)
            noted = noted | {
                key: copy.detach().clone().requires_grad_(copy.requires_grad)
                for key, copy in self.copied.items()
            }
        put_back(self.holder, noted, now)


class BlockMemory:
    """What is remembered of one block from forward to forward.

    The first forward is compared with copies of all buffers and plain tensors of the module; from
    then on those that it changed in place are copied before each forward. Objects on the module
    are looked into at the first forward, and from then on if that changed them.

    Args:
        name: the block's, for messages.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.parts = name, list(module.modules())
        self.first = True
        self.objects: list[Any] = []
        self.written: defaultdict[int, set[Any]] = defaultdict(set)
        """Names of what a forward changes in place, by the holder's id."""
        for part in self.parts:
            if isinstance(part, _NormBase):  # its operators count no version
                self.written[id(part._buffers)] |= part._buffers.keys()

    def copied(self, holder: Any) -> Container[Any]:
        """Names of what is copied before a forward."""
        return _All() if self.first else self.written[id(holder)]


class _All(Container[Any]):
    def __contains__(self, _: object) -> bool:
        return True


class Snapshot:
    """The state in which a block's forward begins.

    Args:
        memory: of the block.
        arguments: the call's values that are no tensors.

    Raises UnsupportedError: an argument that can be run through once only.
    """

    def __init__(self, memory: BlockMemory, arguments: Iterable[Any]) -> None:
        self._memory = memory
        found = Found(arguments)
        if found.iterators:
            raise refusal(
                memory.name,
                f"a {type(found.iterators[0]).__name__} among the block's arguments",
                "it can be run through once, and the recompute runs the block a second time",
                "give the block a list, or leave it out of checkpointing",
            )
        self._given = [_Noted(h, f"a tensor in a {type(h).__name__}") for h in found.holders]
        self._weights = [
            _Noted(part._parameters, f"the weight {type(part).__name__}.") for part in memory.parts
        ]
        self._modules = [
            _Noted(holder, f"{what} {type(part).__name__}.", memory.copied(holder))
            for part in memory.parts
            for holder, what in ((part, "a tensor in"), (part._buffers, "the buffer"))
        ]
        values = [v for noted in self._modules for v in members(noted.look)]
        if memory.first:
            inside = Found(values)
            self._generators, on_modules = [*found.generators, *inside.generators], inside.holders
        else:
            own = [v for v in values if isinstance(v, torch.Generator)]
            self._generators = [*found.generators, *own]
            on_modules = [v for v in values if isinstance(v, _ITEMS)] + memory.objects
        unique = {id(item): item for item in on_modules}.values()
        self._items = [_Noted(h, f"a tensor in a {type(h).__name__} of the module") for h in unique]
        self._random = [g.get_state() for g in self._generators]

    def reachable(self) -> list[Tensor]:
        """Tensors that the objects among the arguments and the module hold now."""
        values = (v for n in self._modules for v in members(look(n.holder)))
        return tensors_in([*(noted.holder for noted in self._given), *values])

    def after(self) -> None:
        """The forward has run.

        Raises UnsupportedError: it has changed a tensor in place of which there is no copy.
        """
        memory = self._memory
        for noted in (*self._given, *self._items):
            for key in noted.written():
                raise refusal(
                    memory.name,
                    f"{noted.what(key)}, changed in place by its forward",
                    CHANGED,
                    f"assign a new tensor instead, {LEAVE_OUT}",
                )
        if memory.first:
            direct = {
                id(v) for n in self._modules for v in members(n.look) if isinstance(v, _ITEMS)
            }
            memory.objects = [
                n.holder
                for n in self._items
                if id(n.holder) not in direct and not same(n.look, look(n.holder))
            ]
        for noted in self._modules:
            written = noted.written()
            for key in written:
                if key not in noted.copied:
                    raise refusal(
                        memory.name,
                        f"{noted.what(key)}, changed by this forward and not by the first one",
                        "the recompute needs its value from before, which is no longer there",
                        "assign a new tensor instead, change it in every training forward or "
                        "outside of the block, or leave the block out of checkpointing",
                    )
            if memory.first:  # also what an operator has changed that counts no version
                known = memory.written[id(noted.holder)]
                known |= {
                    key
                    for key, copy in noted.copied.items()
                    if key in written or not torch.equal(copy, noted.versions[key][0])
                }
                noted.keep_copies(known & noted.copied.keys())
            else:
                noted.keep_copies(noted.copied.keys())
        for noted in (*self._modules, *self._items):
            noted.loosen()
        memory.first = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was before the forward; afterwards as it is now.

        Raises UnsupportedError: something was changed in place since.
        """
        every = [*self._given, *self._weights, *self._modules, *self._items]
        for noted in every:
            for key in noted.written():
                raise changed_between(self._memory.name, noted.what(key))
        states = [g.get_state() for g in self._generators]
        now = [look(noted.holder) for noted in every]
        try:
            for noted, looked in zip(every, now, strict=True):
                noted.put_back(looked)
            for generator, state in zip(self._generators, self._random, strict=True):
                generator.set_state(state)
            yield
        finally:
            for noted, looked in zip(every, now, strict=True):
                put_back(noted.holder, looked)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
