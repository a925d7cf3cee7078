"""The JSON Schema for editors: fresh, complete, and in agreement with the models."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ckpt.config import json_schema
from ds_ckpt.config.models import DeepSpeedActivationSection, PluginConfig


def test_the_dialect_and_the_root() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["properties"]) == {"ds_ckpt", "activation_checkpointing"}
    assert schema["additionalProperties"] is True  # the rest is DeepSpeed's
    assert "properties" in schema["$defs"][PluginConfig.__name__]
    keys = schema["$defs"][DeepSpeedActivationSection.__name__]["properties"]
    assert set(keys) == set(DeepSpeedActivationSection.model_fields)


def _properties() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (section, key, prop)
        for section, definition in json_schema()["$defs"].items()
        for key, prop in definition["properties"].items()
    ]


@pytest.mark.parametrize(("section", "key", "prop"), _properties())
def test_every_key_is_described_and_takes_null(
    section: str, key: str, prop: dict[str, Any]
) -> None:
    assert len(prop["description"]) > 15
    kinds = prop.get("type", [])
    nullable = (
        "null" in ([kinds] if isinstance(kinds, str) else kinds)
        or None in prop.get("enum", [])
        or {"type": "null"} in prop.get("anyOf", [])
    )
    assert nullable


def test_unknown_keys_are_refused_in_our_sections() -> None:
    for definition in json_schema()["$defs"].values():
        assert definition["additionalProperties"] is False
