"""`weights.resident: "auto"`: hosts keep the weights where that makes steps shorter.

Whole steps are timed with the weights resident and as the file says without (DeepSpeed's gathers
between all processes, or hpZ's where `zero_hpz_partition_size` is set), by the rules of
`exchange.autotune`: a tie goes to DeepSpeed, which needs no copy. Both train alike to the bit, so
that turns change nothing. Steps in which something else is compared, codecs or how gradients
travel, are not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ds_ckpt.exchange.autotune import Autotuner, Words
from ds_ckpt.zero3.weights import WeightsHook

log = logging.getLogger("ds_ckpt")
WEIGHTS = Words(
    "weights are",
    "resident on every host",
    "gathered by DeepSpeed",
    "gathered by DeepSpeed",
    "weights.resident: true keeps them always",
)


class Residence:
    """Puts the weights hook on and takes it off between steps, on all processes alike.

    Args:
        engine: DeepSpeed's.
        hook: attached.
        make_room: raises an error on all processes where one has no memory for the copy.
        busy: whether something else that step times depend on is being compared.
    """

    def __init__(
        self,
        engine: Any,
        hook: WeightsHook,
        make_room: Callable[[], None],
        busy: Callable[[], bool],
    ) -> None:
        group = engine.optimizer.dp_process_group
        world = torch.distributed.get_world_size(group)
        self._engine, self._hook, self._make_room, self._busy = engine, hook, make_room, busy
        self._skipped = int(engine.skipped_steps)
        self._gave_up = False
        self.tuner = Autotuner(
            lambda times: torch.distributed.all_reduce(times, group=group),
            world=world,
            layout=(world, int(engine.zero_hpz_partition_size())),
            speaks=torch.distributed.get_rank(group) == 0,
            words=WEIGHTS,
        )

    def step_ended(self, step: int) -> None:
        """Count it, and have the next one's weights where they shall be. Collective."""
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        if self._hook.settled and not self._busy():
            self.tuner.exchanged(("weights",), self._hook.device)
        else:
            self.tuner.interrupted()
        self.tuner.step_ended(skipped=self._skipped > before)
        self.place()

    def place(self) -> None:
        """Have the weights where the tuner says. Collective, between steps."""
        if self._gave_up or (self.tuner.way == "compressed") == self._hook.attached:
            return
        if self._hook.attached:
            self._hook.detach()
            return
        try:
            self._make_room()
        except Exception as error:  # everybody's, by then
            self._gave_up = True
            log.warning("ds_ckpt: weights stay with DeepSpeed: %s", error)
            return
        self._hook.attach()
