"""Real steps, timed: policies take turns, so that a busy machine slows all of them alike.

No dispatch mode is on and no hook but one that drops gradients, so that what is timed is the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_ckpt.profile.measure import checkpointed, gradients_dropped
from ds_ckpt.profile.policies import Choice
from ds_ckpt.profile.records import Times
from ds_ckpt.profile.subject import run_forward


@dataclass
class _Taken:
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)


def times_of(
    model: nn.Module,
    batch: Any,
    wanted: Sequence[Choice],
    device: torch.device,
    repeats: int,
    told: Callable[[str], object] = lambda text: None,
) -> dict[str, Times]:
    """Medians by policy. The first round warms up and does not count.

    Raises ConfigError, UnsupportedError: from putting a policy on the model.
    """
    taken = {choice.name: _Taken() for choice in wanted}
    for repeat in range(repeats + 1):
        told(f"timed steps, {repeat} of {repeats}" if repeat else "warming up")
        for choice in wanted:
            forward_s, backward_s, recompute_s = _step(model, batch, choice, device)
            if repeat:
                taken[choice.name].forward_s.append(forward_s)
                taken[choice.name].backward_s.append(backward_s)
                taken[choice.name].recompute_s.append(recompute_s)
    return {
        name: Times(
            device=name_of(device),
            repeats=repeats,
            forward_s=statistics.median(t.forward_s),
            backward_s=statistics.median(t.backward_s),
            recompute_s=statistics.median(t.recompute_s),
        )
        for name, t in taken.items()
    }


def _step(
    model: nn.Module, batch: Any, choice: Choice, device: torch.device
) -> tuple[float, float, float]:
    clock = _Clock(device)
    with gradients_dropped(model, batch), checkpointed(model, choice, clock.recomputing):
        start_s = clock.now()
        loss = run_forward(model, batch)
        middle_s = clock.now()
        loss.backward()
        end_s = clock.now()
    return middle_s - start_s, end_s - middle_s, clock.recompute_s


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.recompute_s = 0.0

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        start_s = self.now()
        try:
            yield
        finally:
            self.recompute_s += self.now() - start_s


def name_of(device: torch.device) -> str:
    """For people: the accelerator's own name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} threads"
