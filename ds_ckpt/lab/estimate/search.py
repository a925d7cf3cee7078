"""Which settings train most tokens a second on a cluster, within its memory and the loss allowed.

All candidates train the same batch a step, so the shortest step is the best plan. What is chosen:

    sequences     of a micro-batch; micro-steps are what is left of the batch
    recompute     for each micro-batch the planner's mixture that recomputes least in what is left
                  of the memory: less recompute never makes a step longer; with and without offload
    weights       ZeRO-3's, hpZ with DeepSpeed's own gradients, or resident: whole, or losslessly
    gradients     DeepSpeed's own, dense, or what verdicts allow

A candidate's step is simulated only while the longest of its resources alone leaves it a chance to
be the best: that sum is a lower bound of a step, so nothing better is passed over. What is within
1% of the shortest step is a tie, which no prediction can tell apart: it goes to what departs least
from plain DeepSpeed, exact gradients first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_ckpt.activation.planning.budget import AUTO_SHARE, ActivationPlan
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.config.verdicts import Loss
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.lab.estimate.memory import DEFAULTS, States, estimate
from ds_ckpt.lab.estimate.model import ACTIVATIONS, Model
from ds_ckpt.lab.estimate.simulate import Block, Gradients, Link, Machine, Step, Way, simulate
from ds_ckpt.lab.estimate.ways import (
    LOSSLESS_BITS,
    LOSSLESS_S,
    RESIDENT,
    STOCK,
    Method,
    gradients,
    methods,
    weights,
)
from ds_ckpt.lab.hosts.hardware import Cluster, Figure
from ds_ckpt.telemetry.units import GIB

NEEDED = (
    *("flop_per_s", "share_of_peak", "memory_bytes", "memory_bytes_per_s"),
    *("inside_bytes_per_s", "bus_bytes_per_s"),
)
"""Figures of an accelerator that a plan needs."""
CALL_S = 3e-5
"""Guess: of calling a collective from Python, where it does not run ahead of the device."""
UPDATE_BYTES = 40.0
"""Memory traffic of AdamW an element: master weight and two moments read and written, the gradient
read twice, cast and clipped, the 16-bit weight written."""
OWN_FIGURES = (
    Figure("bits of a lossless change", LOSSLESS_BITS, "measured: lossless_bits.py, rate 3e-4"),
    Figure("coding a lossless change, s an element", LOSSLESS_S, "measured: docs/weights.md"),
    Figure("calling a collective, s", CALL_S, "guess: the time of a launch from Python"),
    Figure("backward over forward", 2.0, "guess: two products for each of the forward's"),
    Figure("memory traffic of AdamW, bytes an element", UPDATE_BYTES, "guess: counted by hand"),
)
"""Beside the hardware's."""
BUCKETS = 8
"""A backward has so many at least, or nothing would be hidden."""
ZERO3, HPZ = "ZeRO-3's", "hpZ"
BUDGET, BOTH = "budget", "attention and mlp"
TIE = 0.01
"""Of a step."""
STEP = 1 << 26
"""Bytes that memory for activations is rounded down to."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        sequences: in a step, all processes.
        dtype: "bf16" or "fp16".
        host_bytes: of a node's memory, for what is offloaded.
        slowest: by how much the slowest host computes longer.
        memory: times what the accelerators have, for what would change the choice.
    """

    model: Model
    cluster: Cluster
    latency_inside_s: float
    sequences: int
    loss: Loss
    dtype: str = "bf16"
    host_bytes: float = 512 * GIB
    slowest: float = 1.0
    memory: float = 1.0

    @property
    def machine(self) -> Machine:
        cluster, device = self.cluster, self.cluster.device
        return Machine(
            hosts=cluster.nodes,
            local=cluster.local,
            network=Link(cluster.rate.value / 8, cluster.latency.value),
            inside=Link(device["inside_bytes_per_s"], self.latency_inside_s),
            bus_bytes_per_s=device["bus_bytes_per_s"],
            call_s=CALL_S,
            slowest=self.slowest,
        )

    @functools.cached_property
    def rates(self) -> Rates:
        """Of products and of all else. The share of peak is of whole steps, so products alone are
        faster by the time that all else takes of a forward. The bus is the simulated step's."""
        device, (flops, moved) = self.cluster.device, self.model.work
        peak, bytes_per_s = device["flop_per_s"], device["memory_bytes_per_s"]
        together_s = flops / (peak * device["share_of_peak"])
        products_s = max(together_s - moved / bytes_per_s, flops / peak)
        return Rates(flops / products_s, bytes_per_s, math.inf)

    @property
    def capacity_bytes(self) -> int:
        return int(round(self.memory * self.cluster.device["memory_bytes"]) * AUTO_SHARE)

    @property
    def tokens(self) -> int:
        return self.sequences * self.model.tokens


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    sequences: int
    micro_steps: int
    policy: str
    offload: bool
    weights: str
    method: Method

    @property
    def departures(self) -> tuple[bool, int]:
        """From plain DeepSpeed: whether gradients are rounded, and how many settings differ."""
        settings = self.method.settings
        differ = (settings is not None, self.weights != ZERO3, self.offload, self.policy != "none")
        return settings is not None and not settings.lossless, sum(differ)


@dataclass
class Candidate:
    """A setting, what it needs, and how long a step takes.

    Attributes:
        memory: bytes by what they are; together what a process needs of its accelerator.
        host_residual_bytes: in host memory.
        host_bytes: that a process may have there.
    """

    setting: Setting
    plan: ActivationPlan
    memory: dict[str, int]
    host_residual_bytes: int
    capacity_bytes: int
    host_bytes: float
    machine: Machine
    blocks: list[Block]
    way: Way

    @property
    def needed_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def offloaded_bytes(self) -> int:
        """Of one process, in host memory."""
        return sum(b.offloaded_bytes for b in self.plan.blocks)

    @property
    def fits(self) -> bool:
        host = self.offloaded_bytes + self.host_residual_bytes
        return self.needed_bytes <= self.capacity_bytes and host <= self.host_bytes

    @functools.cached_property
    def step(self) -> Step:
        return simulate(self.machine, self.blocks, self.way)

    @property
    def bound_s(self) -> float:
        """No step is shorter."""
        machine, way = self.machine, self.way
        each = sum(b.forward_s + b.backward_s + b.recompute_s for b in self.blocks)
        compute_s = way.micro_steps * each * machine.slowest + way.update_s
        crossing = sum(b.elements * (1 if b.kept else 2) for b in self.blocks) * way.itemsize
        share = (machine.processes - 1) / machine.processes
        trained, gathered = sum(b.trained for b in self.blocks), way.micro_steps * crossing * share
        if way.hpz:
            gathered = sum(b.elements for b in self.blocks) * way.itemsize * share
        elif way.weights is not None:
            gathered = sum(b.elements for b in self.blocks) * way.weights.link_bytes
        exchanges = 1 if way.gradients.once else way.micro_steps
        nbytes = gathered + exchanges * trained * way.gradients.link_bytes
        return max(compute_s, nbytes / machine.network.bytes_per_s if machine.hosts > 1 else 0.0)


class Search:
    """All candidates of a question.

    Attributes:
        told: called with words before each micro-batch is looked at, which takes seconds.

    Raises:
        ConfigError: the batch cannot be divided among the processes.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.told: Callable[[str], object] = lambda words: None
        machine = question.machine
        two_levels = machine.hosts > 1 and machine.local > 1
        exchanging = machine.hosts if two_levels else machine.processes
        self.methods, self.refused = methods(question.loss, exchanging)
        processes, rows = question.machine.processes, question.model.rows
        if question.sequences % (processes * rows):
            fits = max(1, round(question.sequences / processes / rows)) * processes * rows
            why = f"each of {processes} processes trains equally many sequences"
            why += f", {rows} at a time, as the model's batch has" * (rows > 1)
            raise ConfigError(
                Problem("--batch", f"{question.sequences} sequences", why, f"write {fits}"),
                headline="the batch cannot be divided",
            )
        self.each = question.sequences // processes
        self._travelling: dict[tuple[str, int], Gradients] = {}
        self._owed: dict[tuple[str, int], tuple[int, bool]] = {}
        self._mixtures: dict[tuple[int, bool, int], ActivationPlan | None] = {}

    def best(self, network: Link | None = None) -> Candidate:
        """The shortest step that fits, with the cluster's links between hosts or with others.

        Raises:
            UnsupportedError: nothing fits; the words say what would.
        """
        candidates = self.all
        if network is not None:
            machine = replace(self.question.machine, network=network)
            candidates = [replace(one, machine=machine) for one in candidates]
        if not candidates:
            raise self._nothing_fits()
        return best_of(candidates)

    @functools.cached_property
    def all(self) -> list[Candidate]:
        """Those that fit and may be the best."""
        return list(self._candidates())

    def _candidates(self) -> Iterator[Candidate]:
        for sequences in self.micro_batches():
            self.told(f"micro-batches of {sequences}")
            found = False
            for kind in self.kinds:
                for method in self.methods_with(kind):
                    for candidate in self._recomputes(sequences, kind, method):
                        found = True
                        yield candidate
            if not found:
                return  # nor does a larger one fit

    @property
    def kinds(self) -> list[str]:
        """Ways of weights."""
        machine = self.question.machine
        if machine.hosts == 1:
            return [ZERO3]
        return [ZERO3, *([HPZ] if machine.local > 1 else []), *RESIDENT]

    def methods_with(self, kind: str) -> list[Method]:
        """Ways of gradients that have been run with that way of weights."""
        return [m for m in self.methods if kind != HPZ or m.settings is None]

    def _recomputes(self, sequences: int, kind: str, method: Method) -> Iterator[Candidate]:
        """With nothing offloaded; if that recomputes, with as much offloaded as host memory takes:
        of the mixture, else of every block's inputs."""
        first = self.mixture(sequences, kind, method, False)
        if first is not None and first.fits:
            yield first
            if not first.plan.recompute_s:
                return
        other = self.mixture(sequences, kind, method, True)
        if other is not None and not other.fits and "block" in self.words(sequences):
            other = self.alike(replace(other.setting, offload=True), "block")
        if other is not None and other.fits:
            yield other

    def words(self, sequences: int) -> list[str]:
        """Ways in which all blocks can be treated."""
        return self.question.model.at(sequences, self.question.rates).planner.words

    def micro_batches(self) -> Sequence[int]:
        """Sequences that a micro-batch can have."""
        if not self.question.model.sized:
            return [self.question.model.rows]
        return [n for n in range(1, self.each + 1) if self.each % n == 0]

    def mixture(self, sequences: int, kind: str, method: Method, offload: bool) -> Candidate | None:
        """The one that recomputes least within the memory; None where none fits."""
        memory = self._memory(sequences, kind, method)
        room = (self.question.capacity_bytes - sum(memory.values())) // STEP * STEP
        key = (sequences, offload, room)
        if key not in self._mixtures:
            allowance = replace(ACTIVATIONS, budget_bytes=room, offload=offload)
            planner = self.question.model.at(sequences, self.question.rates).planner
            try:
                self._mixtures[key] = planner.plan(allowance) if room > 0 else None
            except UnsupportedError:
                self._mixtures[key] = None
        plan = self._mixtures[key]
        if plan is None:
            return None
        setting = Setting(sequences, self.each // sequences, BUDGET, offload, kind, method)
        return self._candidate(setting, plan, memory)

    def alike(self, of: Setting, policy: str) -> Candidate:
        """With one policy for all blocks, whether or not it fits."""
        planner = self.question.model.at(of.sequences, self.question.rates).planner
        plan = planner.all_alike(policy, replace(ACTIVATIONS, offload=of.offload))
        memory = self._memory(of.sequences, of.weights, of.method)
        return self._candidate(of, plan, memory)

    def _candidate(self, of: Setting, plan: ActivationPlan, memory: dict[str, int]) -> Candidate:
        """Under the policy that the plan comes to, whatever `of` says of it."""
        question, machine = self.question, self.question.machine
        model, device = question.model, question.cluster.device
        words = set(plan.choices)
        policy = words.pop() if len(words) == 1 else BUDGET
        if policy == BOTH:  # no policy of that name
            policy = BUDGET
        at = model.at(of.sequences, question.rates)
        way = Way(
            of.micro_steps,
            model.parameters.itemsize,
            self._gradients(of.method, of.micro_steps),
            bucket=bucket_of(model),
            prefetch=DEFAULTS["stage3_prefetch_bucket_size"],
            weights=weights(of.weights, machine, model.parameters.itemsize),
            hpz=of.weights == HPZ,
            update_s=UPDATE_BYTES
            * model.trained
            / machine.processes
            / device["memory_bytes_per_s"],
        )
        blocks = model.simulated(
            at,
            plan,
            persistent=DEFAULTS["stage3_param_persistence_threshold"],
            reuse=DEFAULTS["stage3_max_reuse_distance"],
        )
        needed = self._with_step({**memory, "activations": plan.needed_bytes}, of.weights)
        nbytes, on_host = self._residuals(of.method, of.micro_steps)
        host = question.host_bytes / machine.local
        return Candidate(
            replace(of, policy=policy),
            plan,
            needed,
            on_host * nbytes,
            question.capacity_bytes,
            host,
            machine,
            blocks,
            way,
        )

    def _gradients(self, method: Method, micro_steps: int) -> Gradients:
        question, known = self.question, self._travelling
        if (method.name, micro_steps) not in known:
            known[method.name, micro_steps] = gradients(
                method,
                question.model,
                question.machine,
                itemsize=question.model.parameters.itemsize,
                accumulation=micro_steps,
                bytes_per_s=question.cluster.device["memory_bytes_per_s"],
            )
        return known[method.name, micro_steps]

    @functools.cached_property
    def _states(self) -> dict[str, States]:
        """What ZeRO keeps, by the way of weights."""
        found = {}
        for kind in self.kinds:
            setting = Setting(1, self.each, "none", False, kind, Method(STOCK))
            machine, file = self.question.machine, deepspeed_file(self.question, setting)
            parameters = self.question.model.parameters
            found[kind], _ = estimate(parameters, file, machine.processes, machine.hosts)
        return found

    def _memory(self, sequences: int, kind: str, method: Method) -> dict[str, int]:
        """Bytes beside activations."""
        at = self.question.model.at(sequences, self.question.rates)
        nbytes, on_host = self._residuals(method, self.each // sequences)
        states = self._states[kind]
        return {
            "weights, gradients, optimizer": states.parameters_bytes
            + states.gradients_bytes
            + states.optimizer_bytes,
            "gathered weights": states.gathered_bytes,
            "buckets": states.communication_bytes,
            "the host's copy of the weights": states.host_copy_bytes,
            "residuals": 0 if on_host else nbytes,
            "gradients of activations, temporaries": at.beside_bytes,
        }

    def _with_step(self, needed: dict[str, int], kind: str) -> dict[str, int]:
        """What the passes need, and what the optimizer's step takes beyond that."""
        step = self._states[kind].step_bytes + needed["residuals"]
        return {**needed, "more, in the optimizer's step": max(0, step - sum(needed.values()))}

    def _residuals(self, method: Method, micro_steps: int) -> tuple[int, bool]:
        """Bytes of one process, and whether in host memory."""
        known, question = self._owed, self.question
        if (method.name, micro_steps) not in known:
            known[method.name, micro_steps] = method.residual_bytes(
                question.model, question.machine, micro_steps
            )
        return known[method.name, micro_steps]

    def _nothing_fits(self) -> UnsupportedError:
        question = self.question
        rows = question.model.rows
        at = question.model.at(rows, question.rates)
        memory = self._memory(rows, ZERO3, Method(STOCK))
        least = at.planner.least(replace(ACTIVATIONS, offload=True)).needed_bytes
        needed = self._with_step({**memory, "activations": least}, ZERO3)
        parts = ", ".join(f"{what} {n / GIB:.1f}" for what, n in needed.items() if n)
        why = (
            f"{'one sequence' if rows == 1 else f'{rows} sequences'} of {question.model.tokens} "
            "tokens, with all recomputed and offloaded, "
            f"needs {sum(needed.values()) / GIB:.1f} GiB of an accelerator ({parts}), and "
            f"{question.capacity_bytes / GIB:.1f} are to be used"
        )
        remedy = "name more nodes or accelerators with more memory, or shorter sequences (--tokens)"
        where = f"{question.model.name} on {question.cluster.text}"
        problem = Problem(where, f"{question.model.elements / 1e9:.2f} G parameters", why, remedy)
        return UnsupportedError(problem, headline="no plan fits")


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The shortest step, of those as short what departs least from plain DeepSpeed."""
    tried, enough_s = list[Candidate](), math.inf
    for candidate in sorted(candidates, key=lambda one: one.bound_s):
        if candidate.bound_s > enough_s:
            break
        tried.append(candidate)
        enough_s = min(enough_s, (1 + TIE) * candidate.step.seconds)
    ties = [one for one in tried if one.step.seconds <= enough_s]
    return min(ties, key=lambda one: (one.setting.departures, one.step.seconds))


def bucket_of(model: Model) -> int:
    """Elements of a bucket of gradients."""
    return min(DEFAULTS["reduce_bucket_size"], -(-model.trained // BUCKETS))


def deepspeed_file(
    question: Question, setting: Setting, plan: ActivationPlan | None = None
) -> dict[str, Any]:
    """The DeepSpeed JSON of a setting; `plan` gives a budget its number."""
    local, activation = question.machine.local, dict[str, Any]()
    if setting.policy == BUDGET:
        assert plan is not None
        gib = math.floor(100 * plan.budget_bytes / GIB) / 100
        activation = {"policy": "budget", "budget_gib": gib, "budget_of": "activations"}
    elif setting.policy != "none":
        policy, _, kept = setting.policy.partition(" ")
        activation = {"policy": policy, **({"save_ops": kept} if kept else {})}
    if activation and setting.offload:
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
