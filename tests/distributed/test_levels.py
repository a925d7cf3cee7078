"""Two levels on real ZeRO-3 engines: four ranks that act as two nodes of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ckpt
from ds_ckpt.engine.gradients import shapes_of
from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import hosts, ranks
from tests.distributed.test_compression import SECTIONS
from tests.distributed.training import DENSE, running, trained, unsent


@ranks(2, 2)
def test_dense_over_two_levels_trains_like_deepspeed() -> None:
    expected = trained("llama", {}, 4).losses
    with running("llama", DENSE) as engine:
        assert models.train(engine, "llama", 4) == pytest.approx(expected, abs=1e-4)


def _entries_held(section: dict[str, Any]) -> tuple[int, int, str]:
    """Entries of residuals that this process holds, those of their parameters, and the summary."""
    with running("llama", section) as engine:
        session = ds_ckpt.session_of(engine)
        models.train(engine, "llama", 2)
        held = sum(r.numel() for r in session.residuals.values())
        whole = sum(s.numel() for n, s, _ in shapes_of(engine) if n in session.residuals)
        return held, whole, session.summary


@pytest.mark.parametrize(
    ("slots", "share", "between"), [([2, 2], 0.5, "nodes"), ([4], 1.0, "ranks")], ids=str
)
@ranks()
def test_residuals_are_divided_by_the_ranks_of_a_node(share: float, between: str) -> None:
    held, whole, summary = _entries_held(SECTIONS["4 bits"])
    assert held == pytest.approx(share * whole, rel=0.02 if share < 1 else 0)
    assert f"gradient bytes between {between}" in summary


@ranks(1, 3)
def test_hosts_that_allow_no_two_levels() -> None:
    section = topk_section(exchange={"levels": 2})
    with pytest.raises(ds_ckpt.UnsupportedError) as error, running("llama", section):
        pass
    assert "$.ds_ckpt.compression.exchange.levels" in str(error.value)
    assert "unequal numbers of ranks (1, 3)" in str(error.value)
    held, whole, _ = _entries_held(SECTIONS["topk"])
    assert held == whole


@pytest.mark.parametrize(
    ("start", "end"), [([2, 2], [4]), ([4], [2, 2]), ([2, 2], [2, 2])], ids=str
)
@ranks(4)
def test_a_checkpoint_with_two_levels_keeps_residuals_on_the_same_nodes_alone(
    tmp_path: Path, start: list[int], end: list[int]
) -> None:
    with hosts(start), running("llama", SECTIONS["powersgd and 4 bits"]) as engine:
        models.train(engine, "llama", 3)
        engine.save_checkpoint(str(tmp_path))
        saved = unsent(engine)
        assert any(total.any() for total in saved.values())
    with hosts(end), running("llama", SECTIONS["powersgd and 4 bits"]) as engine:
        engine.load_checkpoint(str(tmp_path))
        loaded = unsent(engine)
        assert loaded.keys() == (saved.keys() if start == end else set())
        for name, total in loaded.items():
            assert torch.allclose(saved[name], total, rtol=1e-6, atol=1e-9)
        assert all(loss == loss for loss in models.train(engine, "llama", 2, first=10))
