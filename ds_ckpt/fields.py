"""What every section of the configuration is made of: strict models that explain their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


@dataclass(frozen=True)
class Expects:
    """What a key takes, in words, and a value to copy (as JSON)."""

    words: str
    example: str


@dataclass(frozen=True)
class Removed:
    """A setting that earlier releases had, or some values of one that is still there.

    Attributes:
        why: what became of it, in words.
        remedy: what to write instead.
        values: only these of the setting's values are gone; empty: the setting is.
        stays: what a setting that is gone always is now; a file that says so is taken, with a
            warning.
    """

    why: str
    remedy: str
    values: tuple[Any, ...] = ()
    stays: Any = None


class Section(BaseModel):
    """One object of the configuration.

    Attributes:
        aliases: keys that people write from other libraries, and the key that was meant.
        removed: settings of earlier releases, by key.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    aliases: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, Removed]] = {}


def list_as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool | float):
        raise ValueError("not a whole number")
    return value


WHOLE_NUMBER = BeforeValidator(_whole_number)
"""`4.0` and `true` equal members of a Literal of integers; they are not whole numbers here."""


def _no_number(value: Any) -> Any:
    if not isinstance(value, bool | str):
        raise ValueError("a number is no switch")
    return value


NO_NUMBER = BeforeValidator(_no_number)
"""`1` equals a Literal's `True`; it is no switch here."""
SWITCH = Expects("true or false", "true")
ModuleName = Annotated[str, Field(min_length=1)]
