"""Validate one section against its model and convert every mistake into a `Problem`.

Pydantic finds the mistakes; the words come from the markers of the fields.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from ds_ckpt.compression.base import ENTRY_POINTS
from ds_ckpt.config.paths import is_auto, join, nearest, show
from ds_ckpt.errors import Problem
from ds_ckpt.fields import AnySection, Expects, Section


def read(
    raw: object, model: type[AnySection], path: str, problems: list[Problem]
) -> AnySection | None:
    """Return the validated section, or None; mistakes are appended to `problems`."""
    if not isinstance(raw, Mapping):
        problems.append(no_object(path, raw))
        return None
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        for entry in error.errors(include_url=False, include_context=False):
            words = entry["msg"].replace("Input should be", "must be").replace("'", '"')
            words = words.replace("Value error, ", "must be ").replace("Field ", "is ")
            words = re.sub("a valid dictionary.*", "an object in braces", words)
            problems.append(_problem(words, entry["loc"], entry["input"], model, path))
        return None


def no_object(path: str, raw: object) -> Problem:
    """Return the problem of a section that is not a JSON object."""
    why = "a section is an object in braces"
    return Problem(path, show(raw), why, "write an object, {}, or remove the key")


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section in a field's type: the type itself, an optional one, a list's item."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def _problem(
    words: str, loc: tuple[int | str, ...], value: object, model: type[Section], path: str
) -> Problem:
    place = parent = path
    key, field = "", None
    for part in loc:
        if isinstance(part, int):
            place = join(place, part)
            continue
        if field is not None:
            section = section_of(field.annotation)
            if section is None:
                break  # a member of a union
            model = section
        key, parent, place = part, place, join(place, part)
        field = model.model_fields.get(part)
    if (removed := model.removed.get(key)) and (not removed.values or value in removed.values):
        return Problem(place, show(value), removed.why, removed.remedy)
    if field is None:
        return _unknown_key(key, value, model, parent)
    found = "nothing" if words == "is required" else show(value)
    remedy = "correct it"
    for marker in (m for m in field.metadata if isinstance(m, Expects)):
        words, remedy = f"must be {marker.words}", f"write for example {marker.example}"
    if not field.is_required():
        default = {} if field.default_factory else field.default
        remedy += f", or remove the key (default {show(default)})"
    if key == "method" and isinstance(value, str):
        remedy += f"; one of your own: install its entry point ({ENTRY_POINTS})"
    why = f"{key} {words}"
    if is_auto(value):
        why += '; "auto" is for keys that Hugging Face fills in; this key is not one of them'
    elif isinstance(value, str):
        close = nearest(value, re.findall(r'"([^"]*)"', words))
        why += f'; did you mean "{close}"?' if close else "; in quotes it is text"
    return Problem(place, found, why, remedy)


def _unknown_key(key: str, value: object, model: type[Section], path: str) -> Problem:
    place, why = join(path, key), f"{show(key)} is not a key of {path}"
    keys = list(model.model_fields)
    if close := nearest(key, keys):
        why += f'; did you mean "{close}"?'
        return Problem(place, show(value), why, f"write it as {path}.{close}")
    remedy = f"remove it; the keys here are {', '.join(keys)}"
    if below := " or as ".join(_below(key, model, path)):
        remedy = f"write it as {below}, or {remedy}"
    return Problem(place, show(value), why, remedy)


def _below(key: str, model: type[Section], path: str) -> Iterator[str]:
    """Yield where sections below this one have the key: `bits` is one of `quantize`."""
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) and get_origin(field.annotation) is not tuple:
            if key in section.model_fields:
                yield join(join(path, name), key)
            yield from _below(key, section, join(path, name))
