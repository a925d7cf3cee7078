"""Rules of the compression section: each wrong entry is named by its place in the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ckpt.compression import LowRank, Quantize, TopK
from ds_ckpt.config import parse
from ds_ckpt.config.compression import CompressionConfig, RuleConfig, exchange_settings
from ds_ckpt.errors import ConfigError

PLACE = "$.ds_ckpt.compression.rules"


def parse_rules(*rules: Any, method: str = "quantize") -> CompressionConfig:
    config = {
        "zero_optimization": {"stage": 3},
        "ds_ckpt": {"compression": {"method": method, "rules": list(rules)}},
    }
    return parse(config).compression


WRONG = {
    "match": ["", 3, None, ["*"], "auto"],
    "method": ["none", "TopK", 1, "auto"],
    "dims": [0, 1.5, "2", True],
    "min_numel": [-1, 1e3, "8"],
    "max_numel": [-1, 1.0, True],
    "topk": [3, [], {"density": 0}],
    "powersgd": [{"rank": 0}, 4],
    "quantize": [{"bits": 5}, "4"],
    "entropy_coded": [{"bits": 3}, "1"],
}
OF_METHOD = {name: name for name in ("topk", "powersgd", "quantize", "entropy_coded")}


def test_every_key_of_a_rule_has_wrong_values() -> None:
    assert set(WRONG) == set(RuleConfig.model_fields)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named_by_its_place(key: str, value: Any) -> None:
    rule = {"match": "*", "method": OF_METHOD.get(key, "topk"), key: value}
    with pytest.raises(ConfigError) as caught:
        parse_rules({"match": "a*", "method": "dense"}, rule)
    places = [p.where for p in caught.value.problems]
    assert any(place.startswith(f"{PLACE}[1].{key}") for place in places), places


def test_an_unknown_key_and_an_entry_that_is_no_object() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules({"pattern": "*", "match": "*", "method": "topk"}, "*embed*")
    first, second = caught.value.problems
    assert first.where == f"{PLACE}[0].pattern"
    assert "match" in first.why
    assert second.where == f"{PLACE}[1]"


def test_a_section_that_the_rules_method_does_not_use_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules({"match": "*", "method": "dense", "quantize": {"bits": 8}})
    (problem,) = caught.value.problems
    assert problem.where == f"{PLACE}[0].quantize"


def test_rules_make_a_common_section_useful() -> None:
    config = {
        "zero_optimization": {"stage": 3},
        "ds_ckpt": {
            "compression": {
                "method": "dense",
                "topk": {"density": 0.5},
                "rules": [{"match": "*", "method": "topk"}],
                "warmup_steps": 5,
            }
        },
    }
    settings = exchange_settings(parse(config).compression)
    assert settings.rules[0].settings.sections["topk"].density == 0.5
    assert settings.warmup_steps == 5
    assert not settings.lossless


def test_settings_become_the_compressor() -> None:
    topk = {"density": 0.25, "values": "bf16"}
    compression = parse_rules(
        {"match": "a", "method": "topk", "topk": topk},
        {"match": "b", "method": "dense"},
        {"match": "c", "method": "quantize", "quantize": {"bits": 2, "block": 128}},
        {"match": "d", "method": "powersgd", "powersgd": {"rank": 3, "alternate": True}},
    )
    a, b, c, d = (r.settings.compressor() for r in exchange_settings(compression).rules)
    assert a == TopK(**topk)
    assert b is None
    assert c == Quantize(bits=2, block=128)
    assert d == LowRank(3, alternate=True)


def test_a_rules_own_section_comes_before_the_common_one() -> None:
    compression = parse_rules(
        {"match": "*.up", "method": "quantize", "quantize": {"bits": 8}},
        {"match": "*.down", "method": "quantize"},
        {"match": "norm*", "method": "dense", "min_numel": 10, "dims": 1},
        method="powersgd",
    )
    rules = exchange_settings(compression).rules
    assert [r.settings.sections["quantize"].bits for r in rules] == [8, 3, 3]
    assert [r.where for r in rules] == [f"{PLACE}[{i}]" for i in range(3)]
    assert rules[2].applies("norm.weight", torch.Size([10]))
    assert not rules[2].applies("norm.weight", torch.Size([9]))
    assert not rules[2].applies("norm.weight", torch.Size([5, 5]))


@pytest.mark.parametrize(
    ("compression", "places"),
    [
        (
            {"method": "topk", "error_feedback": {"enabled": False, "dtype": "bf16"}},
            ["error_feedback.dtype"],
        ),
        (
            {"method": "topk", "error_feedback": {"enabled": False, "device": "cpu"}},
            ["error_feedback.device"],
        ),
        (
            {
                "method": "quantize",
                "topk": {"density": 0.1},
                "rules": [{"match": "a", "method": "powersgd"}],
            },
            ["topk"],
        ),
        (
            {
                "method": "quantize",
                "rules": [
                    {"match": "a", "method": "powersgd", "topk": {"density": 0.1}},
                    {"match": "b", "method": "topk", "quantize": {"bits": 2}},
                ],
            },
            ["rules[0].topk", "rules[1].quantize"],
        ),
        # these act
        ({"method": "powersgd", "topk": {"density": 0.1}}, []),
        ({"method": "topk", "error_feedback": {"enabled": False}}, []),
        (
            {
                "method": "powersgd",
                "quantize": {"bits": 2},
                "rules": [{"match": "a", "method": "quantize"}],
            },
            [],
        ),
    ],
)
def test_settings_that_others_leave_without_a_use(
    compression: dict[str, Any], places: list[str]
) -> None:
    config = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": compression}}
    if not places:
        parse(config)
        return
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert [p.where for p in caught.value.problems] == [
        f"$.ds_ckpt.compression.{place}" for place in places
    ]
    assert all("does nothing" in p.why or "in this rule" in p.why for p in caught.value.problems)


@pytest.mark.parametrize(
    ("section", "where", "remedy"),
    [
        ({"topk": {"offsets": "packed"}}, "topk.offsets", "remove it"),
        ({"topk": {"selection": "exact"}}, "topk.selection", "raise density"),
        ({"topk": {"offsets": True}}, "topk.offsets", "remove it"),
        ({"rules": [{"match": "*", "method": "quantize", "quantize": {"rotated": True}}]},)
        + ("rules[0].quantize.rotated", "more bits"),
        ({"rules": [{"match": "*", "method": "quantize", "quantize": {"rotated": 0}}]},)
        + ("rules[0].quantize.rotated", "more bits"),
    ],
)
def test_a_setting_that_is_gone_is_refused_with_what_to_write(
    section: dict[str, Any], where: str, remedy: str
) -> None:
    config = {
        "zero_optimization": {"stage": 3},
        "ds_ckpt": {"compression": {"method": "topk", **section}},
    }
    with pytest.raises(ConfigError) as caught:
        parse(config)
    (problem,) = caught.value.problems
    assert problem.where == f"$.ds_ckpt.compression.{where}"
    assert remedy in problem.remedy


def test_a_setting_that_is_gone_may_say_what_is_always_so_now(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = parse_rules({"match": "*", "method": "quantize", "quantize": {"rotated": False}})
    assert old == parse_rules({"match": "*", "method": "quantize", "quantize": {}})
    (line,) = (record.message for record in caplog.records)
    assert f"{PLACE}[0].quantize.rotated" in line
    assert "remove it" in line
