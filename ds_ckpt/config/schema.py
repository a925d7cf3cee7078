"""JSON Schema (draft 2020-12) of the whole file, for editors (`ds-ckpt schema`).

Describes our section and `activation_checkpointing`; all other keys are DeepSpeed's and pass.
Every key also takes null. Rules across sections are not in it: `ds-ckpt validate` checks those.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ds_ckpt.config.models import DeepSpeedActivationSection, PluginConfig, follow_registry

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema as a JSON-ready dict."""
    follow_registry()
    models: list[type[BaseModel]] = [PluginConfig, DeepSpeedActivationSection]
    _, generated = models_json_schema([(m, "validation") for m in models])
    definitions = generated["$defs"]
    for definition in definitions.values():
        definition.pop("title", None)
        if "properties" in definition:
            definition["description"] = " ".join(definition.get("description", "").split())
            definition["properties"] = {
                name: _nullable(prop) for name, prop in definition["properties"].items()
            }
    return {
        "$schema": _DIALECT,
        "title": "DeepSpeed configuration with ds_ckpt",
        "type": "object",
        "properties": {
            "ds_ckpt": _nullable({"$ref": f"#/$defs/{PluginConfig.__name__}"}),
            "activation_checkpointing": _nullable(
                {"$ref": f"#/$defs/{DeepSpeedActivationSection.__name__}"}
            ),
        },
        "additionalProperties": True,
        "$defs": dict(sorted(definitions.items())),
    }


def _nullable(prop: dict[str, Any]) -> dict[str, Any]:
    """The same property, with null allowed."""
    prop = {k: v for k, v in prop.items() if k != "title"}
    options = prop.pop("anyOf", None)
    if options is not None:
        return {"anyOf": options, **prop}
    if "enum" in prop:
        choices = prop["enum"]
        prop.pop("type", None)
        return {**prop, "enum": choices if None in choices else [*choices, None]}
    if "$ref" in prop:
        return {"anyOf": [{"$ref": prop.pop("$ref")}, {"type": "null"}], **prop}
    if isinstance(prop.get("type"), str) and prop["type"] != "null":
        prop["type"] = [prop["type"], "null"]
    return prop
