"""The side stream's order of events, on a device module that only writes down what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_ckpt.activation.offload import Copies, SideStream, copies_for


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wait_stream(self, other: Any) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def wait_event(self, event: Any) -> None:
        self._log.append(f"{self._name} waits for {event.name}")


class Module:
    """Like `torch.cuda`, as far as copies need it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = Stream("compute", self.log)
        self.current = self.compute
        self._events = 0

    def Stream(self, device: Any) -> Stream:  # noqa: N802 - torch's name
        return Stream("side", self.log)

    def current_stream(self, device: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def Event(self) -> Any:  # noqa: N802 - torch's name
        module = self
        module._events += 1

        class Event:
            name = f"copy {module._events}"

            def record(self, stream: Stream) -> None:
                module.log.append(f"{self.name} on {stream._name}")

            def query(self) -> bool:
                return False

        return Event()


class Watched(torch.Tensor):
    """Notes on which stream it is copied into, and how."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        self.module.log.append(  # type: ignore[attr-defined]
            f"copied on {self.module.current._name}, non_blocking={non_blocking}"  # type: ignore[attr-defined]
        )
        return self


def test_a_copy_comes_after_what_was_asked_and_before_what_follows_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    copies = SideStream(torch.device("cuda", 0))
    target = torch.empty(4).as_subclass(Watched)
    target.module = module  # type: ignore[attr-defined]
    first = copies.copy(torch.ones(4), target)
    copies.copy(torch.ones(4), target)
    assert not first.done()
    first.wait()
    assert module.log == [
        "side waits for compute",
        "copied on side, non_blocking=True",
        "copy 1 on side",
        "side waits for compute",
        "copied on side, non_blocking=True",
        "copy 2 on side",
        "compute waits for copy 1",
    ]


def test_the_stand_in_copies_at_once() -> None:
    copies = copies_for(torch.device("cpu"))
    assert type(copies) is Copies
    target = torch.zeros(4)
    ticket = copies.copy(torch.ones(4), target)
    assert ticket.done()
    assert torch.equal(target, torch.ones(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gradients_through_a_real_side_stream() -> None:
    from ds_ckpt.activation.inputs import Keeping, build_inputs
    from ds_ckpt.activation.install import CheckpointedBlocks
    from ds_ckpt.activation.policies import Policy, make_plan
    from tests.unit.offload_models import batch, build, equal, gradients

    device = torch.device("cuda", torch.cuda.current_device())
    model = build("llama").to(device)
    data = {k: v.to(device) for k, v in batch().items()}
    plain = gradients(model, data)
    units = make_plan(model, Policy())
    keeping = Keeping(offload=True, offload_min_bytes=0)
    boundaries = build_inputs(keeping, model, units, device)
    assert boundaries is not None
    CheckpointedBlocks(model, units=units, around=boundaries.around)
    for _ in range(5):
        assert equal(plain, gradients(model, data))
    assert boundaries.store is not None
    counters = boundaries.store.counters
    assert counters.out == counters.back
    assert counters.out.total() >= 15
