"""Streams, checked without an accelerator: offload, the exchange, residuals on the host, and seeded
faults that the check must find. docs/gpu.md lists what `pretended_gpu` models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from offload_models import Model, put_on
from torch import Tensor
from virtual import World

from ds_ckpt.activation.offload import BlockCall, InputStore, SideStream, Wait
from ds_ckpt.activation.policies import Policy, PolicySettings
from ds_ckpt.compression import Feedback, Quantize
from ds_ckpt.weights import lossless
from tests.pretended_gpu import DEVICE, Gpu, Stream, in_threads

# ---- the check itself: a copy to the host on a side stream


def _copied_out(
    gpu: Gpu, *, behind: bool = True, waited: bool = True, read: str = "", recorded: bool = False
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
        if waited:
            event.wait()
        if read == "behind":
            event.synchronize()
        if read:
            host.sum()
        del x
        gpu.tensor(torch.ones(1000)) * 3


@pytest.mark.parametrize(
    "right", [{}, {"read": "behind"}, {"waited": False, "recorded": True}], ids=str
)
def test_ordered_accesses_are_no_finding(right: dict[str, Any]) -> None:
    gpu = Gpu()
    _copied_out(gpu, **right)
    assert not gpu.findings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"behind": False}, "reads what mul"),
        ({"waited": False}, "freed to default"),
        ({"read": "at once", "waited": False}, "sum on host reads what copy_"),
    ],
    ids=str,
)
def test_unordered_accesses_are_findings(wrong: dict[str, Any], words: str) -> None:
    gpu = Gpu()
    _copied_out(gpu, **wrong)
    assert any(words in finding for finding in gpu.findings), gpu.findings


def test_writing_over_what_another_stream_still_reads_is_found() -> None:
    gpu = Gpu()
    with gpu.watched():
        x, side = gpu.tensor(torch.ones(8)), gpu.Stream()
        y = x + 1
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            z = y * 2
        y.zero_()
        assert len(gpu.findings) == 1
        assert "zero_ on default writes what mul" in gpu.findings[0]
        gpu.current_stream().wait_stream(side)
        y.zero_()
        z.sum()
        assert len(gpu.findings) == 1


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


# ---- offload


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
        how = Policy(PolicySettings(policy), modules=("Block",))
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


def _not_behind_compute(patched: pytest.MonkeyPatch) -> None:
    def copy(self: SideStream, source: Tensor, target: Tensor) -> Wait:
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return lambda: self._wait(event)

    patched.setattr(SideStream, "copy", copy)


def _nobody_waits(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(SideStream, "_wait", lambda stream, event: None)


def _let_go_at_once(patched: pytest.MonkeyPatch) -> None:
    def ended(self: InputStore, call: BlockCall) -> None:
        for kept in self._leaving:
            kept.original = kept.pending = None
            kept.aliases.clear()
        self._leaving.clear()

    patched.setattr(InputStore, "ended", ended)


@pytest.mark.parametrize("seed", [_not_behind_compute, _nobody_waits, _let_go_at_once])
@pytest.mark.parametrize("policy", ["block", "offload"])
def test_a_seeded_fault_of_offload_is_found(
    plain: Gpu,
    seed: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    seed(monkeypatch)
    _train(plain, policy=policy)
    assert plain.findings


# ---- the exchange, with residuals on the device and on the host


def _exchanged(gpus: list[Gpu], where: Any, *, on: Stream | None = None) -> None:
    world = World(2, lambda name, shape: Quantize(bits=3))
    for exchange, p in zip(world.exchanges, range(2), strict=True):
        exchange.feedback = world.feedbacks[p] = Feedback(device=where, dtype="int8", seed=p)
    shapes = [(name, torch.Size([48, 64])) for name in ("w", "v")]

    def step(p: int) -> None:
        gpu = gpus[p]
        if not world.feedbacks[p].steps:
            world.exchanges[p].reserve(shapes, DEVICE)
        with gpu.stream(on if p == 0 else None):
            made = gpu.tensor(torch.randn(48, 64).bfloat16()) * 1.0
            gpu.waits.clear()
            world.exchanges[p].average(["w", "v"], [made, made + 1.0], 8.0)
        assert not gpu.waits

    with gpus[0].watched():
        for _ in range(3):
            world.virtual.run(lambda p: in_threads(gpus[p], step)(p))
            world.commit()


@pytest.mark.parametrize("where", ["accelerator", "cpu"])
def test_an_exchange_is_ordered_and_waits_for_nothing(where: str) -> None:
    gpus = [Gpu(), Gpu()]
    _exchanged(gpus, where)
    assert [gpu.findings for gpu in gpus] == [[], []]


# ---- weights between hosts


def test_lossless_changes_make_the_host_wait_a_chunk_at_a_time() -> None:
    """They are coded on the host, after the optimizer: as often for much as for little."""
    counts = []
    for numel in (300, 30000):
        gpu = Gpu()
        old = torch.randn(numel).bfloat16()
        new = (old.float() + 1e-3 * torch.randn(numel)).bfloat16()
        with gpu.watched():
            here, there = gpu.tensor(old.clone()), gpu.tensor(old.clone())
            payload = lossless.encode(here, gpu.tensor(new.clone()))
            lossless.decode_(there, payload)
        assert torch.equal(there.inner, new)  # type: ignore[attr-defined]
        assert not gpu.findings
        counts.append(sum(gpu.waits.values()))
    assert counts[0] == counts[1] <= 20
