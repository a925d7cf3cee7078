"""What a block's forward finds in its module besides buffers, and in objects that it is handed.

Weights, plain attributes (`self.calls += 1`, `self.aux_loss = ...`), objects among the arguments.
All of it is noted when the forward runs; the recompute finds it as it was then, and leaves it as it
was found. So a counter counts once, what a forward leaves on its module is the forward's, and what
the recompute made goes with it. A weight that was changed in place in between is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_ckpt.activation.guards import attribute_changed, object_changed, one_way, weight_changed
from ds_ckpt.activation.holders import ITEMS, Found, look, members, put_back, same, tensors_in


def version_of(tensor: Tensor) -> int:
    """0 where none is counted."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _loose(value: Any) -> Any:
    """The value without its graph, which would keep that of a former step alive."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


class _Noted:
    """One look at a holder, with the versions of the tensors in it."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.look = look(holder)
        self._versions = [(t, version_of(t)) for t in self.tensors()]

    def tensors(self) -> list[Tensor]:
        own = (m for m in members(self.look) if isinstance(m, Tensor))
        return [t for t in own if not isinstance(t, nn.Parameter)]

    def written(self) -> list[Tensor]:
        """Tensors that were changed in place since."""
        return [t for t, version in self._versions if version_of(t) != version]

    def loosen(self) -> None:
        """Hold no graph, and values instead of tensors that the forward replaces."""
        if isinstance(self.look, dict):
            self.look = {key: _loose(value) for key, value in self.look.items()}
        else:
            self.look = [_loose(value) for value in self.look]
        self._versions = [(_loose(t), version) for t, version in self._versions]

    def replace(self, copies: dict[int, Tensor]) -> None:
        """Copies in the place of what the forward has changed in place, by id."""
        assert isinstance(self.look, dict)
        self.look = {key: copies.get(id(value), value) for key, value in self.look.items()}
        self._versions = [(t, v) for t, v in self._versions if id(t) not in copies]


class StateOfSite:
    """What is remembered of one block from forward to forward.

    The first forward is compared with copies of all plain tensors on the module; from then on those
    that it changed in place are copied before each forward. Objects on the module are looked into
    at the first forward, and from then on if that changed them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.first = True
        self.written: set[tuple[int, str]] = set()
        """Module and name of the attributes that a forward changes in place."""
        self.objects: list[Any] = []


class State:
    """The state of one call, made before its forward.

    Args:
        site: of the block.
        parts: the block's module and all in it.
        arguments: the call's positional and keyword values.

    Raises UnsupportedError: an argument that can be run through once only.
    """

    def __init__(
        self, site: StateOfSite, parts: Sequence[nn.Module], arguments: Iterable[Any]
    ) -> None:
        self._site, self._parts = site, parts
        self._weights = [
            (part, key, p, version_of(p))
            for part in parts
            for key, p in part._parameters.items()
            if p is not None
        ]
        found = Found(arguments, taken_apart=True)
        if found.iterators:
            raise one_way(site.name, type(found.iterators[0]).__name__)
        self._given = [_Noted(holder) for holder in found.holders]
        self._generators = found.generators
        self._modules = [_Noted(part) for part in parts]
        self._items = [_Noted(holder) for holder in self._on_modules()]
        self._random = [g.get_state() for g in self._generators]
        self._copies = self._copied()

    def _on_modules(self) -> list[Any]:
        """Lists and the like directly on the modules, and the objects that are looked into."""
        items: list[Any] = []
        values = [v for noted in self._modules for v in members(noted.look)]
        self._generators += [v for v in values if isinstance(v, torch.Generator)]
        if self._site.first:
            items = Found(values, taken_apart=False).holders
        else:
            items = [v for v in values if isinstance(v, ITEMS)] + self._site.objects
        return list({id(item): item for item in items}.values())

    def _copied(self) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        """By module and name: the tensor, and a copy of it."""
        site = self._site
        if not site.first and not site.written:
            return {}
        return {
            (id(noted.holder), name): (value, value.detach().clone())
            for noted in self._modules
            for name, value in noted.look.items()  # type: ignore[union-attr]
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if site.first or (id(noted.holder), name) in site.written
        }

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors in objects among the arguments, and the weights."""
        inside = [t for noted in self._given for t in noted.tensors()]
        return [*inside, *(p for _, _, p, _ in self._weights)]

    def left_behind(self) -> list[Tensor]:
        """Tensors that the forward's objects and modules hold now."""
        values = (v for n in self._modules for v in members(look(n.holder)))
        return tensors_in([*(noted.holder for noted in self._given), *values])

    def after(self) -> None:
        """The forward has run.

        Raises UnsupportedError: it has changed a tensor in place of which there is no copy.
        """
        site = self._site
        for noted in self._given:
            if noted.written():
                raise object_changed(site.name, type(noted.holder).__name__, "by its forward")
        if site.first:
            values = [v for n in self._modules for v in members(n.look)]
            known = {id(v) for v in values if isinstance(v, ITEMS)}
            site.objects = [
                n.holder
                for n in self._items
                if not same(n.look, look(n.holder)) and id(n.holder) not in known
            ]
        for noted in self._modules:
            written = {id(t) for t in noted.written()}
            copies: dict[int, Tensor] = {}
            for name, value in noted.look.items():  # type: ignore[union-attr]
                if id(value) not in written:
                    continue
                place = (id(noted.holder), name)
                if place not in self._copies:
                    raise attribute_changed(site.name, f"{type(noted.holder).__name__}.{name}")
                site.written.add(place)
                copies[id(value)] = self._copies[place][1].requires_grad_(value.requires_grad)
            if copies:
                noted.replace(copies)
            noted.loosen()
        for noted in self._items:
            if noted.written():
                raise attribute_changed(site.name, f"a {type(noted.holder).__name__} of the module")
            noted.loosen()
        site.first = False
        self._copies = {}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was before the forward; afterwards as it is now.

        Raises UnsupportedError: a weight or a noted tensor was changed in place since.
        """
        name = self._site.name
        for part, key, weight, version in self._weights:
            if version_of(weight) != version:
                raise weight_changed(name, f"{type(part).__name__}.{key}")
        for noted in (*self._given, *self._modules, *self._items):
            if noted.written():
                what = type(noted.holder).__name__
                raise object_changed(name, what, "after the block's forward")
        states = [g.get_state() for g in self._generators]
        before = [*self._given, *self._modules, *self._items]
        now = [(noted.holder, look(noted.holder)) for noted in before]
        weights = [
            (part._parameters, key, part._parameters.get(key), weight)
            for part, key, weight, _ in self._weights
            if part._parameters.get(key) is not weight
        ]
        try:
            for noted in before:
                put_back(noted.holder, noted.look)
            for place, key, _, weight in weights:  # torch.func.functional_call gave others
                place[key] = weight
            for generator, state in zip(self._generators, self._random, strict=True):
                generator.set_state(state)
            yield
        finally:
            for holder, looked in now:
                put_back(holder, looked)
            for place, key, present, _ in weights:
                place[key] = present
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
