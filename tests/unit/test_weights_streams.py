"""Weights on pretended accelerators, gathered and sent between hosts: the order of streams, host
waits, and seeded faults that must be found. What stands in for DeepSpeed gathers on a stream of its
own, which waits for no other, as DeepSpeed's does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from torch import Tensor

from ds_ckpt.lab.validate.virtual import VirtualWorld
from ds_ckpt.telemetry import Counters
from ds_ckpt.weights import changes, transfer
from ds_ckpt.weights.changes import Lossless, NodeLayout, Whole
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.weights_hook import WeightsHook, _checksum
from tests.pretended_gpu import Gpu, in_threads

WORLD = 2


@pytest.fixture(autouse=True)
def _no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed reads the rank before it decides not to log."""
    monkeypatch.setattr(partition_parameters, "print_rank_0", lambda *_, **__: None)


class _Maker(Init):
    """DeepSpeed's, which makes the methods of its parameters."""

    zero_param_process_group = num_ranks_in_param_group = num_param_groups = rank_in_group = None

    def __init__(self) -> None:
        pass

    def _partition_param(self, param: _Param, **_: Any) -> None:
        pass

    def _partition_param_sec(self, param: _Param, has_been_updated: bool) -> None:
        if has_been_updated:
            param.ds_secondary_tensor = param.data

    def partition_of(self, param: _Param) -> Callable[..., None]:
        def partition(has_been_updated: bool = False) -> None:
            self._partition([param], has_been_updated=has_been_updated)

        return partition


class _Param:
    """A ZeRO-3 parameter of which `shard` is this process's."""

    ds_secondary_tensor: Any = None

    def __init__(self, host: _Host, number: int, shard: Tensor) -> None:
        self.partition = host.maker.partition_of(self)
        self.ds_id, self.ds_numel = number, shard.numel() * WORLD
        self.ds_shape = torch.Size([self.ds_numel])
        self.ds_tensor, self.data, self._host = shard, shard, host
        self.ds_status, self.device = ZeroParamStatus.NOT_AVAILABLE, shard.device

    def partition_numel(self) -> int:
        return self.ds_numel // WORLD

    def all_gather(self) -> None:
        shard = self.ds_tensor
        self.data = shard.new_empty(self.ds_numel)
        sizes = [0 if p == self._host.number else 2 * shard.numel() for p in range(WORLD)]
        arrived = shard.new_empty(shard.numel())
        self._host.all_to_all(arrived.view(torch.uint8), shard.view(torch.uint8), sizes, sizes)
        parts = [arrived, shard] if self._host.number else [shard, arrived]
        self.data.copy_(torch.cat(parts))

    def all_gather_coalesced(self, params: list[_Param]) -> Any:
        """Gather over a node with several ranks; not called here."""


class _Host:
    """One process with a pretended accelerator, its parameters and its optimizer."""

    def __init__(self, number: int, world: VirtualWorld, sizes: list[int], codec: Any) -> None:
        self.number, self.gpu, self.maker = number, Gpu(), _Maker()
        self.transport, self.codec, self.sizes = world.transports[number], codec, sizes
        self.comm = self.gpu.Stream()
        self.gathers = self.gpu.Stream()

    def start(self) -> None:
        gpu, total = self.gpu, sum(self.sizes)
        generator = torch.Generator().manual_seed(self.number)
        master = torch.randn(total, generator=generator)
        self.master, self.flat = gpu.tensor(master), gpu.tensor(master.bfloat16())
        shards = self.flat.split(self.sizes)
        self.params = [_Param(self, i, shard) for i, shard in enumerate(shards)]
        coordinator = SimpleNamespace(_PartitionedParameterCoordinator__prefetch_bucket_sz=1)
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.optimizer = SimpleNamespace(
            parameter_offload=SimpleNamespace(get_param_coordinator=lambda: coordinator),
            persistent_parameters=[],
            fp16_groups=[self.params],
            fp16_partitioned_groups_flat=[self.flat],
            fp32_partitioned_groups_flat=[self.master],
            _reassign_or_swap_out_partitioned_parameters=nothing,
            **dict.fromkeys(("load_state_dict", "offload_states"), nothing),
            **dict.fromkeys(("reload_states", "invalidate_secondary_tensor"), nothing),
        )
        self.gather_hook: Any = SimpleNamespace(around_post_step=None)
        self.hook = WeightsHook(
            self.optimizer,
            {f"p{i}": param for i, param in enumerate(self.params)},
            NodeLayout(WORLD, 1, self.number, "inside"),
            "between",
            self.all_to_all_single,
            self.codec,
            Counters(),
            self.gather_hook,
            SimpleNamespace(before_forward=[]),  # type: ignore[arg-type]
        )

    def all_to_all(self, out: Tensor, given: Tensor, receive: Any, send: Any) -> None:
        self.gpu.uncounted(self.transport.all_to_all)(out, given, receive, send)

    def all_to_all_single(
        self, out: Tensor, given: Tensor, receive: Any, send: Any, group: Any, async_op: bool
    ) -> Any:
        """Exchange as NCCL does: on its own stream, which is recorded for the allocator."""
        self.all_to_all(out, given, receive, send)
        on_host = not hasattr(out, "inner")
        if on_host:
            return None
        gpu, comm = self.gpu, self.comm
        comm.wait_stream(gpu.current_stream())
        with gpu.stream(comm):
            gpu.kernel("all_to_all", [given.inner], [out.inner], host=False)  # type: ignore[attr-defined]
        for tensor in (out, given):
            gpu.keep_for(tensor, comm)
        done = comm.record_event()
        if not async_op:
            done.wait()
            return None
        return SimpleNamespace(wait=done.wait)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + self.number)
        moved = torch.randn(len(self.master), generator=generator).mul(1e-3)
        self.master.add_(self.gpu.tensor(moved))
        self.optimizer._reassign_or_swap_out_partitioned_parameters(0)
        self.gather_hook.around_post_step(lambda: None)

    def forward(self) -> None:
        self.gathered = []
        for param in self.params:
            with self.gpu.stream(self.gathers):
                param.all_gather_coalesced([param]).wait()
            gathered = param.data
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE  # released
            default = self.gpu.current_stream()
            default.wait_stream(self.gathers)
            gathered.record_stream(default)
            gathered.sum()
            self.gathered.append(gathered.inner)


def _train(codec: Callable[[], Any], sizes: list[int], steps: int = 3) -> list[_Host]:
    """Steps of two hosts; host waits are those of the last one."""
    world = VirtualWorld(WORLD, timeout_s=20.0)
    hosts = [_Host(p, world, sizes, codec()) for p in range(WORLD)]

    here = threading.local()

    def work(p: int) -> None:
        here.gpu = hosts[p].gpu
        hosts[p].start()
        hosts[p].forward()
        for number in range(steps):
            hosts[p].gpu.waits.clear()
            hosts[p].step(number)
            hosts[p].forward()

    with hosts[0].gpu.watched(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "get_device_module", lambda device=None: here.gpu)
        world.run(lambda p: in_threads(hosts[p].gpu, work)(p))
    return hosts


codecs = pytest.mark.parametrize("codec", [Whole, Lossless], ids=["whole", "lossless"])


@codecs
def test_weights_between_hosts_are_ordered(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CHUNK", 300)  # several chunks, of which two fly at a time
    monkeypatch.setattr(transfer, "IN_FLIGHT", 2)
    hosts = _train(codec, [200, 120, 64, 320, 8])
    assert len(hosts[0].hook._chunks) > 2
    assert [host.gpu.findings for host in hosts] == [[], []]
    # every host keeps what the owners have
    for mine, theirs in zip(hosts[0].params, hosts[1].params, strict=True):
        kept = [p.ds_secondary_tensor.inner for p in (mine, theirs)]  # type: ignore[attr-defined]
        assert torch.equal(*kept)
        owned = [p.ds_tensor.inner for p in (mine, theirs)]  # type: ignore[attr-defined]
        assert torch.equal(kept[0], torch.cat(owned))
    for host in hosts:
        for param, gathered in zip(host.params, host.gathered, strict=True):
            assert torch.equal(param.ds_secondary_tensor.inner, gathered)


@codecs
def test_host_waits_grow_with_chunks_and_not_with_tensors(codec: Any) -> None:
    """Changes are packed for the network on the host: a chunk at a time."""
    few, many = (_train(codec, [math.ceil(768 / n)] * n) for n in (2, 16))
    assert len(few[0].hook._chunks) == len(many[0].hook._chunks) == 1
    counts = [sum(hosts[0].gpu.waits.values()) for hosts in (few, many)]
    assert counts[0] == counts[1] <= 20, [hosts[0].gpu.waits for hosts in (few, many)]


def _gathers_at_once(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(WeightsHook, "_wait_for_writes", lambda hook: None)


def _arrival_not_waited_for(patched: pytest.MonkeyPatch) -> None:
    receive = transfer.ReplicaTransfer.receive

    def at_once(sender: transfer.ReplicaTransfer) -> dict[int, Tensor]:
        sender._in_flight[0].handle = None
        return receive(sender)

    patched.setattr(transfer.ReplicaTransfer, "receive", at_once)


def _decoded_elsewhere(patched: pytest.MonkeyPatch) -> None:
    decode = WeightsHook._decode

    def aside(hook: Any, chunk: Any, packets: Any) -> None:
        gpu = torch.get_device_module(hook.device)
        side = gpu.Stream()
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            decode(hook, chunk, packets)

    patched.setattr(WeightsHook, "_decode", aside)


@pytest.mark.parametrize("seed", [_gathers_at_once, _arrival_not_waited_for, _decoded_elsewhere])
def test_a_seeded_fault_is_found(
    seed: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(monkeypatch)
    hosts = _train(Lossless, [200, 120])
    assert hosts[0].gpu.findings


def test_masters_of_a_group_that_stays_on_the_accelerator_meet_those_on_the_host() -> None:
    """`offload_optimizer.ratio` below 1: a chunk has parameters of either."""
    there = torch.device("meta")
    shard = torch.ones(8, device=there, dtype=torch.bfloat16)
    param = SimpleNamespace(ds_tensor=shard)
    pieces = [SimpleNamespace(param=param, group=g, start=0, size=8) for g in range(2)]
    hook: Any = object.__new__(WeightsHook)
    masters = [torch.ones(8), torch.ones(8, device=there)]
    hook._optimizer = SimpleNamespace(fp32_partitioned_groups_flat=masters)
    hook._counters, hook.codec = Counters(), SimpleNamespace(encode=_taken)
    hook.layout = NodeLayout(WORLD, 1, 5, "inside")
    hook._zero_padding = lambda *_: None
    assert hook._encode(pieces).device == there


def _taken(held: Tensor, master: Tensor) -> Tensor:
    """Return the master weights, as an uncompressed codec would."""
    assert held.device == master.device
    return master


def test_a_gather_is_ordered_behind_the_step() -> None:
    gpu = Gpu()
    with gpu.watched():
        shard, gathers, gathered = gpu.tensor(torch.ones(4)), gpu.Stream(), []

        def gather(params: list[Any], forward: bool, quantize: bool = False) -> None:
            with gpu.stream(gathers):
                gathered.append(shard * 1)

        of = "_PartitionedParameterCoordinator_"
        coordinator = SimpleNamespace(
            **{f"{of}_allgather_stream": gathers, f"{of}_all_gather_params_": gather},
            release_sub_module=None,
            fetch_sub_module=None,
        )
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        optimizer = SimpleNamespace(
            parameter_offload=SimpleNamespace(get_param_coordinator=lambda: coordinator),
            persistent_parameters=[],
            backward_epilogue=nothing,
            _post_step=nothing,
        )
        GatherHook(optimizer, Counters(), share=False)
        for _ in range(2):
            shard.mul_(2)
            optimizer._post_step()
            getattr(coordinator, f"{of}_all_gather_params_")([], True)
            gpu.current_stream().wait_stream(gathers)  # as DeepSpeed does behind a gather
    assert not gpu.findings
    assert not gpu.waits
    assert torch.equal(gathered[-1].inner, torch.full((4,), 4.0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_a_checksum_takes_weights_of_any_size_and_sees_any_bit(dtype: torch.dtype) -> None:
    some = torch.zeros(5, dtype=torch.float32).to(dtype)
    other = some.clone()
    other.view(torch.uint8)[-1] = 1
    assert _checksum(some) != _checksum(other)
