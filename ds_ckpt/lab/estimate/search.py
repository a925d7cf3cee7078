"""Search for the settings that train most tokens a second on a cluster, within memory and loss.

Candidates differ in micro-batch and recomputation (the model's own, or a budget's plan, with and
without offload). Weights are ZeRO-1, ZeRO-2, ZeRO-3, hpZ, resident whole or losslessly. Gradients
are DeepSpeed's own, dense, or by methods that verdicts allow. If memory is short, buckets differ
too. Steps that differ by less than the simulator's error are a tie. A tie goes to the setting that
departs least from plain DeepSpeed. ZeRO-1 all-reduces gradients once a step, ZeRO-2 in every
micro-step; both gather changed weights after the optimizer (DeepSpeed's `stage_1_and_2.py`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_ckpt.activation.planning.budget import AUTO_SHARE, ActivationPlan, Allowance, Planner
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.activation.planning.fake import MOST_ELEMENTS
from ds_ckpt.config.verdicts import LossLimit
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.lab.estimate.memory_model import ZERO_DEFAULTS, Parameters, States, estimate
from ds_ckpt.lab.estimate.methods import (
    LOSSLESS_BITS,
    LOSSLESS_S,
    PlanMethod,
    gradients,
    plan_methods,
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
    at_least_s,
    simulate,
)
from ds_ckpt.lab.hosts.hardware import Cluster, Constant
from ds_ckpt.lab.workload import BUCKETS, RESIDENT, STOCK
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
HOST_BYTES, MOST_HOST_BYTES = 512 * GIB, 2048 * GIB
"""Memory of a node for offloaded tensors, and for an offloaded optimizer that is proposed."""
OWN_FIGURES = (
    Constant("bits of a lossless change", LOSSLESS_BITS, "measured: lossless_bits.py, rate 3e-4"),
    Constant("coding a lossless change, s per element", LOSSLESS_S, "measured: docs/weights.md"),
    Constant("calling a collective, s", CALL_S, "guess: the time of a launch from Python"),
    Constant("backward over forward", 2.0, "guess: two products for each of the forward's"),
    Constant("memory traffic of AdamW, bytes per element", UPDATE_BYTES, "guess: counted by hand"),
    Constant("memory of a node for offloaded tensors, bytes", HOST_BYTES, "guess"),
)
SMALLER_BUCKETS = (1, 4, 16)
"""Divisors of the bucket that are tried as long as memory is short."""
ZERO1, ZERO2, ZERO3, HPZ = "ZeRO-1", "ZeRO-2", "ZeRO-3", "hpZ"
ZERO_KINDS = (ZERO1, ZERO2, ZERO3, HPZ)
BUDGET, OWN = "budget", "the model's own"
"""Policies: a mixture, and the model's own checkpointing of every block, without this plugin."""
TIE = 0.06
"""Share of a step: the median error of predicted steps (docs/plan.md)."""
BASELINE_TIE = 0.01
"""Tie for the DeepSpeed baseline, so that what the plugin saves is not overstated."""
TOKENS_EACH, ROWS_EACH = 1 << 14, 8
"""Default batch: tokens of an accelerator and step, or its rows if a batch has no token ids."""
IN_UPDATE = "more, in the optimizer's step"
MAX_NODES, MIN_TOKENS, LORA_RANK = 256, 128, 16
"""Bounds of what is proposed if nothing fits."""
STEP = 1 << 26
"""Bytes that memory for activations is rounded down to."""


@dataclass(frozen=True)
class Question:
    """A model, a cluster, the sequences of a step on all ranks, and the loss that may be lost."""

    model: Model
    cluster: Cluster
    latency_inside_s: float
    sequences: int
    loss: LossLimit
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
    divisor: int = 1
    """Divisor of the default bucket's size."""

    @property
    def sections(self) -> int:
        """Number of this plugin's features; 0: DeepSpeed alone."""
        recomputes = self.policy not in ("none", OWN)
        return recomputes + bool(self.method.section) + (self.weights in RESIDENT)

    @property
    def distance(self) -> tuple[Any, ...]:
        """Distance from plain DeepSpeed, by what counts first.

        Rounded gradients, the number of settings changed, tuned betas, the factor of fewer bytes.
        """
        settings = self.method.settings
        fewer_bytes = max((r.fewer_bytes for r in self.method.records), default=1.0)
        others = (self.weights == HPZ, self.offload, self.policy == OWN, self.divisor > 1)
        is_lossy = settings is not None and not settings.lossless
        return is_lossy, self.sections, sum(others), self.method.betas is not None, fewer_bytes

    def describe(self) -> str:
        """Describe the setting on one line."""
        parts, offloads = [placement(self.weights)], self.offload and self.policy != "offload"
        if self.method.section:
            parts.append(f"gradients {self.method.name}")
        if self.method.betas:
            parts.append("AdamW betas {:g}, {:g}".format(*self.method.betas))
        if self.policy != "none":
            parts.append(f"checkpointing {self.policy}" + ", inputs offloaded" * offloads)
        if self.divisor > 1:
            parts.append(f"buckets of 1/{self.divisor}")
        return "; ".join([*parts, f"micro-batch {self.sequences} x {self.micro_steps}"])


def placement(kind: str) -> str:
    """Describe the placement of weights."""
    lossless = kind in RESIDENT and RESIDENT[kind] != "none"
    return "resident weights" + ", lossless changes" * lossless if kind in RESIDENT else kind


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
    def node_bytes(self) -> int:
        """Host memory of a node."""
        return self.host_bytes * self.machine.local

    @property
    def rounded_bytes(self) -> int:
        """Needed bytes, with memory for activations rounded up as the search does."""
        return self.needed_bytes + max(0, -self.plan.needed_bytes % STEP - self.memory[IN_UPDATE])

    @property
    def fits(self) -> bool:
        """Compare memory with its limits."""
        fits_host = self.node_bytes <= HOST_BYTES
        return fits_host and self.needed_bytes <= self.capacity_bytes

    @functools.cached_property
    def at_least_s(self) -> float:
        """Bound the step from below, to simulate fewer."""
        return at_least_s(self.machine, self.blocks, self.strategy)

    @functools.cached_property
    def step(self) -> StepTimes:
        """Simulate the step."""
        return simulate(self.machine, self.blocks, self.strategy)


class Search:
    """All candidates of a question; ConfigError if its batch cannot be divided.

    `report` is called before each micro-batch size. `each` counts the sequences of a rank in a
    step. `refused` are methods that verdicts do not allow.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.report: Callable[[str], object] = lambda words: None
        self.machine = machine = question.machine
        two_levels = machine.hosts > 1 and machine.local > 1
        exchanging = machine.hosts if two_levels else machine.ranks
        self.methods, self.refused = plan_methods(question.loss, exchanging)
        self.each, rest = divmod(question.sequences, machine.ranks)
        if rest:
            why = f"each of {machine.ranks} ranks trains equally many sequences"
            remedy = f"write {(self.each + 1) * machine.ranks}"
            problem = Problem("--batch", f"a batch of {question.sequences}", why, remedy)
            raise ConfigError(problem, headline="the batch cannot be divided")
        far = [*[HPZ] * two_levels, *RESIDENT] if machine.hosts > 1 else []
        self.kinds = [ZERO1, ZERO2, ZERO3, *far]
        self._plan = functools.cache(self._plan_within)
        self._fewest = functools.cache(self._fewest_bytes)
        self._states = functools.cache(self._zero_states)

    def best(self) -> PlanOption:
        """Return the shortest step that fits. Raises UnsupportedError if nothing does."""
        if not self.all:
            raise self._nothing_fits()
        best = best_of(self.all)
        theirs = self.other(best) if best.setting.sections else None
        # the plugin's plainest is chosen if it does not tie with DeepSpeed alone
        return best_of(self.all, TIE, theirs.step.seconds / (1 + TIE)) if theirs else best

    def other(self, best: PlanOption) -> PlanOption | None:
        """Return the best of the other kind: of DeepSpeed alone, or with this plugin; None: none.

        DeepSpeed's own is its fastest within 1%.
        """
        is_ours = bool(best.setting.sections)
        found = [one for one in self.all if bool(one.setting.sections) != is_ours]
        return best_of(found, BASELINE_TIE if is_ours else TIE) if found else None

    def during_warm_up(self, one: PlanOption) -> PlanOption:
        """Return it with DeepSpeed's own reduction of gradients."""
        return self._candidate(replace(one.setting, method=PlanMethod(STOCK)), one.plan)

    def pairs(self) -> Iterator[tuple[str, PlanMethod]]:
        """Yield the weights and gradients that are tried together."""
        for kind in self.kinds:
            for method in self.methods:
                if kind in (ZERO3, *RESIDENT) or method.settings is None:
                    yield kind, method

    def least(self, kind: str, method: PlanMethod) -> PlanOption:
        """Return the candidate that needs the least memory, whether or not it fits."""
        found = []
        for n in {1, *(one.setting.sequences for one in self.all)}:
            of = Setting(n, self.each // n, BUDGET, True, kind, method, SMALLER_BUCKETS[-1])
            plan = self._planner(n).least(self._allowance(0, True))
            found.append(self._candidate(of, plan))
        return min(found, key=lambda one: one.rounded_bytes)

    @functools.cached_property
    def all(self) -> list[PlanOption]:
        """Candidates that fit and may be the best."""
        return list(self._candidates())

    def micro_batches(self) -> Sequence[int]:
        """Sizes that a micro-batch can have. With more token ids no model is surveyed."""
        most = max(1, min(self.each, MOST_ELEMENTS // (2 * self.question.model.tokens)))
        return [n for n in range(1, most + 1) if self.each % n == 0]

    def _candidates(self) -> Iterator[PlanOption]:
        for sequences in self.micro_batches():
            self.report(f"micro-batches of {sequences}")
            micro_steps = self.each // sequences
            found = [
                candidate
                for kind, method in self.pairs()
                for candidate in self._with_buckets(
                    Setting(sequences, micro_steps, BUDGET, False, kind, method)
                )
            ]
            if not found:
                return  # nor does a larger one fit
            yield from found

    def _with_buckets(self, of: Setting) -> Iterator[PlanOption]:
        """Yield candidates with smaller and smaller buckets, until nothing is recomputed."""
        before = -1
        for divisor in SMALLER_BUCKETS:
            setting = replace(of, divisor=divisor)
            if before < (room := self._room(setting)):
                found = [*self._recomputes(setting)]
                yield from found
                if found and not (found[0].plan.recompute_s or found[0].setting.offload):
                    return
            before = room

    def _recomputes(self, of: Setting) -> Iterator[PlanOption]:
        """With nothing offloaded; if that recomputes, also with offload, as host memory allows."""
        first = self.mixture(of)
        if first is not None and first.fits:
            yield first
            if not first.plan.recompute_s:
                return
        has_block = "block" in self._planner(1).way_names  # a larger one may not be surveyed
        other = self.mixture(replace(of, offload=True))
        if other is not None and not other.fits and has_block:
            other = self.uniform(replace(of, offload=True), "block")
        if other is not None and other.fits:
            yield other
        is_alone = of.weights in ZERO_KINDS and of.method.settings is None
        has_own = has_block and self.question.model.has_own_checkpointing
        if is_alone and has_own and sum(self._memory(of).values()) < self.question.capacity_bytes:
            own = self.uniform(replace(of, policy=OWN), "block")
            yield from [own] * own.fits

    def _planner(self, sequences: int) -> Planner:
        return self.question.model.planner(sequences, self.question.rates)

    def _room(self, of: Setting) -> int:
        """Return the memory for activations, rounded down."""
        return (self.question.capacity_bytes - sum(self._memory(of).values())) // STEP * STEP

    def mixture(self, of: Setting) -> PlanOption | None:
        """Recompute least within the memory; None: nothing fits."""
        plan = self._plan(of.sequences, self._room(of), of.offload)
        return None if plan is None else self._candidate(of, plan)

    def _plan_within(self, sequences: int, room: int, offload: bool) -> ActivationPlan | None:
        if room <= 0 or room < self._fewest(sequences, offload):
            return None
        try:
            return self._planner(sequences).plan(self._allowance(room, offload))
        except UnsupportedError:
            return None

    def _allowance(self, room: int, offload: bool) -> Allowance:
        host = HOST_BYTES // self.machine.local if offload else 0
        return replace(ACTIVATIONS, budget_bytes=room, offload=offload, host_bytes=host)

    def _fewest_bytes(self, sequences: int, offload: bool) -> int:
        """Return the smallest budget of any plan: failed plans cost the most time."""
        planner = self._planner(sequences)
        return min(planner.least(self._allowance(0, offload)).needed_bytes, planner.saved_bytes)

    def uniform(self, of: Setting, policy: str) -> PlanOption:
        """Give all blocks one policy, whether or not it fits."""
        allowance = replace(ACTIVATIONS, offload=of.offload)
        plan = self._planner(of.sequences).uniform_plan(policy, allowance)
        return self._candidate(of, plan)

    def _candidate(self, of: Setting, plan: ActivationPlan) -> PlanOption:
        question, machine, model = self.question, self.machine, self.question.model
        is_replicated, size = of.weights in (ZERO1, ZERO2), model.parameters.itemsize
        distinct = {*plan.choices}
        # "attention and mlp" is no policy
        policy = BUDGET if len(distinct) > 1 or " and " in plan.choices[0] else distinct.pop()
        policy = OWN if of.policy == OWN else policy
        blocks = model.simulated(self._planner(of.sequences).forward_s, plan)
        bytes_per_s = question.cluster.device["memory_bytes_per_s"]
        if is_replicated:
            blocks = [replace(block, elements=0) for block in blocks]
            hops = 2 * (machine.ranks - 1)
            each = size * hops / machine.ranks
            exchange = GradientTimes(each, each, hops=hops, once=of.weights == ZERO1, ring=True)
        else:
            exchange = gradients(of.method, model, machine, size, of.micro_steps, bytes_per_s)
        strategy = Strategy(
            of.micro_steps,
            size,
            exchange,
            bucket=bucket_of(model, of.divisor),
            weights=weights(of.weights, machine, size, bytes_per_s),
            hpz=of.weights == HPZ,
            gathers_changed=is_replicated,
            gathers_twice=policy == OWN,
            update_s=UPDATE_BYTES * model.trained / machine.ranks / bytes_per_s,
        )
        held = of.method.exchange_memory(model, machine, of.micro_steps)
        memory = {**self._memory(of), "activations": plan.needed_bytes}
        in_update = (
            self._states(of.weights, of.divisor).step_bytes + memory["residuals"] + held.nccl
        )
        memory[IN_UPDATE] = max(0, in_update - sum(memory.values()))
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

    def _zero_states(self, kind: str, divisor: int) -> States:
        setting = Setting(1, self.each, "none", False, kind, PlanMethod(STOCK), divisor)
        file, parameters = deepspeed_file(self.question, setting), self.question.model.parameters
        states, _ = estimate(parameters, file, self.machine.ranks, self.machine.hosts)
        return states if self.machine.streams else replace(states, nccl_bytes=0)

    def _memory(self, of: Setting) -> dict[str, int]:
        model, machine = self.question.model, self.machine
        states = self._states(of.weights, of.divisor)
        held = of.method.exchange_memory(
            model, machine, of.micro_steps, bucket_of(model, of.divisor)
        )
        kept = states.parameters_bytes + states.gradients_bytes + states.optimizer_bytes
        return {
            "weights, gradients, optimizer": kept,
            "gathered weights": states.gathered_bytes,
            "buckets": states.communication_bytes + held.buffers,
            "the node's copy of the weights": states.host_copy_bytes,
            "residuals": held.residuals * (not held.on_host),
            "NCCL's buffers": states.nccl_bytes + held.nccl,
            "gradients of activations, temporaries": model.temporary_bytes(of.sequences),
        }

    def _nothing_fits(self) -> UnsupportedError:
        """Make the error; of the remedies those that would fit."""
        machine, question, model = self.machine, self.question, self.question.model
        limit, bucket = question.capacity_bytes, bucket_of(model, SMALLER_BUCKETS[-1])
        plain = PlanMethod(STOCK)
        stock = Setting(1, 1, "none", False, ZERO3, plain, SMALLER_BUCKETS[-1])
        remedies = list[str]()

        def propose(
            remedy: str,
            nodes: int = machine.hosts,
            of: Parameters = model.parameters,
            length: Model = model,
            host_limit: int = HOST_BYTES,
            **zero: object,
        ) -> bool:
            """Propose the remedy if one sequence fits then."""
            plan = length.planner(1, question.rates).least(replace(ACTIVATIONS, offload=True))
            beside = plan.needed_bytes + -plan.needed_bytes % STEP + length.temporary_bytes(1)
            found = []
            for kind in (ZERO3,) if zero else (ZERO2, ZERO3):  # few layers: ZeRO-2 needs less
                file = deepspeed_file(question, replace(stock, weights=kind))
                file["zero_optimization"] |= zero
                found.append(estimate(of, file, nodes * machine.local, nodes)[0])
            needed = min(max(beside + s.resident_bytes, s.step_bytes) for s in found)
            on_host = found[-1].host_bytes + sum(b.offloaded_bytes for b in plan.blocks)
            on_host *= machine.local
            if fits := needed <= limit and on_host <= host_limit:
                host = f", {on_host / GIB:.1f} GiB of a node's host memory" * bool(zero)
                remedies.append(f"{remedy} ({needed / GIB:.1f} GiB per rank{host})")
            return fits

        propose(
            'write "offload_optimizer": {"device": "cpu"}',
            host_limit=MOST_HOST_BYTES,
            offload_optimizer={"device": "cpu"},
        )
        shapes = [shape for block in model.blocks for _, shape in block.shapes if len(shape) == 2]
        factors = tuple(LORA_RANK * sum(shape) for shape in shapes)
        counts = model.parameters.counts + factors
        lora = replace(model.parameters, counts=counts, trainable=factors, shapes=())
        propose(f"train LoRA of rank {LORA_RANK}", of=lora)
        more = range(machine.hosts + 1, MAX_NODES + 1)
        next((n for n in more if propose(f"use {n} nodes", n)), None)
        smallest = min(
            (self.least(kind, plain) for kind in self.kinds), key=lambda o: o.rounded_bytes
        )
        needed, tokens = smallest.rounded_bytes, model.tokens // 2
        with_none = self._states(ZERO3, SMALLER_BUCKETS[-1])
        while tokens >= MIN_TOKENS and max(with_none.resident_bytes, with_none.step_bytes) < limit:
            tokens_fit = propose(f"--tokens {tokens}", length=model.with_tokens(tokens))
            tokens = 0 if tokens_fit else tokens // 2
        gb = math.ceil(needed / AUTO_SHARE / 1e9)
        remedy = "; or ".join([*remedies, f"use accelerators of {gb} GB or more"])
        why = (
            f"one sequence of {model.tokens} tokens, the smallest micro-batch, with all recomputed "
            f"and offloaded and a bucket of {bucket:,} elements, needs {needed / GIB:.1f} GiB of "
            f"an accelerator, of which a plan uses {limit / GIB:.1f}"
        )
        problem = Problem("--cluster", f"{model.name} on {question.cluster.text}", why, remedy)
        return UnsupportedError(problem, headline="no plan fits")


def default_batch(model: Model, devices: int) -> int:
    """Return the sequences of a step: so many tokens each, a power of two of micro-batches."""
    each = TOKENS_EACH / model.tokens if model.tokens > 1 else ROWS_EACH
    return devices * (1 << max(0, round(math.log2(each))))


def best_of(
    candidates: Sequence[PlanOption], tie: float = TIE, within_s: float = math.inf
) -> PlanOption:
    """Return the shortest step; of a tie, the one that departs least from plain DeepSpeed.

    `tie` is a share of the step, `within_s` another limit. A candidate whose lower bound is beaten
    is not simulated.
    """
    least_s = math.inf
    for one in sorted(candidates, key=lambda one: one.at_least_s):
        if one.at_least_s < least_s:
            least_s = min(least_s, one.step.seconds)
    enough_s = min((1 + tie) * least_s, within_s)
    close = [one for one in candidates if one.at_least_s <= enough_s]
    close.sort(key=lambda one: one.setting.distance)
    for _, equals in itertools.groupby(close, lambda one: one.setting.distance):
        if ties := [one for one in equals if one.step.seconds <= enough_s]:
            return min(ties, key=lambda one: one.step.seconds)
    raise AssertionError("the shortest is among the close ones")


def bucket_of(model: Model, divisor: int = 1) -> int:
    """Return the elements of a bucket of gradients."""
    return -(-min(ZERO_DEFAULTS["reduce_bucket_size"], -(-model.trained // BUCKETS)) // divisor)


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
    elif setting.policy not in ("none", OWN):
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
    stage = {ZERO1: 1, ZERO2: 2}.get(setting.weights, 3)
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
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket_of(question.model, setting.divisor),
            **({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
            **({"zero_hpz_partition_size": local} if setting.weights == HPZ else {}),
        },
        **({"ds_ckpt": ours} if ours else {}),
    }
