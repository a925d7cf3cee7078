"""Ownership compared with ZeRO-3's rule, and packets."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.transport import Packets
from ds_ckpt.lab.validate.virtual import VirtualWorld

worlds = st.integers(1, 9)


@given(st.integers(0, 200), worlds)
def test_shards_are_zero3s(numel: int, world: int) -> None:
    layout = ShardLayout(numel, world)
    chunk = math.ceil(numel / world)
    entries = list(range(numel))
    for process in range(world):
        owned = entries[layout.shard(process)]
        assert owned == entries[process * chunk : process * chunk + chunk]
        assert layout.size(process) == len(owned)
    assert sum(layout.size(p) for p in range(world)) == numel


@given(st.lists(st.integers(0, 100), max_size=5), st.integers(2, 6), st.sampled_from([0, 8]))
def test_every_payload_arrives_where_it_belongs(numels: list[int], world: int, header: int) -> None:
    shards = [ShardLayout(n, world) for n in numels]
    sizes = [[8 * shard.size(p) for shard in shards] for p in range(world)]
    virtual = VirtualWorld(world, timeout_s=20.0)

    def work(me: int) -> dict[int, list[Tensor]]:
        entries = [[shard.size(p) for shard in shards] for p in range(world)]
        packets = Packets(virtual.transports[me], sizes, entries, torch.device("cpu"), header)
        others = [p for p in range(world) if p != me]
        assert [dest for dests, _ in packets.outgoing for dest in dests] == others
        going = {
            dest: [piece[row] for piece in pieces]
            for dests, pieces in packets.outgoing
            for row, dest in enumerate(dests)
        }
        coming = {p: [piece[row] for piece in packets.incoming] for row, p in enumerate(others)}
        for dest, pieces in going.items():
            for place, piece in enumerate(pieces):
                piece.fill_((100 * place + 10 * me + dest) % 256)
        # nothing lies over another, and nothing is left out but what fills packets up
        for of, buffer in ((going, packets._out), (coming, packets._in)):
            covered: list[int] = []
            for piece in (piece for pieces in of.values() for piece in pieces):
                start = piece.data_ptr() - buffer.data_ptr()
                covered += range(start, start + piece.numel()) if piece.numel() else ()
            assert len(set(covered)) == len(covered)
            assert set(covered) <= set(range(buffer.numel()))
            assert buffer.numel() - len(covered) <= 8 * len(others)
        packets.exchange()
        return coming

    for me, arrived in enumerate(virtual.run(work)):
        for source, pieces in arrived.items():
            assert [piece.numel() for piece in pieces] == [header, *sizes[me]]
            for place, piece in enumerate(pieces):
                assert bool((piece == (100 * place + 10 * source + me) % 256).all())
