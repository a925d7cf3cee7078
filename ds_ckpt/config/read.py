"""Validate one section against its model and convert every mistake into a `Problem`.

Pydantic finds the mistakes; the words come from the markers of the fields. Nulls, aliases of keys
and removed settings are handled before pydantic sees the section.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_ckpt.config.load import RENAMED
from ds_ckpt.config.models import plugin_model
from ds_ckpt.config.paths import OURS, is_auto, join, nearest, show
from ds_ckpt.errors import Problem
from ds_ckpt.fields import Section, expected

log = logging.getLogger("ds_ckpt")


def read(raw: object, model: type[Section], path: str, problems: list[Problem]) -> BaseModel | None:
    """Return the validated section, or None; mistakes are appended to `problems`."""
    if not isinstance(raw, Mapping):
        problems.append(_not_an_object(raw, path))
        return None
    cleaned = _clean(raw, model, path, problems)
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        for entry in error.errors(include_url=False, include_context=False):
            problems.append(_problem(entry["type"], entry["loc"], entry["input"], model, path))
        return None


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section in a field's type: the type itself, an optional one, a list's item."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def default_of(field: FieldInfo) -> Any:
    """Return the default as it would stand in JSON."""
    value = field.get_default(call_default_factory=True, validated_data={})
    return value.model_dump() if isinstance(value, BaseModel) else value


def _clean(
    raw: Mapping[Any, Any], model: type[Section], path: str, problems: list[Problem]
) -> dict[str, Any]:
    """Drop nulls and removed settings, which are reported here."""
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        field = model.model_fields.get(key)
        place = join(path, str(key))
        if _is_removed(key, value, model, place, problems):
            continue
        if field is not None and value is None:
            continue
        section = section_of(field.annotation) if field is not None else None
        if section is not None and isinstance(value, Mapping):
            value = _clean(value, section, place, problems)
        elif section is not None and isinstance(value, list | tuple):
            value = [
                _clean(item, section, join(place, i), problems)
                if isinstance(item, Mapping)
                else item
                for i, item in enumerate(value)
            ]
        kept[str(key)] = value
    return kept


def _is_removed(
    key: object, value: object, model: type[Section], place: str, problems: list[Problem]
) -> bool:
    removed = model.removed.get(str(key))
    if removed is None or (removed.values and value not in removed.values):
        return False
    if not removed.values and value == removed.constant and type(value) is type(removed.constant):
        log.warning("%s has no effect: %s; %s", place, removed.why, removed.remedy)
    else:
        problems.append(Problem(place, show(value), removed.why, removed.remedy))
    return True


def _problem(
    kind: str, loc: tuple[int | str, ...], value: object, model: type[Section], path: str
) -> Problem:
    """Convert one error of pydantic."""
    field: FieldInfo | None = None
    place, key = path, ""
    for part in loc:
        if isinstance(part, str) and field is not None:
            model = section_of(field.annotation) or model
        path, place = place, join(place, part)
        if isinstance(part, str):
            key, field = part, model.model_fields.get(part)
    if field is None:
        return _unknown_key(str(key), value, model, path)
    if kind == "missing":
        return Problem(place, "nothing", f"{key} must be {expected(field).words}", _remedy(field))
    if is_auto(value):
        why = (
            '"auto" is filled in by the Hugging Face integration for keys that it knows; '
            "nothing fills it in here"
        )
        return Problem(place, show(value), why, _remedy(field))
    if kind == "model_type":
        return _not_an_object(value, place)
    return _wrong_value(value, field, place, str(key))


def _unknown_key(key: str, value: object, model: type[Section], path: str) -> Problem:
    place, why = join(path, key), f"{show(key)} is not a key of {path}"
    if new := RENAMED.get(place.removeprefix(f"{OURS}.")):
        why = f"it is the former name of {OURS}.{new}, which is written too"
        return Problem(place, show(value), why, "remove it")
    keys = list(model.model_fields)
    if meant := model.aliases.get(key.lower()) or nearest(key, keys):
        why += f'; did you mean "{meant}"?'
        return Problem(place, show(value), why, f"write it as {path}.{meant}")
    elsewhere = [there for there in _all_keys(plugin_model(), OURS) if there.endswith(f".{key}")]
    remedy = f"remove it; the keys here are {', '.join(keys)}"
    return Problem(
        place, show(value), why, f"move it to {elsewhere[0]}" if len(elsewhere) == 1 else remedy
    )


def _all_keys(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield join(path, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _all_keys(field.annotation, join(path, name))


def _remedy(field: FieldInfo) -> str:
    remedy = f"write for example {expected(field).example}"
    if field.is_required():
        return remedy
    return f"{remedy}, or leave the key out or null (default {show(default_of(field))})"


def _wrong_value(value: object, field: FieldInfo, place: str, key: str) -> Problem:
    expects = expected(field)
    why, remedy = f"{key} must be {expects.words}", _remedy(field)
    if isinstance(value, bool):
        why += f"; {show(value)} is neither a number nor text"
    elif isinstance(value, str) and (choices := re.findall(r'"([^"]*)"', expects.words)):
        if close := nearest(value, choices):
            why += f'; did you mean "{close}"?'
            remedy = f'write "{close}"'
    elif isinstance(value, str) and not expects.example.startswith(('"', "[")):
        why += "; in quotes it is text"
    elif isinstance(value, float) and "whole number" in expects.words:
        why += "; with a point or an exponent it is not a whole number in JSON"
    return Problem(place, show(value), why, remedy)


def _not_an_object(value: object, place: str) -> Problem:
    kind = "a list" if isinstance(value, list | tuple) else show(value)[:20]
    why = f"a section is an object in braces, not {kind}"
    return Problem(place, show(value), why, "write an object, {}, or remove the key")
