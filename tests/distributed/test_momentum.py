"""First moments on real ZeRO-3 engines: when they are in force, on whom, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.exchange.momentum import EVERY
from tests.distributed import cases_compression, cases_momentum, cases_resume
from tests.distributed.models import topk_section

OWN = 0.9


def cured(momentum: Any = "matched", **compression: Any) -> dict[str, Any]:
    feedback = {"momentum": momentum}
    return topk_section(topk={"density": 0.05}, error_feedback=feedback, **compression)


@pytest.mark.parametrize(
    ("section", "options"),
    [
        (cured(0.4, warmup_steps=2), {}),
        (cured("matched", warmup_steps=2), {"accumulation": 2}),
        (cured(0.4, warmup_steps=2), {"offload_optimizer": True, "clip": 0.1}),
        (cured(0.4, warmup_steps=2), {"bf16": {"enabled": True}}),
    ],
    ids=["number", "matched", "offload", "bf16"],
)
def test_the_first_moment_leads_from_the_warm_ups_end(
    world2: Any, section: dict[str, Any], options: dict[str, Any]
) -> None:
    one, other = world2.run(cases_momentum.stepped, section, 4, **options)
    assert one == other
    assert one["outside"]
    assert set(one["kept"]) == {0}  # norms go whole
    assert 0.3 < one["kept"][0] < 1
    warm, cure = one["seen"][:2], one["seen"][2:]
    assert all(b1 == OWN for step in warm for _, b1 in step)
    for step in cure:
        assert {group for group, _ in step} == {0, 1}
        assert all(b1 < OWN if group == 0 else b1 == OWN for group, b1 in step)
    assert "has a lead" in one["summary"]


def test_it_is_off_where_it_is_not_asked_for(world2: Any) -> None:
    off, on = (
        world2.run(cases_compression.run, "llama", cured(how), 3)[0] for how in ("none", 0.4)
    )
    plain = world2.run(cases_compression.run, "llama", topk_section(topk={"density": 0.05}), 3)[0]
    assert off["losses"] == plain["losses"]
    assert off["weights"] == plain["weights"]
    assert on["losses"][:1] == off["losses"][:1]
    assert on["losses"] != off["losses"]


def test_a_resumed_run_goes_on_to_the_bit(world2: Any, tmp_path: Path) -> None:
    """Saved between two measurements, and loaded right before one."""
    for split, steps in ((EVERY // 2, EVERY + 2), (EVERY, EVERY + 2)):
        folder = str(tmp_path / str(split))
        whole = world2.run(cases_resume.train, cured(), steps, split, folder)
        assert world2.run(cases_resume.resume, folder, cured(), split, steps) == whole


@pytest.mark.parametrize("bad_step", [3, EVERY])
def test_a_skipped_step_changes_nothing(world2: Any, bad_step: int) -> None:
    for process in world2.run(cases_momentum.skipped, cured(), bad_step):
        assert process["skips"] == 1
        assert process["before"] == process["after"] == process["later"]
        assert process["before"]["kept"]


def test_what_a_scheduler_writes_is_what_leads(world2: Any) -> None:
    pairs = world2.run(cases_momentum.scheduled, cured(0.5), 10)[0]
    written = [b1 for b1, _ in pairs]
    assert min(written) < 0.4 < 0.6 < max(written)
    assert all(used == 0.5 * b1 for b1, used in pairs)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("SGD", "SGD is none"), ("Adam", "weight decay"), ("maximizing", "maximizes")],
)
def test_another_optimizer_is_left_alone_with_a_word(world2: Any, kind: str, why: str) -> None:
    for process in world2.run(cases_momentum.left_alone, cured(), kind):
        assert process["moments"] is None
        assert why in process["summary"].partition("first moments stay as they are: ")[2]


def test_detach_leaves_the_optimizer_as_it_was_found(world2: Any) -> None:
    for process in world2.run(cases_compression.detach_restores, cured(0.4)):
        assert process["changed"]
        assert process["left"] == []
