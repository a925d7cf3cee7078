"""A plan in plain values: what each block does, holds and costs. As line, table and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from ds_ckpt.activation.blocks import Block, is_hf_layer
from ds_ckpt.activation.policies import Unit
from ds_ckpt.planner.candidates import UnitWords
from ds_ckpt.planner.costs import Rates

GIB = 2**30
BudgetOf = Literal["saved", "activations", "accelerator"]
_OF = {
    "saved": "saved between forward and backward",
    "activations": "activations with the recompute's own peak",
    "accelerator": "the whole accelerator",
}


@dataclass(frozen=True)
class BlockPlan:
    """What one block does.

    Attributes:
        held_bytes: on the device between its forward and its backward.
        offloaded_bytes: of what it keeps, in host memory meanwhile.
        full_bytes: on the device while its backward runs.
        recompute_s: by the device's rates, waiting for copies included.
    """

    name: str
    word: str
    units: tuple[UnitWords, ...]
    held_bytes: int
    offloaded_bytes: int
    full_bytes: int
    recompute_flops: int
    recompute_s: float


@dataclass(frozen=True)
class ActivationPlan:
    """What a budget has led to. The same on every process.

    Attributes:
        of: what the budget is for.
        budget_bytes: as asked for.
        resident: bytes that are there beside activations, by what they are (budgets for the
            accelerator).
        none_bytes: what would be held if nothing were recomputed.
        held_bytes: what the device holds between forward and backward.
        needed_bytes: the most that is there at once, of what the budget counts.
        forward_flops, forward_s: of one forward.
        tokens: elements of the largest tensor of whole numbers that the plan was made for, else of
            the largest tensor.
        planning_s: wall time of measuring and searching.
    """

    of: BudgetOf
    budget_bytes: int
    resident: dict[str, int]
    blocks: tuple[BlockPlan, ...]
    none_bytes: int
    held_bytes: int
    needed_bytes: int
    forward_flops: int
    forward_s: float
    rates: Rates
    tokens: int
    planning_s: float = 0.0

    @property
    def recompute_flops(self) -> int:
        return sum(b.recompute_flops for b in self.blocks)

    @property
    def recompute_s(self) -> float:
        return sum(b.recompute_s for b in self.blocks)

    @property
    def recompute_share(self) -> float:
        """Of a forward's time: comparable between batches."""
        return self.recompute_s / self.forward_s if self.forward_s else 0.0

    @property
    def choices(self) -> list[str]:
        """The treatment of each block."""
        return [b.word for b in self.blocks]

    def units(self, model: nn.Module) -> list[Unit]:
        """For `CheckpointedBlocks`."""
        modules = dict(model.named_modules())
        return [
            Unit(
                tuple(_block(name, modules[name]) for name in unit.modules),
                unit.save_ops,
                "$.ds_ckpt.activation.budget_gib",
            )
            for block in self.blocks
            for unit in block.units
        ]

    def line(self) -> str:
        """What is done, what it holds and costs."""
        counts = Counter(self.choices)
        treated = ", ".join(f"{n} x {word}" for word, n in counts.most_common())
        offloaded = sum(b.offloaded_bytes for b in self.blocks)
        away = f", {_gib(offloaded)} in host memory" if offloaded else ""
        share = self.recompute_flops / self.forward_flops if self.forward_flops else 0.0
        return (
            f"plan for {_gib(self.budget_bytes)} ({_OF[self.of]}): {treated}; "
            f"{_gib(self.held_bytes)} held of {_gib(self.none_bytes)} without recompute{away}, "
            f"{_gib(self.needed_bytes)} needed at most; recomputes {share:.1%} of a forward's "
            f"products, {self.recompute_share:.1%} of its time; "
            f"made for {self.tokens} tokens in {self.planning_s:.1f} s"
        )

    def table(self) -> str:
        """One line for neighbours that are treated alike, with their bytes and costs."""
        head = ("blocks", "treatment", "held MiB", "in backward MiB", "recompute GFLOP", "ms")
        rows = [head]
        for first, last in self._neighbours():
            group = self.blocks[first : last + 1]
            name = group[0].name if first == last else f"{group[0].name} to {group[-1].name}"
            rows.append(
                (
                    name,
                    group[0].word,
                    f"{sum(b.held_bytes for b in group) / 2**20:.1f}",
                    f"{max(b.full_bytes for b in group) / 2**20:.1f}",
                    f"{sum(b.recompute_flops for b in group) / 1e9:.2f}",
                    f"{1e3 * sum(b.recompute_s for b in group):.3f}",
                )
            )
        outside = self.held_bytes - sum(b.held_bytes for b in self.blocks)
        rows.append(("outside of blocks", "", f"{outside / 2**20:.1f}", "", "", ""))
        rows += [(what, "", f"{n / 2**20:.1f}", "", "", "") for what, n in self.resident.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _neighbours(self) -> list[tuple[int, int]]:
        groups: list[tuple[int, int]] = []
        for index, block in enumerate(self.blocks):
            if groups and self.blocks[groups[-1][0]].word == block.word:
                groups[-1] = (groups[-1][0], index)
            else:
                groups.append((index, index))
        return groups

    def to_json(self) -> str:
        """For other processes and for telemetry."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ActivationPlan:
        values: dict[str, Any] = json.loads(text)
        values["rates"] = Rates(**values["rates"])
        values["blocks"] = tuple(_block_plan(b) for b in values["blocks"])
        return cls(**values)


def _block_plan(values: Mapping[str, Any]) -> BlockPlan:
    units: Sequence[Mapping[str, Any]] = values["units"]
    words = tuple(UnitWords(tuple(u["modules"]), tuple(u["save_ops"])) for u in units)
    return BlockPlan(**{**values, "units": words})


def _block(name: str, module: nn.Module) -> Block:
    return Block(name, module, "hf" if is_hf_layer(module) else "forward")


def _gib(nbytes: int) -> str:
    """With so many digits that small models still say something."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 4 else f"{nbytes / 2**20:.3f} MiB"
