"""What a profile says, as frozen records with units in their names. Nothing here measures.

`Profile.to_json` and `Profile.from_json` are inverse to each other. `schema` changes when a field
is renamed or removed, not when one is added. What is `held` are saved activations.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ds_ckpt.telemetry.memory import OUTSIDE, Phase

NONE = "none"
"""The step without a policy."""
PARTS = ("attention", "mlp", "norm", "other")


@dataclass(frozen=True)
class BlockHeld:
    """Bytes that autograd saves for one block between forward and backward.

    A storage belongs to the module that ran when it was first saved. `checkpointed_bytes` is what a
    checkpointed call keeps for its recompute: its inputs, and results of operators.
    """

    name: str
    class_name: str
    attention_bytes: int = 0
    mlp_bytes: int = 0
    norm_bytes: int = 0
    other_bytes: int = 0
    checkpointed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(map(self.part_bytes, (*PARTS, "checkpointed")))

    def part_bytes(self, part: str) -> int:
        """Of one kind of layer, or "checkpointed"."""
        return int(getattr(self, f"{part}_bytes"))


@dataclass(frozen=True)
class Work:
    """Of one phase of a step.

    `launches` counts operators that compute (views and allocations are left out): on an
    accelerator each starts at least one kernel. `moved_bytes` are those of their arguments and
    results: what they must read and write at least.
    """

    launches: int = 0
    flops: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.launches + other.launches,
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
        )


@dataclass(frozen=True)
class Peak:
    """The most bytes that were there at once of what a step makes, and where that was."""

    live_bytes: int
    kind: Phase
    block: str

    def words(self) -> str:
        if self.kind == "forward" and self.block == OUTSIDE:
            return "forward, outside the blocks"
        place = "outside the blocks" if self.block == OUTSIDE else f"of {self.block}"
        return f"{self.kind} {place}"


@dataclass(frozen=True)
class Times:
    """Medians over interleaved real steps: no optimizer, no communication."""

    device: str
    repeats: int
    forward_s: float
    backward_s: float
    """Recompute included."""
    recompute_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Footprint:
    """One policy at one batch size: one forward and backward."""

    policy: str
    batch: int
    tokens: int
    """Of one sequence; 1 where inputs are no sequences of tokens."""
    fake: bool
    """Whether the bytes come from a step on fake tensors."""
    held_bytes: int
    blocks: tuple[BlockHeld, ...]
    peak: Peak
    forward: Work
    recompute: Work
    backward: Work
    score_bytes: int
    """Of `held_bytes`: attention weights that are stored (eager attention)."""
    core_avoided_bytes: int = 0
    """Attention weights that attention cores (flash, SDPA) compute and do not store."""
    operators: tuple[tuple[str, int], ...] = ()
    """The most frequent ones of the whole step, with their launches."""
    times: Times | None = None
    real_held_bytes: int | None = None
    real_peak_bytes: int | None = None

    @property
    def launches(self) -> int:
        return self.forward.launches + self.recompute.launches + self.backward.launches

    @property
    def flops(self) -> int:
        return self.forward.flops + self.recompute.flops + self.backward.flops

    @property
    def tokens_per_s(self) -> float | None:
        """None where no step was timed."""
        return None if self.times is None else self.batch * self.tokens / self.times.step_s

    def part_bytes(self, part: str) -> int:
        """Of one kind of layer over all blocks; "outside": beside the blocks."""
        if part == "outside":
            return sum(b.total_bytes for b in self.blocks if b.name == OUTSIDE)
        return sum(b.part_bytes(part) for b in self.blocks if b.name != OUTSIDE)


@dataclass(frozen=True)
class States:
    """What a process keeps beside activations. From sizes and settings; nothing is run."""

    world: int
    zero_stage: int
    assumed: bool
    """No configuration was given: ZeRO stage 3 with AdamW is assumed."""
    parameters_count: int
    parameters_bytes: int
    gathered_bytes: int
    """Weights that ZeRO-3 has gathered at a time: what it keeps for reuse, at least the largest
    block and the prefetch bucket."""
    gradients_bytes: int
    optimizer: str
    optimizer_bytes: int
    communication_bytes: int
    """The bucket that gradients are reduced from, and the copy that its reduction sends."""
    reduce_bucket_bytes: int
    """Of them the bucket, which is allocated whole."""
    trainable_bytes: int
    """Gradients of one process before they are sharded."""
    temporary_bytes: int
    """32-bit gradients in the optimizer's step, and the piece they are made from: not at the same
    time as activations."""
    host_bytes: int
    """Of the above, moved to host memory by the configuration; not part of the other fields."""
    hosts: int | None = None
    """That the processes are on, equally many on each; None: not known."""
    host_copy_bytes: int = 0
    """This process's part of the weights that its host keeps: resident weights, or hpZ's copy."""
    residual_bytes: int = 0
    """Of gradient compression: what it owes to later steps."""

    @property
    def resident_bytes(self) -> int:
        """On the accelerator while a forward or backward runs."""
        kept = self.parameters_bytes + self.host_copy_bytes + self.gathered_bytes
        kept += self.gradients_bytes + self.optimizer_bytes + self.residual_bytes
        return kept + self.communication_bytes

    @property
    def step_bytes(self) -> int:
        """On the accelerator in the optimizer's step, when gathered weights are gone."""
        copied = self.communication_bytes - self.reduce_bucket_bytes
        return self.resident_bytes - self.gathered_bytes - copied + self.temporary_bytes


@dataclass(frozen=True)
class BlockCompiled:
    """What torch.compile does to one block."""

    name: str
    captured_operators: int
    operators: int
    eager_bytes: int
    compiled_bytes: int
    checkpointed_bytes: int
    """What policy "block" would keep."""
    needs_policy: bool


@dataclass(frozen=True)
class Break:
    """A place where the compiler's graph ends."""

    reason: str
    where: str


@dataclass(frozen=True)
class Compiled:
    """How much torch.compile captures, and what its partitioner saves by recomputing itself."""

    graphs: int
    breaks: tuple[Break, ...]
    captured_flops: int
    flops: int
    captured_operators: int
    operators: int
    eager_held_bytes: int
    """The same step without the compiler, with the masks that transformers makes for it."""
    min_cut_bytes: int
    """Saved for backward by the captured graphs as torch.compile cuts them."""
    blocks: tuple[BlockCompiled, ...]


@dataclass(frozen=True)
class Best:
    """The batch with the most tokens a second that fits under the limit."""

    policy: str
    batch: int
    total_bytes: int
    tokens_per_s: float | None
    """None where no step was timed: then the largest batch that fits."""


@dataclass(frozen=True)
class Finding:
    """One thing to know, and the configuration that acts on it."""

    text: str
    config: dict[str, Any] | None = None
    """To be merged into the DeepSpeed JSON file; None where no setting acts on it."""

    @property
    def line(self) -> str | None:
        """As it is written in the file."""
        return None if self.config is None else json.dumps(self.config)[1:-1]


@dataclass(frozen=True)
class Profile:
    """All of it."""

    model: str
    class_name: str
    dtype: str
    attention: str
    """"core", "eager", "none", or "mixed": what computes attention."""
    states: States
    footprints: tuple[Footprint, ...]
    """Every policy at every batch size that was asked for."""
    findings: tuple[Finding, ...]
    not_measured: tuple[str, ...]
    limit_bytes: int | None = None
    best: Best | None = None
    compiled: Compiled | None = None
    schema: Literal[2] = 2

    @property
    def first(self) -> Footprint:
        """No policy, at the first batch."""
        return next(found for found in self.footprints if found.policy == NONE)

    @property
    def at_first(self) -> dict[str, Footprint]:
        """Every policy at the first batch, by name."""
        return {f.policy: f for f in self.footprints if f.batch == self.first.batch}

    def total_bytes(self, footprint: Footprint) -> int:
        """What a process has at the peak: resident states and what the passes make, or the
        optimizer's step."""
        in_passes = self.states.resident_bytes + footprint.peak.live_bytes
        return max(in_passes, self.states.step_bytes)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises ValueError (pydantic's ValidationError) for anything that `to_json` did not
        write."""
        from pydantic import TypeAdapter

        return TypeAdapter(Profile).validate_json(text)
