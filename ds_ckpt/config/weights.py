"""The section `ds_ckpt.weights`: resident copies of the weights, and how changes are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_ckpt.fields import Expects, Removed, Requires, Section


class WeightsConfig(Section):
    """Copies of the weights on every node, so that all-gathers stay inside the node."""

    removed = {
        "deltas": Removed(
            "weight changes in few bits were removed", 'write "auto"', ("4bit", "3bit")
        )
    }

    resident: Annotated[bool | Literal["auto"], Expects('true, false or "auto"', "true")] = Field(
        False,
        description="Keep one copy of the weights per node, sharded over its ranks, and send "
        "weights between nodes once per step, for 2 bytes per parameter (4 in fp32). Bit-equal to "
        'DeepSpeed. "auto": only if that shortens the step.',
    )
    deltas: Annotated[
        Literal["auto", "none", "lossless"], Requires("resident", not_in=(False,), suggest=True)
    ] = Field(
        "auto",
        description='Encoding of weights between nodes. "none": uncompressed. "lossless": changes '
        'in 0.8 to 4 bits a weight, bit-equal. "auto": the faster one for bf16 and fp16, none for '
        "fp32.",
    )

    def summary(self) -> str:
        """Describe the active settings in a few words."""
        condition = ", if that shortens the step" if self.resident == "auto" else ""
        return f"weights resident on every node{condition}"
