"""One plan for all processes: each measures its own batch, and the one that holds most plans."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.errors import Problem, StateError, UnsupportedError
from ds_ckpt.planner.budget import ActivationPlan, Allowance, Planner
from ds_ckpt.planner.costs import Rates, measured_rates
from ds_ckpt.planner.simulate import simulate
from ds_ckpt.planner.survey import survey
from ds_ckpt.session.batches import Sample, not_smaller
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import resident_bytes
from ds_ckpt.zero3.together import together

log = logging.getLogger("ds_ckpt")
_REMEMBERED = 4
"""Shapes of batches whose measurements are kept."""


@dataclass(frozen=True)
class Agreed:
    """What the processes agreed on.

    Attributes:
        least: nothing fits; the plan is the one that needs the fewest bytes.
        sample: of this process's batches the one that would hold most.
        covered: the most tokens and work of the batches of all processes.
    """

    plan: ActivationPlan
    least: bool
    sample: Sample
    covered: tuple[int, int]


class Agreement:
    """Makes plans together with the other processes.

    Args:
        blocks: whose weights are gathered one at a time.
        limit_bytes: what may be used; a first plan that needs more is refused.
        capacity_bytes: what the device has.
    """

    def __init__(
        self,
        engine: Any,
        config: ActivationConfig,
        blocks: Sequence[nn.Module],
        limit_bytes: int,
        capacity_bytes: int,
    ) -> None:
        self._engine, self._config, self._blocks = engine, config, blocks
        self._device, self._limit = torch.device(engine.device), limit_bytes
        self._capacity = capacity_bytes
        self._rates: Rates | None = None
        self._planners: dict[str, Planner] = {}
        self._start_s = 0.0

    def make(self, samples: Sequence[Sample], budget_bytes: int, *, first: bool) -> Agreed:
        """Collective. Checkpointing must not be on the model.

        Args:
            samples: batches of this process; the plan is for the one that would hold most.

        Raises:
            UnsupportedError: the model cannot be measured, or nothing fits at first.
            StateError: planning failed on another process.
        """
        self._start_s = time.perf_counter()
        measure = functools.partial(self._largest, samples)
        planner, sample = together(measure, None, what="measure the model")
        covered = (max(s.tokens for s in samples), max(s.work for s in samples))
        return self._agreed(planner, sample, covered, budget_bytes, first)

    def _largest(self, samples: Sequence[Sample]) -> tuple[Planner, Sample]:
        """Neither tokens nor length alone tell which batch holds most, so each is measured."""
        measured = [(self._measure(sample), sample) for sample in not_smaller(samples)]
        return max(measured, key=lambda pair: pair[0].saved_bytes)

    def _measure(self, sample: Sample) -> Planner:
        model, device = self._engine.module, self._device
        # a parameter that is frozen or let loose changes what is saved
        trained = "".join(str(int(p.requires_grad)) for p in model.parameters())
        key = f"{sample.shapes} {trained}"
        known = self._planners.get(key)
        if known is not None:
            return known
        with sample.surroundings():
            found = survey(
                model, sample.args, sample.kwargs, modules=self._config.modules, device=device
            )
        if self._rates is None:
            dtype = max(model.parameters(), key=_numel).dtype
            self._rates = measured_rates(device, dtype)
        planner = Planner(found, self._rates, sample.tokens)
        while len(self._planners) >= _REMEMBERED:
            del self._planners[next(iter(self._planners))]
        self._planners[key] = planner
        return planner

    def _agreed(
        self,
        planner: Planner,
        sample: Sample,
        own_covered: tuple[int, int],
        budget_bytes: int,
        first: bool,
    ) -> Agreed:
        """The plan of the process that would hold the most."""
        world = torch.distributed.get_world_size()
        sizes = [planner.saved_bytes, *own_covered]
        own = torch.tensor(sizes, dtype=torch.int64, device=self._device)
        every = [torch.empty_like(own) for _ in range(world)]
        torch.distributed.all_gather(every, own)
        totals, tokens, work = zip(*(t.tolist() for t in every), strict=True)
        covered = (max(tokens), max(work))
        owner = totals.index(max(totals))
        text, failure = "", None
        if torch.distributed.get_rank() == owner:
            try:
                text = self._plan_text(planner, sample, budget_bytes, first)
            except Exception as error:  # the others wait for an answer
                failure = error
                text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        answer = json.loads(self._from(owner, text))
        if failure is not None:
            raise failure
        if "failed" in answer:
            raise StateError(
                Problem(
                    where=f"process {owner}, whose batch holds the most",
                    found=answer["failed"],
                    why="it plans for all processes, and could not",
                    remedy="see the error of that process",
                )
            )
        if "problem" in answer:
            raise UnsupportedError(Problem(**answer["problem"]), headline=answer["headline"])
        if answer["least"] and torch.distributed.get_rank() == 0:
            log.warning("ds_ckpt: %s", answer["words"])
        plan = ActivationPlan.from_json(answer["plan"])
        return Agreed(plan, bool(answer["least"]), sample, covered)

    def _plan_text(self, planner: Planner, sample: Sample, budget_bytes: int, first: bool) -> str:
        allowance = self._allowance(budget_bytes)
        if allowance.of == "accelerator":
            allowance = self._with_temporaries(planner, sample, allowance)
        try:
            plan = self._timed(planner.plan(allowance))
            return json.dumps({"plan": plan.to_json(), "least": False})
        except UnsupportedError:
            full = replace(allowance, budget_bytes=self._limit)  # "auto" plans for less than it
            least = self._timed(planner.least(full))
            if first and least.needed_bytes > self._limit:
                error = planner.too_small(full)
                problem, headline = error.problems[0], str(error).splitlines()[0]
                return json.dumps({"problem": vars(problem), "headline": headline})
            words = (
                f"everything is recomputed that can be, and {least.needed_bytes / GIB:.6g} GiB of "
                f"{self._limit / GIB:.6g} are needed for batches of {least.tokens} tokens"
            )
            return json.dumps({"plan": least.to_json(), "least": True, "words": words})

    def _timed(self, plan: ActivationPlan) -> ActivationPlan:
        """With the time since this process began to measure."""
        return replace(plan, planning_s=time.perf_counter() - self._start_s)

    def _allowance(self, budget_bytes: int) -> Allowance:
        config = self._config
        of = config.budget_is_of
        resident: dict[str, int] = {}
        if of == "accelerator":
            resident = resident_bytes(self._engine, self._blocks)
        return Allowance(
            budget_bytes,
            of,
            resident,
            config.offload,
            config.offload_prefetch,
            config.offload_min_bytes,
            int(self._engine.train_micro_batch_size_per_gpu()),
            self._capacity,
        )

    def _with_temporaries(
        self, planner: Planner, sample: Sample, allowance: Allowance
    ) -> Allowance:
        """What lives for a while only, simulated with the plan that there is without it."""
        try:
            plan = planner.plan(allowance)
        except UnsupportedError:
            plan = planner.least(allowance)
        model = self._engine.module
        with sample.surroundings():
            step = simulate(
                model, sample.args, sample.kwargs, plan.units(model), device=self._device
            )
        counted = plan.needed_bytes - sum(plan.resident.values())
        offloaded = sum(b.offloaded_bytes for b in plan.blocks)  # simulated as if it stayed
        beside = max(0, step.peak_bytes - counted - offloaded)
        resident = {**allowance.resident, "gradients of activations and temporaries": beside}
        return replace(allowance, resident=resident)

    def _from(self, owner: int, text: str) -> str:
        """What the owner says, on every process."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device=self._device)
        torch.distributed.broadcast(size, owner)
        if torch.distributed.get_rank() != owner:
            data = torch.empty(int(size), dtype=torch.uint8)
        data = data.to(self._device)
        torch.distributed.broadcast(data, owner)
        return bytes(data.cpu().tolist()).decode()


def _numel(parameter: torch.nn.Parameter) -> int:
    """Of the whole parameter: one that ZeRO-3 has partitioned is empty by itself."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
