"""`weights.resident: "auto"`: keep the weights resident if it shortens the step.

Whole steps are timed with resident weights and without (DeepSpeed's gathers between all ranks, or
hpZ's with `zero_hpz_partition_size`). Both train alike to the bit. Steps in which something else is
compared, codecs or gradients, are not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ds_ckpt.engine.tuner import Subject, Tuner
from ds_ckpt.zero3.weights import WeightsHook

log = logging.getLogger("ds_ckpt")
WEIGHTS = Subject(
    "weights are",
    {"resident": "resident on every node", "gathered": "gathered by DeepSpeed"},
    "weights.resident: true keeps them always",
)


class ResidencyTuner:
    """Attaches and detaches the weights hook between steps, on all ranks alike.

    Args:
        engine: DeepSpeed's.
        hook: attached.
        make_room: raises an error on all ranks if one has no memory for the copy.
        is_busy: returns whether something else that step times depend on is being compared.
    """

    def __init__(
        self,
        engine: Any,
        hook: WeightsHook,
        make_room: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        group = engine.optimizer.dp_process_group
        self._engine, self._hook, self._make_room = engine, hook, make_room
        self._is_busy = is_busy
        self._skipped = int(engine.skipped_steps)
        self._gave_up = False
        self.tuner = Tuner(
            ("resident", "gathered"),
            lambda times: torch.distributed.all_reduce(times, group=group),
            world=torch.distributed.get_world_size(group),
            device=hook.device,
            subject=WEIGHTS,
            is_logging_rank=torch.distributed.get_rank(group) == 0,
        )

    def step_ended(self, step: int) -> None:
        """Count the step, and place the weights for the next one. Collective."""
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        if self._hook.settled and not self._is_busy():
            self.tuner.step_ended(is_counted=self._skipped == before)
        else:
            self.tuner.pause()
        self.place()

    def loaded(self) -> None:
        """Compare anew after a checkpoint was loaded. Collective."""
        self.tuner.restart()
        self.place()

    def place(self) -> None:
        """Attach or detach the hook as the tuner chooses. Collective, between steps."""
        if self._gave_up or (self.tuner.current == "resident") == self._hook.attached:
            return
        if self._hook.attached:
            self._hook.detach()
            return
        try:
            self._make_room()
        except Exception as error:  # the same on every rank
            self._gave_up = True
            log.warning("ds_ckpt: weights stay with DeepSpeed: %s", error)
            return
        self._hook.attach()
