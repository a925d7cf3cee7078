"""The keys of a memory budget: what they need, and where they would say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ckpt.config import ActivationConfig, parse
from ds_ckpt.errors import ConfigError, Problem


def read(stage: int = 3, **activation: Any) -> ActivationConfig:
    config = {"zero_optimization": {"stage": stage}, "ds_ckpt": {"activation": activation}}
    return parse(config).activation


def problems(stage: int = 3, **activation: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        read(stage, **activation)
    return {p.where.removeprefix("$.ds_ckpt.activation."): p for p in caught.value.problems}


@pytest.mark.parametrize(
    ("section", "of"),
    [
        ({"policy": "budget", "budget_gib": 6}, "activations"),
        ({"policy": "budget", "budget_gib": 0.5, "budget_of": "saved"}, "saved"),
        ({"policy": "budget", "budget_gib": 80.0, "budget_of": "accelerator"}, "accelerator"),
        ({"policy": "auto"}, "accelerator"),
        ({"policy": "auto", "budget_of": "accelerator"}, "accelerator"),
        ({"policy": "auto", "budget_gib": 4.0}, "activations"),
    ],
)
def test_what_the_budget_is_for(section: dict[str, Any], of: str) -> None:
    config = read(**section)
    assert config.active
    assert config.planned
    assert config.budget_is_of == of
    assert section["policy"] in config.summary()
    assert of in config.summary()


def test_a_budget_without_a_number_is_none() -> None:
    assert list(problems(policy="budget")) == ["budget_gib"]
    assert "6.0" in problems(policy="budget")["budget_gib"].remedy
    assert list(problems(policy="auto", budget_of="activations")) == ["budget_of"]


@pytest.mark.parametrize("policy", ["none", "block", "selective"])
def test_a_number_without_a_plan_says_nothing(policy: str) -> None:
    found = problems(policy=policy, budget_gib=6.0, budget_of="saved")
    assert list(found) == ["budget_gib", "budget_of"]
    assert '"budget"' in found["budget_gib"].remedy


@pytest.mark.parametrize("value", [0, -1.0, 0.0, "6", True, float("inf"), float("nan")])
def test_only_numbers_above_zero(value: Any) -> None:
    assert list(problems(policy="budget", budget_gib=value)) == ["budget_gib"]


@pytest.mark.parametrize("key", ["every_n", "segment_size", "save_ops"])
def test_settings_of_other_policies_do_nothing_in_a_plan(key: str) -> None:
    value: Any = "matmuls" if key == "save_ops" else 3
    assert list(problems(policy="budget", budget_gib=6.0, **{key: value})) == [key]


def test_the_plan_decides_for_every_block() -> None:
    rules = [{"match": "0", "policy": "block"}]
    assert list(problems(policy="budget", budget_gib=6.0, rules=rules)) == ["rules"]
    assert list(problems(policy="auto", partition=True)) == ["partition"]


@pytest.mark.parametrize("policy", ["budget", "auto"])
def test_no_rule_is_a_plan_of_its_own(policy: str) -> None:
    found = problems(policy="block", rules=[{"match": "0", "policy": policy}])
    assert list(found) == ["rules[0].policy"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_whole_accelerator_is_known_under_zero_3_alone(stage: int) -> None:
    for section in ({"policy": "auto"}, {"policy": "budget", "budget_gib": 6.0}):
        found = problems(stage, **section, budget_of="accelerator")
        assert list(found) == ["$.zero_optimization.stage"]
    assert read(stage, policy="budget", budget_gib=6.0).planned
