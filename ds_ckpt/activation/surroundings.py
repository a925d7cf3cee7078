"""What a forward depends on besides its arguments: random states, autocast, modes, and buffers.

Each is noted when the forward runs and put back around the recompute, which leaves it afterwards
as it was found: generators go on from where training stands, a model that has been set to
evaluation stays so, buffers (the running statistics of BatchNorm) are changed once. A buffer that
the forward only reads must be as it was: another one in its place is swapped, a change is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ds_ckpt.activation.guards import buffer_changed
from ds_ckpt.errors import Problem, UnsupportedError


class Tracker(Protocol):
    """Random states that are kept aside: Megatron's and DeepSpeed's for tensor parallelism."""

    def get_states(self) -> dict[str, Any]: ...

    def set_states(self, states: dict[str, Any]) -> None: ...


class RandomState:
    """The generators' states at one moment: the CPU's, those of `devices`, and of the trackers."""

    def __init__(self, devices: Sequence[torch.device], trackers: Sequence[Tracker]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = [
            (d, torch.get_device_module(d.type).get_rng_state(d))
            for d in devices
            if hasattr(torch.get_device_module(d.type), "get_rng_state")
        ]
        self._trackers = [(t, dict(t.get_states())) for t in trackers]

    def put_back(self) -> None:
        """Set every generator to what it was."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device.type).set_rng_state(state, device)
        for tracker, states in self._trackers:
            tracker.set_states(dict(states))


def devices_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """The accelerators on which the tensors lie, each once."""
    return list(dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta")))


def _set_training(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        if part.training != training:
            part.training = training


class Surroundings:
    """Random states, autocast and `training` flags as they are when this object is made.

    Args:
        tensors: those that the forward gets or finds; the generators of their devices count.
        trackers: random states beside torch's.
        parts: the module whose forward runs and all in it; their flags count.
    """

    def __init__(
        self, tensors: Sequence[Tensor], trackers: Sequence[Tracker], parts: Sequence[nn.Module]
    ) -> None:
        devices = devices_of(tensors)
        self._devices, self._trackers = devices, trackers
        self._random = RandomState(devices, trackers)
        self._training = [(part, part.training) for part in parts]
        self._autocast = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in ("cpu", *dict.fromkeys(d.type for d in devices))
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were then; afterwards as they are now."""
        now = RandomState(self._devices, self._trackers)
        training = [(part, part.training) for part, _ in self._training]
        try:
            self._random.put_back()
            _set_training(self._training)
            with ExitStack() as stack:
                for kind, enabled, dtype, cache in self._autocast:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
                yield
        finally:
            _set_training(training)
            now.put_back()


class _Missing:
    """In the place of a buffer that is not registered."""


_MISSING = _Missing()
_Place = tuple[nn.Module, str]
_Value = Tensor | _Missing | None
Copy = tuple[_Place, _Value]
"""A buffer's place and its value from before a forward: none, or not registered, are values too."""
Read = tuple[_Place, Tensor, int]
"""A buffer that a forward does not change, and its version."""


def _at(place: _Place) -> _Value:
    return place[0]._buffers.get(place[1], _MISSING)


def _version(value: _Value) -> int:
    """0 where none is counted: what comes from inference mode cannot be changed in training."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


class Buffers:
    """Finds the buffers that a block's forward changes, and gives them to its recompute as before.

    The first forward is compared with copies of all buffers. From then on only those that it
    changed or registered, and the statistics of norms, are copied before each forward.

    Args:
        name: the block's, for messages.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._parts = list(module.modules())
        self._known: set[tuple[int, str]] = set()
        self._places: list[_Place] = []
        self._changing: list[_Place] = []
        self._first = True

    def _new(self) -> list[_Place]:
        """The buffers that have been registered since this was asked last."""
        new = [(m, k) for m in self._parts for k in m._buffers if (id(m), k) not in self._known]
        self._known.update((id(m), k) for m, k in new)
        return new

    def before(self) -> list[Copy]:
        """Copies of what the coming forward will change, or may change."""
        for module, key in self._new():
            # the operators of norms count no version
            statistics = isinstance(module, _NormBase) and module._buffers[key] is not None
            (self._changing if statistics else self._places).append((module, key))
        places = [*self._changing, *self._places] if self._first else self._changing
        values = ((place, _at(place)) for place in places)
        return [(p, v.clone() if isinstance(v, Tensor) else v) for p, v in values]

    def versions(self) -> list[tuple[_Value, int]]:
        """Handed to `after`, which compares."""
        return [(value, _version(value)) for value in map(_at, self._places)]

    def after(self, copies: list[Copy], versions: list[tuple[_Value, int]]) -> list[Copy]:
        """The copies that the recompute needs: those of changed buffers.

        Raises UnsupportedError for a buffer that changes now and did not at first. One that begins
        now had no value before, which is as good as a copy.
        """
        began: list[Copy] = [(place, _MISSING) for place in self._new()]
        changed = []
        for place, (before, version) in zip(self._places, versions, strict=True):
            now = _at(place)
            if now is not before and not isinstance(before, Tensor):
                began.append((place, before))
            elif now is not before or _version(now) != version:
                changed.append(place)
        if self._first:
            self._first = False
            values = {(id(m), k): copy for (m, k), copy in copies}
            for place in self._places:
                now, was = _at(place), values[id(place[0]), place[1]]
                if place in changed or not isinstance(now, Tensor) or not isinstance(was, Tensor):
                    continue
                if not torch.equal(now, was):  # changed by an operator that counts no version
                    changed.append(place)
            self._changing += changed
            self._places = [p for p in self._places if p not in changed]
            keep = {(id(m), k) for m, k in self._changing}
            copies = [c for c in copies if (id(c[0][0]), c[0][1]) in keep]
        elif changed:
            names = ", ".join(f"{type(m).__name__}.{k}" for m, k in changed)
            raise UnsupportedError(
                Problem(
                    where=self._name,
                    found=f"the buffer {names}, changed by this forward and not by the first one",
                    why="the recompute needs its value from before, which is no longer there",
                    remedy="change it in every training forward, or outside of the block",
                )
            )
        if began:
            self._changing += [place for place, _ in began]
            self._places = [p for p in self._places if p not in self._changing]
            copies = [*copies, *began]
        return copies

    def read(self) -> list[Read]:
        """After a forward: the buffers that it did not change."""
        values = ((place, _at(place)) for place in self._places)
        return [(p, value, _version(value)) for p, value in values if isinstance(value, Tensor)]


@contextmanager
def read_again(name: str, buffers: list[Read]) -> Iterator[None]:
    """The buffers that a forward has read, where others have come into their places since.

    Raises UnsupportedError: one was changed in place since the forward of block `name`.
    """
    for (module, key), value, version in buffers:
        if _version(value) != version:
            raise buffer_changed(name, f"{type(module).__name__}.{key}")
    others = [(place, _at(place), value) for place, value, _ in buffers]
    others = [(place, now, value) for place, now, value in others if now is not value]
    try:
        for (module, key), _, value in others:
            module._buffers[key] = value
        yield
    finally:
        for (module, key), now, _ in others:
            if isinstance(now, _Missing):
                module._buffers.pop(key, None)
            else:
                module._buffers[key] = now


@contextmanager
def swapped(copies: list[Copy]) -> Iterator[None]:
    """The buffers' values from before the forward; what is done to them is thrown away."""
    parts = {id(m): m for (m, _), _ in copies}.values()
    originals = [(m._buffers, dict(m._buffers)) for m in parts]
    try:
        for (module, key), copy in copies:
            if isinstance(copy, _Missing):
                module._buffers.pop(key, None)
            else:
                module._buffers[key] = copy if copy is None else copy.clone()
        yield
    finally:
        for buffers, original in originals:  # cleared, for the order of the keys
            buffers.clear()
            buffers.update(original)


def entered(scopes: Sequence[Any]) -> AbstractContextManager[Any]:
    """All of the scopes, entered in order when the result is."""

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope())
            yield

    return all_of_them()
