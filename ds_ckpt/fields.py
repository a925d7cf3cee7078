"""Building blocks of the configuration: strict sections, and the markers on their fields.

A field is an `Annotated` type with at most one `Expects` and any number of `Requires`.
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

log = logging.getLogger("ds_ckpt")


@dataclass(frozen=True)
class Expects:
    """Accepted values in words, and an example as JSON, in place of pydantic's message."""

    words: str
    example: str


@dataclass(frozen=True)
class Requires:
    """Setting without which the marked key has no effect.

    Attributes:
        key: a key of the same section, or `section.key` below `ds_ckpt`.
        values: values of `key` that give the marked key an effect, or a function that returns them.
        not_in: values of `key` that take its effect away; used if there are no `values`.
        suggest: value for the error message; default: the first of `values`.
        why: reason for the error message; default: the value of `key`.
        for_values: values of the marked key that need this; default: all.
    """

    key: str
    values: tuple[Any, ...] | Callable[[], Sequence[Any]] = ()
    not_in: tuple[Any, ...] = ()
    suggest: Any = None
    why: str = ""
    for_values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Removed:
    """Setting of an earlier release, or removed values of a setting.

    Attributes:
        why: reason for the removal.
        remedy: replacement.
        values: removed values; empty: the setting itself is removed.
        constant: the value that is always used now; a file that has it is accepted.
    """

    why: str
    remedy: str
    values: tuple[Any, ...] = ()
    constant: Any = None


class Section(BaseModel):
    """One object of the configuration.

    Attributes:
        renamed: former names of keys, which are accepted with a warning, and their names.
        removed: settings of earlier releases, by key.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    renamed: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, Removed]] = {}

    @model_validator(mode="before")
    @classmethod
    def _accept(cls, raw: Any) -> Any:
        """Drop nulls and removed settings at their constant value, and apply new names."""
        if not isinstance(raw, Mapping):
            return raw
        kept: dict[str, Any] = {}
        for key, value in ((str(key), value) for key, value in raw.items()):
            new, removed = cls.renamed.get(key), cls.removed.get(key)
            if new and raw.get(new) is None:
                warn(f"{key}: former name of {new}, which the next release will refuse")
                key = new
            is_same = removed and (type(value), value) == (type(removed.constant), removed.constant)
            if removed and is_same and not removed.values:
                warn(f"{key}: no effect: {removed.why}; {removed.remedy}")
                continue
            if value is not None or key not in cls.model_fields:
                kept[key] = value
        return kept


@functools.cache
def warn(words: str) -> None:
    """Log a warning about the configuration, once per process."""
    log.warning("ds_ckpt configuration: %s", words)


def field_of(kind: type[Section], description: str) -> Any:
    """Declare a field that holds a section."""
    return Field(default_factory=kind, description=description)


AnySection = TypeVar("AnySection", bound=Section)


def derive(base: type[AnySection], **types: Any) -> type[AnySection]:
    """Return the model with other types for its fields (with their markers), or with more fields.

    A new field is a pair of its type and its `Field`.
    """
    fields: dict[str, Any] = {}
    for name, kind in types.items():
        fields[name] = kind
        if not isinstance(kind, tuple):
            field = copy.copy(base.model_fields[name])
            if field.default_factory is not None:
                field.default_factory = kind
            fields[name] = (kind, field)
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)


def is_auto(value: object) -> bool:
    """Return whether the value is "auto", the placeholder that Hugging Face fills in."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def list_as_tuple(value: Any) -> Any:
    """Convert a JSON list to the tuple that frozen sections hold."""
    return tuple(value) if isinstance(value, list) else value


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool | float):
        raise ValueError("a whole number")
    return value


def _not_auto(value: str) -> str:
    if is_auto(value):
        raise ValueError("a name")
    return value


WHOLE_NUMBER = BeforeValidator(_whole_number)
"""For a Literal of integers, which 4.0 and true would equal."""
Name = Annotated[str, Field(min_length=1), AfterValidator(_not_auto)]
