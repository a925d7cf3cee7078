"""The weights hook: every host holds the weights, and only what changed crosses, once a step.

ZeRO++'s secondary partition (hpZ, Wang et al. 2023, arXiv 2306.10209) is a copy of the 16-bit
weights that a host's processes divide among them; DeepSpeed's gathers prefer it, and DeepSpeed
throws it away after every step, so that the next forward gathers between hosts again. This hook
makes one at attach, hosts of one process included, keeps it for good, and after each optimizer step
sends every host what the owners' shards have become: whole, or as changes that lose nothing.

Law: the secondary partition is, bit for bit, the gather of all owners' `ds_tensor`. Who owns shard
k of P = H hosts x L processes sends it once to each host, to the process k // H there, which is the
one whose part of the secondary partition has it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, Purpose

log = logging.getLogger("ds_ckpt")
CHECK_EVERY = 100
"""Steps from one comparison of checksums between hosts to the next."""


class Codec(Protocol):
    """How a change of weights travels."""

    @property
    def needs_old(self) -> bool:
        """Whether `encode` looks at the weights before the step."""

    def encode(self, old: Tensor, new: Tensor) -> Tensor:
        """uint8: what turns `old` into `new` for one who has `old`."""

    def decode_(self, weights: Tensor, payload: Tensor) -> None:
        """Turn the old weights into the new ones, in place."""


@dataclass(frozen=True)
class Hosts:
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
    def kept(self) -> range:
        """The owners whose shards this process keeps."""
        first = self.rank % self.local * self.hosts
        return range(first, first + self.hosts)


class WeightsHook:
    """Keeps the secondary partition of one ZeRO-3 optimizer's parameters. `detach()` drops it.

    Collective: every process makes one.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        params: all of the model's parameters, frozen ones included.
        all_to_all_single: `torch.distributed`'s function, or one of the same arguments that counts
            around it.
        codec: how changes travel.
    """

    def __init__(
        self,
        optimizer: Any,
        params: Sequence[Any],
        hosts: Hosts,
        all_to_all_single: Callable[..., Any],
        codec: Codec,
        counters: Counters,
    ) -> None:
        self._optimizer = optimizer
        self._params = list(params)
        self._hosts = hosts
        self._all_to_all_single = all_to_all_single
        self._codec = codec
        self._counters = counters
        self._payloads: dict[int, Tensor] = {}
        """What turns a group's shard of before the step into that of after it."""
        self._steps = 0
        self._loads = 0
        self._patches = Patches()
        self._divide_inside()
        self._install()
        self.gather_anew()

    def _divide_inside(self) -> None:
        """Tell DeepSpeed which processes divide a secondary partition."""
        hosts = self._hosts
        makers = {id(m): m for m in map(_maker, self._params)}
        for maker in makers.values():
            self._patches.set(maker, "zero_param_process_group", hosts.inside)
            self._patches.set(maker, "num_ranks_in_param_group", hosts.local)
            self._patches.set(maker, "num_param_groups", hosts.hosts)
            self._patches.set(maker, "rank_in_group", hosts.rank % hosts.local)
        for param in self._params:
            self._patches.set(param, "ds_zero_param_process_group", hosts.inside)
            self._patches.set(param, "ds_secondary_tensor_group_size", hosts.local)
            self._patches.set(param, "ds_secondary_tensor_num_of_groups", hosts.hosts)
            # DeepSpeed may have made one among other processes: by another engine's hpZ key
            param.ds_secondary_tensor = None

    def _install(self) -> None:
        optimizer = self._optimizer
        reassign = optimizer._reassign_or_swap_out_partitioned_parameters
        post_step = optimizer._post_step

        def reassign_and_encode(group: int) -> None:
            shard = optimizer.fp16_partitioned_groups_flat[group]
            before = shard.clone() if self._codec.needs_old else shard
            reassign(group)
            for padding in self._padding(group):
                padding.zero_()
            self._payloads[group] = self._codec.encode(before, shard)

        def exchange_and_post_step(*args: Any, **kwargs: Any) -> None:
            with self._counters.purpose(Purpose.WEIGHTS):
                self._exchange()
            small, optimizer.persistent_parameters = optimizer.persistent_parameters, []
            try:
                post_step(*args, **kwargs)  # would gather them between hosts
            finally:
                optimizer.persistent_parameters = small
            if small:
                with self._counters.purpose(Purpose.GATHER_FORWARD):
                    small[0].all_gather_coalesced(small).wait()

        self._patches.set(
            optimizer, "_reassign_or_swap_out_partitioned_parameters", reassign_and_encode
        )
        self._patches.set(optimizer, "_post_step", exchange_and_post_step)
        self._patches.set(optimizer, "invalidate_secondary_tensor", lambda: None)
        load_state_dict = optimizer.load_state_dict

        def load_and_gather(*args: Any, **kwargs: Any) -> None:
            with self.loading():
                load_state_dict(*args, **kwargs)

        self._patches.set(optimizer, "load_state_dict", load_and_gather)
        for name in ("offload_states", "reload_states"):
            self._patches.set(optimizer, name, self._following(getattr(optimizer, name)))

    def _following(self, move: Callable[..., None]) -> Callable[..., None]:
        """Have this process's part lie where DeepSpeed's own lies, also after a move."""

        @functools.wraps(move)
        def move_both(*args: Any, **kwargs: Any) -> None:
            move(*args, **kwargs)
            for param in self._params:
                kept = param.ds_secondary_tensor
                kept.data = kept.data.to(param.ds_tensor.device)

        return move_both

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Owners get other weights inside; the outermost one ends by gathering them. Collective."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1
        if not self._loads:
            self.gather_anew()

    def gather_anew(self) -> None:
        """Make the secondary partition from the owners' shards. Collective."""
        for group in range(len(self._optimizer.fp16_groups)):
            for padding in self._padding(group):
                padding.zero_()
        for param in self._params:
            if param.ds_status.name == "AVAILABLE":
                param.partition()
            param.all_gather()  # between all processes
            param.partition(has_been_updated=True)

    def _pieces(self, group: int) -> Iterator[tuple[Any, int, int]]:
        """Parameter, where its part of a shard begins, and how many elements it has there."""
        start = 0
        for param in self._optimizer.fp16_groups[group]:
            numel = param.partition_numel()
            yield param, start, numel
            start += numel

    def _padding(self, group: int) -> Iterator[Tensor]:
        """This process's elements that are no weights; DeepSpeed leaves them uninitialised."""
        shard = self._optimizer.fp16_partitioned_groups_flat[group]
        for param, start, numel in self._pieces(group):
            weights = min(max(param.ds_numel - self._hosts.rank * numel, 0), numel)
            yield shard.data[start + weights : start + numel]

    def _exchange(self) -> None:
        """Send the changes, and put those that arrive into this process's part."""
        if not self._payloads:
            return  # a step that was skipped
        hosts, shards = self._hosts, self._optimizer.fp16_partitioned_groups_flat
        groups = sorted(self._payloads)
        mine = [self._payloads.pop(group) for group in groups]
        sizes = self._tell([payload.numel() for payload in mine])
        packets = self._deliver(torch.cat(mine), {owner: sum(sizes[owner]) for owner in sizes})
        for index, owner in enumerate(hosts.kept):
            if owner == hosts.rank:
                for group in groups:
                    self._copy(group, index, shards[group])
            else:
                payloads = packets[owner].split(sizes[owner])
                for group, payload in zip(groups, payloads, strict=True):
                    self._change(group, index, payload)
        self._steps += 1
        if self._steps % CHECK_EVERY == 0:
            self.check()

    def check(self) -> bool:
        """Whether all hosts keep what the owners have; if not, gather it anew. Collective."""
        hosts, shards = self._hosts, self._optimizer.fp16_partitioned_groups_flat
        groups = range(len(shards))
        told = self._tell([_checksum(shard) for shard in shards])
        told[hosts.rank] = [_checksum(shard) for shard in shards]
        wrong = any(
            _checksum(torch.cat(self._parts(group, index))) != told[owner][group]
            for index, owner in enumerate(hosts.kept)
            for group in groups
        )
        flag = torch.tensor(float(wrong), device=shards[0].device)
        group = self._optimizer.dp_process_group
        torch_dist.all_reduce(flag, op=torch_dist.ReduceOp.MAX, group=group)
        if flag.item():
            if hosts.rank == 0:
                log.warning(
                    "ds_ckpt: a host's copy of the weights is not what their owners have; "
                    "something has written to it, or to them, since the last step. All weights "
                    "are sent anew"
                )
            self.gather_anew()
        return not flag.item()

    def _tell(self, numbers: list[int]) -> dict[int, list[int]]:
        """A few whole numbers to every keeper; by owner those of all owners but this process."""
        packet = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        owners = [owner for owner in self._hosts.kept if owner != self._hosts.rank]
        arrived = self._deliver(packet, dict.fromkeys(owners, packet.numel()))
        return {owner: arrived[owner].view(torch.int64).tolist() for owner in owners}

    def _deliver(self, packet: Tensor, lengths: dict[int, int]) -> dict[int, Tensor]:
        """One packet to every keeper; by owner those of all owners but this process.

        Args:
            packet: uint8 on the CPU.
            lengths: bytes of each owner's packet.
        """
        optimizer, hosts = self._optimizer, self._hosts
        world = hosts.hosts * hosts.local
        keepers = [keeper for keeper in hosts.keepers(hosts.rank) if keeper != hosts.rank]
        send = [packet.numel() if process in keepers else 0 for process in range(world)]
        receive = [lengths.get(process, 0) for process in range(world)]
        outgoing = packet.repeat(len(keepers)).to(optimizer.fp16_partitioned_groups_flat[0].device)
        arrived = outgoing.new_empty(sum(receive))
        group = optimizer.dp_process_group
        self._all_to_all_single(arrived, outgoing, receive, send, group=group)
        # each in memory of its own: a view of wider numbers must be aligned
        parts = [part.clone() for part in arrived.cpu().split(receive)]
        return {owner: parts[owner] for owner in lengths}

    def _parts(self, group: int, index: int) -> list[Tensor]:
        """Views of the secondary partition: the `index`-th owner's shard."""
        pieces = self._pieces(group)
        return [p.ds_secondary_tensor.data[index * n : (index + 1) * n] for p, _, n in pieces]

    def _change(self, group: int, index: int, payload: Tensor) -> None:
        shard = torch.cat(self._parts(group, index))
        self._codec.decode_(shard, payload)
        self._copy(group, index, shard)

    def _copy(self, group: int, index: int, shard: Tensor) -> None:
        parts = self._parts(group, index)
        for part, weights in zip(parts, shard.split([p.numel() for p in parts]), strict=True):
            part.copy_(weights)

    @property
    def nbytes(self) -> int:
        """Of this process's part of the secondary partition."""
        return sum(p.ds_secondary_tensor.nbytes for p in self._params)

    def detach(self) -> None:
        """Drop the secondary partition; DeepSpeed gathers between hosts again."""
        self._patches.undo()
        for param in self._params:
            param.ds_secondary_tensor = None


def _checksum(weights: Tensor) -> int:
    """Of bits and their places."""
    total = 0
    for chunk in weights.view(torch.int16 if weights.element_size() == 2 else torch.int32).split(
        1 << 20
    ):
        places = torch.arange(1, chunk.numel() + 1, device=chunk.device)
        total = (31 * total + int((chunk * places).sum())) % (1 << 62)
    return total


def _maker(param: Any) -> Any:
    """The `zero.Init` that made a parameter: what its methods close over."""
    return inspect.getclosurevars(param.partition).nonlocals["self"]
