"""What is asked for: a policy for all blocks, and rules for some of them. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "block", "attention", "mlp", "every_n", "segments", "selective"]


@dataclass(frozen=True)
class Treatment:
    """How blocks are treated.

    Attributes:
        kind: what a recompute covers; "none" leaves the blocks alone.
        every_n: for "every_n": the first block and every n-th after it.
        segment_size: for "segments": blocks in one recompute.
        save_ops: for "selective": sets and operators whose results are kept.
    """

    kind: Kind = "block"
    every_n: int = 2
    segment_size: int = 2
    save_ops: tuple[str, ...] = ("matmuls",)


@dataclass(frozen=True)
class Rule:
    """Another treatment for the blocks that `match` names: a pattern, "3", or "0-15"."""

    match: str
    treatment: Treatment


@dataclass(frozen=True)
class Policy:
    """The treatment of all blocks, but for those that a rule names; the first rule that does wins.

    Attributes:
        modules: class names or patterns; None takes the layers that Hugging Face declares. They
            name the parts themselves for "attention" and "mlp" (without rules), else the blocks.
        check_determinism: compare every n-th forward of a block with its recompute; 0 never.
    """

    treatment: Treatment = Treatment()
    rules: tuple[Rule, ...] = ()
    modules: tuple[str, ...] | None = None
    check_determinism: int = 0
