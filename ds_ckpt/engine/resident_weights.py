"""Setup of `weights.resident`: nodes and replicas, process groups, memory, choice by step time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_ckpt.compression.base import on_host
from ds_ckpt.config.models import WeightsConfig
from ds_ckpt.config.paths import show
from ds_ckpt.engine.tuner import Tuner
from ds_ckpt.errors import Problem, UnsupportedError, log
from ds_ckpt.exchange.hierarchy import ONE_NODE, discard, hosts_of, new_groups
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.memory import free_on, measure_non_torch_bytes
from ds_ckpt.telemetry.units import size
from ds_ckpt.weights.changes import ChangeCodec, Lossless, NodeLayout, Whole
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.gradient_hook import GradientHook
from ds_ckpt.zero3.parameters import gathered_dtype, is_of_own_group, own_group
from ds_ckpt.zero3.resident import missing_copy_bytes
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise
from ds_ckpt.zero3.weights_hook import WeightsHook

GATHERED = "deepspeed"
"""Candidate without resident weights."""


@dataclass
class ResidentWeights:
    """The attached weights hook of an engine, its process groups, and the choice by step time.

    `codecs` are by name; all train alike to the bit. `nccl_bytes` have been allocated for `groups`.
    With `may_detach` DeepSpeed's own gathers are a candidate, too. `tuner` is None if there is
    nothing to choose.
    """

    engine: Any
    hook: WeightsHook
    codecs: Mapping[str, ChangeCodec]
    groups: tuple[Any, ...]
    may_detach: bool
    nccl_bytes: int = 0

    def __post_init__(self) -> None:
        self._skipped_steps = int(self.engine.skipped_steps)
        candidates = [*self.codecs, *[GATHERED] * self.may_detach]
        self.tuner: Tuner | None = None
        if len(candidates) > 1:
            self.tuner = Tuner("resident weights", candidates, self.hook.device)

    def describe(self) -> str:
        """Return a clause for the line at the start."""
        nodes, mb = self.hook.layout.nodes, self.hook.nbytes / 1e6
        changes = f"changes sent {' or '.join(self.codecs)}"
        nccl = f", NCCL's buffers {self.nccl_bytes / 1e6:,.4g} MB" if self.nccl_bytes else ""
        changes += ", if that shortens the step" if self.may_detach else ""
        return f"weights resident on each of {nodes} nodes, {mb:.4g} MB per rank{nccl}, {changes}"

    def step_ended(self, *, is_busy: bool) -> None:
        """Count the step, and place the weights for the next one. Collective.

        While another tuner compares (`is_busy`), times do not count.
        """
        if self.tuner is None:
            return
        before, self._skipped_steps = self._skipped_steps, int(self.engine.skipped_steps)
        if is_busy:
            self.tuner.pause()
        else:
            self.tuner.step_ended(is_counted=self._skipped_steps == before)
        self._place(self.tuner.current)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surround a load: gather the weights that it wrote, then compare anew. Collective."""
        with self.hook.loading():
            yield
        if self.tuner is not None:
            self.tuner.restart()
            self._place(self.tuner.current)

    def _place(self, choice: str) -> None:
        if choice == GATHERED:
            if self.hook.is_attached:
                self.hook.detach()
            return
        self.hook.codec = self.codecs[choice]
        if self.hook.is_attached:
            return
        try:
            refuse_too_large(self.engine, self.hook.layout, '"auto"')
        except Exception as error:  # the same on every rank
            self.tuner = None
            log.warning("ds_ckpt: weights stay with DeepSpeed: %s", error)
            return
        self.hook.attach()

    def detach(self) -> None:
        """Let DeepSpeed gather between nodes again."""
        try:
            if self.hook.is_attached:
                self.hook.detach()
        finally:
            for group in self.groups:
                discard(group)


def make_resident(
    engine: Any,
    config: WeightsConfig,
    counters: Counters,
    gather_hook: GatherHook,
    gradient_hook: GradientHook,
) -> ResidentWeights | None:
    """Make the weights resident; None if all ranks share one node. Collective.

    Raises UnsupportedError if the nodes, the model or DeepSpeed's settings do not allow it.
    """
    from deepspeed import comm

    asked, own = show(config.resident), own_group(engine)
    if not all(is_of_own_group(engine, p) for p in engine.module.parameters()):
        why = "ZeRO-3 shards parameters over several process groups, and a copy belongs to one"
        raise _refusal("resident", asked, why, "build the model without zero.Init")
    nodes = hosts_of(own, least=1)
    if nodes == ONE_NODE:
        return None
    if isinstance(nodes, str):
        raise _refusal("resident", asked, nodes, "give every node the same slots")
    local = len(nodes[0])
    if nodes != tuple(tuple(range(n * local, (n + 1) * local)) for n in range(len(nodes))):
        why = f"the ranks of a node are not consecutive: {nodes}"
        raise _refusal("resident", asked, why, "order the hostfile's lines node by node")
    partition = int(engine.zero_hpz_partition_size())
    if partition not in (0, 1, local):
        key = "$.zero_optimization.zero_hpz_partition_size"
        why = f"{key} is {partition}, and a node has {local} ranks"
        raise _refusal("resident", asked, why, f"write {local}, or remove that key")
    codecs = _codecs(config, gathered_dtype(engine))
    rank = dist.get_rank(own)
    refuse_too_large(engine, NodeLayout(len(nodes), local, rank, None), asked)
    inside, between = new_groups(own, nodes[rank // local], range(len(nodes) * local))
    hook: WeightsHook | None = None
    try:
        hook = WeightsHook(
            engine.optimizer,
            dict(engine.module.named_parameters()),
            NodeLayout(len(nodes), local, rank, inside),
            between,
            comm.all_to_all_single,
            next(iter(codecs.values())),
            counters,
            gather_hook,
            gradient_hook,
        )
        nccl_bytes = 0
        if not on_host(hook.device):
            run_on_all_or_raise(partial(hook.preallocate, sends=False), what="code weight changes")
            nccl_bytes = measure_non_torch_bytes(hook.device, partial(hook.preallocate, sends=True))
    except BaseException:
        if hook is not None:
            hook.drop()
        for group in (between, inside):
            discard(group)
        raise
    groups, may_detach = (between, inside), config.resident == "auto"
    return ResidentWeights(engine, hook, codecs, groups, may_detach, nccl_bytes)


def _codecs(config: WeightsConfig, dtype: torch.dtype) -> dict[str, ChangeCodec]:
    has_16_bits = dtype in (torch.bfloat16, torch.float16)
    if config.deltas == "lossless" and not has_16_bits:
        why = f"weights are gathered as {dtype}, and lossless changes need 16-bit weights"
        raise _refusal("deltas", '"lossless"', why, 'write "none" or "auto"')
    codecs: list[ChangeCodec] = []
    if config.deltas != "none" and has_16_bits:
        codecs.append(Lossless())
    if config.deltas != "lossless":
        codecs.append(Whole())
    return {codec.name: codec for codec in codecs}


def refuse_too_large(engine: Any, layout: NodeLayout, asked: str) -> None:
    """Raise on all ranks if one has no memory for its part of the copy. Collective."""
    device, local = torch.device(engine.device), layout.local
    sharing = local if device.type == "cpu" else 1  # ranks on the same memory
    needed = sharing * missing_copy_bytes(engine.module.parameters(), layout.nodes * local, local)
    lacking = torch.tensor(needed - free_on(device), device=device)
    dist.all_reduce(lacking, dist.ReduceOp.MAX)
    if lacking > 0:
        why = f"the copy takes {size(needed)} of memory, {size(int(lacking))} more than are free"
        raise _refusal("resident", asked, why, f"free {size(int(lacking))}")


def _refusal(key: str, found: str, why: str, remedy: str) -> UnsupportedError:
    off = "or set $.ds_ckpt.weights.resident to false"
    return UnsupportedError(Problem(f"$.ds_ckpt.weights.{key}", found, why, f"{remedy}, {off}"))
