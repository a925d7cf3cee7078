"""The section's values: defaults, nulls, what switches the plugin on, and its JSON Schema."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_ckpt.activation import Policy, PolicySettings, Rule
from ds_ckpt.compression import LowRank, Quantize, TopK
from ds_ckpt.config import CompressionConfig, json_schema, parse
from ds_ckpt.config.activation import ActivationConfig, activation_policy
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.models import CompatSection

ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def ours(**section: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ZERO3), "ds_ckpt": section}


def activation(stage: int = 3, **section: Any) -> ActivationConfig:
    config = {"zero_optimization": {"stage": stage}, "ds_ckpt": {"activation": section}}
    return parse(config).activation


def compression(**section: Any) -> CompressionConfig:
    return parse(ours(compression=section)).compression


@pytest.mark.parametrize("config", [{}, ZERO3, {"ds_ckpt": None}, {"ds_ckpt": {}}])
def test_nothing_asked_for_is_plain_deepspeed(config: dict[str, Any]) -> None:
    parsed = parse(config)
    assert parsed == parse({})
    assert not parsed.active
    assert "plain DeepSpeed" in parsed.summary()


def test_defaults_are_those_that_are_documented() -> None:
    config = parse(ours(compression={"method": "topk"}, activation={"policy": "block"}))
    assert config.active
    assert config.model_dump() == {
        "activation": {
            "policy": "block",
            "modules": None,
            "every_n": 2,
            "segment_size": 2,
            "save_ops": ("matmuls",),
            "rules": (),
            "check_determinism": False,
            "share_gather": True,
            "budget_gib": None,
            "budget_of": None,
            "offload": False,
            "offload_prefetch": 1,
            "offload_min_bytes": 65536,
            "partition": False,
            "partition_min_bytes": 65536,
        },
        "compression": {
            "method": "topk",
            "topk": {"density": 0.01, "values": "int8"},
            "quantize": {"bits": 3, "block": 64},
            "entropy_coded": {"bits": 1.0, "metric": "steps"},
            "powersgd": {"rank": 16},
            "rules": (),
            "error_feedback": {
                "enabled": True,
                "dtype": "fp32",
                "device": "accelerator",
                "momentum": "none",
            },
            "exchange": {"when": "auto", "autotune": True, "levels": "auto"},
            "guard": {"action": "off", "error": None, "residual_norm": None, "every_n_steps": 10},
            "warmup_steps": 100,
            "warmup_bits": None,
            "min_numel": 4096,
        },
        "weights": {"resident": False, "deltas": "auto"},
        "telemetry": {"enabled": False, "every_n_steps": 10, "path": None},
    }


def test_null_leaves_every_key_at_its_default() -> None:
    section = {
        "activation": {"policy": "block", "modules": None, "share_gather": None},
        "compression": {
            "method": "topk",
            "topk": {"density": None, "values": None},
            "error_feedback": None,
            "warmup_steps": None,
        },
        "telemetry": None,
    }
    expected = ours(activation={"policy": "block"}, compression={"method": "topk"})
    assert parse(ours(**section)) == parse(expected)


def test_the_given_configuration_is_not_changed_and_the_result_is_frozen() -> None:
    config = ours(activation={"share_gather": False}, telemetry=None)
    config["activation_checkpointing"] = {}
    before = copy.deepcopy(config)
    parsed = parse(config)
    assert config == before
    with pytest.raises(ValidationError):
        parsed.activation.policy = "mlp"


_valid = st.fixed_dictionaries(
    {
        "compression": st.fixed_dictionaries(
            {"method": st.just("topk")},
            optional={
                "topk": st.fixed_dictionaries(
                    {},
                    optional={
                        "density": st.floats(0, 1, exclude_min=True) | st.just(1),
                        "values": st.sampled_from(["fp32", "bf16", "int8"]),
                    },
                ),
                "error_feedback": st.just({"enabled": False})
                | st.fixed_dictionaries({"device": st.sampled_from(["accelerator", "cpu"])}),
                "warmup_steps": st.integers(0, 10**6),
            },
        )
    },
    optional={
        "activation": st.fixed_dictionaries(
            {"policy": st.just("block")},
            optional={
                "share_gather": st.booleans(),
                "modules": st.lists(st.sampled_from(["Block", "h.*"]), min_size=1),
            },
        ),
        "telemetry": st.fixed_dictionaries(
            {"enabled": st.just(True)}, optional={"every_n_steps": st.integers(1, 99)}
        ),
    },
)


def _as_given(parsed: Any, given_: Any) -> Any:
    """The parsed values of those keys that were given, lists as in JSON."""
    if isinstance(given_, dict):
        return {key: _as_given(getattr(parsed, key), value) for key, value in given_.items()}
    return list(parsed) if isinstance(parsed, tuple) else parsed


@settings(max_examples=100, deadline=None, derandomize=True)
@given(_valid)
def test_valid_sections_come_back_as_given(section: dict[str, Any]) -> None:
    parsed = parse(ours(**section))
    assert _as_given(parsed, section) == section
    assert parsed.summary()


def test_import_is_light() -> None:
    program = (
        "import sys, ds_ckpt.config\n"
        "found = [m for m in 'deepspeed transformers typer'.split() if m in sys.modules]\n"
        "sys.exit(' '.join(found) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


# DeepSpeed's section


@pytest.mark.parametrize("section", [{}, {"profile": False}, {"number_checkpoints": None}])
def test_deepspeeds_section_alone_selects_block(section: dict[str, Any]) -> None:
    config = {**ZERO3, "activation_checkpointing": section}
    assert parse(config).activation.policy == "block"
    with_null = {**config, "ds_ckpt": {"activation": {"policy": None}}}
    assert parse(with_null).activation.policy == "block"
    explicit = parse({**config, "ds_ckpt": {"activation": {"policy": "none"}}})
    assert explicit.activation.policy == "none"
    assert not parse({**ZERO3, "activation_checkpointing": None}).active


@pytest.mark.parametrize(("key", "same"), CompatSection.ours.items())
def test_deepspeeds_keys_act_as_ours(key: str, same: str) -> None:
    config = {**ZERO3, "activation_checkpointing": {key: True}}
    parsed = parse(config).activation
    assert getattr(parsed, same) is True
    assert parse({**config, "ds_ckpt": {"activation": {same: True}}}).activation == parsed


# activation


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"policy": "attention"}, PolicySettings("attention")),
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
def test_a_policy_and_its_setting(section: dict[str, Any], expected: PolicySettings) -> None:
    config = activation(**section)
    assert config.active
    assert activation_policy(config) == Policy(expected)
    assert section["policy"] in config.summary()


def test_rules_become_settings_in_their_order() -> None:
    rules = [
        {"match": "0-15", "policy": "selective", "save_ops": "attention+qkvo"},
        {"match": "*.layers.16", "policy": "none"},
    ]
    config = activation(policy="block", modules=["Block"], rules=rules, check_determinism=5)
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
    assert activation(rules=[{"match": "0-3", "policy": "block"}]).active
    assert not activation(rules=[{"match": "0-3", "policy": "none"}]).active


@pytest.mark.parametrize(("value", "every"), [(None, 0), (False, 0), (True, 1), (1, 1), (7, 7)])
def test_how_often_determinism_is_checked(value: Any, every: int) -> None:
    assert activation(policy="block", check_determinism=value).check_every == every


@pytest.mark.parametrize(
    ("section", "of"),
    [
        ({"policy": "budget", "budget_gib": 6}, "activations"),
        ({"policy": "budget", "budget_gib": 0.5, "budget_of": "saved"}, "saved"),
        ({"policy": "budget", "budget_gib": 80.0, "budget_of": "accelerator"}, "accelerator"),
        ({"policy": "auto"}, "accelerator"),
        ({"policy": "auto", "budget_gib": 4.0}, "activations"),
    ],
)
def test_what_the_budget_is_for(section: dict[str, Any], of: str) -> None:
    config = activation(**section)
    assert config.active
    assert config.planned
    assert config.budget_is_of == of
    assert of in config.summary()


# compression


def test_settings_become_the_compressor() -> None:
    topk = {"density": 0.25, "values": "bf16"}
    config = compression(
        method="powersgd",
        rules=[
            {"match": "a", "method": "topk", "topk": topk},
            {"match": "b", "method": "dense"},
            {"match": "c", "method": "quantize", "quantize": {"bits": 2, "block": 128}},
            {"match": "d", "method": "powersgd", "powersgd": {"rank": 3}},
            {"match": "e", "method": "quantize"},
        ],
    )
    rules = exchange_settings(config).rules
    a, b, c, d, e = (rule.settings.compressor() for rule in rules)
    assert a == TopK(**topk)
    assert b is None
    assert c == Quantize(bits=2, block=128)
    assert d == LowRank(3)
    assert e == Quantize(bits=3)
    assert [r.where for r in rules] == [f"$.ds_ckpt.compression.rules[{i}]" for i in range(5)]


def test_a_rule_selects_by_dimensions_and_size() -> None:
    rule = {"match": "norm*", "method": "dense", "min_numel": 10, "dims": 1}
    (rule,) = exchange_settings(compression(method="powersgd", rules=[rule])).rules
    assert rule.applies("norm.weight", torch.Size([10]))
    assert not rule.applies("norm.weight", torch.Size([9]))
    assert not rule.applies("norm.weight", torch.Size([5, 5]))


def test_the_common_section_holds_for_rules() -> None:
    rules = [{"match": "*", "method": "topk"}]
    config = compression(method="dense", topk={"density": 0.5}, rules=rules, warmup_steps=5)
    found = exchange_settings(config)
    assert found.rules[0].settings.sections["topk"].density == 0.5
    assert found.warmup_steps == 5
    assert not found.lossless


@pytest.mark.parametrize(
    ("section", "by_itself"),
    [
        ({"method": "topk"}, True),
        ({"method": "dense"}, False),
        ({"method": "quantize", "error_feedback": {"enabled": False}}, False),
        ({"method": "dense", "rules": [{"match": "*", "method": "topk"}]}, True),
    ],
)
def test_micro_steps_wait_by_themselves_if_there_are_residuals(
    section: dict[str, Any], by_itself: bool
) -> None:
    expected = {"auto": by_itself, "micro_step": False, "accumulation_boundary": True}
    for when, held in expected.items():
        found = exchange_settings(compression(**section, exchange={"when": when}))
        assert found.holds_back(8) == held
        assert not found.holds_back(1)


def test_a_removed_setting_with_its_constant_value_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="ds_ckpt")
    rule = {"match": "*", "method": "quantize"}
    old = compression(method="topk", rules=[{**rule, "quantize": {"rotated": False}}])
    assert old == compression(method="topk", rules=[{**rule, "quantize": {}}])
    (line,) = (record.message for record in caplog.records)
    assert "$.ds_ckpt.compression.rules[0].quantize.rotated" in line
    assert "remove it" in line


# the JSON Schema


def test_the_schema_has_every_key_with_a_description_and_null() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["properties"]) == {"ds_ckpt", "activation_checkpointing"}
    assert schema["additionalProperties"] is True  # other keys are DeepSpeed's
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert section["description"]
        for key in section["properties"].values():
            assert len(key["description"]) > 15
            kinds = key.get("type", [])
            null = {"type": "null"} in key.get("anyOf", []) or None in key.get("enum", [])
            assert null or "null" in kinds
