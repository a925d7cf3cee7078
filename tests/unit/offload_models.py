"""Small models and a store on the stand-in device, for the tests of offload."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation import CheckpointedBlocks, make_units
from ds_ckpt.activation.inputs import CheckpointedInputs
from ds_ckpt.activation.offload import Copies, InputStore, Wait
from ds_ckpt.activation.policies import Policy

CPU = torch.device("cpu")


class _Late:
    """The ticket of a copy that is made when somebody waits, and not before."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._values: Tensor | None = source.clone()
        self._target = weakref.ref(target)
        # weak: whoever asked for the copy must hold both ends until he has waited
        self._ends = [StorageWeakRef(t.untyped_storage()) for t in (source, target)]

    def __call__(self) -> None:
        target = self._target()
        if self._values is not None and target is not None:
            target.copy_(self._values)
            self._values = None

    @property
    def lost(self) -> bool:
        """An end was freed while the copy was still to be made."""
        return self._values is not None and any(end.expired() for end in self._ends)


class LateCopies(Copies):
    """A device on which every copy takes as long as it may: targets hold rubbish until the wait."""

    def __init__(self) -> None:
        self._tickets: list[_Late] = []

    def copy(self, source: Tensor, target: Tensor) -> Wait:
        ticket = _Late(source, target)
        target.fill_(0xA5)
        self._tickets.append(ticket)
        return ticket

    @property
    def sound(self) -> bool:
        return not any(ticket.lost for ticket in self._tickets)


class Block(nn.Module):
    """Dropout and an optional keyword argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(torch.relu(self.up(x))))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    """A few of them, with the same weights whenever it is built."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=scale)
        return x.square().mean()


def grads(model: nn.Module, *inputs: Any, **data: Any) -> list[Tensor]:
    """Gradients of all parameters that have one; the same dropout in every call."""
    torch.manual_seed(3)
    model.zero_grad()
    found = model(*inputs, **data)
    (found if torch.is_tensor(found) else found.loss).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Boom(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OSError("boom")


def put_on(model, patterns, *, copies=None, policy=None, **options) -> tuple:
    """Checkpointed blocks with their boundaries in host memory, or policy "offload"; the store."""
    store = InputStore(
        CPU, copies or Copies(), owned=[*model.parameters(), *model.buffers()], **options
    )
    policy = policy or Policy(modules=tuple(patterns) if patterns else None)
    units = make_units(model, policy)
    inputs = CheckpointedInputs(store, units=units)
    return CheckpointedBlocks(model, policy=policy, units=units, around=inputs.around), store


def device_bytes(store: InputStore) -> int:
    return sum(s.nbytes for s in store._storages.values() if s.on_device is not None)


def host_bytes(store: InputStore) -> int:
    return sum(storage.nbytes for storage in store._storages.values() if storage.host is not None)


def nothing_left(store: InputStore) -> bool:
    store.end_backward()
    if isinstance(store._copies, LateCopies):
        assert store._copies.sound
    return (device_bytes(store), host_bytes(store)) == (0, 0)


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    """Return whether the tensors are equal to the bit, and there are any."""
    return len(one) == len(two) > 0 and all(map(torch.equal, one, two))
