"""Streams, checked without an accelerator: offload, the exchange, residuals and weights between
hosts. docs/gpu.md lists what `pretended_gpu` models; `tests.faults` seeds faults of order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from offload_models import Model, put_on
from torch import Tensor
from virtual import World

from ds_ckpt.activation.offload import SideStream
from ds_ckpt.activation.policies import Policy, make_policy
from ds_ckpt.compression import Dense, Feedback, LowRank, Quantize, TopK
from ds_ckpt.lab.validate.virtual import VirtualWorld
from ds_ckpt.telemetry import Counters
from ds_ckpt.weights import changes, lossless, transfer
from ds_ckpt.weights.changes import Lossless, NodeLayout, Whole
from ds_ckpt.zero3.gather import GatherHook
from ds_ckpt.zero3.weights_hook import WeightsHook, _checksum
from tests.pretended_gpu import DEVICE, HOST, Gpu, in_threads


def _copied_out(
    gpu: Gpu, *, behind=True, waited=True, read="", recorded=False, overwritten=False
) -> None:
    with gpu.watched():
        host = torch.empty(1000)
        x = gpu.tensor(torch.ones(1000)) * 2
        side = gpu.Stream()
        if behind:
            side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            host.copy_(x, non_blocking=True)
            event = side.record_event()
        if recorded:
            x.record_stream(side)
        if overwritten:
            x.zero_()
        if waited:
            event.wait()
        if read == "behind":
            event.synchronize()
        if read:
            host.sum()
        del x
        gpu.tensor(torch.ones(1000)) * 3


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, ""),
        ({"read": "behind"}, ""),
        ({"waited": False, "recorded": True}, ""),
        ({"behind": False}, "reads what mul"),
        ({"waited": False}, "freed to default"),
        ({"read": "at once", "waited": False}, "sum on host reads what copy_"),
        ({"overwritten": True, "waited": False}, "zero_ on default writes what copy_"),
    ],
    ids=str,
)
def test_only_unordered_accesses_are_findings(how: dict[str, Any], words: str) -> None:
    gpu = Gpu()
    _copied_out(gpu, **how)
    assert bool(gpu.findings) == bool(words)
    assert not words or any(words in finding for finding in gpu.findings), gpu.findings


@pytest.mark.parametrize(
    ("waits", "read"),
    [
        (1, lambda x: x.sum().item()),
        (1, lambda x: x.cpu()),
        (1, lambda x: x[x > 0]),
        (1, lambda x: x.copy_(torch.ones(4))),
        (0, lambda x: x.copy_(torch.ones(4), non_blocking=True)),
        (0, lambda x: torch.where(x > 0, x, 0.0)),
    ],
)
def test_host_waits_are_counted(waits: int, read: Callable[[Tensor], Any]) -> None:
    gpu = Gpu()
    with gpu.watched():
        read(gpu.tensor(torch.ones(4)))
    assert sum(gpu.waits.values()) == waits


@pytest.fixture
def plain() -> Iterator[Gpu]:
    """Offload reads tensors' addresses: every plain tensor is the device's."""
    gpu = Gpu(plain=True)
    allocate = SideStream.host_buffer

    def in_host_memory(stream: SideStream, nbytes: int) -> Tensor:
        with gpu.host_memory():
            return allocate(stream, nbytes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SideStream, "host_buffer", in_host_memory)
        yield gpu


def _train(gpu: Gpu, *, dropped: bool = False, policy: str = "block") -> int:
    """Train a model whose blocks' inputs, or all that they save, leave; return how many did."""
    with gpu.watched():
        model = Model(width=32)
        how = Policy(make_policy(policy), modules=("Block",))
        blocks, store = put_on(model, None, policy=how, copies=SideStream(torch.device("cpu")))
        for step in range(3):
            loss = model(torch.randn(8, 32))
            if not (dropped and step == 1):
                loss.backward()
            del loss
            model.zero_grad()
        moved = store.counters.out.total()
        blocks.remove()
        del store, blocks
    return moved


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("policy", ["block", "offload"])
def test_offload_is_ordered_and_waits_for_nothing(plain: Gpu, dropped: bool, policy: str) -> None:
    assert _train(plain, dropped=dropped, policy=policy) >= 3 * 3 * (1 + 2 * (policy == "offload"))
    assert plain.findings == []
    assert not [place for place in plain.waits if "ds_ckpt" in place]


def _on_nccls_stream(gpu, comm, collective) -> Callable[..., None]:
    """A collective whose caller's stream waits for it, and no other."""

    def call(*given: Any) -> None:
        gpu.uncounted(collective)(*given)
        tensors = [t for t in given if isinstance(t, Tensor)]
        comm.wait_stream(gpu.current_stream())
        with gpu.stream(comm):
            gpu.kernel("collective", [], [t.inner for t in tensors], host=False)  # type: ignore[attr-defined]
        for tensor in tensors:
            gpu.keep_for(tensor, comm)
        gpu.current_stream().wait_stream(comm)

    return call


@pytest.mark.parametrize("where", ["accelerator", "cpu"])
@pytest.mark.parametrize("compressor", [Dense(), Quantize(bits=3), TopK(density=0.05), LowRank(2)])
def test_neither_backward_nor_the_host_waits_for_an_exchange(compressor, where) -> None:
    """DeepSpeed's reduction stream does, with the next bucket; backward's end waits for it."""
    world, gpus = World(2, lambda name, shape: compressor), [Gpu(), Gpu()]
    streams = [(gpu.current_stream(), gpu.Stream(), gpu.Stream()) for gpu in gpus]
    for p, exchange in enumerate(world.exchanges):
        exchange.feedback = world.feedbacks[p] = Feedback(device=where, dtype="int8", seed=p)
        for name in ("all_to_all", "all_reduce"):
            collective = getattr(exchange.transport, name)
            call = _on_nccls_stream(gpus[p], streams[p][2], collective)
            setattr(exchange.transport, name, call)

    def backward(p: int) -> None:
        gpu, (compute, reduction, comm) = gpus[p], streams[p]
        clocks = [(who, other) for who in (compute, "host") for other in (reduction, comm)]
        before = [gpu.seen[who].get(other, 0) for who, other in clocks]
        held: list[Tensor] = []
        if not world.feedbacks[p].steps:
            shapes = [(f"w{bucket}", torch.Size([48, 64])) for bucket in range(3)]
            world.exchanges[p].reserve(shapes, DEVICE)
        for bucket in range(3):
            held.append(gpu.tensor(torch.randn(48, 64).bfloat16()) * 1.0)
            reduction.wait_stream(compute)
            with gpu.stream(reduction):
                held += world.exchanges[p].average([f"w{bucket}"], held[-1:], 8.0)
        assert [gpu.seen[who].get(other, 0) for who, other in clocks] == before
        compute.wait_stream(reduction)
        after = [gpu.seen[who].get(other, 0) for who, other in clocks]
        assert all(now > then for now, then in zip(after[:2], before[:2], strict=True))
        assert not gpu.waits

    with gpus[0].watched():
        for _ in range(3):
            world.virtual.run(lambda p: in_threads(gpus[p], backward)(p))
            world.commit()
    assert [gpu.findings for gpu in gpus] == [[], []]


# weights, gathered and sent between hosts; what stands in for DeepSpeed gathers on a stream of its
# own, which waits for no other
WORLD = 2
# DeepSpeed reads the rank before it decides not to log
partition_parameters.print_rank_0 = lambda *_, **__: None


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
        self.ds_id, self.ds_numel = number, shard.numel() * host.world
        self.ds_shape = torch.Size([self.ds_numel])
        self.ds_tensor, self.data, self._host = shard, shard, host
        self.ds_status, self.device = ZeroParamStatus.NOT_AVAILABLE, shard.device

    def partition_numel(self) -> int:
        return self.ds_numel // self._host.world

    def all_gather(self) -> None:
        shard, world = self.ds_tensor, self._host.world
        self.data, sizes = shard.new_empty(self.ds_numel), [2 * shard.numel()] * world
        given = shard.repeat(world).view(torch.uint8)
        self._host.all_to_all(self.data.view(torch.uint8), given, sizes, sizes)
        self.data.mul_(1)  # collectives write unseen

    def all_gather_coalesced(self, params: list[_Param]) -> Any:
        """Gather over a node with several ranks; not called here."""


class _Host:
    """One process with a pretended accelerator, its parameters and its optimizer."""

    def __init__(self, number: int, world: VirtualWorld, sizes: list[int], codec: Any) -> None:
        self.number, self.gpu, self.maker = number, Gpu(), _Maker()
        self.transport, self.codec, self.sizes = world.transports[number], codec, sizes
        self.world, self.sent_before, self.awaited = len(world.transports), 0, [0]
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
        layout, step = NodeLayout(self.world, 1, self.number, "inside"), self.gather_hook
        way = layout, "between", self.all_to_all_single, self.codec, Counters(), step
        forward: Any = SimpleNamespace(before_forward=[])
        params = {f"p{i}": param for i, param in enumerate(self.params)}
        self.hook = WeightsHook(self.optimizer, params, *way, forward)

    def all_to_all(self, out: Tensor, given: Tensor, receive: Any, send: Any) -> None:
        self.gpu.uncounted(self.transport.all_to_all)(out, given, receive, send)

    def all_to_all_single(self, out, given, receive, send, group, async_op) -> Any:
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
        self.gpu.begin()
        self.sent_before = self.gpu.seen[self.comm].get(self.comm, 0)
        self.optimizer._reassign_or_swap_out_partitioned_parameters(0)
        self.gather_hook.around_post_step(lambda: None)
        assert [*vars(self.hook._coordinator).values()] == [0], "prefetches while in flight"
        self.moved = self.gpu.moved[self.gpu.current_stream()]
        self.awaited = [self._awaited()]

    def _awaited(self) -> int:
        """Return the last message of this step that the compute stream or the host waited for."""
        both = self.gpu.seen[self.gpu.current_stream()], self.gpu.seen[HOST]
        return max(clock.get(self.comm, 0) for clock in both) - self.sent_before

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
            self.awaited.append(self._awaited())


def trained_hosts(codec: Callable[[], Any], sizes: list[int], size: int = WORLD) -> list[_Host]:
    """Three steps of two hosts; what is counted is of the last one."""
    world = VirtualWorld(size, timeout_s=600.0)
    hosts = [_Host(p, world, sizes, codec()) for p in range(size)]

    here = threading.local()

    def work(p: int) -> None:
        here.gpu = hosts[p].gpu
        hosts[p].start()
        hosts[p].forward()
        for number in range(3):
            hosts[p].step(number)
            hosts[p].forward()

    with hosts[0].gpu.watched(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "get_device_module", lambda device=None: here.gpu)
        world.run(lambda p: in_threads(hosts[p].gpu, work)(p))
    return hosts


class InterpretedKernel:
    """A kernel of `lossless`, run by Triton's interpreter, one at a time, on the device."""

    one_at_a_time = threading.Lock()

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            inner = [a.inner for a in args if isinstance(a, Tensor)]
            gpu = torch.get_device_module(DEVICE)
            with self.one_at_a_time:
                run = gpu.uncounted(self._kernel[grid])
                run(*(getattr(a, "inner", a) for a in args), **constants)
            gpu.kernel("kernel", [], inner, host=False)

        return launch


@pytest.fixture
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A codec; of lossless changes with kernels, or on the host."""
    kind, has_kernels = request.param
    monkeypatch.setattr(lossless.fused, "is_supported", lambda *_: has_kernels)
    if has_kernels:
        kernels = pytest.importorskip("ds_ckpt.weights.lossless_kernels")
        for name in ("encode", "find_ones", "decode"):
            monkeypatch.setattr(kernels, name, InterpretedKernel(getattr(kernels, name)))
    return kind


KINDS = {"whole": (Whole, False), "kernels": (Lossless, True), "host": (Lossless, False)}
codecs = pytest.mark.parametrize("codec", KINDS.values(), ids=KINDS, indirect=True)


@codecs
def test_weights_between_hosts_are_ordered(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CHUNK", 300)  # several chunks, of which two fly at a time
    monkeypatch.setattr(transfer, "IN_FLIGHT", 2)
    hosts = trained_hosts(codec, [200, 120, 64, 320, 8])
    assert len(hosts[0].hook._chunks) > 2
    # before a gather needs a chunk only the lengths of lossless changes are waited for
    lengths, needed = int(codec is Lossless), hosts[0].hook._chunk_of
    for host in hosts:
        assert host.awaited == [lengths, *(lengths + 1 + needed[p.ds_id] for p in host.params)]
        assert [*vars(host.hook._coordinator).values()] == [1], "prefetches again"
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
@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_only_lengths_are_read_on_the_host_if_there_are_kernels(codec, chunk, monkeypatch) -> None:
    monkeypatch.setattr(changes, "CHUNK", chunk)
    has_kernels = lossless.fused.is_supported(DEVICE)
    for number in (2, 16):
        host = trained_hosts(codec, [math.ceil(768 / number)] * number)[0]
        most = 0 if codec is Whole else 1 if has_kernels else 9 * len(host.hook._chunks)
        assert sum(host.gpu.waits.values()) <= most, host.gpu.waits
        assert host.moved <= (20 if codec is Whole else 40) * 768  # of the compute stream, a step


def test_masters_of_a_group_that_stays_on_the_accelerator_meet_those_on_the_host() -> None:
    """`offload_optimizer.ratio` below 1: a chunk has parameters of either."""
    there = torch.device("meta")
    shard = torch.ones(8, device=there, dtype=torch.bfloat16)
    param = SimpleNamespace(ds_tensor=shard)
    pieces = [SimpleNamespace(param=param, group=g, start=0, size=8) for g in range(2)]
    hook: Any = object.__new__(WeightsHook)
    masters = [torch.ones(8), torch.ones(8, device=there)]
    hook._optimizer = SimpleNamespace(fp32_partitioned_groups_flat=masters)
    hook._counters, hook.codec = Counters(), Whole()
    hook.layout = NodeLayout(WORLD, 1, 5, "inside")
    hook._zero_padding = lambda *_: None
    assert hook._encode(pieces).device == there


def test_a_gather_is_ordered_behind_the_step() -> None:
    gpu = Gpu()
    with gpu.watched():
        shard, gathers, gathered = gpu.tensor(torch.ones(4)), gpu.Stream(), []

        def gather(params: list[Any], forward: bool, quantize: bool = False) -> None:
            with gpu.stream(gathers):
                gathered.append(shard * 1)

        of = "_PartitionedParameterCoordinator_"
        parts = {f"{of}_allgather_stream": gathers, f"{of}_all_gather_params_": gather}
        coordinator = SimpleNamespace(**parts, release_sub_module=None, fetch_sub_module=None)
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
        parts = {"persistent_parameters": [], "backward_epilogue": nothing, "_post_step": nothing}
        optimizer = SimpleNamespace(parameter_offload=offload, **parts)
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
