"""Two levels on real ZeRO-3 engines: four ranks that act as two nodes of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import cases_levels as cases
from tests.distributed.models import quantize_section, topk_section

TWO = [2, 2]
SLOW = pytest.mark.slow
SECTIONS = {
    "topk": topk_section(topk={"density": 0.05}),
    "powersgd": topk_section(method="powersgd", powersgd={"rank": 2}),
    "both": topk_section(
        method="powersgd", powersgd={"rank": 2}, rules=[{"match": "*.mlp.*", "method": "quantize"}]
    ),
}


@pytest.mark.parametrize(
    ("section", "accumulation"),
    [("both", 2), pytest.param("topk", 2, marks=SLOW), pytest.param("powersgd", 1, marks=SLOW)],
)
def test_nothing_is_lost(world4: Any, section: str, accumulation: int) -> None:
    for process in world4.run(cases.conservation, TWO, SECTIONS[section], 3, accumulation):
        assert process["levels"] == 2
        assert process["unsent"] > 0
        assert process["worst"] < 3e-5


def test_dense_over_two_levels_trains_like_deepspeed(world4: Any) -> None:
    baseline = world4.run(cases.run, [4], "llama", {}, 4)
    ours = world4.run(cases.run, TWO, "llama", {"compression": {"method": "dense"}}, 4)
    for expected, got in zip(baseline, ours, strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], abs=1e-4)


def test_residuals_are_divided_by_the_ranks_of_a_node(world4: Any) -> None:
    section = quantize_section()
    for two, one in zip(
        world4.run(cases.entries_held, TWO, section),
        world4.run(cases.entries_held, [4], section),
        strict=True,
    ):
        assert one["held"] == one["whole"]
        assert two["held"] == pytest.approx(two["whole"] / 2, rel=0.02)
        assert "gradient bytes between nodes" in two["summary"]
        assert "gradient bytes between ranks" in one["summary"]


def test_hosts_that_allow_no_two_levels(world4: Any) -> None:
    for message in world4.run(cases.refused, [1, 3]):
        assert "$.ds_ckpt.compression.exchange.levels" in message
        assert "unequal numbers of ranks (1, 3)" in message
    one = world4.run(cases.entries_held, [1, 3], SECTIONS["topk"])[0]
    assert one["held"] == one["whole"]


def test_a_checkpoint_with_two_levels_keeps_residuals_on_the_same_nodes_alone(
    world4: Any, tmp_path: Path
) -> None:
    for start, end in ((TWO, [4]), ([4], TWO), (TWO, TWO)):
        folder = str(tmp_path / f"{len(start)}to{len(end)}")
        saved = world4.run(cases.save, start, folder, SECTIONS["both"], 3)[0]
        loaded, losses = world4.run(cases.load, end, folder, SECTIONS["both"])[0]
        assert any(total.abs().sum() > 0 for total in saved.values())
        if start != end:
            assert loaded == {}
        else:
            assert saved.keys() == loaded.keys()
            for name, total in saved.items():
                assert torch.allclose(loaded[name], total, rtol=1e-6, atol=1e-9)
        assert all(loss == loss for loss in losses)
