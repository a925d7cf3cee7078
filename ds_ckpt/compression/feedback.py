"""Error feedback: what compression left behind is added to the next gradient.

    pending = residual + gradient / (world * loss_scale)
    sent    = codec(pending)
    residual = pending - sent

One residual per parameter name, fp32, flat, as long as the whole parameter, in units of this
process's share of the averaged gradient with the loss scale removed, so that neither a change of
the loss scale nor another process's gradient touches it.

Transactional: a step works on `pending`; `commit` makes it the residual, `rollback` forgets it,
and the residual is then bit-equal to what it was. Two buffers per parameter change places, so
neither costs a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class Feedback:
    """Residuals of one process. With `enabled=False` nothing is carried from call to call."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._committed: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._scratch: Tensor | None = None

    def holds(self, name: str) -> bool:
        """Whether a residual exists for `name`, from earlier steps or from this one."""
        return name in self._pending or name in self._committed

    def accumulate(
        self, name: str, grad_flat: Tensor, world: int, loss_scale: float = 1.0
    ) -> Tensor:
        """Residual plus this process's share of the mean: fp32 [n], for the codec to reduce.

        The returned buffer belongs to this object and becomes the new residual: whatever is
        delivered must be subtracted from it in place. In a step's first call for `name` it starts
        from the committed residual, later (further micro-steps) from what the step left so far.
        With feedback disabled it is a scratch buffer, valid until the next call.

        Args:
            grad_flat: [n], any floating dtype, multiplied by `loss_scale`; not changed.
            world: number of processes that are averaged over.

        Raises:
            ValueError: the residual of `name` has another length.
        """
        divisor = world * loss_scale
        if not self.enabled:
            return _divide(grad_flat, divisor, self._scratch_like(grad_flat))
        target = self._pending.get(name)
        source = target if target is not None else self._committed.get(name)
        if source is not None and source.numel() != grad_flat.numel():
            raise ValueError(
                f"the residual of {name!r} has {source.numel()} entries, "
                f"its gradient {grad_flat.numel()}"
            )
        if source is not None and source.device != grad_flat.device:
            source = source.to(grad_flat.device)
            target = None
        if target is None:
            target = self._spare.pop(name, None)
            if target is None or target.device != grad_flat.device:
                target = torch.empty(grad_flat.numel(), device=grad_flat.device)
            self._pending[name] = target
        if source is None:
            return _divide(grad_flat, divisor, target)
        return _add_divided(source, grad_flat, divisor, target)

    def commit(self) -> None:
        """The step was taken: what it left becomes the residual."""
        for name, buffer in self._pending.items():
            previous = self._committed.get(name)
            self._committed[name] = buffer
            if previous is not None:
                self._spare[name] = previous
        self._pending.clear()

    def rollback(self) -> None:
        """The step was skipped: the residuals are bit-equal to those before it."""
        self._spare.update(self._pending)
        self._pending.clear()

    def state_dict(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Committed residuals by parameter name: fp32 [n] each.

        Without `copy` the tensors are the live buffers, which later steps overwrite: good for
        writing them to a file at once.
        """
        return {name: t.clone() if copy else t for name, t in self._committed.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace every residual by a copy of `state`; a step under way is forgotten."""
        self._committed = {
            name: residual.detach().to(torch.float32, copy=True).reshape(-1)
            for name, residual in state.items()
        }
        self._pending.clear()
        self._spare.clear()

    @property
    def nbytes(self) -> int:
        """Memory that is held, spare and scratch buffers included."""
        held = [*self._committed.values(), *self._pending.values(), *self._spare.values()]
        if self._scratch is not None:
            held.append(self._scratch)
        return sum(t.numel() * t.element_size() for t in held)

    def _scratch_like(self, grad_flat: Tensor) -> Tensor:
        scratch = self._scratch
        if (
            scratch is None
            or scratch.numel() < grad_flat.numel()
            or scratch.device != grad_flat.device
        ):
            scratch = self._scratch = torch.empty(grad_flat.numel(), device=grad_flat.device)
        return scratch[: grad_flat.numel()]


def all_finite(values: Tensor) -> bool:
    """Whether no entry is inf or NaN. One pass unless the sum of finite entries overflows."""
    # A non-finite entry always makes the sum non-finite; the reverse does not hold.
    if math.isfinite(values.sum().item()):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _is_power_of_two(x: float) -> bool:
    return math.frexp(x)[0] == 0.5


def _divide(grad: Tensor, divisor: float, out: Tensor) -> Tensor:
    # Widen first: fp16 / divisor would round, and underflow under a large loss scale.
    return torch.div(grad.float(), divisor, out=out)


def _add_divided(source: Tensor, grad: Tensor, divisor: float, out: Tensor) -> Tensor:
    if _is_power_of_two(divisor):
        # The reciprocal is exact, so one fused pass rounds exactly as a division would.
        return torch.add(source, grad.float(), alpha=1.0 / divisor, out=out)
    return torch.addcdiv(source, grad.float(), torch.full((), divisor, device=grad.device), out=out)
