"""Reads one section against its model and turns every mistake into a `Problem`.

Keys, nulls and `"auto"` are handled here; types and ranges by pydantic, whose errors are used for
their place only: the words come from the model's `Expects`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_ckpt.config.load import RENAMED
from ds_ckpt.config.models import PluginConfig
from ds_ckpt.config.paths import is_auto, join, nearest, plain, show
from ds_ckpt.errors import Problem
from ds_ckpt.fields import Expects, Section

log = logging.getLogger("ds_ckpt")
OURS = "$.ds_ckpt"
DEEPSPEEDS = "$.activation_checkpointing"

# Names that people write from other libraries or from wrong documentation: the key that was meant.
# Methods of compression have theirs themselves.
_ALIASES = {
    f"{OURS}.activation": {
        "type": "policy",
        "mode": "policy",
        "classes": "modules",
        "blocks": "modules",
    },
    f"{OURS}.activation.rules": {"pattern": "match", "blocks": "match", "name": "match"},
}
_SWITCHES = {
    f"{OURS}.compression": '"method": "none" switches compression off',
    f"{OURS}.activation": '"policy": "none" switches checkpointing off',
}


def _submodel(field: FieldInfo) -> type[BaseModel] | None:
    if get_origin(field.annotation) is tuple:
        return None
    kinds = [field.annotation, *get_args(field.annotation)]
    sections = (k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
    return next(sections, None)


def _item_model(field: FieldInfo) -> type[BaseModel] | None:
    """The section that each entry of a list is."""
    if get_origin(field.annotation) is not tuple:
        return None
    kind = get_args(field.annotation)[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _expects(field: FieldInfo) -> Expects:
    return next(m for m in field.metadata if isinstance(m, Expects))


def _takes_auto(field: FieldInfo) -> bool:
    return "auto" in get_args(field.annotation) or '"auto"' in _expects(field).words


def _places(model: type[BaseModel], path: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield name, join(path, name)
        if sub := _submodel(field):
            yield from _places(sub, join(path, name))


def _remedy(field: FieldInfo) -> str:
    default = "" if field.is_required() else f" (default {show(_default(field))})"
    example = _expects(field).example
    without = "" if field.is_required() else f", or leave the key out or null{default}"
    return f"write for example {example}{without}"


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    return value.model_dump() if isinstance(value, BaseModel) else value


def _unknown_key(key: object, value: object, model: type[BaseModel], path: str) -> Problem:
    why = f"{show(key)} is not a key of {path}"
    keys = list(model.model_fields)
    if path == DEEPSPEEDS and key == "partitioned_activations":
        why = (
            "DeepSpeed's documentation names it, but no code reads it: the key is "
            '"partition_activations"; did you mean that?'
        )
        remedy = f"write it as {DEEPSPEEDS}.partition_activations, or remove it"
        return Problem(join(path, key), show(value), why, remedy)
    if new := RENAMED.get(join(path, key).removeprefix(f"{OURS}.")):
        why = f"it is the former name of {OURS}.{new}, which is written too"
        return Problem(join(path, key), show(value), why, "remove it")
    if plain(key) in ("enable", "enabled") and path in _SWITCHES:
        return Problem(join(path, key), show(value), why, f"remove it; {_SWITCHES[path]}")
    of_model = model.aliases if issubclass(model, Section) else {}
    meant = {**_ALIASES.get(path.rstrip("0123456789[]"), {}), **of_model}.get(str(key).lower())
    meant = meant or nearest(key, keys)
    if meant:
        why += f'; did you mean "{meant}"?'
        return Problem(join(path, key), show(value), why, f"write it as {path}.{meant}")
    elsewhere = [place for name, place in _places(PluginConfig, OURS) if name == key]
    if len(elsewhere) == 1:
        return Problem(join(path, key), show(value), why, f"move it to {elsewhere[0]}")
    remedy = f"remove it; the keys here are {', '.join(keys)}"
    return Problem(join(path, key), show(value), why, remedy)


def _auto(value: object, field: FieldInfo, where: str) -> Problem:
    why = (
        '"auto" is filled in by the Hugging Face integration for keys that it knows; '
        "nothing fills it in here"
    )
    return Problem(where, show(value), why, _remedy(field))


def _wrong_value(value: object, field: FieldInfo, where: str, key: str) -> Problem:
    expects = _expects(field)
    why = f"{key} must be {expects.words}"
    if isinstance(value, bool):
        why += f"; {show(value)} is neither a number nor text"
    elif isinstance(value, str) and expects.words.startswith('"'):
        choices = [word.strip('"') for word in expects.words.replace(" or ", ", ").split(", ")]
        if close := nearest(value, choices):
            why += f'; did you mean "{close}"?'
            without = "" if field.is_required() else ", or leave the key out"
            return Problem(where, show(value), why, f'write "{close}"{without}')
    elif isinstance(value, str) and not expects.example.startswith(('"', "[")):
        why += "; in quotes it is text"
    elif isinstance(value, float) and "whole number" in expects.words:
        why += "; with a point or an exponent it is not a whole number in JSON"
    return Problem(where, show(value), why, _remedy(field))


def not_an_object(value: object, where: str) -> Problem:
    kind = "a list" if isinstance(value, list | tuple) else f"{show(value)[:20]}"
    why = f"a section is an object in braces, not {kind}"
    return Problem(where, show(value), why, "write an object, {}, or remove the key")


def _clean(
    raw: Mapping[Any, Any], model: type[BaseModel], path: str, problems: list[Problem]
) -> dict[str, Any]:
    """What is left for pydantic: known keys, without nulls and without what is reported here."""
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        field = model.model_fields.get(key) if isinstance(key, str) else None
        where = join(path, str(key))
        if _is_gone(key, value, model, where, problems):
            continue
        if field is None:
            problems.append(_unknown_key(key, value, model, path))
        elif value is None:
            continue
        elif is_auto(value) and not _takes_auto(field):
            problems.append(_auto(value, field, where))
        elif isinstance(value, list | tuple) and (item := _item_model(field)) is not None:
            kept[key] = _clean_items(value, item, where, problems)
        elif isinstance(value, list | tuple) and any(is_auto(item) for item in value):
            position = next(i for i, item in enumerate(value) if is_auto(item))
            problems.append(_auto(value[position], field, join(where, position)))
        elif (sub := _submodel(field)) is None:
            kept[key] = value
        elif isinstance(value, Mapping):
            kept[key] = _clean(value, sub, where, problems)
        else:
            problems.append(not_an_object(value, where))
    return kept


def _is_gone(
    key: object, value: object, model: type[BaseModel], where: str, problems: list[Problem]
) -> bool:
    """Whether an earlier release had that setting or value; told here."""
    gone = model.removed.get(str(key)) if issubclass(model, Section) else None
    if gone is None or (value not in gone.values if gone.values else value is None):
        return False
    if not gone.values and value == gone.stays and type(value) is type(gone.stays):
        log.warning("ds_ckpt: %s is no setting any more: %s; %s", where, gone.why, gone.remedy)
    else:
        problems.append(Problem(where, show(value), gone.why, gone.remedy))
    return True


def _clean_items(
    items: list[Any] | tuple[Any, ...], model: type[BaseModel], path: str, problems: list[Problem]
) -> list[Any]:
    kept = []
    for i, item in enumerate(items):
        if isinstance(item, Mapping):
            kept.append(_clean(item, model, join(path, i), problems))
        else:
            problems.append(not_an_object(item, join(path, i)))
    return kept


def read(
    raw: object, model: type[BaseModel], path: str, problems: list[Problem]
) -> BaseModel | None:
    """The section without what is wrong in it (that goes to `problems`), or None."""
    if not isinstance(raw, Mapping):
        problems.append(not_an_object(raw, path))
        return None
    cleaned = _clean(raw, model, path, problems)
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        for entry in error.errors(include_url=False, include_context=False):
            problem = _from_pydantic(entry["loc"], entry["input"], model, path)
            if entry["type"] == "missing":  # what pydantic shows is all that is around it
                problem = replace(problem, found="nothing")
            problems.append(problem)
        return None


def _from_pydantic(
    loc: tuple[int | str, ...], value: object, model: type[BaseModel], path: str
) -> Problem:
    where, key, field = path, "", None
    for part in loc:
        where = join(where, part)
        if isinstance(part, str):
            key, field = part, model.model_fields[part]
            model = _submodel(field) or _item_model(field) or model
    assert field is not None, "a section's own type is checked before pydantic sees it"
    return _wrong_value(value, field, where, key)
