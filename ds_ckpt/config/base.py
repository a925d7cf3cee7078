"""What every section's model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Expects:
    """What a key takes, in words, and a value to copy (as JSON)."""

    words: str
    example: str


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def list_as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


SWITCH = Expects("true or false", "true")
ModuleName = Annotated[str, Field(min_length=1)]
