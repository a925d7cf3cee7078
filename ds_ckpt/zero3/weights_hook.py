"""The weights hook: every node keeps a copy of the weights, and receives the changes of each step.

ZeRO++'s secondary partition (hpZ, Wang et al. 2023, arXiv 2306.10209) is a copy of the 16-bit
weights. The ranks of a node shard it, and DeepSpeed's gathers prefer it. DeepSpeed drops it after
every step. This hook creates one at attach, also on nodes of one rank, and keeps it. After each
optimizer step every node receives what the owners' shards have become.

Law: the secondary partition equals, bit for bit, the gather of all owners' `ds_tensor`, which is
the rounded master weights.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.compression.base import on_host
from ds_ckpt.errors import log
from ds_ckpt.patch import Patches, patched
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.weights import changes
from ds_ckpt.weights.changes import ChangeCodec, NodeLayout
from ds_ckpt.weights.transfer import ReplicaTransfer
from ds_ckpt.zero3.compatibility import require_resident_weights
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.gradient_hook import GradientHook

CHECK_EVERY = 100
"""Steps between comparisons of checksums between nodes."""
_PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"


class ParamShard(NamedTuple):
    """One parameter's part of this rank's flat shard of an optimizer group."""

    param: Any
    group: int
    start: int
    size: int
    """Elements, padding included; the same for every owner."""


class LocalGatherHandle:
    """Replaces a gather if one rank holds the node's whole copy; like DeepSpeed's handles.

    Copies, because a model may write to gathered weights, which ZeRO-3 discards.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

        self._params = list(params)
        for param in self._params:
            if param.ds_status.name != "NOT_AVAILABLE":
                raise RuntimeError(param.ds_summary())
            kept = param.ds_secondary_tensor.data[: param.ds_numel]
            sent = kept.to(param.device, get_allgather_dtype(param, param.ds_tensor), copy=True)
            param.data = sent.to(param.ds_tensor.dtype).view(param.ds_shape)
            param.ds_status = type(param.ds_status).INFLIGHT

    def wait(self, **_: Any) -> None:
        """Mark the parameters available, once: later calls may follow their release."""
        for param in self._params:
            param.ds_status = type(param.ds_status).AVAILABLE
        self._params = []


class WeightsHook:
    """Keeps the secondary partition of one ZeRO-3 optimizer's parameters. Collective.

    `detach()` drops it; between steps `attach()` creates it again. After the optimizer step the
    changes are sent chunk by chunk. Small parameters that stay gathered are first, the others
    follow in the order of forward. A gather waits for the chunks of its parameters, so forward
    starts while later chunks are in flight.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        params: All parameters of the model, frozen ones included.
        layout: Nodes, ranks and replicas.
        group: All ranks, for this traffic alone.
        all_to_all_single: `torch.distributed`'s function, or one of the same arguments that counts.
        codec: Encoding of the changes; may be replaced between steps.
    """

    def __init__(
        self,
        optimizer: Any,
        params: Mapping[str, Any],
        layout: NodeLayout,
        group: Any,
        all_to_all_single: Callable[..., Any],
        codec: ChangeCodec,
        counters: Counters,
        gather_hook: GatherHook,
        gradient_hook: GradientHook,
    ) -> None:
        require_resident_weights(metadata.version("deepspeed"))
        self._optimizer = optimizer
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._params = list(params.values())
        self.layout, self._group = layout, group
        self.codec = self._sent_codec = codec
        self._counters = counters
        self._gather_hook, self._gradient_hook = gather_hook, gradient_hook
        self._chunks = self._divide_into_chunks()
        self._chunk_of = {
            piece.param.ds_id: number
            for number, chunk in enumerate(self._chunks)
            for piece in chunk
        }
        self._transfer = ReplicaTransfer(layout, group, all_to_all_single, lambda: self.device)
        self._has_stepped = False
        self._steps = 0
        self._written: Any = None
        """Event on an accelerator: the last write to the secondary partition."""
        self._loads = 0
        self._is_doubtful = False
        """A load has raised; owners' shards may have been written."""
        self._is_wrong = False
        """A change did not fit this rank's copy."""
        self._patches, self._while_in_flight = Patches(), Patches()
        self.attach()

    def attach(self) -> None:
        """Create the secondary partition. Collective."""
        _attached.update({id(param): self for param in self._params})
        _replace_partition()
        try:
            self._install()
            self.gather_anew()
        except BaseException:
            self.drop()
            raise

    @property
    def is_attached(self) -> bool:
        """Return whether this hook's secondary partition exists."""
        return self._patches.active

    @property
    def device(self) -> torch.device:
        """Device of this rank's shards."""
        device: torch.device = self._params[0].ds_tensor.device
        return device

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part of the secondary partition."""
        return sum(p.ds_secondary_tensor.nbytes for p in self._params)

    def _divide_into_chunks(self) -> list[list[ParamShard]]:
        small = {param.ds_id for param in self._optimizer.persistent_parameters}
        pieces = []
        for group, params in enumerate(self._optimizer.fp16_groups):
            start = 0
            for param in params:
                pieces.append(ParamShard(param, group, start, param.partition_numel()))
                start += param.partition_numel()
        pieces.sort(key=lambda piece: piece.param.ds_id not in small)
        chunks: list[list[ParamShard]] = []
        size = changes.CHUNK
        for piece in pieces:
            if size >= changes.CHUNK:
                chunks.append([])
                size = 0
            chunks[-1].append(piece)
            size += piece.size
        return chunks

    @contextmanager
    def inside(self, maker: Any) -> Iterator[None]:
        """Make a `zero.Init`, which engines may share, use this hook's groups."""
        layout = self.layout
        ours = {
            "zero_param_process_group": layout.inside,
            "num_ranks_in_param_group": layout.local,
            "num_param_groups": layout.nodes,
            "rank_in_group": layout.rank % layout.local,
        }
        patches = Patches()
        for name, value in ours.items():
            patches.set(maker, name, value)
        try:
            yield
        finally:
            patches.undo()

    def _install(self) -> None:
        optimizer, patches, layout = self._optimizer, self._patches, self.layout

        def record_step(group: int) -> None:
            """Replace the copy of the master weights into the shard; `_send` does it."""
            self._has_stepped = True

        patches.set(optimizer, "_reassign_or_swap_out_partitioned_parameters", record_step)
        patches.set(optimizer, "invalidate_secondary_tensor", lambda: None)
        for param in self._params:
            patches.set(param, "ds_zero_param_process_group", layout.inside)
            patches.set(param, "ds_secondary_tensor_group_size", layout.local)
            patches.set(param, "ds_secondary_tensor_num_of_groups", layout.nodes)
            # DeepSpeed may have made one over other ranks: another engine's hpZ setting
            param.ds_secondary_tensor = None
            gather = param.all_gather_coalesced
            patches.set_method(
                param, "all_gather_coalesced", self._from_copy(gather, _maker(param))
            )
        load_state_dict = optimizer.load_state_dict

        def load_and_gather(*args: Any, **kwargs: Any) -> None:
            with self.loading():
                load_state_dict(*args, **kwargs)

        patches.set(optimizer, "load_state_dict", load_and_gather)
        for name in ("offload_states", "reload_states"):
            patches.set(optimizer, name, self._moving_copies(getattr(optimizer, name)))
        patches.set(self._gather_hook, "around_post_step", self._around_post_step)
        self._gradient_hook.before_forward.append(self._check_if_doubtful)

    def _around_post_step(self, post_step: Callable[[], None]) -> None:
        if self._has_stepped:  # false for a skipped step
            self._has_stepped = False
            self._send()
        small = self._optimizer.persistent_parameters
        with patched(self._optimizer, "persistent_parameters", []):
            post_step()  # would gather them between nodes
        if small:
            with _unrounded(small):
                small[0].all_gather_coalesced(small).wait()

    def _check_if_doubtful(self) -> None:
        if self._is_doubtful:
            self._is_doubtful = False
            self.check()

    def _from_copy(self, gather: Callable[..., Any], maker: Any) -> Callable[..., Any]:
        """Return a gather within the node, once the parameters' chunks have arrived."""

        def gather_from_copy(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            params = list(params)
            last = max((self._chunk_of.get(param.ds_id, -1) for param in params), default=-1)
            while self._transfer.is_active and self._transfer.received <= last:
                self._receive()
            self._wait_for_writes()  # DeepSpeed's gathers run on a stream that waits for no other
            if self.layout.local == 1:
                return LocalGatherHandle(params)
            with self.inside(maker):
                return gather(params, *args, **kwargs)

        return gather_from_copy

    def _wait_for_writes(self) -> None:
        """Order the current stream behind writes to the secondary partition."""
        if self._written is not None:
            self._stream().wait_event(self._written)

    def _record_writes(self) -> None:
        if not on_host(self.device):
            self._written = self._stream().record_event()

    def _stream(self) -> Any:
        return torch.get_device_module(self.device).current_stream(self.device)

    def _moving_copies(self, move: Callable[..., None]) -> Callable[..., None]:
        """Move this rank's part of the copy together with DeepSpeed's own shards."""

        @functools.wraps(move)
        def move_both(*args: Any, **kwargs: Any) -> None:
            self.drain()
            move(*args, **kwargs)
            for param in self._params:
                kept = param.ds_secondary_tensor
                kept.data = kept.data.to(param.ds_tensor.device)

        return move_both

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surround a load of the owners' weights; the outermost one ends with a gather. Collective.

        If it raises, maybe on one rank alone, the next forward compares checksums instead.
        """
        self._loads += 1
        try:
            yield
        except BaseException:
            self._is_doubtful = True
            raise
        finally:
            self._loads -= 1
        if not self._loads and self.is_attached:
            self.gather_anew()

    def gather_anew(self) -> None:
        """Create the secondary partition from the owners' shards. Collective."""
        self.drain()
        for param in self._params:
            self._zero_padding(param, param.ds_tensor.data)
            if param.ds_status.name == "AVAILABLE":
                param.partition()
            param.all_gather()  # between all ranks
            param.partition(has_been_updated=True)
        self._is_doubtful = self._is_wrong = False
        self._record_writes()

    def _master(self, piece: ParamShard) -> Tensor:
        master: Tensor = self._optimizer.fp32_partitioned_groups_flat[piece.group].data
        return master[piece.start : piece.start + piece.size]

    def _replica(self, param: Any, owner: int) -> Tensor:
        """Return this rank's replica of the owner's shard, a part of the secondary partition."""
        kept: Tensor = param.ds_secondary_tensor.data
        index, size = owner - self.layout.replicated.start, param.partition_numel()
        return kept[index * size : (index + 1) * size]

    def _zero_padding(self, param: Any, shard: Tensor) -> None:
        """Zero elements that are no weights: DeepSpeed leaves them uninitialized."""
        weights = param.ds_numel - self.layout.rank * len(shard)
        shard[min(max(weights, 0), len(shard)) :].zero_()

    def _send(self) -> None:
        """Encode all chunks and start to send them. Collective, once per step."""
        self.drain()
        if self._steps and self._steps % CHECK_EVERY == 0:
            self.check()
        self._sent_codec = self.codec
        self._wait_for_writes()
        packets = [self._encode(chunk) for chunk in self._chunks]
        with self._counters.purpose(Purpose.WEIGHTS):
            self._transfer.start(packets, is_fixed_size=self.codec.is_fixed_size)
        self._record_writes()
        if self._transfer.is_active:
            # a gather ahead of need would wait for all chunks
            self._while_in_flight.set(self._coordinator, _PREFETCH, 0)
        self._steps += 1

    def _encode(self, chunk: Sequence[ParamShard]) -> Tensor:
        """Update this rank's shards, and its replicas of them. Returns the encoded change."""
        for piece in chunk:
            self._zero_padding(piece.param, self._master(piece))
        shards = [piece.param.ds_tensor.data for piece in chunk]
        with self._counters.span("pack"):
            packet = self.codec.encode(shards, [self._master(piece) for piece in chunk])
        if (rank := self.layout.rank) in self.layout.replicated:
            torch._foreach_copy_([self._replica(piece.param, rank) for piece in chunk], shards)
        return packet

    def preallocate(self, *, sends: bool) -> None:
        """Code a chunk of zeros as large as the largest, which compiles kernels; or send one.

        Collective if it sends.
        """
        elements = max(sum(piece.size for piece in chunk) for chunk in self._chunks)
        zeros = self._params[0].ds_tensor.new_zeros(elements)
        if sends:
            self._transfer.preallocate(zeros.nbytes)
            return
        self.codec.decode_(zeros, self.codec.encode([zeros], [zeros.clone()]))
        torch.get_device_module(self.device).synchronize(self.device)  # raises a kernel's failure

    def drain(self) -> None:
        """Wait for all chunks in flight. Collective."""
        while self._transfer.is_active:
            self._receive()

    def _receive(self) -> None:
        """Wait for the next chunk, and update this rank's replicas."""
        chunk = self._chunks[self._transfer.received]
        self._wait_for_writes()  # packets are encoded on the compute stream
        with self._counters.purpose(Purpose.WEIGHTS):
            packets = self._transfer.receive()
        with self._counters.span("pack"):
            self._decode(chunk, packets)
        self._record_writes()
        if not self._transfer.is_active:
            self._while_in_flight.undo()

    def _decode(self, chunk: Sequence[ParamShard], packets: Mapping[int, Tensor]) -> None:
        for owner, packet in packets.items():
            replicas = [self._replica(piece.param, owner) for piece in chunk]
            held = torch.cat(replicas)
            try:
                self._sent_codec.decode_(held, packet)
            except ValueError as error:  # on this rank alone: the others receive on
                if not self._is_wrong:
                    log.warning(
                        "ds_ckpt: rank %d's copy of the weights cannot be changed: %s. The next "
                        "comparison of checksums gathers all weights anew",
                        *(self.layout.rank, error),
                    )
                self._is_wrong = True
                continue
            torch._foreach_copy_(replicas, held.split([piece.size for piece in chunk]))

    def check(self) -> bool:
        """Compare checksums of replicas and owners; gather anew if any differ. Collective."""
        self.drain()
        params = self._params  # including frozen ones
        own = [_checksum(param.ds_tensor.data) for param in params]
        with self._counters.purpose(Purpose.WEIGHTS):
            expected = {**self._transfer.exchange(own), self.layout.rank: own}
        is_wrong = any(
            _checksum(self._replica(param, owner)) != expected[owner][number]
            for owner in self.layout.replicated
            for number, param in enumerate(params)
        )
        flag = torch.tensor(int(is_wrong), dtype=torch.int64, device=self.device)
        torch_dist.all_reduce(flag, op=torch_dist.ReduceOp.MAX, group=self._group)
        if flag.item():
            if self.layout.rank == 0:
                log.warning(
                    "ds_ckpt: a node's copy of the weights differs from its owners': something "
                    "wrote to one of them since the last step. All weights are gathered anew"
                )
            self.gather_anew()
        return not flag.item()

    def detach(self) -> None:
        """Drop the secondary partition, also if waiting for chunks in flight raises."""
        try:
            self.drain()
        finally:
            self.drop()

    def drop(self) -> None:
        """Drop the secondary partition without waiting for chunks in flight."""
        self._while_in_flight.undo()
        self._patches.undo()
        for param in self._params:
            param.ds_secondary_tensor = None
            _attached.pop(id(param), None)
        if self._check_if_doubtful in self._gradient_hook.before_forward:
            self._gradient_hook.before_forward.remove(self._check_if_doubtful)
        if not _attached:
            _global.undo()


_attached: dict[int, WeightsHook] = {}
"""Attached hooks by the `id` of each of their parameters."""
_global = Patches()


def _replace_partition() -> None:
    """Partition each parameter by its own hook: a list may hold parameters of several engines."""
    from deepspeed.runtime.zero.partition_parameters import Init

    if _global.active:
        return
    deepspeeds = Init._partition

    def partition(
        maker: Any,
        param_list: Iterable[Any],
        force: bool = False,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        for param in param_list:
            hook = _attached.get(id(param))
            if hook is not None and has_been_updated:  # writes to the secondary partition
                hook.drain()
            with hook.inside(maker) if hook is not None else nullcontext():
                deepspeeds(maker, [param], force, has_been_updated, free_data)

    _global.set(Init, "_partition", partition)


@contextmanager
def _unrounded(params: Iterable[Any]) -> Iterator[None]:
    """Gather in the weights' dtype under `torch_autocast`, as DeepSpeed does after a step."""
    types = {
        param: vars(param).pop("comm_dtype") for param in params if hasattr(param, "comm_dtype")
    }
    try:
        yield
    finally:
        for param, dtype in types.items():
            param.comm_dtype = dtype


def forget_hpz() -> None:
    """Remove hpZ's process group, which DeepSpeed would use for every later ZeRO-3 engine."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def _checksum(weights: Tensor) -> int:
    """Return a checksum of the bits and their positions."""
    total = 0
    bits = {1: torch.uint8, 2: torch.int16}.get(weights.element_size(), torch.int32)
    for chunk in weights.view(bits).split(1 << 20):
        positions = torch.arange(1, chunk.numel() + 1, dtype=torch.int64, device=chunk.device)
        total = (31 * total + int((chunk * positions).sum())) % (1 << 62)
    return total


def _maker(param: Any) -> Any:
    """Return the `zero.Init` that made a parameter: its methods close over it."""
    return inspect.getclosurevars(param.partition).nonlocals["self"]
