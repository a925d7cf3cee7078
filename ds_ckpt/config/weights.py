"""The `weights` section: what every host keeps of the weights, and how their changes travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_ckpt.fields import NO_NUMBER, Expects, Section


class WeightsConfig(Section):
    """Weights that stay on every host, so that gathers no longer cross between hosts."""

    resident: Annotated[
        Literal[True, False, "auto"], NO_NUMBER, Expects('true, false or "auto"', '"auto"')
    ] = Field(
        default=False,
        description="Keep a copy of the weights on every host, divided among its processes: all "
        "gathers stay inside the host, and weights cross between hosts once a step, after the "
        "optimizer. Costs 2 bytes a parameter (4 in fp32) over the processes of a host, from the "
        "start. Training is bit-equal to plain DeepSpeed, unless changes travel in few bits. "
        '"auto": whole steps are timed with and without, and the copy is kept where it makes them '
        "shorter.",
    )
    deltas: Annotated[
        Literal["auto", "none", "lossless", "4bit", "3bit"],
        Expects('"auto", "none", "lossless", "4bit" or "3bit"', '"auto"'),
    ] = Field(
        default="auto",
        description='How weights cross: "none", whole; "lossless", what changed in units of the '
        "last place, near its entropy: 0.7 to 4 bits a weight in place of 16, the fewer the "
        'lower the learning rate, bit-equal; "4bit" and "3bit", how far the owner is ahead of '
        "what hosts hold, so that rounding does not add up; a tensor that would be held worse "
        'than 1.5 times as coarsely as in bf16 travels whole. "auto": for bf16 and fp16 lossless '
        "or none, whichever takes less time; for fp32 none.",
    )

    @property
    def few_bits(self) -> int | None:
        """Bits of a change where weights are tracked; None: they travel without loss."""
        return {"4bit": 4, "3bit": 3}.get(self.deltas)

    def summary(self) -> str:
        words = {"auto": "", "none": ", sent whole", "lossless": ", their changes sent losslessly"}
        few_bits = f", their changes sent in {self.few_bits} bits"
        where = ", where that makes steps shorter" if self.resident == "auto" else ""
        return f"weights resident on every host{words.get(self.deltas, few_bits)}{where}"
