"""Error feedback: what compression left behind is added to the next gradient.

    pending = residual + gradient / (world * loss_scale)
    sent    = compressor(pending)
    residual = pending - sent

One residual per parameter name, flat, in units of this process's share of the averaged gradient
with the loss scale removed, so that neither a change of the loss scale nor another process's
gradient touches it. Worked on in fp32 on the gradient's device; kept in fp32, bf16 or int8 with
scales, there or in host memory (`storage` has the rounding).

Transactional: a step works on `pending`; `commit` makes it the residual, `rollback` forgets it,
and the residual and the state of its rounding are then bit-equal to what they were. Two buffers per
parameter change places, so neither costs a copy. Kept in fp32 on the gradient's device, the
working tensor is the pending buffer itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ds_ckpt.compression.base import on_host
from ds_ckpt.compression.storage import TORCH_DTYPES, ResidualDtype, Storage, Stored, pieces

ResidualDevice = Literal["accelerator", "cpu"]


class HostMemory(Protocol):
    """Where host tensors come from; `ds_ckpt.memory.HostPool` is one."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def give_back(self, tensor: Tensor) -> None: ...


@dataclass
class _Residual:
    """One parameter's.

    Attributes:
        committed: what the last step that was taken has left.
        pending: what this step has left so far.
        spare: memory that the next step writes to.
        working: handed out by `accumulate` and not yet stored, where it is not `pending` itself.
        turns: how often this step has rounded it.
        cleared: this step has left nothing.
    """

    committed: Stored | None = None
    pending: Stored | None = None
    spare: Stored | None = None
    working: Tensor | None = None
    turns: int = 0
    cleared: bool = False


class Feedback:
    """Residuals of one process. With `enabled=False` nothing is carried from call to call.

    Args:
        accumulates: without `enabled`: calls of a step add up all the same, and what no `clear`
            was said for waits for the next step.
        dtype: of what is kept between steps.
        device: where it is kept: beside the gradients, or in host memory.
        seed: of the rounding to bf16 or int8; a different one in each process.
        host: host memory for residuals with `device="cpu"`, and for working tensors of gradients
            that are on the host. None: allocated as needed.

    Raises:
        ValueError: `dtype` or `device` is none of the choices.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        accumulates: bool = False,
        dtype: ResidualDtype = "fp32",
        device: ResidualDevice = "accelerator",
        seed: int = 0,
        host: HostMemory | None = None,
    ) -> None:
        if device not in ("accelerator", "cpu"):
            raise ValueError(f"residuals live on 'accelerator' or 'cpu', not {device!r}")
        self.enabled = enabled
        self.accumulates = enabled or accumulates
        self._storage = Storage(dtype, seed)
        self._on_host = device == "cpu"
        self._host = host
        self._step = 0
        self._residuals: defaultdict[str, _Residual] = defaultdict(_Residual)
        self._reserved: list[Tensor] = []
        self._place: torch.device | None = None

    def reserve(self, numel: int, device: torch.device) -> None:
        """Allocate now what steps will keep of one parameter: where memory is short, that is told
        before training and not in the middle of an exchange, in which other processes wait. It
        stays here through steps that leave nothing behind.

        Args:
            device: of its gradients.
        """
        self._storage.prepare(device)
        self._place = torch.device("cpu") if self._on_host else device
        for _ in range(self.enabled + self.accumulates):
            self._reserved += self._new(numel, self._place, anew=True).tensors

    @property
    def dtype(self) -> ResidualDtype:
        """What residuals are rounded to between steps."""
        return self._storage.dtype

    @property
    def on_host(self) -> bool:
        """Whether residuals are kept in host memory whatever the accelerator."""
        return self._on_host

    @property
    def entry_bytes(self) -> float:
        """Bytes an entry, once a step is taken: the residual, and what the next step writes."""
        return (self.enabled + self.accumulates) * self._storage.entry_bytes

    @property
    def steps(self) -> int:
        """Committed steps so far. State: the rounding of the next step depends on it."""
        return self._step

    def holds(self, name: str) -> bool:
        """Whether a residual exists for `name`, from earlier steps or from this one."""
        residual = self._residuals.get(name)
        if residual is None or not self.accumulates:
            return False
        return any(x is not None for x in (residual.pending, residual.working, residual.committed))

    def accumulate(
        self, name: str, grad_flat: Tensor, world: int, loss_scale: float = 1.0
    ) -> Tensor:
        """Residual plus this process's share of the mean: fp32 [n], for the codec to take from.

        The tensor belongs to this object; what is delivered must be subtracted from it in place,
        then `store` makes it the step's residual so far. It is valid until then. Several names may
        be in work at once. In a step's first call for `name` it starts from the committed residual,
        later (further micro-steps) from what the step left so far. Where nothing accumulates it is
        the share alone.

        Args:
            grad_flat: [n], any floating dtype, multiplied by `loss_scale`; not changed.
            world: number of processes that are averaged over.

        Raises:
            ValueError: the residual of `name` has another length.
        """
        divisor, device = world * loss_scale, grad_flat.device
        source, working = self._begun(name, grad_flat)
        if source is None:
            return divide(grad_flat, divisor, working)
        source = source.to(device)
        if source.values.dtype == torch.float32:
            return add_divided(source.values, grad_flat, divisor, working)
        for piece in pieces(grad_flat.numel(), device):
            part = working[piece.start : piece.stop]
            source.decode(piece, part)
            add_divided(part, grad_flat[piece.start : piece.stop], divisor, part)
        return working

    def begin(self, name: str, grad_flat: Tensor) -> tuple[Tensor | None, Tensor]:
        """`accumulate` for a kernel that adds the gradient itself: what it adds to, fp32 [n] or
        None for zeros, and where the sum goes, maybe the same."""
        source, working = self._begun(name, grad_flat)
        if source is None:
            return None, working
        source = source.to(grad_flat.device)
        if source.values.dtype == torch.float32:
            return source.values, working
        for piece in pieces(grad_flat.numel(), grad_flat.device):
            source.decode(piece, working[piece.start : piece.stop])
        return working, working

    def _begun(self, name: str, grad_flat: Tensor) -> tuple[Stored | None, Tensor]:
        """What a call starts from, and the tensor that it works in."""
        numel, device = grad_flat.numel(), grad_flat.device
        residual = self._residuals[name]
        residual.cleared = False
        source = None
        if self.accumulates:
            source = residual.pending or residual.committed
            if residual.working is not None:
                source = Stored(residual.working)
        if source is not None and source.numel != numel:
            raise ValueError(
                f"the residual of {name!r} has {source.numel} entries, its gradient {numel}"
            )
        if self._is_pending_itself(device):
            working = self._target(residual, numel, device).values
        elif self.accumulates and residual.working is not None:
            working = residual.working
        else:
            self._forget_working(residual)
            working = residual.working = self._empty(numel, torch.float32, device)
        return source, working

    def store(self, name: str, working: Tensor) -> None:
        """What is left of `accumulate`'s tensor, after delivery, is the step's residual so far.

        Rounds to what is stored. The tensor may be overwritten from here on. A tensor that was not
        kept is kept by `commit`.
        """
        residual = self._residuals[name]
        if self.accumulates and not self._is_pending_itself(working.device):
            device = torch.device("cpu") if self._on_host else working.device
            target = self._target(residual, working.numel(), device)
            if self._storage.rounds:
                there = target.device == working.device
                rounded = target if there else self._new(working.numel(), working.device)
                self._storage.encode(working, rounded, name, self._step, residual.turns)
                residual.turns += 1
                if not there:
                    target.copy_(rounded)
            else:
                target.copy_(Stored(working))
        self._forget_working(residual)

    def clear(self, name: str) -> None:
        """Nothing of `name` is owed: once the step is taken, nothing is held for it but what was
        reserved."""
        self._residuals[name].cleared = True

    def commit(self) -> None:
        """The step was taken: what it left becomes the residual."""
        for name, residual in self._residuals.items():
            if residual.working is not None:
                self.store(name, residual.working)
            before, left = residual.committed, residual.pending
            if left is not None:
                residual.committed = left
                if before is not None and not before.is_like(left):  # a load has brought it
                    self._give_back(before)
                elif before is not None:
                    residual.spare = before
            if residual.cleared and self.enabled:
                self._give_back(residual.committed, residual.spare)
                residual.committed = residual.spare = None
            elif residual.cleared and left is not None:  # the next step's calls add up there
                self._give_back(residual.spare)
                residual.committed, residual.spare = None, left
            residual.pending, residual.turns, residual.cleared = None, 0, False
        self._step += 1

    def rollback(self) -> None:
        """The step was skipped: the residuals are bit-equal to those before it."""
        for residual in self._residuals.values():
            self._forget_working(residual)
            residual.spare = residual.pending or residual.spare
            residual.pending, residual.turns, residual.cleared = None, 0, False

    def state_dict(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Committed residuals by parameter name, decoded: fp32 [n] each.

        Without `copy` those that are kept in fp32 are the live buffers, which later steps
        overwrite: good for looking at them at once.
        """
        return {
            name: stored.values
            if not copy and stored.values.dtype == torch.float32
            else stored.decoded()
            for name, stored in self.stored().items()
        }

    def stored(self) -> dict[str, Stored]:
        """Committed residuals as they are kept: the live buffers, which later steps overwrite."""
        self._wait_for_copies()
        every = self._residuals.items()
        return {name: each.committed for name, each in every if each.committed is not None}

    def load_stored(self, state: Mapping[str, Stored], steps: int) -> None:
        """Replace every residual by a copy of `state`, of any dtype, and the count of steps.

        After `load_stored(other.stored(), other.steps)` the next steps are those of `other` to the
        bit.
        """
        for residual in self._residuals.values():
            self._give_back(residual.committed, residual.pending, residual.spare)
            self._forget_working(residual)
        self._residuals.clear()
        self._step = steps
        for name, source in state.items():
            device = torch.device("cpu") if self._on_host else self._place or source.device
            copy = Stored(*(self._room(t.numel(), t.dtype, device) for t in source.tensors))
            copy.copy_(source)
            self._residuals[name].committed = copy
        self._wait_for_copies()

    @property
    def nbytes(self) -> int:
        """Memory that is held: residuals, what the step under way or the next one writes to,
        tensors in work, and the rounding's tables."""
        held = [*self._storage.tables, *self._reserved]
        for residual in self._residuals.values():
            for stored in (residual.committed, residual.pending, residual.spare):
                held += () if stored is None else stored.tensors
            held += () if residual.working is None else (residual.working,)
        return sum(t.nbytes for t in held)

    def _is_pending_itself(self, device: torch.device) -> bool:
        """Whether a gradient there is worked on in what is kept."""
        return (
            self.accumulates
            and not self._storage.rounds
            and (not self._on_host or device.type == "cpu")
        )

    def _target(self, residual: _Residual, numel: int, device: torch.device) -> Stored:
        """Where the step's residual is written."""
        target = residual.pending
        if target is None:
            target, residual.spare = residual.spare, None
        if target is None or target.device != device or target.numel != numel:
            target = self._new(numel, device)
        residual.pending = target
        return target

    def _new(self, numel: int, device: torch.device, *, anew: bool = False) -> Stored:
        """Room for one residual, as it is kept; `anew`: not what was reserved."""
        room = self._empty if anew else self._room
        return Stored(*(room(n, t, device) for n, t in self._storage.shapes(numel)))

    def _room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for i, tensor in enumerate(self._reserved):
            if (tensor.shape[0], tensor.dtype, tensor.device) == (numel, dtype, device):
                return self._reserved.pop(i)
        return self._empty(numel, dtype, device)

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu" and self._host is not None:
            return self._host.take((numel,), dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def _give_back(self, *held: Stored | None) -> None:
        held_here = [stored for stored in held if stored is not None]
        if held_here:
            self._wait_for_copies()
        kept = TORCH_DTYPES[self.dtype]
        for stored in held_here:
            if stored.device == self._place and stored.values.dtype == kept:
                self._reserved += stored.tensors
            else:
                self._release(stored.tensors)

    def _release(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self._host is not None and tensor.device.type == "cpu":
                self._host.give_back(tensor)

    def _forget_working(self, residual: _Residual) -> None:
        if residual.working is not None:
            self._release([residual.working])
            residual.working = None

    def _wait_for_copies(self) -> None:
        """Host buffers hold what was last copied to them."""
        if self._on_host and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def divide(grad: Tensor, divisor: float, out: Tensor) -> Tensor:
    """`out = grad / divisor`, fp32."""
    # Widen first: fp16 / divisor would round, and underflow under a large loss scale.
    return torch.div(grad.float(), divisor, out=out)


def add_divided(source: Tensor, grad: Tensor, divisor: float, out: Tensor) -> Tensor:
    """`out = source + grad / divisor`, fp32; `out` may be `source`."""
    if on_host(grad.device):
        grad = grad.float()  # an accelerator widens in the kernel
    if is_power_of_two(divisor):
        # The reciprocal is exact, so one fused pass rounds exactly as a division would.
        return torch.add(source, grad, alpha=1.0 / divisor, out=out)
    return torch.addcdiv(source, grad, source.new_full((), divisor), out=out)


def is_power_of_two(x: float) -> bool:
    return math.frexp(x)[0] == 0.5


def finite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """Whether no entry of any is inf or NaN: bool [] on their device, where nobody waits for it.

    Args:
        tensors: floating, one device, at least one.
    """
    if on_host(tensors[0].device):
        return torch.tensor(all(map(all_finite, tensors)), dtype=torch.bool, device="cpu")
    ends = [end for values in tensors if values.numel() for end in torch.aminmax(values)]
    return torch.stack(ends or [tensors[0].new_zeros(())]).isfinite().all()


def all_finite(values: Tensor) -> bool:
    """Whether no entry is inf or NaN. One pass unless the sum of finite entries overflows; on an
    accelerator the host waits, as it does not for `finite_flag`."""
    # A non-finite entry always makes the sum non-finite; the reverse does not hold.
    if math.isfinite(values.sum().item()):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())
