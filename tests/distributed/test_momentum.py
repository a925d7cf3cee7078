"""Momentum correction on real ZeRO-3 engines: when it is active, on which groups, what is left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_compression, cases_momentum
from tests.distributed.models import topk_section

OWN = 0.9


def section_of(momentum: Any = 0.4, **compression: Any) -> dict[str, Any]:
    feedback = {"momentum": momentum}
    return topk_section(topk={"density": 0.05}, error_feedback=feedback, **compression)


@pytest.mark.parametrize(
    "options",
    [{"accumulation": 2}, {"offload_optimizer": True, "clip": 0.1}, {"bf16": {"enabled": True}}],
    ids=["accumulation", "offload", "bf16"],
)
@pytest.mark.sampled(2)
def test_the_first_moment_is_corrected_from_the_warm_ups_end(
    world2: Any, options: dict[str, Any]
) -> None:
    one, other = world2.run(cases_momentum.stepped, section_of(warmup_steps=2), 4, **options)
    assert one == other
    assert one["outside"]
    warm, compressed = one["seen"][:2], one["seen"][2:]
    assert all(b1 == OWN for step in warm for _, b1 in step)
    for step in compressed:
        assert {group for group, _ in step} == {0, 1}
        assert all(b1 < OWN if group == 0 else b1 == OWN for group, b1 in step)  # norms: dense
    assert "momentum correction 0.4" in one["summary"]


def test_it_is_off_by_default(world2: Any) -> None:
    off, on = (
        world2.run(cases_compression.run, "llama", section_of(how), 3)[0] for how in ("none", 0.4)
    )
    plain = world2.run(cases_compression.run, "llama", topk_section(topk={"density": 0.05}), 3)[0]
    assert off["losses"] == plain["losses"]
    assert off["weights"] == plain["weights"]
    assert on["losses"][:1] == off["losses"][:1]
    assert on["losses"] != off["losses"]


def test_another_optimizer_is_not_corrected(world2: Any) -> None:
    for summary in world2.run(cases_momentum.left_alone, section_of()):
        assert "SGD is not" in summary.partition("no momentum correction: ")[2]


def test_detach_leaves_the_optimizer_as_it_was_found(world2: Any) -> None:
    for process in world2.run(cases_compression.detach_restores, section_of()):
        assert process["changed"]
        assert process["left"] == []
