"""The weights hook: every host holds the weights, and only what changed crosses, once a step.

ZeRO++'s secondary partition (hpZ, Wang et al. 2023, arXiv 2306.10209) is a copy of the 16-bit
weights that a host's processes divide among them; DeepSpeed's gathers prefer it, and DeepSpeed
throws it away after every step, so that the next forward gathers between hosts again. This hook
makes one at attach, hosts of one process included, keeps it for good, and after each optimizer step
sends every host what the owners' shards have become: whole, or as changes that lose nothing.

Law: the secondary partition is, bit for bit, the gather of all owners' `ds_tensor`, which is the
rounded master weights or, with changes in few bits, what all hosts hold in their place. Who owns
shard k of P = H hosts x L processes sends it once to each host, to the process k // H there, which
is the one whose part of the secondary partition has it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from statistics import median
from typing import Any, Protocol
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.compression.base import on_host
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose
from ds_ckpt.zero3.compatibility import require_resident_weights

log = logging.getLogger("ds_ckpt")
CHECK_EVERY = 100
"""Steps from one comparison of checksums between hosts to the next."""
CHUNK = 1 << 22
"""Elements of a shard from which on no further parameter travels with them."""
IN_FLIGHT = 8
"""Chunks that are under way at a time: a bound on the memory of those that arrive."""
COMPARED = 8
"""Steps with each codec, in turns, before one is chosen."""
RECHECK = 1000
"""Steps from one choice of a codec to the next."""
_PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"


class Codec(Protocol):
    """How a step's change of a shard travels."""

    words: str
    """What travels, for people."""
    tracks: bool
    """Whether hosts may hold something else than the owner's rounded master weights."""

    def encode(self, held: Tensor, master: Tensor, sizes: Sequence[int]) -> Tensor:
        """Move `held` to what hosts hold after the step, in place; what has the same done there.

        Args:
            held: the owner's shard, which all hosts hold, before the step.
            master: the optimizer's weights after it, of the same shape and device.
            sizes: elements of each tensor in it.

        Returns:
            uint8 on the CPU; it may share memory with `held`.
        """

    def decode_(self, held: Tensor, payload: Tensor, sizes: Sequence[int]) -> None:
        """Move `held` as the owner's was, in place."""


@dataclass(frozen=True)
class HostLayout:
    """P = hosts x local processes, those of a host consecutive.

    Attributes:
        rank: this process.
        inside: the process group of this process's host.
    """

    hosts: int
    local: int
    rank: int
    inside: Any

    def keepers(self, owner: int) -> list[int]:
        """Who keeps shard `owner`: one process on each host."""
        return [host * self.local + owner // self.hosts for host in range(self.hosts)]

    @property
    def world(self) -> int:
        return self.hosts * self.local

    @property
    def kept(self) -> range:
        """The owners whose shards this process keeps."""
        first = self.rank % self.local * self.hosts
        return range(first, first + self.hosts)


@dataclass(frozen=True)
class Piece:
    """One parameter's part of this process's shard.

    Attributes:
        group: of the optimizer's groups, whose shards are flat.
        start: where it begins in that group's shard.
        size: elements, padding included; equal for every owner.
    """

    param: Any
    group: int
    start: int
    size: int


@dataclass
class Flight:
    """A chunk under way.

    Attributes:
        handle: of the collective.
        outgoing: sent, and to be kept until it is.
        arriving: received, owners one after the other.
        lengths: bytes from each process.
    """

    pieces: Sequence[Piece]
    handle: Any
    outgoing: Tensor
    arriving: Tensor
    lengths: Sequence[int]


class Copied:
    """In place of a gather, where a process keeps a host's whole copy: of DeepSpeed's handles.

    A copy, as a model may write to gathered weights, which plain ZeRO-3 forgets.
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
        """They are there, on the stream that this was called on. Called once for each of them, the
        later times when others may have been released already."""
        for param in self._params:
            param.ds_status = type(param.ds_status).AVAILABLE
        self._params = []


class WeightsHook:
    """Keeps the secondary partition of one ZeRO-3 optimizer's parameters. `detach()` drops it, and
    between steps `attach()` makes it again.

    After the optimizer the changes are encoded chunk by chunk, small parameters that stay gathered
    first, then in the order of forward, and sent; a gather waits for the chunks that its parameters
    are in, so that forward begins while others are on the way.

    Collective: every process makes one.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        params: all of the model's parameters by name, frozen ones included.
        between: a group of all processes for this traffic alone: it is under way beside others.
        all_to_all_single: `torch.distributed`'s function, or one of the same arguments that counts
            around it.
        codecs: how changes travel. Of several, which must not differ in what arrives, the one that
            holds the processes up for the least time is chosen, again every `RECHECK` steps.
    """

    def __init__(
        self,
        optimizer: Any,
        params: Mapping[str, Any],
        hosts: HostLayout,
        between: Any,
        all_to_all_single: Callable[..., Any],
        codecs: Sequence[Codec],
        counters: Counters,
    ) -> None:
        require_resident_weights(metadata.version("deepspeed"))
        self._optimizer = optimizer
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._params = list(params.values())
        self._names = {param.ds_id: name for name, param in params.items()}
        self._hosts = hosts
        self._between = between
        self._all_to_all_single = all_to_all_single
        self.codecs = codecs
        self._counters = counters
        self._chunks = self._divide_into_chunks()
        self._chunk_of = {
            piece.param.ds_id: number
            for number, chunk in enumerate(self._chunks)
            for piece in chunk
        }
        self._stepped = False
        self._steps = 0
        self._written: Any = None
        """On an accelerator: when the last part of the secondary partition is written."""
        self._to_send: deque[tuple[Sequence[Piece], Tensor, Sequence[int]]] = deque()
        self._flying: deque[Flight] = deque()
        self._prefetched = 0
        """DeepSpeed's own setting: gathers ahead of need would wait for all chunks."""
        self._held_up_s = 0.0
        """By the latest step: encoding, sending, waiting, decoding."""
        self._times: list[list[float]] = [[] for _ in codecs]
        self._chosen = 0
        self._loads = 0
        self._doubted = False
        """A load has raised, with owners' shards written or not."""
        self._patches = Patches()
        finalize(self, _restore_partition)  # where it is dropped without a word
        self.attach()

    def attach(self) -> None:
        """Make the secondary partition. Collective."""
        _replace_partition(self)
        try:
            self._divide_inside()
            self._install()
            self.gather_anew()
        except BaseException:
            self.drop()
            raise

    @property
    def attached(self) -> bool:
        """Whether there is a secondary partition of ours."""
        return self._patches.active

    @property
    def settled(self) -> bool:
        """Whether no codecs are being compared."""
        return len(self.codecs) == 1 or self._steps % RECHECK > COMPARED * len(self.codecs)

    @property
    def device(self) -> torch.device:
        """Of this process's shards."""
        return self._shard(self._chunks[0][0]).device

    @property
    def tracks(self) -> bool:
        """Whether hosts may hold something else than the owners' rounded master weights."""
        return any(codec.tracks for codec in self.codecs)

    def _divide_into_chunks(self) -> list[list[Piece]]:
        small = {param.ds_id for param in self._optimizer.persistent_parameters}
        pieces = []
        for group, params in enumerate(self._optimizer.fp16_groups):
            start = 0
            for param in params:
                pieces.append(Piece(param, group, start, param.partition_numel()))
                start += param.partition_numel()
        pieces.sort(key=lambda piece: piece.param.ds_id not in small)
        chunks: list[list[Piece]] = []
        size = CHUNK
        for piece in pieces:
            if size >= CHUNK:
                chunks.append([])
                size = 0
            chunks[-1].append(piece)
            size += piece.size
        return chunks

    def _divide_inside(self) -> None:
        """Tell DeepSpeed which processes divide a secondary partition."""
        hosts = self._hosts
        for param in self._params:
            self._patches.set(param, "ds_zero_param_process_group", hosts.inside)
            self._patches.set(param, "ds_secondary_tensor_group_size", hosts.local)
            self._patches.set(param, "ds_secondary_tensor_num_of_groups", hosts.hosts)
            # DeepSpeed may have made one among other processes: by another engine's hpZ key
            param.ds_secondary_tensor = None

    @contextmanager
    def _inside(self, maker: Any) -> Iterator[None]:
        """A `zero.Init`, which others may share, takes a secondary partition for one of ours."""
        hosts = self._hosts
        ours = {
            "zero_param_process_group": hosts.inside,
            "num_ranks_in_param_group": hosts.local,
            "num_param_groups": hosts.hosts,
            "rank_in_group": hosts.rank % hosts.local,
        }
        before = {name: getattr(maker, name) for name in ours}
        vars(maker).update(ours)
        try:
            yield
        finally:
            vars(maker).update(before)

    def _install(self) -> None:
        optimizer = self._optimizer
        post_step = optimizer._post_step

        def stepped(group: int) -> None:
            """In place of copying the master weights into the shard: `_send` does."""
            self._stepped = True

        def send_and_post_step(*args: Any, **kwargs: Any) -> None:
            if self._stepped:  # no step that was skipped
                self._stepped = False
                self._send()
            small, optimizer.persistent_parameters = optimizer.persistent_parameters, []
            self._counters.gathers.update(param.ds_id for param in small)
            try:
                post_step(*args, **kwargs)  # would gather them between hosts
            finally:
                optimizer.persistent_parameters = small
            if small:
                with self._counters.purpose(Purpose.GATHER_FORWARD), _unrounded(small):
                    small[0].all_gather_coalesced(small).wait()

        self._patches.set(optimizer, "_reassign_or_swap_out_partitioned_parameters", stepped)
        self._patches.set(optimizer, "_post_step", send_and_post_step)
        self._patches.set(optimizer, "invalidate_secondary_tensor", lambda: None)
        for param in self._params:
            gather = param.all_gather_coalesced
            self._patches.set_method(
                param, "all_gather_coalesced", self._after_arrival(gather, _maker(param)), gather
            )
        load_state_dict = optimizer.load_state_dict

        def load_and_gather(*args: Any, **kwargs: Any) -> None:
            with self.loading():
                load_state_dict(*args, **kwargs)

        self._patches.set(optimizer, "load_state_dict", load_and_gather)
        for name in ("offload_states", "reload_states"):
            self._patches.set(optimizer, name, self._following(getattr(optimizer, name)))
        forward_begins = optimizer.clear_backward_seen_flag

        def look_and_begin() -> None:
            if self._doubted:
                self._doubted = False
                self.check()
            forward_begins()

        self._patches.set(optimizer, "clear_backward_seen_flag", look_and_begin)

    def _after_arrival(self, gather: Callable[..., Any], maker: Any) -> Callable[..., Any]:
        def gather_what_is_there(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            params = list(params)
            if self._flying:
                last = max(self._chunk_of.get(param.ds_id, -1) for param in params)
                while self._flying and self._landed <= last:
                    self._land()
            self._behind_writes()  # DeepSpeed gathers on a stream of its own, which waits for none
            if self._hosts.local == 1:
                return Copied(params)
            with self._inside(maker):
                return gather(params, *args, **kwargs)

        return gather_what_is_there

    def _behind_writes(self) -> None:
        """What the current stream does next finds the secondary partition written."""
        if self._written is not None:
            self._stream().wait_event(self._written)

    def _has_written(self) -> None:
        if not on_host(self._params[0].ds_tensor.device):
            self._written = self._stream().record_event()

    def _stream(self) -> Any:
        device = self._params[0].ds_tensor.device
        return torch.get_device_module(device).current_stream(device)

    def _following(self, move: Callable[..., None]) -> Callable[..., None]:
        """Have this process's part lie where DeepSpeed's own lies, also after a move."""

        @functools.wraps(move)
        def move_both(*args: Any, **kwargs: Any) -> None:
            self.land()
            move(*args, **kwargs)
            for param in self._params:
                kept = param.ds_secondary_tensor
                kept.data = kept.data.to(param.ds_tensor.device)

        return move_both

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Owners get other weights inside; the outermost one ends by gathering them. Collective.

        Where it raises, maybe on one process alone, nothing collective follows: the next forward,
        which all processes begin, looks at what hosts keep.
        """
        self._loads += 1
        try:
            yield
        except BaseException:
            self._doubted = True
            raise
        finally:
            self._loads -= 1
        if not self._loads and self.attached:
            self.gather_anew()

    def gather_anew(self) -> None:
        """Make the secondary partition from the owners' shards. Collective."""
        self.land()
        for param in self._params:
            self._zero_padding(param, param.ds_tensor.data)
            if param.ds_status.name == "AVAILABLE":
                param.partition()
            param.all_gather()  # between all processes
            param.partition(has_been_updated=True)
        self._doubted = False
        self._has_written()

    def _shard(self, piece: Piece) -> Tensor:
        """This process's part, as all hosts hold it."""
        shard: Tensor = piece.param.ds_tensor.data
        return shard

    def _master(self, piece: Piece) -> Tensor:
        master: Tensor = self._optimizer.fp32_partitioned_groups_flat[piece.group].data
        return master[piece.start : piece.start + piece.size]

    def _kept(self, param: Any, index: int) -> Tensor:
        """The secondary partition's part of the `index`-th owner's shard."""
        kept: Tensor = param.ds_secondary_tensor.data
        size = param.partition_numel()
        return kept[index * size : (index + 1) * size]

    def _zero_padding(self, param: Any, shard: Tensor) -> None:
        """Elements that are no weights: DeepSpeed leaves them uninitialised."""
        weights = param.ds_numel - self._hosts.rank * len(shard)
        shard[min(max(weights, 0), len(shard)) :].zero_()

    def _send(self) -> None:
        """Encode all chunks, and let the first of them go. Collective, once a step."""
        self.land()
        if self._steps and self._steps % CHECK_EVERY == 0:
            self.check()
        if not self.settled:
            self._times[self._chosen].append(self._held_up_s)
        self._chosen = self._choose()
        started_s = time.perf_counter()
        self._behind_writes()
        payloads = [self._encode(chunk) for chunk in self._chunks]
        self._has_written()
        with self._counters.purpose(Purpose.WEIGHTS):
            told = self._tell([payload.numel() for payload in payloads])
            for number, (chunk, payload) in enumerate(zip(self._chunks, payloads, strict=True)):
                lengths = [told[p][number] if p in told else 0 for p in range(self._hosts.world)]
                self._to_send.append((chunk, payload, lengths))
            self._launch()
        if self._flying:
            self._prefetched = getattr(self._coordinator, _PREFETCH)
            setattr(self._coordinator, _PREFETCH, 0)
        self._steps += 1
        self._held_up_s = time.perf_counter() - started_s

    def _choose(self) -> int:
        """The codec of this step: in turns while they are compared."""
        if self.settled:
            return self._chosen
        turn = self._steps % RECHECK
        if turn == 0:
            self._times = [[] for _ in self.codecs]
        if turn < COMPARED * len(self.codecs):
            return turn % len(self.codecs)
        medians = [median(times) for times in self._times]
        found_s = torch.tensor(medians, dtype=torch.float32, device=self.device)
        torch_dist.all_reduce(found_s, group=self._between)
        best = int(found_s.argmin())
        if self._hosts.rank == 0:
            times = ", ".join(
                f"{1e3 * float(s) / self._hosts.world:.1f} ms {codec.words}"
                for codec, s in zip(self.codecs, found_s, strict=True)
            )
            log.info(
                "ds_ckpt: autotune: weights travel %s: they hold a step up for %s "
                "(ds_ckpt.weights.deltas chooses one for good)",
                self.codecs[best].words,
                times,
            )
        return best

    @property
    def _codec(self) -> Codec:
        """Of the step whose changes are encoded or under way."""
        return self.codecs[self._chosen]

    def _encode(self, chunk: Sequence[Piece]) -> Tensor:
        for piece in chunk:
            self._zero_padding(piece.param, self._master(piece))
        parts = [self._shard(piece) for piece in chunk]
        held = torch.cat(parts)
        # `offload_optimizer.ratio`: some groups are on the host, others on the accelerator
        master = torch.cat([self._master(piece).to(held.device) for piece in chunk])
        sizes = [piece.size for piece in chunk]
        with self._counters.span("pack"):
            payload = self._codec.encode(held, master, sizes)
        after = held.split(sizes)
        for part, now in zip(parts, after, strict=True):
            part.copy_(now)
        if self._hosts.rank in self._hosts.kept:
            index = self._hosts.kept.index(self._hosts.rank)
            for piece, now in zip(chunk, after, strict=True):
                self._kept(piece.param, index).copy_(now)
        return payload

    def _launch(self) -> None:
        """Let chunks go while the bound allows it."""
        while self._to_send and len(self._flying) < IN_FLIGHT:
            chunk, payload, lengths = self._to_send.popleft()
            handle, outgoing, arriving = self._deliver(payload, lengths, async_op=True)
            self._flying.append(Flight(chunk, handle, outgoing, arriving, lengths))

    @property
    def _landed(self) -> int:
        """Chunks of the step that are there."""
        return len(self._chunks) - len(self._to_send) - len(self._flying)

    def land(self) -> None:
        """Wait for everything that is on its way."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        """Wait for the next chunk, and put it into this process's part."""
        started_s = time.perf_counter()
        flight = self._flying.popleft()
        with self._counters.purpose(Purpose.WEIGHTS):
            if flight.handle is not None:
                flight.handle.wait()
            self._launch()
        self._behind_writes()
        with self._counters.span("pack"):
            self._decode(flight)
        self._has_written()
        if not self._flying:
            setattr(self._coordinator, _PREFETCH, self._prefetched)
        self._held_up_s += time.perf_counter() - started_s

    def _decode(self, flight: Flight) -> None:
        sizes = [piece.size for piece in flight.pieces]
        packets = flight.arriving.cpu().split(list(flight.lengths))
        for index, owner in enumerate(self._hosts.kept):
            if owner == self._hosts.rank:
                continue  # kept when it was sent
            parts = [self._kept(piece.param, index) for piece in flight.pieces]
            held = torch.cat(parts)
            self._codec.decode_(held, packets[owner].clone(), sizes)  # views must be aligned
            for part, now in zip(parts, held.split(sizes), strict=True):
                part.copy_(now)

    def check(self) -> bool:
        """Whether all hosts keep what the owners have; if not, gather it anew. Collective."""
        self.land()
        hosts, params = self._hosts, self._params  # frozen ones, too
        own = [_checksum(param.ds_tensor.data) for param in params]
        with self._counters.purpose(Purpose.WEIGHTS):
            told = {**self._tell(own), hosts.rank: own}
        wrong = any(
            _checksum(self._kept(param, index)) != told[owner][number]
            for index, owner in enumerate(hosts.kept)
            for number, param in enumerate(params)
        )
        flag = torch.tensor(int(wrong), dtype=torch.int64, device=params[0].ds_tensor.device)
        torch_dist.all_reduce(flag, op=torch_dist.ReduceOp.MAX, group=self._between)
        if flag.item():
            if hosts.rank == 0:
                log.warning(
                    "ds_ckpt: a host's copy of the weights is not what their owners have; "
                    "something has written to it, or to them, since the last step, maybe a load "
                    "that failed. All weights are sent anew"
                )
            self.gather_anew()
        return not flag.item()

    def _tell(self, numbers: list[int]) -> dict[int, list[int]]:
        """A few whole numbers to every keeper; by owner those of all owners but this process."""
        packet = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)
        owners = [owner for owner in self._hosts.kept if owner != self._hosts.rank]
        lengths = [packet.numel() if p in owners else 0 for p in range(self._hosts.world)]
        arrived = self._deliver(packet, lengths, async_op=False)[2].cpu().split(lengths)
        return {owner: arrived[owner].clone().view(torch.int64).tolist() for owner in owners}

    def _deliver(
        self, packet: Tensor, lengths: Sequence[int], *, async_op: bool
    ) -> tuple[Any, Tensor, Tensor]:
        """One packet to every keeper: a handle, what is sent, what arrives.

        Args:
            packet: uint8 on the CPU.
            lengths: bytes from each process.
        """
        hosts = self._hosts
        keepers = [keeper for keeper in hosts.keepers(hosts.rank) if keeper != hosts.rank]
        send = [packet.numel() if process in keepers else 0 for process in range(hosts.world)]
        outgoing = packet.repeat(len(keepers)).to(self.device)
        arriving = outgoing.new_empty(sum(lengths))
        handle = self._all_to_all_single(
            arriving, outgoing, list(lengths), send, group=self._between, async_op=async_op
        )
        return handle, outgoing, arriving

    def held(self) -> dict[str, Tensor]:
        """This process's shards, as all hosts hold them, by parameter."""
        pieces = [piece for chunk in self._chunks for piece in chunk]
        return {self._names[piece.param.ds_id]: self._shard(piece) for piece in pieces}

    @property
    def nbytes(self) -> int:
        """Of this process's part of the secondary partition."""
        return sum(p.ds_secondary_tensor.nbytes for p in self._params)

    def detach(self) -> None:
        """Drop the secondary partition; DeepSpeed gathers between hosts again.

        Raises:
            Exception: what waiting for changes on their way raised. It is dropped all the same.
        """
        try:
            self.land()
        finally:
            self.drop()

    def drop(self) -> None:
        """As `detach`, of an engine that is gone: changes on their way are not waited for."""
        self._patches.undo()
        for param in self._params:
            param.ds_secondary_tensor = None
            _hooks.pop(id(param), None)
        _restore_partition()


_hooks: WeakValueDictionary[int, WeightsHook] = WeakValueDictionary()
"""Those attached, by the `id` of each of their parameters."""
_global = Patches()


def _replace_partition(hook: WeightsHook) -> None:
    """Have each parameter divided as it is its own: of a list, which may be of several engines
    (`GatheredParameters` of two models), DeepSpeed has the first one's `zero.Init` divide all."""
    from deepspeed.runtime.zero.partition_parameters import Init

    _hooks.update({id(param): hook for param in hook._params})
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
            owner = _hooks.get(id(param))
            if owner is None:
                deepspeeds(maker, [param], force, has_been_updated, free_data)
                continue
            if has_been_updated:  # writes to the secondary partition
                owner.land()
            with owner._inside(maker):
                deepspeeds(maker, [param], force, has_been_updated, free_data)

    _global.set(Init, "_partition", partition)


def _restore_partition() -> None:
    if not any(True for _ in _hooks.values()):
        _global.undo()


@contextmanager
def _unrounded(params: Iterable[Any]) -> Iterator[None]:
    """Gathers are in the weights' type, also where `torch_autocast` has them sent in another: as
    DeepSpeed's own of small parameters after a step."""
    types = {
        param: vars(param).pop("comm_dtype") for param in params if hasattr(param, "comm_dtype")
    }
    try:
        yield
    finally:
        for param, dtype in types.items():
            param.comm_dtype = dtype


def forget_hpz() -> None:
    """Have engines that are built from now on be what their own file says.

    DeepSpeed keeps hpZ's process group for the whole program, and every later ZeRO-3 engine makes
    secondary partitions where there is one, whatever its file says.
    """
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def _checksum(weights: Tensor) -> int:
    """Of bits and their places."""
    total = 0
    whole = {1: torch.uint8, 2: torch.int16}.get(weights.element_size(), torch.int32)
    for chunk in weights.view(whole).split(1 << 20):
        places = torch.arange(1, chunk.numel() + 1, dtype=torch.int64, device=chunk.device)
        total = (31 * total + int((chunk * places).sum())) % (1 << 62)
    return total


def _maker(param: Any) -> Any:
    """The `zero.Init` that made a parameter: what its methods close over."""
    return inspect.getclosurevars(param.partition).nonlocals["self"]
