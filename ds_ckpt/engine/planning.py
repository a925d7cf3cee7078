"""The policies "budget" and "auto" on an engine: when a plan is made, and how it is agreed on.

The first training forward brings the shapes. Every process measures its own batch; the one that
would hold the most plans for all, and its plan is what all use. Between optimizer steps one small
reduction tells every process the largest batch and memory that any of them has seen. All decisions
are made from what that reduction gives, so they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_ckpt.activation.blocks import find_blocks
from ds_ckpt.activation.planning.budget import ActivationPlan, MemoryWatch, Word
from ds_ckpt.activation.policies import Unit
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.engine.agreement import Agreement, Sample, not_smaller, size_of
from ds_ckpt.engine.memory import MemoryGauge, gauge_for
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry.device import capacity_of
from ds_ckpt.telemetry.units import GIB


@dataclass(frozen=True)
class Change:
    """A plan that began to hold: at its first step, because of what."""

    step: int
    why: str
    plan: ActivationPlan


class Planning:
    """Makes plans for one engine until `stop()`.

    Args:
        engine: DeepSpeed's.
        config: with policy "budget" or "auto".
        install: puts the units of a plan on the model, in the place of what is there.
        remove: takes checkpointing off the model.
        tell: takes each change.
        beside: see `Agreement`.

    Raises:
        ConfigError: the budget is larger than the device's memory, or "auto" cannot watch it.
    """

    def __init__(
        self,
        engine: Any,
        config: ActivationConfig,
        *,
        install: Callable[[Sequence[Unit]], None],
        remove: Callable[[], None],
        tell: Callable[[Change], None],
        beside: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._engine, self._config = engine, config
        self._install, self._remove, self._tell = install, remove, tell
        self._device = torch.device(engine.device)
        blocks = [b.module for b in find_blocks(engine.module, config.modules)]
        capacity = capacity_of(self._device)
        asked = config.budget_gib
        self._check(asked, capacity)
        self._limit = capacity if asked is None else int(asked * GIB)
        self._agreement = Agreement(engine, config, blocks, self._limit, capacity, beside)
        self._watch = MemoryWatch(self._limit) if config.policy == "auto" else None
        self._patches = Patches()
        self._gauge: MemoryGauge | None = None
        if self._watch is not None:
            self._gauge = gauge_for(engine, config.budget_is_of, self._patches)
        self.plan: ActivationPlan | None = None
        self.history: list[Change] = []
        self._planned: Sample | None = None
        self._since: list[Sample] = []
        """The largest of the forwards since the last look."""
        self._recent: list[list[Sample]] = []
        """By step, of the last ones."""
        self._covered = (0, 0)
        """Tokens and work of the largest batch of all processes that the plan was made for."""
        self._stuck = False
        hook = torch.compiler.disable(self._before_forward)
        self._handle = engine.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def _check(self, asked: float | None, capacity: int) -> None:
        cpu = self._device.type == "cpu"
        if cpu and self._config.policy == "auto":
            if asked is None:
                why = "the CPU accelerator has no memory of its own to watch: a limit must be given"
                raise _wrong("gib", "nothing", why, "write the GiB that may be held")
            if self._config.budget_is_of == "accelerator":
                why = "on the CPU accelerator nobody counts what is allocated"
                raise _wrong("of", '"accelerator"', why, 'write "activations" or "saved"')
        if asked is not None and asked * GIB > capacity:
            what = "this host" if cpu else "the device"
            why = f"{what} has {capacity / GIB:.1f} GiB"
            raise _wrong("gib", f"{asked:g}", why, f"write at most {capacity / GIB:.1f}")

    # -- the batches -----------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if self.plan is None:
            self._since = [Sample.of(args, kwargs, self._device)]
            step = int(self._engine.global_steps)
            self._make(step, "the first batch", self._since, first=True)
            return
        tokens, work = size_of(args, kwargs)
        if not any(s.tokens >= tokens and s.work >= work for s in self._since):
            self._since = not_smaller([*self._since, Sample.of(args, kwargs, self._device)])

    # -- between steps ---------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """Collective: every process has ended optimizer step `step`."""
        if self.plan is None or self._planned is None:
            return
        seen, self._since = self._since, []
        tokens = max((s.tokens for s in seen), default=0)
        work = max((s.work for s in seen), default=0)
        used = float(self._gauge.take()) if self._gauge is not None else 0.0
        told = torch.tensor([tokens, work, used], dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
        most_tokens, most_work, most_used = told.tolist()
        if seen:
            self._recent = [*self._recent, seen][-(self._watch.patience if self._watch else 1) :]
        if self._watch is None:
            if most_tokens > self._covered[0] or most_work > self._covered[1]:
                why = f"batches have grown to {int(most_tokens)} tokens"
                self._make(step, why, [*seen, self._planned])
            return
        used = most_used + self._unseen_bytes(self.plan, most_tokens)
        word = self._watch.look(step, used)
        if word is not None:
            self._follow(step, word, used)

    def _unseen_bytes(self, plan: ActivationPlan, tokens: float) -> float:
        """What a recompute makes again, which a gauge of what is saved does not see."""
        if plan.of != "activations":
            return 0.0
        share = tokens / self._covered[0] if self._covered[0] else 1.0
        return share * max(0, plan.needed_bytes - plan.held_bytes)

    def _follow(self, step: int, word: Word, used_bytes: float) -> None:
        assert self._watch is not None
        assert self._planned is not None
        if word == "more" and self._stuck:
            return
        share = used_bytes / self._watch.capacity_bytes
        why = f"{share:.0%} of {self._watch.capacity_bytes / GIB:.6g} GiB in use"
        before = self.plan
        while True:
            recent = [sample for samples in self._recent for sample in samples]
            self._make(step, why, recent or [self._planned], word=word)
            if self.plan is not before:
                self._watch.changed(step, word)
                return
            if not self._watch.unchanged(step, word) or self._stuck:
                return

    # -- a plan ----------------------------------------------------------------------------------

    def _make(
        self,
        step: int,
        why: str,
        samples: Sequence[Sample],
        *,
        first: bool = False,
        word: Word | None = None,
    ) -> None:
        """Measure, agree, install. Every process calls it at the same moment."""
        before = self.plan
        if not first:
            self._remove()
        budget_bytes = self._watch.budget_bytes if self._watch is not None else self._limit
        try:
            agreed = self._agreement.make(samples, budget_bytes, first=first)
            plan = agreed.plan
            wrong_way = (
                before is not None
                and word is not None
                and (plan.recompute_share > before.recompute_share) != (word == "more")
            )
            same = before is not None and (plan.choices == before.choices or wrong_way)
            kept = before if before is not None and same else plan
            self._install(kept.units(self._engine.module))
        except BaseException:
            self._remove()
            if before is not None:
                self._install(before.units(self._engine.module))
            raise
        self._stuck, covered = agreed.least, agreed.covered
        if word is None:  # what was planned for before is planned for still
            covered = (max(covered[0], self._covered[0]), max(covered[1], self._covered[1]))
        self._covered = covered
        if not same or word is None:
            self._planned = agreed.sample
        if same:
            if word is None:
                self.plan = plan  # does the same, with the numbers of the larger batch
            return
        self.plan = plan
        change = Change(step, why, plan)
        self.history.append(change)
        self._tell(change)

    def stop(self) -> None:
        """Watch and plan no longer."""
        self._handle.remove()
        self._patches.undo()


def _wrong(key: str, found: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"$.ds_ckpt.activation.budget_{key}", found, why, remedy))
