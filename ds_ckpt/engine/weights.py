"""What `weights.resident` sets up: who keeps what on which host, and how changes travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.config.paths import show
from ds_ckpt.config.weights import WeightsConfig
from ds_ckpt.engine.refusals import refuse_model_parallel
from ds_ckpt.errors import Problem, StateError, UnsupportedError
from ds_ckpt.exchange.hierarchy import discard, hosts_of, warm
from ds_ckpt.sealed import DamagedError, SealedFile, write
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.device import free_on
from ds_ckpt.telemetry.units import size
from ds_ckpt.weights import lossless
from ds_ckpt.weights.tracked import Tracked
from ds_ckpt.zero3.resident import OFFLOADED, host_copy_bytes, resident_bytes
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise
from ds_ckpt.zero3.weights import Codec, HostLayout, WeightsHook

WHERE = "$.ds_ckpt.weights"
OFF = f"or set {WHERE}.resident to false"
_FILE = "ds_ckpt_weights_{process:05d}_of_{world:05d}.safetensors"
_ANY = "ds_ckpt_weights_*_of_*.*"
"""Also what a save that was killed has left."""


class Whole:
    """The new weights as they are."""

    words = "whole"
    tracks = False

    def encode(self, held: Tensor, master: Tensor, sizes: Sequence[int]) -> Tensor:
        return held.copy_(master).cpu().view(torch.uint8)

    def decode_(self, held: Tensor, payload: Tensor, sizes: Sequence[int]) -> None:
        held.view(torch.uint8).copy_(payload)


class Lossless:
    """What changed, in units of the last place."""

    words = "as what changed, losslessly"
    tracks = False

    def encode(self, held: Tensor, master: Tensor, sizes: Sequence[int]) -> Tensor:
        before = held.clone()
        return lossless.encode(before, held.copy_(master))

    def decode_(self, held: Tensor, payload: Tensor, sizes: Sequence[int]) -> None:
        lossless.decode_(held, payload)


@dataclass(frozen=True)
class Resident:
    """What came of `weights.resident`.

    Attributes:
        hook: None where there is nothing to gain.
        summary: the clause for the line at the start.
        groups: process groups that go with the hook.
        make_room: raises an error on all processes where one has no memory for the copy.
    """

    hook: WeightsHook | None
    summary: str
    groups: tuple[Any, ...] = ()
    make_room: Callable[[], None] = lambda: None

    def error(self) -> dict[str, float]:
        """How this process's weights are held, of `StepRecord`; empty: to the bit."""
        codecs = self.hook.codecs if self.hook else ()
        return next((asdict(c.last) for c in codecs if isinstance(c, Tracked)), {})

    def detach(self) -> None:
        """Let DeepSpeed gather between nodes again."""
        if self.hook is not None:
            try:
                if self.hook.attached:
                    self.hook.detach()
            finally:
                for group in self.groups:
                    discard(group)


class HeldFiles:
    """What hosts hold of the weights, where it is not the rounded master weights, and whether they
    are to hold them: a file a process.

    Without the file of as many processes, hosts start from the master weights, which travel whole,
    and compare anew.
    """

    what = "part of what hosts hold of the weights"
    anew = "hosts then start from the master weights"
    not_converted: str | None = None

    def __init__(self, hook: WeightsHook, process: int, world: int) -> None:
        self._hook = hook
        self._name = _FILE.format(process=process, world=world)
        self._world = world

    @property
    def keeps(self) -> bool:
        return self._hook.tracks

    def clear(self, folder: Path) -> None:
        for path in folder.glob(_ANY):
            path.unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        if self.keeps:
            folder.mkdir(parents=True, exist_ok=True)
            metadata = {"name": self._name}
            write(folder / self._name, self._held(), metadata)

    def _held(self) -> dict[str, Tensor]:
        return self._hook.held() if self._hook.tracks else {}

    def read(self, folder: Path) -> dict[str, Tensor] | None:
        """Return saved weights by parameter.

        Raises:
            StateError: the file is missing where others are, damaged, or of another model.
        """
        path = folder / self._name
        those = f"ds_ckpt_weights_*_of_{self._world:05d}.safetensors"
        if not self.keeps or not list(folder.glob(those)):
            return None
        try:
            file = SealedFile(path)
            file.check()
        except DamagedError as error:
            raise _not_held(path, str(error)) from error
        if (name := file.metadata.get("name")) != self._name:
            raise _not_held(path, f"{name} under this name")
        saved = {key: file.tensor(key) for key in file.keys} if self._hook.tracks else {}
        if not saved:  # of a run that holds the rounded master weights, or this one does
            return {}
        found = {name: (t.shape, t.dtype) for name, t in saved.items()}
        wanted = {name: (t.shape, t.dtype) for name, t in self._hook.held().items()}
        if found != wanted:
            name = next(n for n in {**found, **wanted} if found.get(n) != wanted.get(n))
            shapes = f"{name}: {found.get(name)}, and the model has {wanted.get(name)}"
            raise _not_held(path, shapes)
        return saved

    def restore(self, state: dict[str, Tensor] | None) -> None:
        held = self._hook.held()
        for name, shard in (state or {}).items():
            held[name].copy_(shard)


def _not_held(path: Path, found: str) -> StateError:
    why = "hosts hold what this file has, and go on from it to the bit"
    remedy = "restore it, load another tag, or remove the ds_ckpt_weights_* files: "
    remedy += "hosts then start from the master weights"
    return StateError(Problem(str(path), found, why, remedy))


def keep_resident(engine: Any, config: WeightsConfig, counters: Counters) -> Resident:
    """Collective: every process of the program calls it.

    Raises:
        UnsupportedError: the hosts, the model or DeepSpeed's settings do not allow it.
    """
    from deepspeed import comm

    optimizer, asked = engine.optimizer, show(config.resident)
    refuse_model_parallel(engine, f"{WHERE}.resident to false")
    hosts = hosts_of(optimizer.dp_process_group, least=1)
    if hosts == "all processes share one host":
        return Resident(None, "weights: nothing to keep, as all processes share one host")
    if isinstance(hosts, str):
        why = "a copy is divided among the processes of a host, equally many on each"
        raise _refusal("resident", asked, f"{hosts}; {why}", "give every host the same slots")
    local = len(hosts[0])
    if hosts != tuple(tuple(range(h * local, (h + 1) * local)) for h in range(len(hosts))):
        why = f"processes of one host do not follow each other: {hosts}"
        raise _refusal("resident", asked, why, "order the hostfile's lines host by host")
    partition = int(engine.zero_hpz_partition_size())
    if partition not in (0, 1, local):
        raise UnsupportedError(
            Problem(
                "$.zero_optimization.zero_hpz_partition_size",
                str(partition),
                f"resident weights are divided among the {local} processes of a host",
                f"write {local} or remove the key, {OFF}",
            )
        )
    dtype = optimizer.fp16_partitioned_groups_flat[0].dtype
    sixteen = dtype in (torch.bfloat16, torch.float16)
    if config.deltas == "lossless" and not sixteen:
        why = f"weights are gathered as {dtype}, and lossless changes are of 16-bit weights"
        remedy = 'write "none" or "auto", or set $.bf16.enabled to true'
        raise _refusal("deltas", '"lossless"', why, remedy)
    pairs = zip(
        optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
    )
    if config.few_bits and any(p.data_ptr() == m.data_ptr() for p, m in pairs):
        why = "DeepSpeed keeps one tensor for weights and master weights, and hosts' must differ"
        raise _refusal("deltas", f'"{config.deltas}"', why, 'write "none" or "auto"')
    codecs: list[Codec] = [Whole()]
    if config.few_bits:
        codecs = [Tracked(config.few_bits)]
    elif config.deltas == "lossless":
        codecs = [Lossless()]
    elif config.deltas == "auto" and sixteen:
        codecs = [Lossless(), Whole()]

    def make_room() -> None:
        run_on_all_or_raise(
            lambda: _refuse_too_large(engine, asked, len(hosts), local),
            optimizer.dp_process_group,
            what="keep its part of a copy of the weights",
        )

    make_room()
    # every process makes every group, in the same order
    inside = [comm.new_group(list(members)) for members in hosts]
    between = comm.new_group([process for members in hosts for process in members])
    warm(between)
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    groups = between, inside[rank // local]
    try:
        hook = WeightsHook(
            optimizer,
            dict(engine.module.named_parameters()),
            HostLayout(len(hosts), local, rank, inside[rank // local]),
            between,
            comm.all_to_all_single,
            codecs,
            counters,
        )
    except BaseException:
        for group in groups:
            discard(group)
        raise
    return Resident(
        hook,
        f"weights resident on each of {len(hosts)} hosts ({hook.nbytes / 1e6:.4g} MB a process), "
        f"sent between hosts once a step, {' or '.join(codec.words for codec in codecs)}"
        f"{', whichever takes less time' * (len(codecs) > 1)}"
        f"{', where that makes steps shorter' * (config.resident == 'auto')}",
        groups,
        make_room,
    )


def _refuse_too_large(engine: Any, asked: str, hosts: int, local: int) -> None:
    """A gather that runs out of memory on one process would leave the others waiting in it."""
    device = torch.device(engine.device)
    alone = device.type != "cpu"  # else the processes of a host share its memory
    missing = [p for p in engine.module.parameters() if p.ds_secondary_tensor is None]  # not hpZ's
    needed = (1 if alone else local) * sum(
        host_copy_bytes([p.ds_numel], hosts * local, local, p.element_size()) for p in missing
    )
    free = free_on(device)
    if needed <= free:
        return
    remedies = [f"free {size(needed - free)}"]
    if alone:
        remedies.append(f"use {-(-local * needed // max(free, 1))} processes a host or more")
        kept = resident_bytes(engine, [])
        offloaded = sum(kept[what] for what in OFFLOADED)
        enough = "enough" if needed <= free + offloaded else "too little alone"
        remedies.append(
            'set $.zero_optimization.offload_optimizer to {"device": "cpu"}, which frees '
            f"{size(offloaded)}, {enough}"
        )
    whose = "this process's device" if alone else f"the memory of a host of {local} processes"
    why = f"the copy takes {size(needed)} of {whose}, where {size(free)} are free"
    raise _refusal("resident", asked, why, "; or ".join(remedies))


def _refusal(key: str, found: str, why: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(Problem(f"{WHERE}.{key}", found, why, f"{remedy}, {OFF}"))
