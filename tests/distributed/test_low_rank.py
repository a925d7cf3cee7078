"""PowerSGD on real ZeRO-3 engines, by rules too: laws 3 to 5, bytes, collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ds_ckpt
from tests.distributed.models import topk_section
from tests.distributed.pool import ranks
from tests.distributed.training import check_non_finite, check_resume, conservation, running


def low_rank(rank: int = 2, **compression: Any) -> dict[str, Any]:
    return topk_section(method="powersgd", powersgd={"rank": rank}, **compression)


def by_rules(metric: str) -> dict[str, Any]:
    return low_rank(
        rules=[
            {"match": "*embed*", "method": "topk", "topk": {"density": 0.05}},
            {"match": "*.mlp.up*", "method": "entropy_coded", "entropy_coded": {"metric": metric}},
            {"match": "lm_head*", "method": "quantize"},
        ]
    )


SECTIONS = {"powersgd": low_rank(), "by rules": by_rules("steps")}


@pytest.mark.parametrize(("section", "slots"), [*((s, [2]) for s in SECTIONS), ("powersgd", [4])])
@pytest.mark.sampled(2)
@ranks()
def test_nothing_is_lost(section: str) -> None:
    worst, compressed = conservation("llama", SECTIONS[section], 4)
    assert compressed > 3
    assert worst < 3e-5


@pytest.mark.parametrize("section", list(SECTIONS))
@pytest.mark.sampled(1)
@ranks(2)
def test_non_finite_passes_through(section: str) -> None:
    where = (1, 1, "model.layers.1.mlp.down_proj.weight")
    check_non_finite(SECTIONS[section], float("inf"), where, 2)


@pytest.mark.parametrize("section", [low_rank(), by_rules("energy")], ids=["powersgd", "by rules"])
@pytest.mark.sampled(1)
@ranks(2)
def test_resume_on_the_same_world_is_bit_exact(tmp_path: Path, section: dict[str, Any]) -> None:
    """The metric of steps is not saved, so a run that uses it does not resume to the bit."""
    assert check_resume(tmp_path, section)["factors"] > 3


@ranks(2)
def test_a_rule_that_takes_nothing_is_refused_by_its_place() -> None:
    section = low_rank(rules=[{"match": "*.missing.*", "method": "topk"}])
    with pytest.raises(ds_ckpt.DsCkptError) as error, running("llama", section):
        pass
    assert "$.ds_ckpt.compression.rules[0]" in str(error.value)
    assert "embed_tokens" in str(error.value)
