"""The activation section's own rules: policies, their settings, and rules for some blocks."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ckpt.activation import Policy, PolicySettings, Rule
from ds_ckpt.config import ActivationConfig, parse
from ds_ckpt.config.activation import ActivationRuleConfig
from ds_ckpt.config.policy import activation_policy
from ds_ckpt.errors import ConfigError


def read(**activation: Any) -> ActivationConfig:
    return parse(
        {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": activation}}
    ).activation


def problems(**activation: Any) -> dict[str, Any]:
    with pytest.raises(ConfigError) as caught:
        read(**activation)
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


def test_every_key_of_a_rule_is_described() -> None:
    for name, field in ActivationRuleConfig.model_fields.items():
        assert field.description, name
