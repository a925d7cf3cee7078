"""Which tensor travels how: rules over names, shapes and sizes, and the plan that they make.

The first rule whose conditions all hold decides; where none does, the method decides, with what is
known to be right built in: biases, norms and small tensors whole; matrices too small for the rank
whole; embeddings with many rows, of which a batch touches few, by Top-K rather than low rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.codec import Codec
from ds_ckpt.compression.quantize import Bits, Block, Quantize
from ds_ckpt.compression.topk import Offsets, Selection, TopK
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.methods import LOOKS_AT
from ds_ckpt.exchange.treatment import LowRank, Treatment

Method = Literal["dense", "topk", "powersgd", "quantize", "hybrid"]

_SETTINGS_OF = {
    "topk": ("density", "values", "selection", "offsets"),
    "powersgd": ("rank", "alternate"),
    "quantize": ("bits", "block", "rotated"),
    "hybrid": ("remainder",),
}

SPARSE_ROWS = 8192
"""Embeddings of at least so many rows go by Top-K where the method is low rank."""


@dataclass(frozen=True)
class MethodSettings:
    """A method and its settings; those of other methods are not looked at."""

    method: Method
    density: float = 0.01
    values: Literal["fp32", "bf16", "int8"] = "int8"
    selection: Selection = "blocks"
    offsets: Offsets = "bytes"
    rank: int = 16
    alternate: bool = False
    bits: Bits = 3
    block: Block = 64
    rotated: bool = False
    remainder: Literal["topk", "quantize"] = "quantize"

    def looked_at(self) -> dict[str, Any]:
        """The method and those settings that it looks at, by name."""
        names = [n for of in LOOKS_AT.get(self.method, ()) for n in _SETTINGS_OF[of]]
        return {name: getattr(self, name) for name in ("method", *names)}

    def treatment(self, method: Method | None = None) -> Treatment:
        """What `method` (default: this one) does to a matrix."""
        method = method or self.method
        if method == "dense":
            return None
        if method == "topk":
            return TopK(self.density, self.values, self.selection, self.offsets)
        if method == "quantize":
            return Quantize(self.bits, self.block, self.rotated)
        rest: Codec | None = None
        if method == "hybrid":
            codec = self.treatment(self.remainder)
            assert codec is not None
            assert not isinstance(codec, LowRank)
            rest = codec
        return LowRank(self.rank, self.alternate, rest)


@dataclass(frozen=True)
class Rule:
    """Tensors that match travel by `settings`.

    Attributes:
        where: its place in the configuration, for messages.
        match: shell pattern (fnmatch) over parameter names.
        dims: number of dimensions; None: any.
        min_numel, max_numel: bounds on the number of entries, both inclusive.
    """

    where: str
    match: str
    settings: MethodSettings
    dims: int | None = None
    min_numel: int = 0
    max_numel: int | None = None

    def applies(self, name: str, shape: torch.Size) -> bool:
        numel = shape.numel()
        return (
            fnmatchcase(name, self.match)
            and (self.dims is None or len(shape) == self.dims)
            and numel >= self.min_numel
            and (self.max_numel is None or numel <= self.max_numel)
        )


@dataclass(frozen=True)
class Rules:
    """The treatment of each parameter; a `Choose`.

    Attributes:
        default: for what no rule takes.
        min_numel: smaller tensors travel whole unless a rule takes them.
        rules: in order.
        embeddings: names of embedding weights that no other layer shares.
        local: processes of a host that divide each gradient among them; 1 with one level.
    """

    default: MethodSettings
    min_numel: int = 4096
    rules: tuple[Rule, ...] = ()
    embeddings: frozenset[str] = frozenset()
    local: int = 1

    def __call__(self, name: str, shape: torch.Size) -> Treatment:
        for rule in self.rules:
            if rule.applies(name, shape):
                return self._possible(rule.settings.treatment(), shape)
        if len(shape) < 2 or shape.numel() < self.min_numel:
            return None
        method: Method | None = None
        low_rank = self.default.method in ("powersgd", "hybrid")
        if low_rank and name in self.embeddings and shape[0] >= SPARSE_ROWS:
            method = "topk"
        return self._possible(self.default.treatment(method), shape)

    def _possible(self, treatment: Treatment, shape: torch.Size) -> Treatment:
        """Factors that are no smaller than the matrix are left out: its remainder, or whole."""
        if isinstance(treatment, LowRank):
            rows, columns = powersgd.matrix_shape(shape)
            if not powersgd.worthwhile(rows, columns, treatment.rank, self.local):
                return treatment.remainder
        return treatment

    def check(self, shapes: Iterable[tuple[str, torch.Size]]) -> None:
        """Refuse rules that take no parameter, and low rank for tensors without two dimensions.

        Raises:
            UnsupportedError: with every such rule.
        """
        taken: dict[int, list[tuple[str, torch.Size]]] = {i: [] for i in range(len(self.rules))}
        names = []
        for name, shape in shapes:
            names.append(name)
            for i, rule in enumerate(self.rules):
                if rule.applies(name, shape):
                    taken[i].append((name, shape))
                    break
        problems = []
        for i, rule in enumerate(self.rules):
            if not taken[i]:
                example = f", such as {names[0]}" if names else ""
                problems.append(
                    Problem(
                        where=rule.where,
                        found=f"match {rule.match!r} with its bounds",
                        why="no trainable parameter is left for it, so it would do nothing",
                        remedy="write a pattern (fnmatch) over the model's parameter names"
                        f"{example}, put it before a rule that takes them all, or remove it",
                    )
                )
            flat = [name for name, shape in taken[i] if len(shape) < 2]
            if flat and rule.settings.method in ("powersgd", "hybrid"):
                problems.append(
                    Problem(
                        where=rule.where,
                        found=f"method {rule.settings.method} for {flat[0]}, a vector",
                        why="a low rank needs two dimensions",
                        remedy='add "dims": 2 to the rule, or choose "topk", "quantize" or "dense"',
                    )
                )
        if problems:
            raise UnsupportedError(problems)


def embeddings_of(model: torch.nn.Module) -> frozenset[str]:
    """Names of embedding weights that no other module uses."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    weights = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in weights and users[id(parameter)] == 1
    )
