"""Transfers packets from the owner of each shard to the ranks that hold its replicas.

One packet per chunk of a shard; a bounded number of chunks is in flight at a time. No DeepSpeed
here: the caller passes the collective, and encodes and decodes the packets.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.compression.base import on_host
from ds_ckpt.weights.changes import NodeLayout

IN_FLIGHT = 8
"""Chunks in flight at a time. Bounds the memory of packets that arrive."""


@dataclass
class InFlight:
    """One chunk in flight; `outgoing` is kept until it is sent."""

    handle: Any
    outgoing: Tensor
    incoming: Tensor
    """Packets in the order of the ranks that send them."""
    lengths: list[int]
    from_host: bool
    """True if packets are encoded on the CPU."""


@dataclass
class ReplicaTransfer:
    """Sends the packets of all owners, in order. Collective: all ranks send equally many packets.

    `group` are all ranks, for this traffic alone: it runs beside other collectives.
    `all_to_all_single` is `torch.distributed`'s, or counts. `device` returns the collective's.
    """

    layout: NodeLayout
    group: Any
    all_to_all_single: Callable[..., Any]
    device: Callable[[], torch.device]

    def __post_init__(self) -> None:
        layout = self.layout
        self._others = [owner for owner in layout.replicated if owner != layout.rank]
        self._waiting: deque[tuple[Tensor, dict[int, int]]] = deque()
        self._in_flight: deque[InFlight] = deque()
        self.received = 0
        """Chunks received since `start`."""

    @property
    def is_active(self) -> bool:
        """Return whether chunks are in flight."""
        return bool(self._in_flight)

    def start(self, packets: list[Tensor], *, is_fixed_size: bool) -> None:
        """Send one packet per chunk, uint8, as far as the bound allows.

        With `is_fixed_size` packets have the same sizes on all ranks. Else each begins with its
        length, int64, which is sent first; the host waits once for all of them. Empties the list:
        only the bytes to send are kept.
        """
        sizes = [packet.numel() for packet in packets]
        by_owner = dict.fromkeys(self._others, sizes)
        if packets and not is_fixed_size:
            own = torch.cat([packet[:8] for packet in packets])
            arrived = self._exchange(own)
            table = torch.stack([own, *arrived.values()]).view(torch.int64).cpu().tolist()
            sizes, by_owner = table[0], dict(zip(arrived, table[1:], strict=True))
        packets.reverse()
        for number, nbytes in enumerate(sizes):
            lengths = {owner: counts[number] for owner, counts in by_owner.items()}
            packet = packets.pop()
            packet = packet if packet.numel() == nbytes else packet[:nbytes].clone()
            self._waiting.append((packet, lengths))
        self.received = 0
        self._launch()

    def preallocate(self, nbytes: int) -> None:
        """Send a packet of zeros and drop it: NCCL makes buffers with a group's first message."""
        packet = torch.zeros(nbytes, dtype=torch.uint8, device=self.device())
        self.start([packet], is_fixed_size=True)
        self.receive()

    def receive(self) -> dict[int, Tensor]:
        """Wait for the next chunk. Returns its packets by owner, on the device that sent them."""
        chunk = self._in_flight.popleft()
        self.received += 1
        if chunk.handle is not None:
            chunk.handle.wait()
        self._launch()
        return self._by_owner(chunk)

    def exchange(self, numbers: list[int]) -> dict[int, list[int]]:
        """Send equally many integers from each owner to its replicas. Returns them by owner."""
        packet = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)
        arrived = self._exchange(packet)
        return {owner: part.view(torch.int64).tolist() for owner, part in arrived.items()}

    def _exchange(self, packet: Tensor) -> dict[int, Tensor]:
        lengths = dict.fromkeys(self._others, packet.numel())
        return self._by_owner(self._deliver(packet, lengths, async_op=False))

    def _launch(self) -> None:
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            packet, lengths = self._waiting.popleft()
            self._in_flight.append(self._deliver(packet, lengths, async_op=True))

    def _deliver(self, packet: Tensor, by_owner: dict[int, int], *, async_op: bool) -> InFlight:
        layout, from_host = self.layout, on_host(packet.device)
        lengths = [by_owner.get(rank, 0) for rank in range(layout.world)]
        to = [rank for rank in layout.replicas(layout.rank) if rank != layout.rank]
        send = [packet.numel() if rank in to else 0 for rank in range(layout.world)]
        if not from_host:  # encoded on the compute stream, sent from this one
            packet.record_stream(_stream(packet))
        outgoing = packet.repeat(len(to)).to(self.device())
        incoming = outgoing.new_empty(sum(lengths))
        handle = self.all_to_all_single(
            incoming, outgoing, lengths, send, group=self.group, async_op=async_op
        )
        return InFlight(handle, outgoing, incoming, lengths, from_host)

    def _by_owner(self, chunk: InFlight) -> dict[int, Tensor]:
        incoming = chunk.incoming.cpu() if chunk.from_host else chunk.incoming
        if not on_host(incoming.device):
            incoming.record_stream(_stream(incoming))
        packets = incoming.split(chunk.lengths)
        return {owner: packets[owner].clone() for owner in self._others}  # views must be aligned


def _stream(tensor: Tensor) -> Any:
    return torch.get_device_module(tensor.device).current_stream(tensor.device)
