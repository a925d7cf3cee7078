"""The header of packets, and the sections of payloads."""

from __future__ import annotations

import pytest
import torch
from virtual import World

from ds_ckpt.compression import Quantize, wire


@pytest.mark.parametrize("finite", [True, False])
def test_headers_carry_the_flag_and_the_version(finite: bool) -> None:
    headers = torch.full((3, wire.HEADER_BYTES + 8), 0xAA, dtype=torch.uint8)[:, :-8]
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
