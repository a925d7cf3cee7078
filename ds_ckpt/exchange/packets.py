"""The all-to-all of one bucket: payloads of several tensors in one packet for each owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_ckpt.exchange.layout import HEADER_BYTES, ColumnLayout, PacketLayout
from ds_ckpt.exchange.transport import Transport


class Packets:
    """Send and receive buffers of one reduction.

    Args:
        layouts: of each tensor that has a payload.
        payload_bytes: of each, the payload's size by number of entries.
    """

    def __init__(
        self,
        transport: Transport,
        layouts: Sequence[ColumnLayout],
        payload_bytes: Sequence[Callable[[int], int]],
        device: torch.device,
    ) -> None:
        self._transport = transport
        self.me = transport.dp_rank
        self.peers = [p for p in range(transport.world) if p != self.me]
        self._layout = PacketLayout.of(
            layouts, payload_bytes, dp_rank=self.me, world=transport.world
        )
        # Every byte is written: headers and compressed payloads by us, whole ones up to their
        # padding, which nobody reads.
        self._outgoing = torch.empty(sum(self._layout.send_bytes), dtype=torch.uint8, device=device)
        self._incoming = torch.empty(
            sum(self._layout.receive_bytes), dtype=torch.uint8, device=device
        )

    def outgoing(self, dest: int, slot: int) -> Tensor:
        """Where the payload of the `slot`-th tensor for `dest` is written."""
        return self._outgoing[self._layout.sent(dest, slot)]

    def incoming(self, source: int, slot: int) -> Tensor:
        """The payload of the `slot`-th tensor from `source`."""
        return self._incoming[self._layout.received(source, slot)]

    def flag(self, nonfinite: bool) -> None:
        """Write the headers."""
        for dest in self.peers:
            start = self._layout.outgoing(dest)
            self._outgoing[start : start + HEADER_BYTES].zero_()
            if nonfinite:
                self._outgoing[start] = 1

    def exchange(self) -> bool:
        """Send and receive; whether any packet that came was flagged."""
        layout = self._layout
        self._transport.all_to_all(
            self._incoming, self._outgoing, layout.receive_bytes, layout.send_bytes
        )
        starts = [layout.incoming(p) for p in self.peers]
        return bool(self._incoming[starts].any())
