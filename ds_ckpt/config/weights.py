"""The section `ds_ckpt.weights`: resident copies of the weights, and how changes are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_ckpt.fields import NO_NUMBER, Expects, Requires, Section


class WeightsConfig(Section):
    """Copies of the weights on every node, so that all-gathers stay inside the node."""

    resident: Annotated[
        Literal[True, False, "auto"],
        NO_NUMBER,
        Expects('true, false or "auto"', '"auto"'),
        Requires(
            "deltas",
            unless=("4bit", "3bit"),
            suggest="auto",
            only=("auto",),
            why="nodes then hold other weights than DeepSpeed would: steps with and without differ",
        ),
    ] = Field(
        default=False,
        description="One copy of the weights per node, sharded over its ranks: all-gathers stay "
        "inside the node, and weights are sent between nodes once per step, after the optimizer. "
        "Costs 2 bytes a parameter (4 in fp32), divided by the ranks of a node. Bit-equal to "
        'DeepSpeed, except with few-bit deltas. "auto": whole steps are timed with and without, '
        "and the copy is kept if it shortens the step.",
    )
    deltas: Annotated[
        Literal["auto", "none", "lossless", "4bit", "3bit"],
        Expects('"auto", "none", "lossless", "4bit" or "3bit"', '"auto"'),
        Requires("resident", unless=(False,), suggest=True),
    ] = Field(
        default="auto",
        description='Encoding of weights between nodes. "none": uncompressed. "lossless": changes '
        "in units of the last place, near their entropy: 0.7 to 4 bits a weight instead of 16, "
        'fewer at lower learning rates, bit-equal. "4bit", "3bit": difference between the '
        "owner's weights and the copies; tensors with a larger error than 1.5 bf16 roundings are "
        'uncompressed. "auto": lossless or none for bf16 and fp16, whichever takes less time; none '
        "for fp32.",
    )

    @property
    def few_bits(self) -> int | None:
        """Bits of a change where weights are tracked; None: they travel without loss."""
        return {"4bit": 4, "3bit": 3}.get(self.deltas)

    def summary(self) -> str:
        """Describe the active settings in a few words."""
        words = {"auto": "", "none": ", sent whole", "lossless": ", their changes sent losslessly"}
        few_bits = f", their changes sent in {self.few_bits} bits"
        where = ", where that makes steps shorter" if self.resident == "auto" else ""
        return f"weights resident on every host{words.get(self.deltas, few_bits)}{where}"
