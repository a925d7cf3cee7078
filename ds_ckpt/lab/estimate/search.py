"""Search for the settings that train most tokens a second on a cluster, within memory and loss.

Candidates differ in micro-batch, recomputation (a budget's plan, with and without offload), weights
(ZeRO-3's, hpZ, resident whole or losslessly) and gradients (DeepSpeed's own, dense, or methods that
verdicts allow). Steps within 1% of the shortest are a tie, which goes to the setting that departs
least from plain DeepSpeed. ZeRO-1 is a baseline: it all-reduces gradients once a step, and gathers
changed weights after the optimizer (DeepSpeed's `stage_1_and_2.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_ckpt.activation.planning.budget import AUTO_SHARE, ActivationPlan, Planner
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.config.verdicts import Loss
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.lab.estimate.memory_model import DEFAULTS, States, estimate
from ds_ckpt.lab.estimate.methods import (
    LOSSLESS_BITS,
    LOSSLESS_S,
    RESIDENT,
    STOCK,
    PlanMethod,
    gradients,
    methods,
    weights,
)
from ds_ckpt.lab.estimate.model import ACTIVATIONS, Model
from ds_ckpt.lab.estimate.simulate import (
    GradientTimes,
    Link,
    Machine,
    StepTimes,
    Strategy,
    TimedBlock,
    simulate,
)
from ds_ckpt.lab.hosts.hardware import Cluster, Constant
from ds_ckpt.telemetry.units import GIB

NEEDED = (
    *("flop_per_s", "share_of_peak", "memory_bytes", "memory_bytes_per_s"),
    *("inside_bytes_per_s", "bus_bytes_per_s"),
)
"""Figures of an accelerator that a plan needs."""
CALL_S = 3e-5
"""Guess: time to call a collective from Python, if it does not run ahead of the device."""
UPDATE_BYTES = 40.0
"""Memory traffic of AdamW an element: master weight, moments, gradient and 16-bit weight."""
HOST_BYTES = 512 * GIB
"""Memory of a node for offloaded tensors."""
OWN_FIGURES = (
    Constant("bits of a lossless change", LOSSLESS_BITS, "measured: lossless_bits.py, rate 3e-4"),
    Constant("coding a lossless change, s per element", LOSSLESS_S, "measured: docs/weights.md"),
    Constant("calling a collective, s", CALL_S, "guess: the time of a launch from Python"),
    Constant("backward over forward", 2.0, "guess: two products for each of the forward's"),
    Constant("memory traffic of AdamW, bytes per element", UPDATE_BYTES, "guess: counted by hand"),
    Constant("memory of a node for offloaded tensors, bytes", HOST_BYTES, "guess"),
)
"""Figures beside the hardware's."""
BUCKETS = 8
"""Least number of buckets in a backward, or nothing would be hidden."""
ZERO3, HPZ, ZERO1 = "ZeRO-3's", "hpZ", "ZeRO-1"
BUDGET = "budget"
TIE = 0.01
"""Share of a step."""
STEP = 1 << 26
"""Bytes that memory for activations is rounded down to."""


@dataclass(frozen=True)
class Question:
    """A model, a cluster, the sequences of a step on all ranks, and the loss that may be lost."""

    model: Model
    cluster: Cluster
    latency_inside_s: float
    sequences: int
    loss: Loss
    dtype: str = "bf16"

    @property
    def machine(self) -> Machine:
        """Describe the cluster to the simulator."""
        cluster, device = self.cluster, self.cluster.device
        return Machine(
            hosts=cluster.nodes,
            local=cluster.local,
            network=Link(cluster.rate.value / 8, cluster.latency.value),
            inside=Link(device["inside_bytes_per_s"], self.latency_inside_s),
            bus_bytes_per_s=device["bus_bytes_per_s"],
            call_s=CALL_S,
        )

    @functools.cached_property
    def rates(self) -> Rates:
        """Rates of products and of all else.

        The share of peak is of whole steps, so products alone are faster than that.
        """
        device, (flops, moved) = self.cluster.device, self.model.work
        peak, bytes_per_s = device["flop_per_s"], device["memory_bytes_per_s"]
        together_s = flops / (peak * device["share_of_peak"])
        products_s = max(together_s - moved / bytes_per_s, flops / peak)
        return Rates(flops / products_s, bytes_per_s, device["bus_bytes_per_s"])

    @property
    def capacity_bytes(self) -> int:
        """Memory of an accelerator that a plan may use."""
        return int(self.cluster.device["memory_bytes"] * AUTO_SHARE)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.tokens


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    sequences: int
    micro_steps: int
    policy: str
    offload: bool
    weights: str
    method: PlanMethod

    @property
    def departures(self) -> tuple[bool, int]:
        """Distance from plain DeepSpeed: rounded gradients, then the number of settings changed."""
        settings = self.method.settings
        differ = (settings is not None, self.weights != ZERO3, self.offload, self.policy != "none")
        return settings is not None and not settings.lossless, sum(differ)

    def describe(self) -> str:
        """Describe the setting on one line."""
        policy = f"checkpointing {self.policy}" + ", inputs offloaded" * self.offload
        batch = f"micro-batch {self.sequences} x {self.micro_steps}"
        return f"{policy}; {placement(self.weights)}; gradients {self.method.name}; {batch}"


def placement(kind: str) -> str:
    """Describe the placement of weights."""
    return f"resident, {kind}" if kind in RESIDENT else "ZeRO-3's weights" * (kind == ZERO3) or kind


@dataclass
class PlanOption:
    """A setting with its memory, in bytes of an accelerator and of a rank's host, and its step."""

    setting: Setting
    plan: ActivationPlan
    memory: dict[str, int]
    capacity_bytes: int
    host_bytes: int
    machine: Machine
    blocks: list[TimedBlock]
    strategy: Strategy

    @property
    def needed_bytes(self) -> int:
        """Add up the memory of an accelerator."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Compare memory with its limits."""
        fits_host = self.host_bytes * self.machine.local <= HOST_BYTES
        return fits_host and self.needed_bytes <= self.capacity_bytes

    @functools.cached_property
    def step(self) -> StepTimes:
        """Simulate the step."""
        return simulate(self.machine, self.blocks, self.strategy)


class Search:
    """All candidates of a question; ConfigError if its batch cannot be divided.

    `report` is called before each micro-batch size; `each` are sequences of a rank in a step;
    `refused` are methods that verdicts do not allow.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.report: Callable[[str], object] = lambda words: None
        self.machine = machine = question.machine
        two_levels = machine.hosts > 1 and machine.local > 1
        exchanging = machine.hosts if two_levels else machine.ranks
        self.methods, self.refused = methods(question.loss, exchanging)
        self.each, rest = divmod(question.sequences, machine.ranks)
        if rest:
            why = f"each of {machine.ranks} ranks trains equally many sequences"
            remedy = f"write {(self.each + 1) * machine.ranks}"
            problem = Problem("--batch", f"{question.sequences} sequences", why, remedy)
            raise ConfigError(problem, headline="the batch cannot be divided")
        self.kinds = [ZERO3] if machine.hosts == 1 else [ZERO3, *[HPZ] * two_levels, *RESIDENT]
        """Placements of weights."""
        self._plan = functools.cache(self._plan_within)

    def best(self) -> PlanOption:
        """Return the shortest step that fits. Raises UnsupportedError if nothing does."""
        if not self.all:
            raise self._nothing_fits()
        return best_of(self.all)

    @functools.cached_property
    def all(self) -> list[PlanOption]:
        """Candidates that fit and may be the best."""
        return list(self._candidates(self.kinds))

    @functools.cached_property
    def zero1(self) -> list[PlanOption]:
        """Steps of ZeRO-1 that fit."""
        return list(self._candidates([ZERO1]))

    def micro_batches(self) -> Sequence[int]:
        """Sizes that a micro-batch can have."""
        return [n for n in range(1, self.each + 1) if self.each % n == 0]

    def _candidates(self, kinds: Sequence[str]) -> Iterator[PlanOption]:
        for sequences in self.micro_batches():
            self.report(f"micro-batches of {sequences}")
            found = [
                candidate
                for kind in kinds
                for method in self.methods
                if kind not in (HPZ, ZERO1) or method.settings is None
                for candidate in self._recomputes(sequences, kind, method)
            ]
            if not found:
                return  # nor does a larger one fit
            yield from found

    def _recomputes(self, sequences: int, kind: str, method: PlanMethod) -> Iterator[PlanOption]:
        """With nothing offloaded; if that recomputes, also with offload, as host memory allows."""
        first = self.mixture(sequences, kind, method, False)
        if first is not None and first.fits:
            yield first
            if not first.plan.recompute_s:
                return
        other = self.mixture(sequences, kind, method, True)
        if other is not None and not other.fits and "block" in self._planner(sequences).words:
            other = self.uniform(replace(other.setting, offload=True), "block")
        if other is not None and other.fits:
            yield other

    def _planner(self, sequences: int) -> Planner:
        return self.question.model.planner(sequences, self.question.rates)

    def mixture(
        self, sequences: int, kind: str, method: PlanMethod, offload: bool
    ) -> PlanOption | None:
        """Recompute least within the memory; None: nothing fits."""
        memory = self._memory(sequences, kind, method)
        room = (self.question.capacity_bytes - sum(memory.values())) // STEP * STEP
        plan = self._plan(sequences, room, offload)
        if plan is None:
            return None
        setting = Setting(sequences, self.each // sequences, BUDGET, offload, kind, method)
        return self._candidate(setting, plan, memory)

    def _plan_within(self, sequences: int, room: int, offload: bool) -> ActivationPlan | None:
        host = HOST_BYTES // self.machine.local if offload else 0
        allowance = replace(ACTIVATIONS, budget_bytes=room, offload=offload, host_bytes=host)
        try:
            return self._planner(sequences).plan(allowance) if room > 0 else None
        except UnsupportedError:
            return None

    def uniform(self, of: Setting, policy: str) -> PlanOption:
        """Give all blocks one policy, whether or not it fits."""
        allowance = replace(ACTIVATIONS, offload=of.offload)
        plan = self._planner(of.sequences).all_alike(policy, allowance)
        return self._candidate(of, plan, self._memory(of.sequences, of.weights, of.method))

    def _candidate(self, of: Setting, plan: ActivationPlan, memory: dict[str, int]) -> PlanOption:
        """The candidate with a plan, under the policy that the plan comes to."""
        question, machine, model = self.question, self.machine, self.question.model
        is_zero1, size = of.weights == ZERO1, model.parameters.itemsize
        alike = {*plan.choices}
        # "attention and mlp" is no policy
        policy = BUDGET if len(alike) > 1 or " and " in plan.choices[0] else alike.pop()
        blocks = model.simulated(self._planner(of.sequences).forward_s, plan)
        bytes_per_s = question.cluster.device["memory_bytes_per_s"]
        if is_zero1:
            blocks = [replace(block, elements=0) for block in blocks]
            hops = 2 * (machine.ranks - 1)
            each = size * hops / machine.ranks
            exchange = GradientTimes(each, each, hops=hops, once=True, ring=True)
        else:
            exchange = gradients(of.method, model, machine, size, of.micro_steps, bytes_per_s)
        strategy = Strategy(
            of.micro_steps,
            size,
            exchange,
            bucket=bucket_of(model),
            weights=weights(of.weights, machine, size),
            hpz=of.weights == HPZ,
            gathers_changed=is_zero1,
            update_s=UPDATE_BYTES * model.trained / machine.ranks / bytes_per_s,
        )
        held = of.method.exchange_memory(model, machine, of.micro_steps)
        memory = {**memory, "activations": plan.needed_bytes}
        in_update = self._states[of.weights].step_bytes + memory["residuals"] + held.nccl
        memory["more, in the optimizer's step"] = max(0, in_update - sum(memory.values()))
        return PlanOption(
            replace(of, policy=policy),
            plan,
            memory,
            question.capacity_bytes,
            sum(b.offloaded_bytes for b in plan.blocks) + held.on_host * held.residuals,
            machine,
            blocks,
            strategy,
        )

    @functools.cached_property
    def _states(self) -> dict[str, States]:
        """States of ZeRO, by placement of weights."""
        found = {}
        for kind in [*self.kinds, ZERO1]:
            setting = Setting(1, self.each, "none", False, kind, PlanMethod(STOCK))
            file = deepspeed_file(self.question, setting)
            if kind == ZERO1:
                file["zero_optimization"] = {"stage": 1}
            parameters = self.question.model.parameters
            states, _ = estimate(parameters, file, self.machine.ranks, self.machine.hosts)
            found[kind] = states if self.machine.streams else replace(states, nccl_bytes=0)
        return found

    def _memory(self, sequences: int, kind: str, method: PlanMethod) -> dict[str, int]:
        """Bytes beside activations."""
        model, machine, states = self.question.model, self.machine, self._states[kind]
        held = method.exchange_memory(model, machine, self.each // sequences, bucket_of(model))
        kept = states.parameters_bytes + states.gradients_bytes + states.optimizer_bytes
        return {
            "weights, gradients, optimizer": kept,
            "gathered weights": states.gathered_bytes,
            "buckets": states.communication_bytes + held.buffers,
            "the node's copy of the weights": states.host_copy_bytes,
            "residuals": held.residuals * (not held.on_host),
            "NCCL's buffers": states.nccl_bytes + held.nccl,
            "gradients of activations, temporaries": model.temporary_bytes(sequences),
        }

    def _nothing_fits(self) -> UnsupportedError:
        question = self.question
        plan = self._planner(1).least(replace(ACTIVATIONS, offload=True))
        setting = Setting(1, self.each, BUDGET, True, ZERO3, PlanMethod(STOCK))
        least = self._candidate(setting, plan, self._memory(1, ZERO3, setting.method))
        parts = ", ".join(f"{what} {n / GIB:.1f}" for what, n in least.memory.items() if n)
        why = (
            f"one sequence of {question.model.tokens} tokens, with all recomputed and offloaded, "
            f"needs {least.needed_bytes / GIB:.1f} GiB of an accelerator ({parts}), of which a "
            f"plan uses {question.capacity_bytes / GIB:.1f}"
        )
        remedy = "name more nodes or accelerators with more memory, or shorter sequences (--tokens)"
        where, found = "--cluster", f"{question.model.name} on {question.cluster.text}"
        return UnsupportedError(Problem(where, found, why, remedy), headline="no plan fits")


def best_of(candidates: Sequence[PlanOption]) -> PlanOption:
    """Return the shortest step; of a tie, the one that departs least from plain DeepSpeed."""
    enough_s = (1 + TIE) * min(one.step.seconds for one in candidates)
    ties = [one for one in candidates if one.step.seconds <= enough_s]
    return min(ties, key=lambda one: (one.setting.departures, one.step.seconds))


def bucket_of(model: Model) -> int:
    """Return the elements of a bucket of gradients."""
    return min(DEFAULTS["reduce_bucket_size"], -(-model.trained // BUCKETS))


def deepspeed_file(
    question: Question, setting: Setting, plan: ActivationPlan | None = None
) -> dict[str, Any]:
    """Write the DeepSpeed JSON of a setting; `plan` gives a budget its number."""
    local, activation = question.machine.local, dict[str, Any]()
    if setting.policy == BUDGET:
        assert plan is not None
        gib = math.floor(100 * plan.budget_bytes / GIB) / 100
        activation = {"policy": "budget", "budget_gib": gib, "budget_of": "activations"}
        activation["offload"] = setting.offload  # false: a plan may not choose "offload" either
    elif setting.policy != "none":
        policy, _, kept = setting.policy.partition(" ")
        activation = {"policy": policy, **({"save_ops": kept} if kept else {})}
        if setting.offload and policy != "offload":
            activation["offload"] = True
    betas = list(setting.method.betas or (0.9, 0.95))
    ours: dict[str, Any] = {"activation": activation} if activation else {}
    if setting.method.section:
        ours["compression"] = dict(setting.method.section)
    if setting.weights in RESIDENT:
        ours["weights"] = {"resident": True, "deltas": RESIDENT[setting.weights]}
    return {
        "train_micro_batch_size_per_gpu": setting.sequences,
        "gradient_accumulation_steps": setting.micro_steps,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": betas, "eps": 1e-8, "weight_decay": 0.1},
        },
        question.dtype: {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket_of(question.model),
            "stage3_gather_16bit_weights_on_model_save": True,
            **({"zero_hpz_partition_size": local} if setting.weights == HPZ else {}),
        },
        **({"ds_ckpt": ours} if ours else {}),
    }
