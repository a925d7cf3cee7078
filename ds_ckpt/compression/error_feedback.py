"""Error feedback: the part of a gradient that compression leaves behind joins the next gradient.

    pending  = residual + gradient / (world * loss_scale)
    sent     = compressor(pending)
    residual = pending - sent

Each parameter name has one flat residual, in units of this rank's share of the averaged gradient.
The loss scale is removed: neither its change nor another rank's gradient affects a residual.
Arithmetic is fp32 on the gradient's device. Between steps a residual is fp32, bf16 or int8
(`storage`), there or in host memory.

Transactional: a step works on `pending`, and `commit` makes it the residual. `rollback` drops it:
the residual and the state of its rounding are bit-equal to those before the step. Two buffers per
parameter change places, so neither costs a copy. An fp32 residual on the gradient's device has no
separate working tensor: the pending buffer is the working tensor.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ds_ckpt.compression import fused
from ds_ckpt.compression.base import on_host
from ds_ckpt.compression.storage import (
    SCALE_BLOCK,
    TORCH_DTYPES,
    QuantizedTensor,
    ResidualDtype,
    entry_bytes,
)

ResidualDevice = Literal["accelerator", "cpu"]


@dataclass
class _Residual:
    committed: QuantizedTensor | None = None  # result of the last step that was taken
    pending: QuantizedTensor | None = None  # result of this step so far
    spare: list[QuantizedTensor] = field(default_factory=list)
    working: Tensor | None = None  # returned by `accumulate`, not stored yet, and not `pending`
    roundings: int = 0  # in this step
    is_cleared: bool = False  # this step leaves nothing


@dataclass(eq=False, kw_only=True)
class Feedback:
    """Residuals of one rank.

    Args:
        enabled: carry what is not sent to the next step.
        accumulates: without `enabled`, calls of a step still add up. Tensors that were not cleared
            wait for the next step.
        device: storage beside the gradients, or in host memory (pinned where CUDA is available).
        seed: seed of the rounding to bf16 or int8. Ranks need different ones, or their rounding
            errors add up instead of averaging out.

    Attributes:
        steps: committed steps so far. State: the rounding of the next step depends on it.
    """

    enabled: bool = True
    accumulates: bool = False
    dtype: ResidualDtype = "fp32"
    device: ResidualDevice = "accelerator"
    seed: int = 0

    def __post_init__(self) -> None:
        self.accumulates = self.enabled or self.accumulates
        self.on_host = self.device == "cpu"
        self.steps = 0
        self._residuals: defaultdict[str, _Residual] = defaultdict(_Residual)
        self._place: torch.device | None = None

    def reserve(self, name: str, numel: int, device: torch.device) -> None:
        """Allocate the buffers of a parameter, whose gradients are on `device`, ahead of steps."""
        self._place = self._storage_device(device)
        for _ in range(self.enabled + self.accumulates):
            self._residuals[name].spare.append(self._empty(numel, self._place))

    @property
    def entry_bytes(self) -> float:
        """Bytes an entry, once a step is taken: the residual and the next step's buffer."""
        return (self.enabled + self.accumulates) * entry_bytes(self.dtype)

    @property
    def adds_in_place(self) -> bool:
        """Return whether gradients on an accelerator are added into the residuals themselves."""
        return self.accumulates and self.dtype == "fp32" and not self.on_host

    def has_residual(self, name: str) -> bool:
        """Return whether accumulated gradients of `name` wait, of earlier steps or of this one."""
        residual = self._residuals.get(name)
        if residual is None or not self.accumulates:
            return False
        return any(x is not None for x in (residual.pending, residual.working, residual.committed))

    def accumulate(
        self, name: str, grad_flat: Tensor, world: int, loss_scale: float = 1.0
    ) -> Tensor:
        """Return residual plus this rank's share of the mean: fp32 [n], for the codec to change.

        The caller subtracts what is delivered in place and then calls `store`; the tensor is valid
        until then. A step's first call for `name` starts from the committed residual, later calls
        (micro-steps) from the step's result so far. `grad_flat` [n], of any floating dtype, is
        multiplied by `loss_scale`, and not changed.
        """
        numel, device = grad_flat.numel(), grad_flat.device
        divisor = world * loss_scale
        residual = self._residuals[name]
        residual.is_cleared = False
        source: QuantizedTensor | None = None
        if self.accumulates:
            source = residual.pending or residual.committed
            if residual.working is not None:
                source = QuantizedTensor(residual.working)
        if source is not None and source.numel != numel:
            raise ValueError(
                f"the residual of {name!r} has {source.numel} entries, its gradient {numel}"
            )
        if self._is_pending_itself(device):
            working = self._target(residual, numel, device).values
        elif self.accumulates and residual.working is not None:
            working = residual.working
        else:
            working = torch.empty(numel, dtype=torch.float32, device=device)
            residual.working = working
        if source is None:
            # widened first: fp16 / divisor would round, and underflow under a large loss scale
            return torch.div(grad_flat.float(), divisor, out=working)
        if source.values.dtype != torch.float32 and fused.is_supported(device):
            stored, *scales = (t.to(device, non_blocking=True) for t in source.tensors)
            tensors = stored, scales[0] if scales else None, grad_flat
            fused.add_gradient(*tensors, divisor, working, SCALE_BLOCK)
            return working
        if source.values.dtype == torch.float32:
            summand = source.values.to(device, non_blocking=True)
        else:
            summand = source.decoded(working)
        if on_host(device):
            grad_flat = grad_flat.float()  # an accelerator widens in the kernel
        if math.frexp(divisor)[0] == 0.5:
            # The reciprocal is exact, so one fused pass rounds exactly as a division would.
            return torch.add(summand, grad_flat, alpha=1.0 / divisor, out=working)
        divisors = summand.new_full((), divisor)
        return torch.addcdiv(summand, grad_flat, divisors, out=working)

    def store(self, name: str, working: Tensor) -> None:
        """Make the rest of `accumulate`'s tensor, after delivery, the step's residual so far.

        The tensor may be overwritten afterwards. `commit` stores a tensor that was not stored.
        """
        residual = self._residuals[name]
        residual.working = None
        if not self.accumulates or self._is_pending_itself(working.device):
            return
        numel, device = working.numel(), self._storage_device(working.device)
        target = encoded = self._target(residual, numel, device)
        if device != working.device:
            encoded = QuantizedTensor.empty(numel, self.dtype, working.device)
        encoded.encode(working, f"{self.seed} {self.steps} {residual.roundings} {name}")
        residual.roundings += 1
        if encoded is not target:
            target.copy_(encoded)

    def clear(self, name: str) -> None:
        """Record that all of `name` is sent: once the step is taken, there is no residual."""
        self._residuals[name].is_cleared = True

    def commit(self) -> None:
        """Make the step's results the residuals: the step was taken."""
        for name, residual in self._residuals.items():
            if residual.working is not None:
                self.store(name, residual.working)
            if residual.pending is not None:
                self._recycle(residual, residual.committed)
                residual.committed = residual.pending
            if residual.is_cleared:
                self._recycle(residual, residual.committed)
                residual.committed = None
            self._begin_step(residual)
        self.steps += 1

    def rollback(self) -> None:
        """Drop the step's results: the step was skipped."""
        for residual in self._residuals.values():
            self._recycle(residual, residual.pending)
            self._begin_step(residual)

    def state_dict(self) -> dict[str, Tensor]:
        """Return committed residuals by parameter name, decoded: fp32 [n] each."""
        return {name: stored.decoded() for name, stored in self.stored().items()}

    def stored(self) -> dict[str, QuantizedTensor]:
        """Return committed residuals in storage: the live buffers, which later steps overwrite."""
        self._wait_for_copies()
        every = self._residuals.items()
        return {name: each.committed for name, each in every if each.committed is not None}

    def load_stored(self, state: Mapping[str, QuantizedTensor], steps: int) -> None:
        """Replace every residual by a copy of `state`, of any dtype, and the count of steps."""
        self._wait_for_copies()
        for residual in self._residuals.values():
            self._recycle(residual, residual.committed)
            self._recycle(residual, residual.pending)
            residual.committed = None
            self._begin_step(residual)
        self.steps = steps
        for name, source in state.items():
            residual = self._residuals[name]
            device = self._place or self._storage_device(source.device)
            if source.values.dtype == TORCH_DTYPES[self.dtype]:
                residual.committed = self._spare(residual, source.numel, device)
            else:
                copies = (torch.empty_like(t, device=device) for t in source.tensors)
                residual.committed = QuantizedTensor(*copies)
            residual.committed.copy_(source)
        self._wait_for_copies()

    @property
    def nbytes(self) -> int:
        """Bytes held: residuals, buffers of this step or the next, and working tensors."""
        total = 0
        for residual in self._residuals.values():
            for stored in (residual.committed, residual.pending, *residual.spare):
                total += 0 if stored is None else sum(t.nbytes for t in stored.tensors)
            total += 0 if residual.working is None else residual.working.nbytes
        return total

    def _storage_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.on_host else device

    def _is_pending_itself(self, device: torch.device) -> bool:
        """Return whether a gradient there is added into the stored tensor itself."""
        same_device = self._storage_device(device).type == device.type
        return self.accumulates and self.dtype == "fp32" and same_device

    def _target(self, residual: _Residual, numel: int, device: torch.device) -> QuantizedTensor:
        if residual.pending is None or residual.pending.device != device:
            residual.pending = self._spare(residual, numel, device)
        return residual.pending

    def _spare(self, residual: _Residual, numel: int, device: torch.device) -> QuantizedTensor:
        while residual.spare:
            stored = residual.spare.pop()
            if stored.numel == numel and stored.device == device:
                return stored
        return self._empty(numel, device)

    def _empty(self, numel: int, device: torch.device) -> QuantizedTensor:
        pinned = self.on_host and torch.cuda.is_available()
        return QuantizedTensor.empty(numel, self.dtype, device, pin_memory=pinned)

    def _recycle(self, residual: _Residual, stored: QuantizedTensor | None) -> None:
        """Let the next step overwrite `stored`; one in another dtype, from a load, is freed."""
        if stored is not None and stored.values.dtype == TORCH_DTYPES[self.dtype]:
            residual.spare.append(stored)

    @staticmethod
    def _begin_step(residual: _Residual) -> None:
        residual.pending = residual.working = None
        residual.roundings, residual.is_cleared = 0, False

    def _wait_for_copies(self) -> None:
        if self.on_host and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def finite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether no entry is inf or NaN: bool [] on the device; the host does not wait."""
    if on_host(tensors[0].device):
        return torch.tensor(all(map(all_finite, tensors)), dtype=torch.bool, device="cpu")
    ends = [end for values in tensors if values.numel() for end in torch.aminmax(values)]
    return torch.stack(ends or [tensors[0].new_zeros(())]).isfinite().all()


def all_finite(values: Tensor) -> bool:
    """Return whether no entry is inf or NaN; on an accelerator the host waits.

    One pass, unless the sum of finite entries overflows.
    """
    # A non-finite entry always makes the sum non-finite; the reverse does not hold.
    if math.isfinite(values.sum().item()):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())
