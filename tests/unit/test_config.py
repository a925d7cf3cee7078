"""The section's values: defaults, nulls, what switches the plugin on, and its JSON Schema."""

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_ckpt.activation import Policy, Rule, make_policy
from ds_ckpt.compression import LowRank, Quantize, TopK
from ds_ckpt.config import json_schema, load_file, parse
from ds_ckpt.config.activation import ActivationConfig, activation_policy
from ds_ckpt.config.compression import CompressionConfig, exchange_settings
from ds_ckpt.config.models import CompatSection
from ds_ckpt.errors import ConfigError
from ds_ckpt.fields import warn

ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def ours(**section: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ZERO3), "ds_ckpt": section}


def activation(**section: Any) -> ActivationConfig:
    return parse(ours(activation=section)).activation


def compression(**section: Any) -> CompressionConfig:
    return parse(ours(compression=section)).compression


@pytest.mark.parametrize("config", [{}, ZERO3, {"ds_ckpt": None}, {"ds_ckpt": {}}])
def test_an_empty_section_is_plain_deepspeed(config: dict[str, Any]) -> None:
    parsed = parse(config)
    assert parsed == parse({})
    assert not parsed.active
    assert "plain DeepSpeed" in parsed.summary()


def test_defaults_are_documented() -> None:
    config = parse(ours(compression={"method": "topk"}, activation={"policy": "block"}))
    assert config.active
    found = config.model_dump()
    assert found["compression"]["topk"] == {"density": 0.01, "values": "int8"}
    assert found["compression"]["exchange"] == {"when": "auto", "autotune": True, "levels": "auto"}
    assert found["compression"]["error_feedback"]["dtype"] == "auto"
    assert found["compression"]["warmup_steps"] == 100
    assert found["activation"]["save_ops"] == ("matmuls",)
    assert found["weights"] == {"resident": False, "deltas": "auto"}
    assert found["telemetry"] == {"enabled": False, "every_n_steps": 10, "path": None}


def test_null_leaves_every_key_at_its_default() -> None:
    nulls = {"method": "topk", "topk": {"density": None}, "error_feedback": None}
    section = {"activation": {"policy": "block", "modules": None}, "telemetry": None}
    given = ours(**section, compression={**nulls, "warmup_steps": None})
    before = copy.deepcopy(given)
    parsed = parse(given)
    assert parsed == parse(ours(activation={"policy": "block"}, compression={"method": "topk"}))
    assert given == before
    with pytest.raises(ValidationError):
        parsed.activation.policy = "mlp"


KEYS = (*CompatSection.model_fields, "partitioned_activations")
VALUES = (None, False, 0, "false", True, 1, "True", "auto", 4, {})
MLP = {"policy": "mlp", "partition": False, "offload": True}
OWN: list[dict[str, Any]] = [{}, {"policy": "none"}, {"policy": "auto"}, MLP]


@given(
    section=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES)),
    own=st.sampled_from(OWN),
)
def test_a_pasted_section_of_deepspeed_is_accepted_and_each_unused_key_warned_of_once(
    section: dict[str, Any], own: dict[str, Any]
) -> None:
    config = {**ZERO3, "activation_checkpointing": section, "ds_ckpt": {"activation": own}}
    lines: list[str] = []
    warn.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        log = logging.getLogger("ds_ckpt")
        patched.setattr(log, "warning", lambda *a: lines.append(a[0] % a[1:]))
        found, _ = (parse(config).activation for _ in range(2))
    assert found.policy == own.get("policy", "block")
    wanted = {key for key, value in section.items() if value not in (None, False, "false")}
    acts = set()
    for key, same in CompatSection.ours.items():
        possible = {"none": (), "auto": ("offload",)}.get(found.policy, ("offload", "partition"))
        if key in wanted and own.get(same) is not False and same in possible:
            is_on = section[key] in (1, "True")
            acts |= {key} if is_on else set()
            assert getattr(found, same) == (is_on or own.get(same, False))
    named = [re.search(r"activation_checkpointing\.(\w+): no effect: .", line) for line in lines]
    assert sorted(name[1] for name in named if name) == sorted(wanted - acts)
    assert all(named)


def test_a_policy_of_ours_overrides_deepspeeds_section() -> None:
    config = {**ZERO3, "activation_checkpointing": {}}
    with_null = {**config, "ds_ckpt": {"activation": {"policy": None}}}
    assert parse(with_null).activation.policy == "block"
    assert not parse({**config, "ds_ckpt": {"activation": {"policy": "none"}}}).active
    assert not parse({**ZERO3, "activation_checkpointing": None}).active


SETTINGS = 'attention; every_n every_n=4; segments segment_size=3; segments segment_size="sqrt"; '
SETTINGS += 'segments segments=3; offload; selective save_ops=["attention","aten.mm"]'


@pytest.mark.parametrize("row", SETTINGS.split("; "))
def test_a_policy_and_its_setting(row: str) -> None:
    policy, *written = row.split()
    settings = {key: json.loads(value) for key, value in (one.split("=") for one in written)}
    config = activation(policy=policy, **settings)
    assert config.active
    made = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    assert activation_policy(config) == Policy(make_policy(policy, **made))
    assert policy in config.summary()


def test_rules_become_settings_in_their_order() -> None:
    rules = [
        {"match": "0-15", "policy": "selective", "save_ops": "attention+qkvo"},
        {"match": "*.layers.16", "policy": "none"},
    ]
    config = activation(policy="block", modules=["Block"], rules=rules, check_determinism=5)
    made = (
        Rule("0-15", make_policy("selective", save_ops=("attention+qkvo",))),
        Rule("*.layers.16", make_policy("none")),
    )
    wanted = Policy(make_policy("block"), made, modules=("Block",), check_determinism=5)
    assert activation_policy(config) == wanted
    assert "2 rules" in config.summary()
    assert activation(rules=[{"match": "0-3", "policy": "block"}]).active
    assert not activation(rules=[{"match": "0-3", "policy": "none"}]).active
    assert activation(policy="block", check_determinism=True).check_determinism is True


@pytest.mark.parametrize("policy", ["auto", "budget"])
@pytest.mark.parametrize("limits", ["activations", "accelerator"])
def test_memory_that_a_budget_limits(policy: str, limits: str) -> None:
    section: dict[str, Any] = {"budget_gib": 6, "budget_of": limits}
    if policy == "auto":  # all of the accelerator's without a limit
        section = {"budget_gib": 4.0} if limits == "activations" else {}
    config = activation(policy=policy, **section)
    assert config.planned
    assert config.budget_is_of == limits
    within = f"{section['budget_gib']:g} GiB for" if section else "90% of the"
    assert re.search(f" within {within} .*{limits}", config.summary())


def test_rules_become_compressors() -> None:
    topk = {"density": 0.25, "values": "bf16"}
    config = compression(
        method="powersgd",
        quantize={"block": 128},
        rules=[
            {"match": "a", "method": "topk", "topk": topk},
            {"match": "b", "method": "dense", "min_numel": 10, "dims": 1},
            {"match": "d", "method": "powersgd", "powersgd": {"rank": 3}},
            {"match": "e", "method": "quantize"},
        ],
    )
    rules = exchange_settings(config).rules
    compressors = [rule.settings.compressor() for rule in rules]
    assert compressors == [TopK(**topk), None, LowRank(3), Quantize(bits=3, block=128)]
    assert [r.where for r in rules] == [f"$.ds_ckpt.compression.rules[{i}]" for i in range(4)]
    assert rules[1].applies("b", torch.Size([10]))
    assert not rules[1].applies("b", torch.Size([9]))
    assert not rules[1].applies("b", torch.Size([5, 5]))


@pytest.mark.parametrize(
    ("section", "has_residuals"),
    [
        ({"method": "topk"}, True),
        ({"method": "dense"}, False),
        ({"method": "quantize", "error_feedback": {"enabled": False}}, False),
        ({"method": "dense", "rules": [{"match": "*", "method": "topk"}]}, True),
    ],
)
def test_micro_steps_wait_if_there_are_residuals(section, has_residuals) -> None:
    expected = {"auto": has_residuals, "micro_step": False, "accumulation_boundary": True}
    for when, waits in expected.items():
        found = exchange_settings(compression(**section, exchange={"when": when}))
        assert found.defers_exchange(8) == waits
        assert not found.defers_exchange(1)


OLD = [
    ({"rules": [{"match": "*", "method": "quantize", "quantize": {"rotated": False}}]}, "remove it")
    + ({"rules": [{"match": "*", "method": "quantize", "quantize": {}}]},),
    ({"start_step": 7}, "former name of warmup_steps", {"warmup_steps": 7}),
    ({"exchange": {"gate": False}}, "former name", {"exchange": {"autotune": False}}),
    ({"topk": {"density": 1}}, "sends 100% of the entries; 1% is", {"topk": {"density": 1.0}}),
]


@pytest.mark.parametrize(("old", "words", "new"), OLD)
def test_a_former_key_or_a_share_in_percent_warns_once(old, words, new, caplog) -> None:
    warn.cache_clear()
    caplog.set_level(logging.WARNING, logger="ds_ckpt")
    for _ in range(2):
        assert compression(method="topk", **old) == compression(method="topk", **new)
    (record,) = caplog.records
    assert words in record.message


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["properties"]) == {"ds_ckpt", "activation_checkpointing"}
    assert schema.get("additionalProperties", True)  # other keys are DeepSpeed's
    for name, section in schema["$defs"].items():
        assert section.get("additionalProperties", True) is (name == "CompatSection")
        assert section["description"]
        assert all(len(key["description"]) > 15 for key in section["properties"].values())


def test_strict_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"a": [1, -2.5e3, {"a": null}, [[]]], "b": "x, NaN // no {comment}", "": {}}')
    expected = {"a": [1, -2500.0, {"a": None}, [[]]], "b": "x, NaN // no {comment}", "": {}}
    assert load_file(path) == load_file(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ('{\n  // why\n  "a": 1\n}', ["FILE:2:3"]),
        ('{"a": 1 /* why */}', ["FILE:1:9"]),
        ('{\n  "a": 1,\n\n}', ["FILE"]),
        ("{'a': 1}", ["FILE:1:2"]),
        ('{"a": True}', ["FILE:1:7"]),
        ('{"a": 1', ["FILE:1:8"]),
        ("", ["FILE"]),
        ("\ufeff{}", ["FILE:1:1"]),
        ('{"a": {"b": 1, "c": [{"d": 1}, {"d": 2, "d": 3}], "b": 2}, "\\u0065": 1, "e": 2}',)
        + (["$.a.b", "$.a.c[1].d", "$.e"],),
        *(
            (f'{{"a": 1, "b": [0, {number}], "c": {number}}}', ["$.b[1]", "$.c"])
            for number in ("NaN", "-Infinity", "1e999")
        ),
        ("[]", ["$"]),
        ("null", ["$"]),
        ('{"a": "\udce4"}', ["FILE"]),
        ("[" * 200_000, ["FILE"]),
        ('{"a": ' + "1" * 5000 + "}", ["FILE"]),
    ],
)
def test_a_file_that_is_not_strict_json_is_refused(tmp_path, text, places) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    found = [problem.where.replace(str(path), "FILE") for problem in caught.value.problems]
    assert all(a.startswith(b) for a, b in zip(found, places, strict=True)), found
    assert all(p.why and p.remedy and p.found for p in caught.value.problems)
    assert text or "found an empty file\n    why: a configuration is one JSON object" in str(
        caught.value
    )
