"""Owners, ranks that share a node, and what is sent: shards, packets, headers, sections."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from virtual import World

from ds_ckpt.compression import Quantize, wire
from ds_ckpt.exchange.hierarchy import Place, arrange, here
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


@pytest.mark.parametrize("finite", [True, False])
def test_headers_carry_the_flag_and_the_version(finite: bool) -> None:
    headers = torch.full((3, wire.PACKET_HEADER_BYTES + 8), 0xAA, dtype=torch.uint8)[:, :-8]
    wire.write_header(headers, torch.tensor(finite))
    assert headers[0, :8].tolist() == [wire.VERSION, int(not finite), 0, 0, 0, 0, 0, 0]
    assert [bool(flag) for flag in wire.read_headers(headers)] == [finite, True]
    headers[1, 8] += 1
    assert [bool(flag) for flag in wire.read_headers(headers)] == [finite, False]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, lambda name, shape: Quantize())
    written = wire.write_header

    def older(headers: torch.Tensor, finite: torch.Tensor) -> None:
        written(headers, finite)
        headers[:, 0] += 1

    monkeypatch.setattr(wire, "write_header", older)
    world.reduce(["w"], [[torch.ones(8, 8)]] * 2)
    with pytest.raises(RuntimeError, match="install the same version of ds_ckpt"):
        world.exchanges[0].nonfinite_buckets  # noqa: B018 - a property that reads the device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_sections_are_filled_up_to_their_alignment(dtype: torch.dtype) -> None:
    payload = torch.full((2, 40), 0xAA, dtype=torch.uint8)
    source = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(dtype)
    end = wire.write_section(payload, 8, source)
    assert end == 8 + wire.aligned(3 * dtype.itemsize)
    assert torch.equal(wire.section(payload, 8, 3, dtype), source)
    assert not payload[:, 8 + 3 * dtype.itemsize : end].any()
    assert (payload[:, end:] == 0xAA).all()


@given(st.integers(2, 5), st.integers(2, 5), st.randoms())
def test_equal_hosts_make_two_levels(hosts: int, local: int, random: object) -> None:
    places = [Place(f"h{host}", index) for host in range(hosts) for index in range(local)]
    random.shuffle(places)  # type: ignore[attr-defined]
    found = arrange(places)
    assert not isinstance(found, str)
    assert all(len(host) == local for host in found)
    assert sorted(p for host in found for p in host) == list(range(hosts * local))
    for host in found:
        assert list(host) == sorted(host)
        assert len({places[p].host for p in host}) == 1


@pytest.mark.parametrize(
    ("places", "word"),
    [
        ([Place("a", 0), Place("a", 1)], "share one node"),
        ([Place("a", 0), Place("b", 0), Place("c", 0)], "every node has one rank"),
        ([Place("a", 0), Place("a", 1), Place("b", 0)], "unequal numbers of ranks (1, 2)"),
        ([Place("a", 0), Place("a", 1), Place("a", 0), Place("a", 1)], "same local rank"),
    ],
)
def test_other_layouts_have_one_level_and_a_reason(places: list[Place], word: str) -> None:
    found = arrange(places)
    assert isinstance(found, str)
    assert word in found


def test_the_launchers_variables() -> None:
    deepspeed = here({"CROSS_RANK": "1", "LOCAL_RANK": "3"})
    assert deepspeed.host.endswith("/1")
    assert deepspeed.local == 3
    torchrun = here({"GROUP_RANK": "2", "LOCAL_RANK": "0"})
    assert torchrun.host.endswith("/2")
    assert here({"OMPI_COMM_WORLD_LOCAL_RANK": "5"}).local == 5
    assert here({}).local is None
