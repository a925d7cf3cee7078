"""Ownership and packet layout: pure arithmetic, held against ZeRO-3's rule."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.exchange.layout import HEADER_BYTES, PacketLayout, ShardLayout

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


@given(st.lists(st.integers(0, 100), max_size=5), st.integers(2, 6))
def test_sender_and_receiver_agree(numels: list[int], world: int) -> None:
    shards = [ShardLayout(n, world) for n in numels]
    sizes = [lambda n: 8 * n] * len(numels)
    layouts = [PacketLayout.of(shards, sizes, dp_rank=p, world=world) for p in range(world)]
    for source in range(world):
        assert layouts[source].send_bytes[source] == layouts[source].receive_bytes[source] == 0
        for dest in set(range(world)) - {source}:
            out, into = layouts[source], layouts[dest]
            assert out.send_bytes[dest] == into.receive_bytes[source]
            for i, shard in enumerate(shards):
                sent, received = out.sent(dest, i), into.received(source, i)
                assert sent.start - out.outgoing(dest) == received.start - into.incoming(source)
                assert sent.stop - sent.start == received.stop - received.start
                assert sent.stop - sent.start == 8 * shard.size(dest)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.integers(2, 6), st.integers(0, 5))
def test_packets_cover_the_buffer_without_overlap(
    numels: list[int], world: int, process: int
) -> None:
    process %= world
    shards = [ShardLayout(n, world) for n in numels]
    layout = PacketLayout.of(shards, [lambda n: 8 * n] * len(numels), dp_rank=process, world=world)
    for total, start_of, payload in (
        (sum(layout.send_bytes), layout.outgoing, layout.sent),
        (sum(layout.receive_bytes), layout.incoming, layout.received),
    ):
        covered: list[int] = []
        for peer in set(range(world)) - {process}:
            covered += range(start_of(peer), start_of(peer) + HEADER_BYTES)
            for i in range(len(numels)):
                covered += range(payload(peer, i).start, payload(peer, i).stop)
        assert sorted(covered) == list(range(total))
