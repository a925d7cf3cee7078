"""Hooks around calls of blocks: tensors that they keep go to an `InputStore`."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_ckpt.activation.offload import BlockCall, InPlaceRef, InputStore, OffloadedRef
from ds_ckpt.activation.partition import Group, Partition, ShardedRef
from ds_ckpt.activation.policies import PLANNED, Unit
from ds_ckpt.fields import Removed, Requires, Section
from ds_ckpt.telemetry.units import size


@dataclass(eq=False)
class CheckpointedInputs:
    """Saved-tensor hooks around the calls of one model's units.

    `partition` splits the arguments of blocks over a group; `store` keeps the tensors. Tensors of
    one recomputation are moved together. Unless `stores_inputs`, autograd keeps the inputs of
    recomputations.
    """

    store: InputStore
    partition: Partition | None = None
    units: Sequence[Unit] = ()
    stores_inputs: bool = True

    def __post_init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        self._weights: dict[str, list[nn.Parameter]] = {}
        for group, unit in enumerate(self.units):
            for index, block in enumerate(unit.blocks):
                self._places[block.name] = group, index
                if unit.offloads:
                    weights = block.module.parameters()
                    self._weights[block.name] = [p for p in weights if p.layout == torch.strided]
        self._local = threading.local()

    def around(
        self,
        label: str,
        checkpointed: Callable[..., Any] | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `checkpointed(function, *args, **kwargs)` of a block and keep what it saves.

        `checkpointed` is None if the block is not recomputed. A block inside a block has no hooks:
        the outer call keeps its tensors, or makes them again.
        """
        enter = checkpointed or run_plainly
        if getattr(self._local, "inside", False):
            return enter(function, *args, **kwargs)
        store, is_recomputed = self.store, checkpointed is not None
        partition = self.partition if is_recomputed else None
        is_forward, hooked = True, self.stores_inputs or not is_recomputed
        with store.lock:
            call = self._begin(label) if hooked else None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_forward
            first, is_forward = is_forward, False
            self._local.inside = True
            try:
                if first and call is not None:
                    with store.lock:
                        store.started(call)
                return function(*args, **kwargs)
            finally:  # a recomputation ends with an exception once it has all tensors
                if first and call is not None:
                    with store.lock:
                        store.ended(call)
                self._local.inside = False

        if call is None:
            return enter(run, *args, **kwargs)

        def pack(tensor: Tensor) -> OffloadedRef | InPlaceRef | ShardedRef:
            with store.lock:
                # results of operators follow the arguments; tensor parallelism may have sharded
                # them already
                if partition is not None and is_forward:
                    return partition.pack(tensor, label, call)
                return store.pack(tensor, call)

        def unpack(ref: OffloadedRef | InPlaceRef | ShardedRef) -> Tensor:
            with store.lock:
                if isinstance(ref, ShardedRef):
                    assert partition is not None
                    return partition.unpack(ref, call)
                return store.unpack(ref, call)

        with saved_tensors_hooks(pack, unpack):
            return enter(run, *args, **kwargs)

    def _begin(self, label: str) -> BlockCall:
        before, place = self.store.last, self._places.get(label)
        if self.partition is not None:
            self.partition.begin(label)
        if before is not None and place is not None:
            group, index = self._places.get(before.label, (-1, 0))
            if (group, index + before.blocks) == place:
                before.blocks += 1
                return before
        return self.store.begin(label, self._weights.get(label))


def run_plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that is not checkpointed."""
    return function(*args, **kwargs)


# from settings


_CHECKPOINTING = Requires("activation.policy", not_in=("none",), suggest="block")
RECOMPUTING = Requires("activation.policy", not_in=("none", "offload"), suggest="block")
PREFETCH, MIN_BYTES = 1, 65536
"""Defaults of the configuration and of budgets."""


class CheckpointedInputsConfig(Section):
    """Storage of checkpointed inputs: keys of `ds_ckpt.activation`."""

    removed: ClassVar = {
        **dict.fromkeys(
            ("contiguous", "contiguous_count", "synchronize", "profile"),
            Removed(
                "it was removed: a buffer for inputs, waits around blocks, a table of times",
                "remove it; use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against "
                "fragmentation, CUDA_LAUNCH_BLOCKING=1 to wait, torch.profiler for times",
            ),
        ),
        "budget_of": Removed(
            "budgets of saved tensors alone were removed",
            'write "activations", which counts the peak of backward, too',
            values=("saved",),
        ),
    }

    offload: Annotated[bool, _CHECKPOINTING] = Field(
        default=False,
        description="Keep the inputs of all recomputations but the last in pinned host memory. "
        "They are copied out while the next block runs, and back before their recomputation: "
        "twice their bytes over the bus per step. Useful if a block computes longer than its "
        "input's copy takes. Same as cpu_checkpointing in activation_checkpointing. A plan on an "
        'accelerator may give blocks policy "offload", too, unless this is false.',
    )
    offload_prefetch: Annotated[int, _CHECKPOINTING] = Field(
        default=PREFETCH,
        ge=1,
        description="Number of blocks ahead of which tensors start to come back from host memory, "
        "or to be gathered if they are split. Each takes the memory of one more block's tensors.",
    )
    offload_min_bytes: Annotated[int, _CHECKPOINTING, Requires("activation.offload", (True,))] = (
        Field(
            default=MIN_BYTES,
            ge=0,
            description="Smallest tensor that is moved to host memory, in bytes.",
        )
    )
    partition: Annotated[
        bool,
        RECOMPUTING,
        Requires(
            "activation.policy",
            not_in=PLANNED,
            suggest="block",
            for_values=(True,),
            why="a plan does not count the memory that partitioning saves",
        ),
    ] = Field(
        default=False,
        description="Split inputs of blocks over the tensor-parallel group, whose n ranks hold "
        "equal inputs: each keeps 1/n of the bytes. Costs one all-gather of each input per step. "
        "Training stops if values differ between ranks. Requires AutoTP or an mpu given to "
        "initialize or attach. Same as partition_activations.",
    )
    partition_min_bytes: Annotated[
        int, _CHECKPOINTING, Requires("activation.partition", (True,))
    ] = Field(
        default=MIN_BYTES,
        ge=0,
        description="Smallest tensor that is split over the tensor-parallel group, in bytes.",
    )

    def describe_input_storage(self) -> str:
        """Describe the active settings; empty if none is active."""
        words = ""
        if self.offload:
            words += f", inputs{self.from_size} in host memory, {self.offload_prefetch} ahead"
        if self.partition:
            words += (
                f", inputs{_from(self.partition_min_bytes)} split over the tensor-parallel group"
            )
            # DeepSpeed's section asks for it without a group, too
            words += "" if "partition" in self.model_fields_set else ", if there is one"
        return words

    @property
    def from_size(self) -> str:
        """Describe the smallest tensor that is moved."""
        return _from(self.offload_min_bytes)


def _from(smallest_bytes: int) -> str:
    return f" from {size(smallest_bytes)} on" if smallest_bytes else ""


def build_inputs(
    config: CheckpointedInputsConfig,
    model: nn.Module,
    units: Sequence[Unit],
    device: torch.device,
    group: Group | None = None,
    make_store: Callable[..., InputStore] = InputStore,
) -> CheckpointedInputs | None:
    """Return the hooks around calls of units; None if autograd keeps all tensors.

    Parameters and buffers of the model are not moved. `group`: ranks over which inputs are split.
    """
    stores_inputs = config.offload or config.partition
    if not stores_inputs and not any(unit.offloads for unit in units):
        return None
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    ahead = config.offload_prefetch
    store = make_store(
        device,
        offload=config.offload,
        min_bytes=config.offload_min_bytes,
        # a part must be here before it is gathered, which is as far ahead of its use
        prefetch=ahead * (2 if config.partition else 1),
        owned=[*model.parameters(), *model.buffers()],
    )
    partition = None
    if config.partition:
        assert group is not None, "the caller finds the group"
        partition = Partition(
            group, store, device, min_bytes=config.partition_min_bytes, ahead=ahead
        )
    return CheckpointedInputs(store, partition, units=units, stores_inputs=stores_inputs)
