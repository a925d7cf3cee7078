"""The section's values: defaults, nulls, strict types, what switches the plugin on."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_ckpt.config import PluginConfig, parse
from ds_ckpt.errors import ConfigError

ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def ours(**section: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ZERO3), "ds_ckpt": section}


def problems(config: Any) -> dict[str, Any]:
    """Problem by JSON path."""
    with pytest.raises(ConfigError) as caught:
        parse(config)
    return {p.where: p for p in caught.value.problems}


@pytest.mark.parametrize("config", [{}, ZERO3, {"ds_ckpt": None}, {"ds_ckpt": {}}])
def test_nothing_asked_for_is_plain_deepspeed(config: dict[str, Any]) -> None:
    parsed = parse(config)
    assert parsed == PluginConfig()
    assert not parsed.active
    assert "plain DeepSpeed" in parsed.summary()


def test_defaults_are_those_that_are_documented() -> None:
    config = parse(ours(compression={"method": "topk"}, activation={"policy": "block"}))
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
            "powersgd": {"rank": 16, "alternate": False},
            "rules": (),
            "error_feedback": {
                "enabled": True,
                "dtype": "fp32",
                "device": "accelerator",
                "momentum": "none",
            },
            "exchange": {
                "when": "auto",
                "autotune": True,
                "levels": "auto",
            },
            "guard": {
                "action": "off",
                "error": None,
                "residual_norm": None,
                "every_n_steps": 10,
            },
            "warmup_steps": 100,
            "warmup_bits": None,
            "min_numel": 4096,
        },
        "weights": {"resident": False, "deltas": "auto"},
        "telemetry": {"enabled": False, "every_n_steps": 10, "path": None},
    }
    assert config.active


@pytest.mark.parametrize("section", [{}, {"profile": False}, {"number_checkpoints": None}])
def test_deepspeeds_section_alone_asks_for_block(section: dict[str, Any]) -> None:
    config = {**ZERO3, "activation_checkpointing": section}
    assert parse(config).activation.policy == "block"
    with_null = {**config, "ds_ckpt": {"activation": {"policy": None}}}
    assert parse(with_null).activation.policy == "block"


def test_explicit_none_wins_over_deepspeeds_section() -> None:
    config = ours(activation={"policy": "none"})
    config["activation_checkpointing"] = {"cpu_checkpointing": False}
    assert parse(config).activation.policy == "none"


def test_deepspeeds_section_as_null_is_absent() -> None:
    assert not parse({**ZERO3, "activation_checkpointing": None}).active


@pytest.mark.parametrize("key", [1, 2.5])
def test_a_key_that_is_no_text_is_a_wrong_key(key: Any) -> None:
    """From Python a section may have one."""
    (problem,) = problems(ours(activation={key: 2})).values()
    assert problem.why == f"{key} is not a key of $.ds_ckpt.activation"


def test_null_leaves_every_key_at_its_default() -> None:
    section = {
        "activation": {"policy": "block", "modules": None, "share_gather": None},
        "compression": {
            "method": "topk",
            "topk": {"density": None, "values": None},
            "error_feedback": None,
            "warmup_steps": None,
            "min_numel": None,
        },
        "telemetry": None,
    }
    expected = ours(activation={"policy": "block"}, compression={"method": "topk"})
    assert parse(ours(**section)) == parse(expected)


def test_the_given_configuration_is_not_changed() -> None:
    config = ours(activation={"share_gather": False}, telemetry=None)
    config["activation_checkpointing"] = {}
    before = copy.deepcopy(config)
    parse(config)
    assert config == before


def test_the_result_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse(ZERO3).activation.policy = "block"


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
                | st.fixed_dictionaries(
                    {"enabled": st.just(True)},
                    optional={
                        "dtype": st.sampled_from(["fp32", "bf16", "int8"]),
                        "device": st.sampled_from(["accelerator", "cpu"]),
                    },
                ),
                "warmup_steps": st.integers(0, 10**6),
                "min_numel": st.integers(0, 10**9),
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
            {"enabled": st.just(True)},
            optional={"every_n_steps": st.integers(1, 99), "path": st.just("runs/t.jsonl")},
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
    assert parse(ours(**section)) == parsed
    assert parsed.summary()


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("activation.share_gather", 1),
        ("activation.share_gather", "true"),
        ("activation.modules", "Block"),
        ("activation.modules", []),
        ("activation.modules", {"Block": True}),
        ("compression.topk.density", True),
        ("compression.topk.density", "0.01"),
        ("compression.topk.density", 0),
        ("compression.topk.density", 1.01),
        ("compression.topk.density", float("nan")),
        ("compression.warmup_steps", 1.0),
        ("compression.warmup_steps", True),
        ("compression.warmup_steps", -1),
        ("compression.min_numel", "4096"),
        ("compression.topk.values", 8),
        ("compression.quantize.bits", 5),
        ("compression.quantize.bits", 4.0),
        ("compression.quantize.bits", "4"),
        ("compression.quantize.block", 48),
        ("compression.quantize.block", True),
        ("compression.error_feedback.enabled", 0),
        ("telemetry.every_n_steps", 0),
        ("telemetry.path", ""),
        ("telemetry.path", 3),
    ],
)
def test_types_and_ranges_are_strict(keys: str, value: Any) -> None:
    method = "quantize" if "quantize" in keys else "topk"
    section: dict[str, Any] = {
        "activation": {"policy": "block"},
        "compression": {"method": method, method: {}, "error_feedback": {}},
        "telemetry": {"enabled": True},
    }
    *parents, last = keys.split(".")
    node = section
    for parent in parents:
        node = node[parent]
    node[last] = value
    assert list(problems(ours(**section))) == [f"$.ds_ckpt.{keys}"]


def test_list_items_are_named_by_position() -> None:
    found = problems(ours(activation={"policy": "block", "modules": ["Block", 3, ""]}))
    assert list(found) == ["$.ds_ckpt.activation.modules[1]", "$.ds_ckpt.activation.modules[2]"]


@pytest.mark.parametrize("value", ["auto", "AUTO", " auto "])
def test_auto_is_refused_with_words(value: str) -> None:
    found = problems(ours(compression={"method": "topk", "warmup_steps": value}))
    problem = found["$.ds_ckpt.compression.warmup_steps"]
    assert "nothing fills it in" in problem.why
    assert "leave the key out or null (default 100)" in problem.remedy
    assert problem.found == f'"{value}"'


def test_auto_inside_a_list_is_refused() -> None:
    found = problems(ours(activation={"policy": "block", "modules": ["Block", "auto"]}))
    assert list(found) == ["$.ds_ckpt.activation.modules[1]"]


@pytest.mark.parametrize(
    ("section", "where", "words"),
    [
        ({"compression": {"methd": "topk"}}, "$.ds_ckpt.compression.methd", '"method"'),
        ({"compression": {"method": "top-k"}}, "$.ds_ckpt.compression.method", '"topk"'),
        ({"compression": {"method": "TopK"}}, "$.ds_ckpt.compression.method", '"topk"'),
        ({"compresion": {}}, "$.ds_ckpt.compresion", '"compression"'),
        ({"compression": {"ratio": 0.1}}, "$.ds_ckpt.compression.ratio", '"topk.density"'),
        ({"activation": {"Policy": "block"}}, "$.ds_ckpt.activation.Policy", '"policy"'),
    ],
)
def test_did_you_mean(section: dict[str, Any], where: str, words: str) -> None:
    assert f"did you mean {words}?" in problems(ours(**section))[where].why


def test_a_key_in_the_wrong_section_is_told_where_it_belongs() -> None:
    found = problems(ours(compression={"method": "topk", "density": 0.1}))
    assert "$.ds_ckpt.compression.topk.density" in found["$.ds_ckpt.compression.density"].remedy


@pytest.mark.parametrize("key", ["enabled", "enable"])
def test_enabled_is_not_how_a_section_is_switched(key: str) -> None:
    found = problems(ours(compression={key: False}))
    assert '"method": "none"' in found[f"$.ds_ckpt.compression.{key}"].remedy


def test_an_option_that_is_planned_is_not_in_the_schema() -> None:
    found = problems(ours(compression={"method": "ef21", "ef21": {"momentum": 0.9}}))
    assert {"$.ds_ckpt.compression.method", "$.ds_ckpt.compression.ef21"} <= set(found)


@pytest.mark.parametrize("section", [[], "block", True, 3])
def test_a_section_is_an_object(section: Any) -> None:
    assert "an object" in problems({**ZERO3, "ds_ckpt": section})["$.ds_ckpt"].why
    nested = problems(ours(activation=section))
    assert "an object" in nested["$.ds_ckpt.activation"].why
    deepspeeds = problems({**ZERO3, "activation_checkpointing": section})
    assert "an object" in deepspeeds["$.activation_checkpointing"].why


@pytest.mark.parametrize("config", [None, [], "config.json", 3])
def test_the_whole_is_an_object(config: Any) -> None:
    assert list(problems(config)) == ["$"]


def test_all_mistakes_are_told_at_once() -> None:
    config = ours(
        activation={"policy": "blok", "share_gather": 1},
        compression={"method": "topk", "topk": {"density": 3}, "typo": None},
        telemetry={"every_n_steps": 5},
    )
    config["zero_optimization"] = {"stage": 2}
    config["activation_checkpointing"] = {"partition_activations": "true"}
    with pytest.raises(ConfigError) as caught:
        parse(config, source="my.json")
    assert {p.where for p in caught.value.problems} == {
        "$.ds_ckpt.activation.policy",
        "$.ds_ckpt.activation.share_gather",
        "$.ds_ckpt.compression.topk.density",
        "$.ds_ckpt.compression.typo",
        "$.ds_ckpt.telemetry.every_n_steps",
        "$.zero_optimization.stage",
        "$.activation_checkpointing.partition_activations",
    }
    assert str(caught.value).startswith("my.json cannot be used: 7 problems")


def test_import_is_light() -> None:
    heavy = "deepspeed transformers typer"
    program = (
        "import sys, ds_ckpt.config\n"
        f"found = [m for m in '{heavy}'.split() if m in sys.modules]\n"
        "sys.exit(' '.join(found) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("value", [[], 0, "", False, "block"])
def test_a_section_that_is_no_object_stays_wrong_beside_deepspeeds(value: Any) -> None:
    found = problems({**ours(activation=value), "activation_checkpointing": {}})
    assert "braces" in found["$.ds_ckpt.activation"].why


@pytest.mark.parametrize("method", ["topk", "entropy_coded", "none", "dense"])
def test_bits_of_no_warm_up_are_told(method: str) -> None:
    section = {"method": method, "warmup_steps": 0, "warmup_bits": 4}
    problem = problems(ours(compression=section))["$.ds_ckpt.compression.warmup_bits"]
    assert problem.found == "4"
    lossy = method in ("topk", "entropy_coded")
    assert problem.remedy.endswith("warmup_steps to 100" if lossy else '"entropy_coded"')
    parse(ours(compression={"method": "topk", "warmup_steps": 1, "warmup_bits": 4}))
