"""Hybrid: low rank first, then values of what the factors missed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ds_ckpt.compression.base import Method
from ds_ckpt.compression.powersgd import LowRank, PowerSGD
from ds_ckpt.settings import Expects


class Hybrid(Method):
    """Hybrid: low rank first, then values of what it missed."""

    name = "hybrid"
    about = "low rank, then few-bit or Top-K values of what it missed"
    example = '{"remainder": "quantize"}'
    least_dims = 2
    uses = ("powersgd",)
    chooses = "remainder"
    sparse = "topk"
    presets = {
        "hybrid": {
            "powersgd": {"rank": 4},
            "quantize": {"bits": 2},
            "hybrid": {"remainder": "quantize"},
        }
    }

    remainder: Annotated[
        Literal["topk", "quantize"], Expects('"topk" or "quantize"', '"quantize"')
    ] = Field(
        default="quantize",
        description="How the entries that the factors missed travel, by the section of that name: "
        "few-bit values of all, or the largest alone.",
    )

    def build(self, sections: Mapping[str, Method]) -> LowRank:
        factors, rest = sections["powersgd"], sections[self.remainder].build(sections)
        assert isinstance(factors, PowerSGD)
        assert rest is not None
        return LowRank(factors.rank, factors.alternate, rest.codec)
