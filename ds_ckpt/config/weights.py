"""The section `ds_ckpt.weights`: resident copies of the weights, and how changes are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_ckpt.fields import NO_NUMBER, Removed, Requires, Section


class WeightsConfig(Section):
    """Copies of the weights on every node, so that all-gathers stay inside the node."""

    removed = {
        "deltas": Removed(
            why="weight changes in few bits were removed",
            remedy='write "auto": lossless changes take 0.7 to 4 bits a weight',
            values=("4bit", "3bit"),
        )
    }

    resident: Annotated[
        Literal[True, False, "auto"],
        NO_NUMBER,
    ] = Field(
        default=False,
        description="One copy of the weights per node, sharded over its ranks: all-gathers stay "
        "inside the node, and weights are sent between nodes once per step, after the optimizer. "
        "Costs 2 bytes a parameter (4 in fp32), divided by the ranks of a node. Bit-equal to "
        'DeepSpeed. "auto": whole steps are timed with and without, '
        "and the copy is kept if it shortens the step.",
    )
    deltas: Annotated[
        Literal["auto", "none", "lossless"],
        Requires("resident", not_in=(False,), suggest=True),
    ] = Field(
        default="auto",
        description='Encoding of weights between nodes. "none": uncompressed. "lossless": changes '
        "in units of the last place, near their entropy: 0.7 to 4 bits a weight instead of 16, "
        'fewer at lower learning rates; both bit-equal. "auto": for bf16 and fp16 the '
        "faster of the two, for fp32 none.",
    )

    def summary(self) -> str:
        """Describe the active settings in a few words."""
        words = {"auto": "", "none": ", sent uncompressed", "lossless": ", changes sent losslessly"}
        condition = ", if that shortens the step" if self.resident == "auto" else ""
        return f"weights resident on every node{words[self.deltas]}{condition}"
