"""The activation section's own rules: policies, their settings, rules for some blocks, budgets."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ckpt.activation import Policy, PolicySettings, Rule
from ds_ckpt.config import ActivationConfig, parse
from ds_ckpt.config.activation import ActivationRuleConfig, activation_policy
from ds_ckpt.errors import ConfigError, Problem


def read(stage: int = 3, **activation: Any) -> ActivationConfig:
    config = {"zero_optimization": {"stage": stage}, "ds_ckpt": {"activation": activation}}
    return parse(config).activation


def problems(stage: int = 3, **activation: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        read(stage, **activation)
    return {p.where.removeprefix("$.ds_ckpt.activation."): p for p in caught.value.problems}


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ({"policy": "attention"}, PolicySettings("attention")),
        ({"policy": "mlp"}, PolicySettings("mlp")),
        ({"policy": "every_n", "every_n": 4}, PolicySettings("every_n", every_n=4)),
        ({"policy": "segments", "segment_size": 3}, PolicySettings("segments", segment_size=3)),
        ({"policy": "selective"}, PolicySettings("selective", save_ops=("matmuls",))),
        (
            {"policy": "selective", "save_ops": "attention+qkvo"},
            PolicySettings("selective", save_ops=("attention+qkvo",)),
        ),
        (
            {"policy": "selective", "save_ops": ["attention", "aten.mm"]},
            PolicySettings("selective", save_ops=("attention", "aten.mm")),
        ),
    ],
)
def test_a_policy_and_its_setting(section: dict[str, Any], settings: PolicySettings) -> None:
    config = read(**section)
    assert config.active
    assert activation_policy(config) == Policy(settings)
    assert section["policy"] in config.summary()


def test_rules_become_settings_in_their_order() -> None:
    rules = [
        {"match": "0-15", "policy": "selective", "save_ops": "attention+qkvo"},
        {"match": "*.layers.16", "policy": "none"},
    ]
    config = read(policy="block", modules=["Block"], rules=rules, check_determinism=5)
    assert activation_policy(config) == Policy(
        PolicySettings("block"),
        (
            Rule("0-15", PolicySettings("selective", save_ops=("attention+qkvo",))),
            Rule("*.layers.16", PolicySettings("none")),
        ),
        modules=("Block",),
        check_determinism=5,
    )
    assert "2 rules" in config.summary()


def test_rules_alone_checkpoint_what_they_name() -> None:
    config = read(rules=[{"match": "0-3", "policy": "block"}], share_gather=False)
    assert config.policy == "none"
    assert config.active
    assert not read(rules=[{"match": "0-3", "policy": "none"}]).active


@pytest.mark.parametrize(("given", "every"), [(None, 0), (False, 0), (True, 1), (1, 1), (7, 7)])
def test_how_often_determinism_is_checked(given: Any, every: int) -> None:
    assert read(policy="block", check_determinism=given).check_every == every


@pytest.mark.parametrize("key", ["every_n", "segment_size", "save_ops"])
def test_a_setting_of_another_policy_would_do_nothing(key: str) -> None:
    value: Any = "matmuls" if key == "save_ops" else 2
    found = problems(**{"policy": "block", key: value})
    assert list(found) == [key]
    assert "belongs to policy" in found[key].why
    found = problems(policy="block", rules=[{"match": "0", "policy": "mlp", key: value}])
    assert list(found) == [f"rules[0].{key}"]


@pytest.mark.parametrize("key", ["every_n", "segment_size", "save_ops", "check_determinism"])
def test_nothing_is_set_where_nothing_is_recomputed(key: str) -> None:
    assert list(problems(**{key: "matmuls" if key == "save_ops" else 3})) == [key]


@pytest.mark.parametrize(
    ("rule", "where", "word"),
    [
        ({"policy": "block"}, "rules[0].match", "match"),
        ({"match": "0"}, "rules[0].policy", "policy"),
        ({"match": "", "policy": "block"}, "rules[0].match", "pattern"),
        ({"match": "0", "policy": "blok"}, "rules[0].policy", '"block"'),
        ({"match": "0", "policy": "block", "modules": ["A"]}, "rules[0].modules", "not a key"),
        ({"pattern": "0", "policy": "block"}, "rules[0].pattern", '"match"'),
        ({"match": "0", "policy": "segments", "segment_size": 1}, "rules[0].segment_size", "2 or"),
        ({"match": "0", "policy": "every_n", "every_n": "2"}, "rules[0].every_n", "text"),
        ("0-3", "rules[0]", "object"),
    ],
)
def test_wrong_rules_are_named_with_their_place(rule: Any, where: str, word: str) -> None:
    found = problems(policy="block", rules=[rule])
    assert where in found
    assert word in found[where].why + found[where].remedy


@pytest.mark.parametrize("gib", [None, 4.0])
def test_what_a_budget_of_another_stage_is_told_to_do_is_accepted(gib: float | None) -> None:
    (problem,) = problems(2, policy="auto", budget_gib=gib, budget_of="accelerator").values()
    assert 'budget_of to "activations"' in problem.remedy
    assert ("budget_gib" in problem.remedy) == (gib is None)
    read(2, policy="auto", budget_gib=gib or 4.0, budget_of="activations")


def test_every_key_of_a_rule_is_described() -> None:
    for name, field in ActivationRuleConfig.model_fields.items():
        assert field.description, name


# budgets


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
