"""PowerSGD on real ZeRO-3 engines, by rules too: laws 3 to 5, bytes, collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_compression as cases
from tests.distributed import cases_resume
from tests.distributed.models import topk_section


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


@pytest.mark.parametrize(
    ("section", "world"), [*((s, "world2") for s in SECTIONS), ("powersgd", "world4")]
)
@pytest.mark.sampled(2)
def test_nothing_is_lost(request: pytest.FixtureRequest, world: str, section: str) -> None:
    chosen = SECTIONS[section]
    for process in request.getfixturevalue(world).run(cases.conservation, "llama", chosen, 4):
        assert process["compressed"] > 3
        assert process["worst"] < 3e-5


@pytest.mark.parametrize("section", ["powersgd", "by rules"])
@pytest.mark.sampled(1)
def test_non_finite_passes_through(world2: Any, section: str) -> None:
    where = (1, 1, "model.layers.1.mlp.down_proj.weight")
    for process in world2.run(cases.poisoned, SECTIONS[section], float("inf"), where, 2):
        assert process["skipped"]
        assert process["held"] > 3
        assert process["equal"]
        assert process["losses"] == process["expected"]


@pytest.mark.parametrize("section", [low_rank(), by_rules("energy")], ids=["powersgd", "by rules"])
@pytest.mark.sampled(1)
def test_resume_on_the_same_world_is_bit_exact(
    world2: Any, tmp_path: Path, section: dict[str, Any]
) -> None:
    """The metric of steps is not saved, so a run that uses it does not resume to the bit."""
    folder = str(tmp_path)
    whole = world2.run(cases_resume.train, section, 6, 3, folder)
    assert world2.run(cases_resume.resume, folder, section, 3, 6) == whole
    assert whole[0]["factors"] > 3


def test_a_rule_that_takes_nothing_is_refused_by_its_place(world2: Any) -> None:
    section = low_rank(rules=[{"match": "*.missing.*", "method": "topk"}])
    for message in world2.run(cases.start_error, section):
        assert "$.ds_ckpt.compression.rules[0]" in message
        assert "embed_tokens" in message
