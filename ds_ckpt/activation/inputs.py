"""Stands around every checkpointed call: who keeps its inputs until the recompute, what it costs.

`CheckpointedInputs.around` is handed to `CheckpointedBlocks`. It lets an `InputStore` keep the
tensors that the call saves for its recompute, times forward and recompute, and synchronizes
around them, each where it was asked for. `build_inputs` makes it from settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_ckpt.activation.offload import InputStore
from ds_ckpt.activation.partition import Partition
from ds_ckpt.activation.pieces import BlockCall, Kept, Left, Split
from ds_ckpt.activation.policies import Unit
from ds_ckpt.activation.rank_consistency import Group
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.fields import SWITCH, Expects, Section
from ds_ckpt.memory import HostPool
from ds_ckpt.memory.copies import copies_for
from ds_ckpt.memory.pool import device_arena
from ds_ckpt.telemetry.timings import BlockProfile


class CheckpointedInputs:
    """What happens around the checkpointed calls of one model.

    Args:
        store: keeps the tensors; None leaves them to autograd.
        partition: splits what blocks are given, and has the store keep a part; needs a store.
        profile: told of every forward and recompute of a block.
        synchronize: called at the begin and the end of each forward and recompute of a block.
    """

    def __init__(
        self,
        store: InputStore | None = None,
        *,
        partition: Partition | None = None,
        profile: BlockProfile | None = None,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        self.store, self.profile, self._synchronize = store, profile, synchronize
        assert partition is None or store is not None, "somebody must keep the parts"
        self.partition = partition
        self._places: dict[str, tuple[int, int]] = {}
        self._local = threading.local()

    def recomputed_together(self, groups: Sequence[Sequence[str]]) -> None:
        """Names of blocks that one recompute runs through, in order: they come back together."""
        self._places = {n: (g, i) for g, names in enumerate(groups) for i, n in enumerate(names)}

    def around(
        self,
        label: str,
        checkpointed: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`checkpointed(function, *args, **kwargs)` of a block, with what it saves kept here.

        A block inside a block is left alone: the outer recompute makes its input again.
        """
        if getattr(self._local, "inside", False):
            return checkpointed(function, *args, **kwargs)
        call = self._begin(label)
        forward = [True]

        def run(*args: Any, **kwargs: Any) -> Any:
            first = bool(forward)
            forward.clear()
            with self._in_block(call if first else None, label, forward=first):
                return function(*args, **kwargs)

        if self.partition is not None:
            self.partition.begin(label)
        with self._kept_by(call, label, forward):
            return checkpointed(run, *args, **kwargs)

    def _begin(self, label: str) -> BlockCall | None:
        if self.store is None:
            return None
        before, place = self.store.last, self._places.get(label)
        if before is not None and place is not None:
            group, index = self._places.get(before.label, (-1, 0))
            if (group, index + before.blocks) == place:
                before.blocks += 1
                return before
        return self.store.begin(label)

    def _kept_by(
        self, call: BlockCall | None, label: str, given: list[bool]
    ) -> AbstractContextManager[Any]:
        """Hooks that see what the call saves for its recompute, and nothing inside it.

        Args:
            given: not empty while what the call was given is saved; then come results of operators,
                which tensor parallelism may have sharded already and which are kept whole.
        """
        store, partition, profile = self.store, self.partition, self.profile
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Kept | Left | Split:
            if partition is not None and call is not None and given:
                split = partition.pack(tensor, label, call)
                if profile is not None:
                    profile.kept(label, split.new_bytes(seen))
                return split
            if profile is not None and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                profile.kept(label, 0 if storage._cdata in seen else storage.nbytes())
                seen.add(storage._cdata)
            if store is not None and call is not None:
                return store.pack(tensor, call)
            return Left(tensor, label)  # autograd compares no version of what hooks have seen

        def unpack(kept: Kept | Left | Split) -> Tensor:
            if isinstance(kept, Split):
                assert partition is not None
                return partition.unpack(kept)
            if store is not None:
                return store.unpack(kept)
            assert isinstance(kept, Left)
            return kept.again()

        if store is None and profile is None:
            return nullcontext()
        return saved_tensors_hooks(pack, unpack)

    @contextmanager
    def _in_block(self, call: BlockCall | None, label: str, *, forward: bool) -> Iterator[None]:
        self._local.inside = True
        store = self.store if call is not None else None
        try:
            if self._synchronize is not None:
                self._synchronize()
            if store is not None and call is not None:
                store.started(call)
            with self.profile.timed(label, forward=forward) if self.profile else nullcontext():
                yield
        finally:  # a recompute is left by an exception when it has all that is needed
            if store is not None and call is not None:
                store.ended(call)
            self._local.inside = False
            if self._synchronize is not None:
                self._synchronize()


# from settings


class Keeping(Section):
    """How what checkpointing keeps is kept: keys of `ds_ckpt.activation`."""

    offload: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Keep the inputs of all recomputes but the last in host memory: they go "
        "out on a side stream while the next block runs, and come back before their recompute. "
        "Costs the bus twice their bytes a step, and pinned host memory of their size. Pays where "
        "a block computes longer than its input travels (long sequences). On the CPU "
        "accelerator a stand-in runs, which saves nothing. The same as cpu_checkpointing in "
        "activation_checkpointing.",
    )
    offload_prefetch: Annotated[int, Expects("a whole number, 1 or more", "1")] = Field(
        default=1,
        ge=1,
        description="How many recomputes ahead inputs start to come back from host memory, or "
        "to be gathered where they are split. Each costs the device one more input in "
        "backward.",
    )
    offload_min_bytes: Annotated[int, Expects("a whole number, 0 or more", "65536")] = Field(
        default=65536,
        ge=0,
        description="Smaller tensors stay on the device: their copies would cost more time than "
        "they save memory.",
    )
    partition: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Split what blocks are given over the tensor-parallel group, whose processes "
        "hold the same: each keeps 1 in n of the bytes, and they are gathered before their "
        "recompute. Costs one all-gather of each input a step, one recompute ahead of its use. "
        "A rank-consistency check compares the values, and stops training where they differ. "
        "Needs AutoTP or an mpu given to initialize or attach. The same as partition_activations.",
    )
    partition_min_bytes: Annotated[int, Expects("a whole number, 0 or more", "65536")] = Field(
        default=65536,
        ge=0,
        description="Smaller tensors are kept whole: their gathers would cost more time than they "
        "save memory.",
    )
    contiguous: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Keep inputs on the device in one buffer that is allocated once, so that they "
        "leave no gaps between other tensors, at the cost of a copy of each; with offload they "
        "leave the device anyway. The same as contiguous_memory_optimization.",
    )
    contiguous_count: Annotated[
        int | None, Field(ge=1), Expects("a whole number, 1 or more", "32")
    ] = Field(
        default=None,
        description="Inputs like the first one that the buffer has room for. Default: one for "
        "each recompute of the model; fewer are refused, more serve several forwards before a "
        "backward. The same as number_checkpoints.",
    )
    synchronize: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Wait for the device at the begin and the end of every forward and recompute "
        "of a block: for debugging and for clean traces; it stops all overlap. The same as "
        "synchronize_checkpoint_boundary.",
    )
    profile: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Log a table of each block's kept bytes, forward time and recompute time "
        "every telemetry.every_n_steps steps. On an accelerator it waits for the device around "
        "every block, so steps are slower while it is on. The same as in activation_checkpointing.",
    )

    def keeping(self) -> str:
        """A few words on what is switched on here; empty where nothing is."""
        words = []
        if self.offload:
            words.append(f"inputs in host memory, {self.offload_prefetch} ahead")
        if self.partition:
            words.append("inputs split over the tensor-parallel group")
        if self.contiguous:
            words.append("inputs in one buffer")
        if self.synchronize:
            words.append("synchronized around blocks")
        if self.profile:
            words.append("profiled")
        return "".join(f", {word}" for word in words)

    @property
    def stores(self) -> bool:
        """Whether inputs are kept in another way than autograd's."""
        return self.offload or self.partition or self.contiguous


def build_inputs(
    keeping: Keeping,
    model: nn.Module,
    units: Sequence[Unit],
    device: torch.device,
    group: Group | None = None,
) -> CheckpointedInputs | None:
    """What stands around the checkpointed calls; None where autograd keeps all by itself.

    Args:
        group: the processes over which inputs are split, where they are.

    Raises:
        ConfigError: the buffer is to have room for fewer inputs than the model has.
    """
    if not (keeping.stores or keeping.synchronize or keeping.profile):
        return None
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    copies = copies_for(device)
    store = partition = None
    if keeping.stores:
        count = _checked_count(keeping.contiguous_count, len(units))
        pool = HostPool(pinned=None if device.type == "cuda" else False)
        on_device = keeping.contiguous and not keeping.offload
        store = InputStore(
            device,
            copies,
            pool=pool if keeping.offload else None,
            arena=device_arena(count, device) if on_device else None,
            min_bytes=keeping.offload_min_bytes if keeping.offload else 0,
            # a part must be here before it is gathered, which is as far ahead of its use
            prefetch=keeping.offload_prefetch * (2 if keeping.partition else 1),
            owned=[*model.parameters(), *model.buffers()],
        )
    if keeping.partition:
        assert store is not None
        assert group is not None, "whoever switches it on finds the group"
        partition = Partition(
            group,
            store,
            device,
            min_bytes=keeping.partition_min_bytes,
            ahead=keeping.offload_prefetch,
        )
    inputs = CheckpointedInputs(
        store,
        partition=partition,
        profile=BlockProfile(copies.synchronize) if keeping.profile else None,
        synchronize=copies.synchronize if keeping.synchronize else None,
    )
    inputs.recomputed_together([[block.name for block in unit.blocks] for unit in units])
    return inputs


def _checked_count(count: int | None, recomputes: int) -> int:
    if count is None or count >= recomputes:
        return count or recomputes
    raise ConfigError(
        Problem(
            where="$.ds_ckpt.activation.contiguous_count",
            found=f"{count} (number_checkpoints in activation_checkpointing is the same)",
            why=f"the policy makes {recomputes} recomputes of this model, and each keeps a "
            "input until backward",
            remedy=f"write {recomputes} or more, or remove the key: the count is then inferred",
        )
    )


def describe(
    keeping: Keeping, recomputes: int, device: torch.device, group: Group | None = None
) -> str:
    """What the start line says of it; empty where nothing is on."""
    words = []
    if keeping.partition and group is not None:
        size = len(group.processes)
        words.append(
            f"inputs split over {size} tensor-parallel processes, 1/{size} of their bytes kept "
            f"by each, {size - 1}/{size} of them received once a step in all-gathers "
            f"{keeping.offload_prefetch} ahead"
        )
    if keeping.offload:
        where = "in pinned host memory" if device.type == "cuda" else "in host memory"
        what = "checkpointed inputs' parts" if keeping.partition else "checkpointed inputs"
        text = (
            f"{recomputes - 1} of {recomputes} {what} kept {where}, brought back "
            f"{keeping.offload_prefetch} ahead: twice their bytes over the bus a step"
        )
        if device.type == "cpu":
            text += " (a stand-in: on the CPU accelerator both ends are the same memory)"
        words.append(text)
    if keeping.contiguous and not keeping.offload:
        words.append("inputs in one buffer, one copy each")
    if keeping.synchronize:
        words.append("the device waited for around every block: no overlap")
    if keeping.profile:
        words.append("every block timed")
    return "".join(f", {word}" for word in words)
