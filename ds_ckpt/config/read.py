"""Validate one section against its model and convert every mistake into a `Problem`.

Pydantic finds the mistakes; the words come from the markers of the fields. Nulls, former names and
removed settings are handled before pydantic sees the section.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from ds_ckpt.config.paths import is_auto, join, nearest, show
from ds_ckpt.errors import Problem
from ds_ckpt.fields import AnySection, Expects, Section

log = logging.getLogger("ds_ckpt")


def read(
    raw: object, model: type[AnySection], path: str, problems: list[Problem]
) -> AnySection | None:
    """Return the validated section, or None; mistakes are appended to `problems`."""
    if not isinstance(raw, Mapping):
        why = "a section is an object in braces"
        problems.append(Problem(path, show(raw), why, "write an object, {}, or remove the key"))
        return None
    try:
        return model.model_validate(_clean(raw, model, path, problems))
    except ValidationError as error:
        for entry in error.errors(include_url=False, include_context=False):
            words = entry["msg"].replace("Input should be", "must be").replace("'", '"')
            words = words.replace("Value error, ", "must be ").replace("Field ", "is ")
            words = re.sub("a valid dictionary.*", "an object in braces", words)
            problems.append(_problem(words, entry["loc"], entry["input"], model, path))
        return None


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section in a field's type: the type itself, an optional one, a list's item."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def _clean(
    raw: Mapping[Any, Any], model: type[Section], path: str, problems: list[Problem]
) -> dict[str, Any]:
    """Drop nulls and removed settings, and apply new names; both are reported or logged."""
    kept: dict[str, Any] = {}
    for written, value in raw.items():
        key, place = str(written), join(path, str(written))
        if key in model.renamed and raw.get(model.renamed[key]) is None:
            key = model.renamed[key]
            _warn(place, f"former name of {key}, which the next release will refuse")
        field = model.model_fields.get(key)
        if _is_removed(key, value, model, place, problems) or (field and value is None):
            continue
        if field and key in model.unused and value is not False:
            _warn(place, str(field.description))
        section = section_of(field.annotation) if field else None
        if section and isinstance(value, Mapping):
            value = _clean(value, section, place, problems)
        elif section and isinstance(value, list | tuple):
            value = [
                _clean(item, section, join(place, i), problems)
                if isinstance(item, Mapping)
                else item
                for i, item in enumerate(value)
            ]
        kept[key] = value
    return kept


@functools.cache
def _warn(place: str, words: str) -> None:
    log.warning("%s: %s", place, words)


def _is_removed(
    key: str, value: object, model: type[Section], place: str, problems: list[Problem]
) -> bool:
    removed = model.removed.get(key)
    if removed is None or (removed.values and value not in removed.values):
        return False
    if not removed.values and value == removed.constant and type(value) is type(removed.constant):
        _warn(place, f"no effect: {removed.why}; {removed.remedy}")
    else:
        problems.append(Problem(place, show(value), removed.why, removed.remedy))
    return True


def _problem(
    words: str, loc: tuple[int | str, ...], value: object, model: type[Section], path: str
) -> Problem:
    """Convert one error of pydantic."""
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
    if field is None:
        return _unknown_key(key, value, model, parent)
    found = "nothing" if words == "is required" else show(value)
    remedy = "correct it"
    for marker in (m for m in field.metadata if isinstance(m, Expects)):
        words, remedy = f"must be {marker.words}", f"write for example {marker.example}"
    if not field.is_required():
        default = {} if field.default_factory else field.default
        remedy += f", or remove the key (default {show(default)})"
    why = f"{key} {words}"
    if is_auto(value):
        why += '; "auto" is for keys that Hugging Face knows, and nothing fills it in here'
    elif isinstance(value, str):
        close = nearest(value, re.findall(r'"([^"]*)"', words))
        why += f'; did you mean "{close}"?' if close else "; in quotes it is text"
    return Problem(place, found, why, remedy)


def _unknown_key(key: str, value: object, model: type[Section], path: str) -> Problem:
    place, why = join(path, key), f"{show(key)} is not a key of {path}"
    keys = list(model.model_fields)
    if meant := model.aliases.get(key.lower()) or nearest(key, keys):
        why += f'; did you mean "{meant}"?'
        return Problem(place, show(value), why, f"write it as {path}.{meant}")
    return Problem(place, show(value), why, f"remove it; the keys here are {', '.join(keys)}")
