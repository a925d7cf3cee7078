"""What a forward depends on besides its arguments: random states, autocast, and changing buffers.

Each is noted when the forward runs and put back around the recompute, which leaves it afterwards
as it was found: generators go on from where training stands, buffers (the running statistics of
BatchNorm) are changed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

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


class Surroundings:
    """Random states and autocast as they are when this object is made."""

    def __init__(self, tensors: Sequence[Tensor], trackers: Sequence[Tracker]) -> None:
        devices = devices_of(tensors)
        self._devices, self._trackers = devices, trackers
        self._random = RandomState(devices, trackers)
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
        try:
            self._random.put_back()
            with ExitStack() as stack:
                for kind, enabled, dtype, cache in self._autocast:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
                yield
        finally:
            now.put_back()


_Place = tuple[nn.Module, str]


class Buffers:
    """Finds the buffers that a block's forward changes, and gives them to its recompute as before.

    The first forward is compared with copies of all buffers. From then on only those that it
    changed, and the statistics of norms, are copied before each forward.

    Args:
        name: the block's, for messages.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._places: list[_Place] = []
        self._changing: list[_Place] = []
        for part in module.modules():
            for key, value in part._buffers.items():
                if value is not None:
                    statistics = isinstance(part, _NormBase)  # its operator counts no version
                    (self._changing if statistics else self._places).append((part, key))
        self._first = True

    def before(self) -> list[tuple[_Place, Tensor]]:
        """Copies of what the coming forward will change, or may change."""
        places = [*self._changing, *self._places] if self._first else self._changing
        return [((m, k), b.clone()) for m, k in places if (b := m._buffers[k]) is not None]

    def versions(self) -> list[tuple[Tensor | None, int]]:
        """Handed to `after`, which compares."""
        buffers = [m._buffers[k] for m, k in self._places]
        return [(b, 0 if b is None else b._version) for b in buffers]

    def after(
        self, copies: list[tuple[_Place, Tensor]], versions: list[tuple[Tensor | None, int]]
    ) -> list[tuple[_Place, Tensor]]:
        """The copies that the recompute needs: those of changed buffers.

        Raises UnsupportedError for a buffer that changes now and did not at first.
        """
        if not self._places and not copies:
            return copies
        changed = [
            place
            for place, (before, version) in zip(self._places, versions, strict=True)
            if (now := place[0]._buffers[place[1]]) is not before
            or (now is not None and now._version != version)
        ]
        if self._first:
            self._first = False
            values = {(id(m), k): copy for (m, k), copy in copies}
            for place in self._places:
                now = place[0]._buffers[place[1]]
                was = values.get((id(place[0]), place[1]))
                if place in changed or now is None or was is None:
                    continue
                if not torch.equal(now, was):  # changed by an operator that counts no version
                    changed.append(place)
            self._changing += changed
            self._places = [p for p in self._places if p not in changed]
            keep = {(id(m), k) for m, k in self._changing}
            return [c for c in copies if (id(c[0][0]), c[0][1]) in keep]
        if changed:
            names = ", ".join(f"{type(m).__name__}.{k}" for m, k in changed)
            raise UnsupportedError(
                Problem(
                    where=self._name,
                    found=f"the buffer {names}, changed by this forward and not by the first one",
                    why="the recompute needs its value from before, which is no longer there",
                    remedy="change it in every training forward, or outside of the block",
                )
            )
        return copies


@contextmanager
def swapped(copies: list[tuple[_Place, Tensor]]) -> Iterator[None]:
    """The buffers' values from before the forward; what is done to them is thrown away."""
    originals = [(m, k, m._buffers[k]) for (m, k), _ in copies]
    try:
        for (module, key), copy in copies:
            module._buffers[key] = copy.clone()
        yield
    finally:
        for module, key, original in originals:
            module._buffers[key] = original


def entered(scopes: Sequence[Any]) -> AbstractContextManager[Any]:
    """All of the scopes, entered in order when the result is."""

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope())
            yield

    return all_of_them()
