"""One plan for all processes: each measures its own batch, and the one that holds most plans."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ds_ckpt.activation.planning.budget import ActivationPlan, Allowance, Planner
from ds_ckpt.activation.planning.costs import Rates, measured_rates
from ds_ckpt.activation.planning.fake import may_be_known
from ds_ckpt.activation.planning.survey import simulate, survey
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.errors import Problem, StateError, UnsupportedError
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import OPTIONAL, resident_bytes
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise

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
        beside: what the plugin itself keeps there: bytes by what they are.
    """

    def __init__(
        self,
        engine: Any,
        config: ActivationConfig,
        blocks: Sequence[nn.Module],
        limit_bytes: int,
        capacity_bytes: int,
        beside: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._engine, self._config, self._blocks = engine, config, blocks
        self._device, self._limit = torch.device(engine.device), limit_bytes
        self._capacity = capacity_bytes
        self._beside = beside
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
        planner, sample = run_on_all_or_raise(measure, None, what="measure the model")
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
        own = torch.tensor([planner.saved_bytes, *own_covered], device=self._device)
        every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, own)
        totals, tokens, work = zip(*(t.tolist() for t in every), strict=True)
        owner = totals.index(max(totals))
        answer: list[Any] = [None]
        failure: Exception | None = None
        if torch.distributed.get_rank() == owner:
            try:
                answer = [self._plan(planner, sample, budget_bytes, first)]
            except Exception as error:  # the others wait for an answer
                failure = error
                answer = [error if isinstance(error, UnsupportedError) else _failed(owner, error)]
        torch.distributed.broadcast_object_list(answer, owner, device=self._device)
        if failure is not None:
            raise failure
        if isinstance(answer[0], Exception):
            raise answer[0]
        plan, words = answer[0]
        if words and torch.distributed.get_rank() == 0:
            log.warning("ds_ckpt: %s", words)
        return Agreed(plan, bool(words), sample, (max(tokens), max(work)))

    def _plan(
        self, planner: Planner, sample: Sample, budget_bytes: int, first: bool
    ) -> tuple[ActivationPlan, str]:
        """And, where nothing fits, so that it is the one that needs the fewest bytes, words."""
        allowance = self._allowance(budget_bytes)
        if allowance.of == "accelerator":
            allowance = self._with_temporaries(planner, sample, allowance)
        try:
            return self._timed(planner.plan(allowance)), ""
        except UnsupportedError:
            full = replace(allowance, budget_bytes=self._limit)  # "auto" plans for less than it
            least = self._timed(planner.least(full))
            if first and least.needed_bytes > self._limit:
                raise planner.too_small(full) from None
            return least, (
                f"everything is recomputed that can be, and {least.needed_bytes / GIB:.6g} GiB of "
                f"{self._limit / GIB:.6g} are needed for batches of {least.tokens} tokens"
            )

    def _timed(self, plan: ActivationPlan) -> ActivationPlan:
        """With the time since this process began to measure."""
        return replace(plan, planning_s=time.perf_counter() - self._start_s)

    def _allowance(self, budget_bytes: int) -> Allowance:
        config = self._config
        of = config.budget_is_of
        resident: dict[str, int] = {}
        if of == "accelerator":
            resident = {**resident_bytes(self._engine, self._blocks), **self._beside()}
        return Allowance(
            budget_bytes,
            of,
            resident,
            config.offload,
            config.offload_prefetch,
            config.offload_min_bytes,
            int(self._engine.train_micro_batch_size_per_gpu()),
            self._capacity,
            OPTIONAL,
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


def _failed(owner: int, error: Exception) -> StateError:
    return StateError(
        Problem(
            where=f"process {owner}, whose batch holds the most",
            found=f"{type(error).__name__}: {error}",
            why="it plans for all processes, and could not",
            remedy="see the error of that process",
        )
    )


def _numel(parameter: torch.nn.Parameter) -> int:
    """Of the whole parameter: one that ZeRO-3 has partitioned is empty by itself."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@dataclass(frozen=True)
class Sample:
    """A batch without its memory: small integers as they are, everything else as shapes.

    Attributes:
        tokens: elements of the largest integer tensor, else of the largest tensor.
        work: of all tensors, elements times the longest dimension: attention grows so.
        autocast: device kind, whether it is on, and its type.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    work: int
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Sample:
        tokens, work = size_of(args, kwargs)
        mode = FakeTensorMode()

        def light(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if may_be_known(leaf):
                return leaf.detach()
            return mode.from_tensor(leaf.detach(), static_shapes=True).requires_grad_(
                leaf.requires_grad
            )

        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        )
        return cls(tree_map(light, args), tree_map(light, kwargs), tokens, work, autocast)

    @property
    def shapes(self) -> str:
        """What decides what is saved."""
        leaves, structure = tree_flatten((self.args, self.kwargs))
        return repr((structure, [_word(leaf) for leaf in leaves], self.autocast))

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Autocast as it was."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _word(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


def size_of(args: Any, kwargs: Any) -> tuple[int, int]:
    """Tokens and work of a batch; see `Sample`."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    whole = [t for t in tensors if not t.is_floating_point() and t.dim()]
    named = [t for t in whole if t.dtype != torch.bool] or whole or tensors  # masks are no tokens
    tokens = max((t.numel() for t in named), default=0)
    return tokens, sum(t.numel() * max(t.shape, default=1) for t in tensors)


def not_smaller(samples: Sequence[Sample]) -> list[Sample]:
    """One of each shape, without those that another beats in tokens and in work."""
    different = list({s.shapes: s for s in samples}.values())
    return [
        s
        for i, s in enumerate(different)
        if not any(
            (o.tokens, o.work) != (s.tokens, s.work) and o.tokens >= s.tokens and o.work >= s.work
            for o in different[:i] + different[i + 1 :]
        )
    ]
