"""The cure for delay: the lead that an optimizer's first moment gets for what a method keeps back.

Error feedback delivers a part of what it is given and keeps the share c for later, which makes it
an exponential average with a pole at c; Adam's first moment m is another one behind it. Two such
in a row are an underdamped loop, whose largest stable step collapses (Cohen et al., arXiv
2207.14484, for one of them). From the end of the warm-up the optimizer steps by

    u = (1 - a) m + a g        m: its first moment, this step's gradient g in it
    a = min(0.4, L),  L = c / (1 - c)

in the place of m (Nesterov's form is a = 1 - b1; Dozat, 2016). L is the lag in steps. For b1 = 0.5
this a puts the zero of u where the pole is (L (1 - b1) / b1 does for any, which gives back all
that a pure delay costs: `benchmarks/results/stability.json`); that it
serves for 0.7 and 0.9, too, was measured (`benchmarks/results/momentum.jsonl`). It costs no bytes.

    c = squared norm of what is left / squared norm of what was given
    over a parameter group's compressed tensors and all processes

With n exchanges a step (micro-steps that go out one by one) the lag is L / n steps, as that of a
share c / (c + n (1 - c)) kept once a step.

Large entries decide it, which are sent first; weighed as Adam's steps weigh them more is kept back
(of 1 bit a half, not a fifth), but the second moment is the owner's alone.

c is measured in the first step after the warm-up and in every `EVERY`-th from there, and is in
force from that step on. What the optimizer's groups say is the user's, or a scheduler's, and m is
what it would be anyway: only while the optimizer steps do they say something else (`leading`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_ckpt.telemetry.timings import Errors

Choice = Literal["matched", "none"] | float
"""What `error_feedback.momentum` says: a number is a lead."""

EVERY = 10
LARGEST = 0.4


def matched(kept: float) -> float:
    """The lead a where compression keeps the share `kept` for later."""
    return LARGEST if kept >= 0.5 else min(LARGEST, kept / (1 - kept))


@contextmanager
def leading(
    optimizer: Optimizer, group: int, parameters: Iterable[Tensor], lead: float
) -> Iterator[None]:
    """While inside, an optimizer of Adam's kind steps by u where it would by m.

    With (1 - a) b1 in the place of b1 it makes u where it makes m; then m is worked out of u.

    Args:
        group: of `optimizer.param_groups`.
        parameters: those of the group that it steps inside, once; their gradients stay.
        lead: a, below 1; 0 changes nothing.
    """
    holder = optimizer.param_groups[group]
    own = holder["betas"]
    if not lead:
        yield
        return
    holder["betas"] = ((1 - lead) * own[0], own[1])
    try:
        yield
    finally:
        holder["betas"] = own
    for parameter in parameters:
        if parameter.grad is not None:
            moment = optimizer.state[parameter]["exp_avg"]
            # (u - a g) / (1 - a), in one pass
            moment.lerp_(parameter.grad.to(moment.dtype), -lead / (1 - lead))


class FirstMoments:
    """What one process's optimizer steps with, the same on all of them.

    Args:
        choice: any but "none".
        groups: number of the optimizer's parameter group by parameter name.
        add_up: sums a small fp32 tensor over all processes, in place.

    Attributes:
        errors: is given what an exchange was given and what it left.
        kept: by group, the share that compression keeps for later steps, as last measured; a group
            of which it keeps none is absent.
    """

    def __init__(
        self,
        choice: Literal["matched"] | float,
        groups: Mapping[str, int],
        add_up: Callable[[Tensor], None],
    ) -> None:
        self._choice, self._add_up = choice, add_up
        self._groups = 1 + max(groups.values(), default=-1)
        self.errors = Errors(by=lambda method, name: str(groups[name]))
        self.kept: dict[int, float] = {}
        self._exchanges: Counter[str] = Counter()
        self._device = torch.device("cpu")

    def exchanging(self, step: int, names: Sequence[str], device: torch.device) -> None:
        """A bucket of these is about to travel in the `step`-th step after the warm-up."""
        self.errors.sampling, self._device = step % EVERY == 0, device
        if self.errors.sampling:
            self._exchanges.update(names)

    def step_ended(self, *, skipped: bool) -> None:
        """The step's verdict. Collective in a step that was measured; one that is skipped is
        measured by nobody, and changes nothing."""
        sums, measured = self.errors.take_sums(), self.errors.sampling
        exchanges = max(self._exchanges.values(), default=1)
        self._exchanges.clear()
        self.errors.sampling = False
        if skipped or not measured:
            return
        own = [sums.get(str(group), (0.0, 0.0)) for group in range(self._groups)]
        every = torch.tensor(own, dtype=torch.float32, device=self._device)
        self._add_up(every)
        self.kept = {
            group: left / (left + exchanges * max(0.0, given - left))
            for group, (given, left) in enumerate(every.tolist())
            if math.isfinite(given + left) and given > 0 < left
        }

    def lead(self, group: int) -> float:
        """Of a parameter group; 0 where nothing is left behind."""
        kept = self.kept.get(group)
        if kept is None:
            return 0.0
        return matched(kept) if self._choice == "matched" else self._choice

    def describe(self) -> str:
        """A clause for the line at the start."""
        lead = (
            "matched to what is left behind" if self._choice == "matched" else f"{self._choice:g}"
        )
        return f"the optimizer's first moment has a lead, {lead}"

    @contextmanager
    def leading(
        self, optimizer: Optimizer, group: int, parameters: Iterable[Tensor]
    ) -> Iterator[None]:
        """While inside, the optimizer steps with the group's lead: `leading`."""
        with leading(optimizer, group, parameters, self.lead(group)):
            yield

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"kept": sorted(self.kept.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is known until the next measurement where a checkpoint does not tell."""
        self.errors.take_sums()
        self.errors.sampling = False
        self.kept = {int(group): float(kept) for group, kept in state.get("kept", ())}
