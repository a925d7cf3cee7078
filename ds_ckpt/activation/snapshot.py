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

import argparse
import copyreg
import enum
import functools
import itertools
import logging
import operator
import sys
import types
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _NormBase

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry.memory import version_of

log = logging.getLogger("ds_ckpt")
MOST = 1000
"""Objects looked into in one call; whoever hands a whole data set to a block gets a warning."""
_ITEMS = (list, dict, set, deque)
_OPEN = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap, Distribution)
"""Of Python's and torch's own classes, which are else not looked into, those that hold others."""
_PLAIN = frozenset({type(None), bool, int, float, str, Tensor, nn.Parameter})
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
Look = dict[Any, Any]


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


def input_changed(name: str, what: str = "argument") -> UnsupportedError:
    """An input of block `name` that has other values now than when it was kept."""
    return refusal(
        name,
        f"an {what} that was changed in place after the block's forward",
        CHANGED,
        f"write x = x + y for x += y where this block's input is used again, {LEAVE_OUT}",
    )


# how objects are looked into


@functools.cache
def _can_change(cls: Any) -> bool:
    """Whether objects of a class are looked into."""
    if issubclass(cls, (*_ITEMS, *_OPEN)):
        return True
    root = cls.__module__.partition(".")[0]
    foreign = root in ("torch", "numpy") or root in sys.stdlib_module_names
    return not (issubclass(cls, _LEAVES) or foreign)


@functools.cache
def _is_object(cls: Any) -> bool:
    """Whether objects of a class are looked into at first, and are none of `_ITEMS`."""
    return _can_change(cls) and not issubclass(cls, _ITEMS)


def look(holder: Any) -> Look:
    """What a list, dict, set, deque or object holds now, by key, place or name."""
    if isinstance(holder, dict):
        return dict(holder.items())
    if isinstance(holder, _ITEMS):
        return dict(enumerate(holder))
    names = copyreg._slotnames(type(holder))  # type: ignore[attr-defined]
    slots = {name: getattr(holder, name) for name in names if hasattr(holder, name)}
    return {**getattr(holder, "__dict__", {}), **slots}


def same(one: Look, other: Look) -> bool:
    """The same objects in the same places."""
    return one.keys() == other.keys() and all(map(operator.is_, map(other.get, one), one.values()))


def put_back(holder: Any, noted: Look) -> None:
    """Make `holder` hold what it held at the look; what is the same is not touched."""
    now = look(holder)
    if same(now, noted):
        return
    if isinstance(holder, _ITEMS):
        holder.clear()  # also for the order of keys
        if isinstance(holder, dict):
            holder.update(noted)
        elif isinstance(holder, set):
            holder.update(noted.values())
        else:
            holder.extend(noted.values())
        return
    for name in now.keys() - noted.keys():
        object.__delattr__(holder, name)
    for name, value in noted.items():
        if name not in now or now[name] is not value:
            object.__setattr__(holder, name, value)


class Found:
    """What can be reached from some values, the values themselves included.

    Attributes:
        holders: what can be changed.
        tensors: also those in holders. Modules are not entered.
        generators: random states of their own.
        iterators: what can be run through once.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.holders: list[Any] = []
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.iterators: list[Any] = []
        seen: set[int] = set()
        left = list(values)[::-1]
        while left:
            value = left.pop()
            if isinstance(value, Tensor):
                self.tensors.append(value)
            cls: Any = type(value)
            if cls in _PLAIN:
                continue
            if isinstance(value, torch.Generator):
                self.generators.append(value)
            if isinstance(value, Iterator):
                self.iterators.append(value)
            if isinstance(value, tuple):
                left += value[::-1]
            elif _can_change(cls) and id(value) not in seen:
                if len(seen) == MOST:
                    log.warning(
                        "ds_ckpt: the %s of a block call is not looked through", type(value)
                    )
                seen.add(id(value))
                if len(seen) <= MOST:
                    self.holders.append(value)
                    left += list(look(value).values())[::-1]


# what is noted of one forward


_version = operator.attrgetter("_version")


def without_graph(value: Any) -> Any:
    """The value without its graph, which would keep that of a former step alive."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _equal(one: Tensor, other: Tensor) -> bool:
    """Of equal values, as far as torch compares tensors of this kind: it does no sparse ones."""
    try:
        return torch.equal(one, other)
    except NotImplementedError:
        return True


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # one from inference mode
        return [version_of(tensor) for tensor in tensors]


class _Noted:
    """One look at a holder, with the versions of the tensors in it."""

    def __init__(self, holder: Any, where: str = "") -> None:
        self.holder, self.what = holder, f"a tensor in a {type(holder).__name__}{where}"
        self.look = look(holder)
        self._tensors = [value for value in self.look.values() if isinstance(value, Tensor)]
        self._written = _versions(self._tensors)

    @property
    def changed(self) -> bool:
        """Whether a tensor in it was changed in place since."""
        return self._written != _versions(self._tensors)

    def loosen(self) -> None:
        """Hold no graph."""
        self.look = {key: without_graph(value) for key, value in self.look.items()}
        self._tensors = [without_graph(tensor) for tensor in self._tensors]


@functools.cache
def _is_blocks_own(name: str) -> bool:
    """Whether a module's attribute is not torch's or DeepSpeed's."""
    return name not in _MODULES_OWN and not name.startswith(("ds_", "applied_"))


class Attributes:
    """What modules hold now: attributes of their own, parameters and buffers.

    Every call of a block is looked at, so this is in flat lists and without a loop in Python.

    Attributes:
        owners: the dict in which each is.
        names, values: of each.
        tensors: where the tensors are among them.
        versions: theirs.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        modules = list(map(vars, parts))
        tables = map(operator.itemgetter("_parameters", "_buffers"), modules)
        dicts = [*modules, *chain.from_iterable(tables)]
        # not through a dict's own class: ZeRO-3's gathers a parameter that is looked at
        names = list(chain.from_iterable(map(dict.keys, dicts)))
        owners = chain.from_iterable(map(repeat, dicts, map(len, dicts)))
        own = list(map(_is_blocks_own, chain.from_iterable(modules)))
        own += repeat(True, len(names) - len(own))
        self.owners: list[dict[str, Any]] = list(compress(owners, own))
        self.names = list(compress(names, own))
        self.values = list(compress(chain.from_iterable(map(dict.values, dicts)), own))
        is_tensor = map(isinstance, self.values, repeat(Tensor))
        self.tensors = list(compress(itertools.count(), is_tensor))
        self.versions = _versions(self._tensors())

    def _tensors(self) -> list[Tensor]:
        return list(map(self.values.__getitem__, self.tensors))

    def of(self, kinds: tuple[type, ...]) -> list[Any]:
        """Values of some classes."""
        return list(compress(self.values, map(isinstance, self.values, repeat(kinds))))

    def trained(self) -> list[bool]:
        """Whether gradients are wanted of each of the tensors."""
        return list(map(operator.attrgetter("requires_grad"), self._tensors()))

    def changed(self) -> list[int]:
        """Where tensors are that were changed in place since."""
        now = _versions(self._tensors())
        if now == self.versions:
            return []
        return [i for i, a, b in zip(self.tensors, self.versions, now, strict=True) if a != b]

    def loosen(self) -> None:
        """Hold no graph."""
        if any(map(operator.attrgetter("grad_fn"), self._tensors())):
            self.values = [without_graph(value) for value in self.values]

    def what(self, index: int, parts: Sequence[nn.Module]) -> str:
        """One of them in words."""
        owner = self.owners[index]
        part = next(
            p for p in parts if any(owner is d for d in (vars(p), p._parameters, p._buffers))
        )
        kind = "a tensor in"
        if owner is not vars(part):
            kind = "the weight" if owner is part._parameters else "the buffer"
        return f"{kind} {type(part).__name__}.{self.names[index]}"

    def put_back(self, values: Sequence[Any], now: Attributes) -> None:
        """Make the modules, which hold `now`, hold `values` in the places of these."""
        if len(values) == len(now.values) and all(
            chain(
                map(operator.is_, values, now.values),
                map(operator.is_, self.owners, now.owners),
                map(operator.eq, self.names, now.names),
            )
        ):
            return
        places = zip(map(id, now.owners), now.names, strict=True)
        held = dict(zip(places, zip(now.owners, now.values, strict=True), strict=True))
        for owner, name, value in zip(self.owners, self.names, values, strict=True):
            _, current = held.pop((id(owner), name), (None, held))
            if current is not value:
                owner[name] = value
        for (_, name), (owner, _) in held.items():
            del owner[name]


class BlockMemory:
    """What is remembered of one block from forward to forward.

    The first forward is compared with copies of all buffers and plain tensors of the module; from
    then on those that it changed in place are copied before each forward. Objects on the module
    are looked into at the first forward, and from then on if that changed them. A forward in
    another mode (`training`), or with other objects on the module, is a first one, too.

    Args:
        name: the block's, for messages.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.parts = name, list(module.modules())
        self.first = True
        self._modes: set[bool] = set()
        self._objects: list[int] = []
        self.objects: list[Any] = []
        """Those that are looked into at every forward."""
        self.written: set[tuple[int, str]] = set()
        """What a forward changes in place: the id of the dict that it is in, and its name."""
        self.alone: set[tuple[int, str]] = set()
        """Likewise, lists and their like that the first forward could reach by no other way."""
        for part in self.parts:
            if isinstance(part, _NormBase):  # its operators count no version
                self.written |= {(id(part._buffers), name) for name in part._buffers}

    def begins(self, before: Attributes) -> None:
        """A forward begins with these."""
        objects = compress(before.values, map(_is_object, map(type, before.values)))
        now, mode = list(map(id, objects)), self.parts[0].training
        if now != self._objects or mode not in self._modes:
            self.first = True
            self._objects = now
            self._modes.add(mode)


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
        self._given = [_Noted(holder) for holder in found.holders]
        self._given_on = {tensor.device for tensor in found.tensors}
        self._before = before = Attributes(memory.parts)
        self._trained = before.trained()
        memory.begins(before)
        if memory.first:
            inside = Found(before.values)
            holders, generators = inside.holders, inside.generators
            copied = [i for i in before.tensors if not isinstance(before.values[i], nn.Parameter)]
        else:
            is_generator = map(operator.is_, map(type, before.values), repeat(torch.Generator))
            generators = list(compress(before.values, is_generator))
            holders = [*before.of(_ITEMS), *memory.objects]
            copied = [
                i for i in before.tensors if memory.written and self._place(i) in memory.written
            ]
        unique = {id(holder): holder for holder in holders}.values()
        self._items = [_Noted(holder, " of the module") for holder in unique]
        self._copies = {i: before.values[i].detach().clone() for i in copied}
        self._generators = [*found.generators, *generators]
        self._random = [generator.get_state() for generator in self._generators]

    def _place(self, index: int) -> tuple[int, str]:
        return id(self._before.owners[index]), self._before.names[index]

    def accelerators(self) -> list[torch.device]:
        """On which tensors of the module lie, or such as can be reached from its arguments."""
        own = {self._before.values[i].device for i in self._before.tensors}
        return [device for device in self._given_on | own if device.type != "cpu"]

    def reachable(self, results: Iterable[Any]) -> list[Tensor]:
        """Tensors in the results, in the objects among the arguments, and on the module now."""
        given = [noted.holder for noted in self._given]
        return Found([*results, *given, *Attributes(self._memory.parts).values]).tensors

    def after(self) -> None:
        """The forward has run.

        Raises UnsupportedError: it has changed a tensor in place of which there is no copy.
        """
        memory, before = self._memory, self._before
        for noted in (*self._given, *self._items):
            if noted.changed:
                raise refusal(
                    memory.name,
                    f"{noted.what}, changed in place by its forward",
                    CHANGED,
                    f"assign a new tensor instead, {LEAVE_OUT}",
                )
        changed = before.changed()
        for index in changed:
            if index not in self._copies and not isinstance(before.values[index], nn.Parameter):
                raise refusal(
                    memory.name,
                    f"{before.what(index, memory.parts)}, changed by this forward and not by the "
                    "first one",
                    "the recompute needs its value from before, which is no longer there",
                    "assign a new tensor instead, change it in every training forward or "
                    "outside of the block, or leave the block out of checkpointing",
                )
        refilled = [noted for noted in self._items if not same(noted.look, look(noted.holder))]
        if memory.first:
            direct = set(map(id, before.of(_ITEMS)))
            watched = {*map(id, memory.objects), *(id(noted.holder) for noted in refilled)}
            objects = (n.holder for n in self._items if id(n.holder) in watched - direct)
            memory.objects = list(objects)
            # also what an operator has changed that counts no version
            memory.written |= {
                self._place(i)
                for i, copy in self._copies.items()
                if i in changed or not _equal(copy, before.values[i])
            }
            written = {i: c for i, c in self._copies.items() if self._place(i) in memory.written}
            self._copies = written
        if refilled or memory.first:
            self._part_with_results(refilled)
        memory.first = False
        for noted in self._items:
            noted.loosen()
        before.loosen()

    def _part_with_results(self, refilled: Sequence[_Noted]) -> None:
        """Have another one in the place of each list, dict, set or deque of the module among
        these, which the forward has changed.

        The list itself may hold a result now, and that its graph, which holds this: a circle that
        no collector opens. What the block can reach by another way, too, stays as it is.
        """
        memory, before = self._memory, self._before
        held = map(isinstance, before.values, repeat(_ITEMS))
        places: defaultdict[int, list[int]] = defaultdict(list)
        for index in compress(itertools.count(), held):
            places[id(before.values[index])].append(index)
        given = {id(value) for n in self._given for value in (n.holder, *n.look.values())}
        if memory.first:
            inside = {id(value) for n in self._items for value in n.look.values()}
            memory.alone = {
                self._place(index)
                for holder, at in places.items()
                if holder not in inside
                for index in at
            }
        for noted in refilled:
            holder, at = noted.holder, places.get(id(noted.holder), [])
            plain = type(holder).__module__ in ("builtins", "collections")
            alone = memory.alone.issuperset(map(self._place, at)) and id(holder) not in given
            if plain and at and alone:
                noted.holder = shallow_copy(holder)
                noted.holder.clear()  # filled for a recompute, and without graphs
                for index in at:
                    before.values[index] = noted.holder

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was before the forward; afterwards as it is now.

        Raises UnsupportedError: something was changed in place since.
        """
        parts, before, name = self._memory.parts, self._before, self._memory.name
        holders = [*self._given, *self._items]
        for noted in holders:
            if noted.changed:
                raise changed_between(name, noted.what)
        for index in before.changed():
            if index not in self._copies:
                raise changed_between(name, before.what(index, parts))
        values = list(before.values)
        for index, copy in self._copies.items():  # a copy of it: there may be another recompute
            values[index] = copy.clone().requires_grad_(values[index].requires_grad)
        states = [generator.get_state() for generator in self._generators]
        others = [
            (tensor, trained)
            for tensor, trained in zip(before._tensors(), self._trained, strict=True)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad != trained
        ]
        now, looks = Attributes(parts), [look(noted.holder) for noted in holders]
        try:
            for parameter, trained in others:
                parameter.requires_grad_(trained)
            before.put_back(values, now)
            for noted in holders:
                put_back(noted.holder, noted.look)
            for generator, state in zip(self._generators, self._random, strict=True):
                generator.set_state(state)
            yield
        finally:
            for parameter, trained in others:
                parameter.requires_grad_(not trained)
            now.put_back(now.values, Attributes(parts))
            for noted, looked in zip(holders, looks, strict=True):
                put_back(noted.holder, looked)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
