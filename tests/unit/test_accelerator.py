"""Host waits, kernels and memory of an exchange, and its independence of global settings.
docs/gpu.md has the defect of each test; the accelerator is pretended."""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from virtual import World, assemble

import ds_ckpt
from ds_ckpt.compression import Compressor, Dense, EntropyCoded, LowRank, Quantize, TopK
from tests.pretended_gpu import DEVICE, Gpu, in_threads

BESIDE = "blocks beside a low rank"
METHODS: dict[str, Compressor | None] = {
    "uncompressed": None,
    "owed": Dense(),
    **{f"{bits} bits": Quantize(bits=bits) for bits in (8, 4, 3, 2)},
    "blocks": TopK(density=0.05, values="bf16"),
    "low rank": LowRank(2),
    BESIDE: TopK(density=0.05),
}
SHAPES = ((48, 40), (16,), (24, 40), (33, 20))
every_method = pytest.mark.parametrize("method", METHODS)
CODED = {"1 bit": EntropyCoded(bits=1.0)}
"""Methods with many operators, slow on the pretended device: used where one test suffices."""


def _names(tensors: int) -> list[str]:
    return [f"p{i}" for i in range(tensors)]


def _gradients(world: int, seed: int, shapes=SHAPES) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(s, generator=generator, dtype=torch.float32).bfloat16() for s in shapes]
        for _ in range(world)
    ]


def _choose(method: str) -> Callable[[str, torch.Size], Compressor | None]:
    def choose(name: str, shape: torch.Size) -> Compressor | None:
        if method == BESIDE and name == "p0":
            return LowRank(2)
        return (METHODS | CODED)[method] if len(shape) > 1 else None

    return choose


class OnGpus:
    """A world whose processes have a pretended accelerator each."""

    def __init__(self, size: int, method: str, **options: Any) -> None:
        self.world = World(size, _choose(method), **options)
        self.gpus = [Gpu() for _ in range(size)]
        for gpu, exchange in zip(self.gpus, self.world.exchanges, strict=True):
            inside = [exchange.in_host.transport] if exchange.in_host is not None else []
            for transport in (exchange.transport, *inside):
                for name in ("all_to_all", "all_reduce"):
                    setattr(transport, name, gpu.uncounted(getattr(transport, name)))

    def reduce(self, gradients: list[list[Tensor]], scale: float = 1.0) -> list[list[Tensor]]:
        return self._run("average", gradients, scale)

    def hold(self, gradients: list[list[Tensor]], scale: float = 1.0) -> list[list[Tensor]]:
        return self._run("accumulate", gradients, scale)

    def _run(self, what: str, gradients: list[list[Tensor]], scale: float) -> list[list[Tensor]]:
        def work(p: int) -> list[Tensor]:
            tensors = [self.gpus[p].tensor(g.clone()) for g in gradients[p]]
            self.gpus[p].forget()
            call = getattr(self.world.exchanges[p], what)
            shards: list[Tensor] = call(_names(len(tensors)), tensors, scale)
            assert all(shard.device == DEVICE for shard in shards)
            return [shard.inner for shard in shards]  # type: ignore[attr-defined]

        with self.gpus[0].watched():
            return self.world.virtual.run(lambda p: in_threads(self.gpus[p], work)(p))

    def verdict(self) -> list[int]:
        """Non-finite buckets; what is counted is of this alone."""
        found = []
        for gpu, exchange in zip(self.gpus, self.world.exchanges, strict=True):
            gpu.forget()
            with gpu.seeing():
                found.append(exchange.nonfinite_buckets)
        self.world.commit()
        return found


@pytest.mark.parametrize(("method", "local"), itertools.product(METHODS, (1, 2)))
@pytest.mark.sampled(9)
def test_the_host_waits_for_no_bucket_and_once_per_step(method: str, local: int) -> None:
    """The delivered values are those of a CPU, up to the order of sums."""
    options: Any = {"local": local, "residual_dtype": "fp32" if local == 1 else "int8"}
    processes, plain = OnGpus(4, method, **options), World(4, _choose(method), **options)
    for step in range(3):
        gradients = _gradients(4, step)
        shards = processes.reduce(gradients, 1000.0)
        wanted = plain.reduce(_names(4), gradients, 1000.0)
        plain.commit()
        for a, b in zip(itertools.chain(*shards), itertools.chain(*wanted), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-6)
        assert [gpu.waits for gpu in processes.gpus] == [Counter()] * 4
        assert [gpu.findings for gpu in processes.gpus] == [[]] * 4
        assert processes.verdict() == [0] * 4
        assert [sum(gpu.waits.values()) for gpu in processes.gpus] == [1] * 4
    assert processes.world.exchanges[0].nonfinite_buckets == 0  # known by now


@pytest.mark.parametrize("room", ["engine", "exchange", "weights", "zero3"])
def test_nothing_that_owns_a_process_group_has_a_finalizer(room: str) -> None:
    """Python runs it at any time, in any thread: groups end by `destroy()` and `detach()` alone."""
    for path in (Path(ds_ckpt.__file__).parent / room).glob("*.py"):
        found = re.findall(r"__del__|\bfinalize\b|\batexit\b", path.read_text(encoding="utf-8"))
        assert not found, path


@every_method
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_flag_is_sent_without_being_read(method: str, bad: float) -> None:
    processes = OnGpus(3, method)
    gradients = _gradients(3, 0)
    gradients[1][2].view(-1)[7] = bad
    shards = processes.reduce(gradients)
    assert not any(gpu.waits for gpu in processes.gpus)
    if method == "uncompressed":  # these carry their own
        assert not torch.isfinite(assemble(shards, 2)).all()
        return
    assert torch.isfinite(assemble(shards, 1)).all()
    for i in (0, 2, 3):
        assert assemble(shards, i).isnan().all()
    assert processes.verdict() == [1] * 3


@pytest.mark.parametrize("method", ["uncompressed", "2 bits", "blocks", "low rank"])
@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.sampled(3)
def test_kernels_do_not_grow_with_processes(method: str, local: int) -> None:
    """The shards before the own one, those after it, and a short last one: three batches at most,
    where one is all there is with two processes."""
    shapes = ((64, 48), (64, 30), (128,))
    counts = {}
    for size in (2, 4, 16):
        processes = OnGpus(size * local, method, local=local)
        processes.reduce(_gradients(size * local, 0, shapes))
        counts[size] = max(sum(gpu.launches.values()) for gpu in processes.gpus)
    assert counts[16] <= 1.05 * counts[4]
    assert counts[16] <= 2.5 * counts[2]


# what an exchange needs is there before the first backward
@pytest.mark.parametrize(
    ("method", "local", "holds"),
    [*((method, 1, False) for method in METHODS), ("3 bits", 2, True), (BESIDE, 1, True)],
)
def test_preallocation_runs_all_that_a_step_runs_and_leaves_nothing(method, local, holds) -> None:
    """Kernels are those of the operators, messages those of every group, of the same sizes."""
    size = 2 * local
    processes = OnGpus(size, method, local=local, holds=holds)
    sent = _messages(processes)
    bucket = [(n, torch.Size(s), torch.bfloat16) for n, s in zip(_names(4), SHAPES, strict=True)]
    seen: list[set[str]] = []
    for sends in (False, True):
        if sends:
            assert not sent

        def preallocate(p: int, sends: bool = sends) -> None:
            processes.world.exchanges[p].preallocate(bucket, DEVICE, sends=sends)

        with processes.gpus[0].watched():
            processes.world.virtual.run(lambda p: in_threads(processes.gpus[p], preallocate)(p))
        seen += [set(gpu.launches) for gpu in processes.gpus]
    assert not any(feedback.state_dict() for feedback in processes.world.feedbacks)
    preallocated = set(sent)
    sent.clear()
    for step in range(2):
        if holds:
            processes.hold(_gradients(size, step))
        processes.reduce(_gradients(size, step))
        new = [set(gpu.launches) - seen[0] for gpu in processes.gpus]
        assert new == [set()] * size
        processes.verdict()
    # with a residual, as with none
    assert {(group, what) for group, what, _ in sent} == {(g, w) for g, w, _ in preallocated}
    assert set(sent) <= preallocated


def _messages(processes: OnGpus) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return what is sent from here on, by any process: level, collective, sizes."""
    sent: list[tuple[str, str, tuple[int, ...]]] = []

    def noting(call: Callable[..., Any], *what: str) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            sent.append((*what, tuple(args[3]) if len(args) > 1 else tuple(args[0].shape)))
            return call(*args)

        return noted

    for exchange in processes.world.exchanges:
        levels = {"between": exchange.transport}
        if exchange.in_host is not None:
            levels["inside"] = exchange.in_host.transport
        for level, transport in levels.items():
            for name in ("all_to_all", "all_reduce"):
                setattr(transport, name, noting(getattr(transport, name), level, name))
    return sent


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def everything_of(method, residual_dtype="fp32", around=contextlib.nullcontext, local=1) -> list:
    """Return all that three steps of an accumulating world deliver and leave."""
    size = 3 * local
    world = World(size, _choose(method), holds=True, local=local, residual_dtype=residual_dtype)
    everything: list[Tensor] = []
    for step in range(3):
        held, last = _gradients(size, 2 * step), _gradients(size, 2 * step + 1)

        def work(p: int, held=held, last=last) -> list[Tensor]:
            exchange = world.exchanges[p]
            with around():
                exchange.accumulate(_names(4), [t.clone() for t in held[p]], 1000.0)
                out = exchange.average(_names(4), [t.clone() for t in last[p]], 1000.0)
                assert not exchange.nonfinite_buckets
                world.feedbacks[p].commit()
                left = world.feedbacks[p].state_dict()
            return [*out, *left.values()]

        everything += [t for process in world.virtual.run(work) for t in process]
        for factors in world.factors:
            factors.commit()
    return everything


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
    "gradients recorded": torch.enable_grad,
}
AROUND = (*SURROUNDINGS, "another default type")


@pytest.mark.parametrize(
    ("method", "residual_dtype", "around"),
    [
        *itertools.product(METHODS | CODED, ("fp32",), AROUND),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in itertools.product(METHODS, ("bf16", "int8"), AROUND)
        ),
    ],
)
def test_surroundings_change_no_bit(method, residual_dtype, around) -> None:
    plain = everything_of(method, residual_dtype)
    with _default_dtype(torch.bfloat16 if around not in SURROUNDINGS else torch.float32):
        inside = SURROUNDINGS.get(around, contextlib.nullcontext)
        other = everything_of(method, residual_dtype, inside)
    for a, b in zip(plain, other, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@every_method
@pytest.mark.usefixtures("deterministic")
def test_every_operator_has_a_deterministic_form_on_cuda(method: str) -> None:
    processes = OnGpus(3, method, holds=True, residual_dtype="int8")
    processes.hold(_gradients(3, 0))
    processes.reduce(_gradients(3, 1))
    # they add in any order, unless a program asks for deterministic algorithms
    atomics = {"index_add_", "index_put_", "scatter_add_", "scatter_reduce_"}
    assert not any(atomics & gpu.launches.keys() for gpu in processes.gpus)


@pytest.mark.usefixtures("deterministic")
def test_every_operator_of_entropy_coding_has_a_deterministic_form_on_cuda() -> None:
    codec, values = CODED["1 bit"], torch.randn(2, 5000)
    assert isinstance(codec, EntropyCoded)
    payloads = torch.empty(2, codec.packed_bytes(5000), dtype=torch.uint8)
    with Gpu(plain=True).watched():
        codec.pack_rows(values, payloads)
        codec.unpack_add_rows(payloads, torch.zeros(5000))


@pytest.mark.parametrize("residual_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("local", [1, 2])
def test_residuals_are_there_before_the_first_step(residual_dtype, local) -> None:
    world = World(2 * local, _choose("3 bits"), local=local, residual_dtype=residual_dtype)
    shapes = [(name, torch.Size(shape)) for name, shape in zip(_names(4), SHAPES, strict=True)]
    for exchange in world.exchanges:
        exchange.reserve(shapes, torch.device("cpu"))
    before = [feedback.nbytes for feedback in world.feedbacks]
    assert all(before)
    assert not any(feedback.has_residual("p0") for feedback in world.feedbacks)
    for step in range(3):
        world.reduce(_names(4), _gradients(2 * local, step))
        world.commit()
        assert [feedback.nbytes for feedback in world.feedbacks] == before
    # a step that sends everything leaves no residual and frees no memory
    world.reduce(_names(4), _gradients(2 * local, 3), choose=lambda name, shape: None)
    world.commit()
    assert not any(feedback.has_residual("p0") for feedback in world.feedbacks)
    assert [feedback.nbytes for feedback in world.feedbacks] == before
