"""Which operators' results a block keeps: named sets, and operators by name."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_ckpt.activation.parts import attention_parts, gates, mlp_parts
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.patch import Patches

_CORES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm")
SETS = {
    "matmuls": "every matrix product and convolution, and attention cores",
    "attention": "attention cores (scaled_dot_product_attention)",
    "qkvo": "the products inside attention modules: query, key, value and output",
    "gate": "the first product of each MLP: the gate where there is one, else the widening",
}


def _overloads(names: Sequence[str]) -> frozenset[Any]:
    found = set()
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found |= {getattr(packet, overload) for overload in packet.overloads()}
    return frozenset(o for o in found if not o._schema.is_mutable)


@functools.cache
def products() -> frozenset[Any]:
    """Matrix products and convolutions."""
    return _overloads(_PRODUCTS)


@functools.cache
def cores() -> frozenset[Any]:
    """Attention cores."""
    return _overloads(_CORES)


def _named(name: str, where: str) -> frozenset[Any]:
    """`aten.mm`, `aten.mm.default` or an operator of another library."""
    space, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), packet_name, None) if packet_name else None
    known = packet.overloads() if packet is not None else []
    if not known or (overload and overload not in known):
        likely = difflib.get_close_matches(name, [*SETS, *(f"aten.{n}" for n in _PRODUCTS)], 1)
        close = f', for example "{likely[0]}"' if likely else ""
        raise ConfigError(
            Problem(
                where=where,
                found=f'"{name}"',
                why="it is neither a set nor an operator that torch knows"
                + (f" (overloads: {', '.join(known)})" if known else ""),
                remedy=f'write sets ({", ".join(SETS)}), joined by "+", or operators such as '
                f'"aten.mm"{close}',
            )
        )
    operators = frozenset(getattr(packet, o) for o in ([overload] if overload else known))
    changing = sorted(str(o) for o in operators if o._schema.is_mutable)
    operators = frozenset(o for o in operators if not o._schema.is_mutable)
    if not operators:
        raise ConfigError(
            Problem(
                where=where,
                found=f'"{name}"',
                why=f"{changing[0]} changes its argument, so its result cannot stand in for it",
                remedy="name operators that return new tensors",
            )
        )
    return operators


class Choice:
    """Which operators of one block are saved. Sets that depend on the module mark it while it runs.

    Args:
        save_ops: sets joined by "+", or operators.
        where: JSON path of the list, for messages.
        name, block: the block.
        patches: where the marks on attention and gates are noted.

    Raises:
        ConfigError: an unknown name, or a set for which the block has no such part.
    """

    def __init__(
        self, save_ops: Sequence[str], where: str, name: str, block: nn.Module, patches: Patches
    ) -> None:
        # a dispatch mode's first use imports it, and would keep that forward's frames alive
        importlib.import_module("torch._dynamo")
        self._where, self._name, self._patches = where, name, patches
        self._parts: list[tuple[str, nn.Module]] = []
        self._always: dict[str, frozenset[Any]] = {}
        self._inside: Counter[str] = Counter()
        """How many marked modules of each kind are running."""
        self._marks: list[str] = []
        for word in dict.fromkeys(part for entry in save_ops for part in entry.split("+")):
            if word == "matmuls":
                self._always[word] = products() | cores()
            elif word == "attention":
                self._always[word] = cores()
            elif word in ("qkvo", "gate"):
                self._mark(word, name, block, patches)
            else:
                self._always[word] = _named(word, where)
        self._quick = frozenset().union(*self._always.values())
        self._products = products()  # looked up here and not in the middle of a forward
        self.hits: Counter[str] = Counter()

    def _mark(self, word: str, name: str, block: nn.Module, patches: Patches) -> None:
        parts = [m for _, m in attention_parts(name, block)]
        if word == "gate":
            parts = gates(mlp_parts(name, block))
        if not parts:
            children = ", ".join(type(m).__name__ for m in block.children())
            raise ConfigError(
                Problem(
                    where=self._where,
                    found=f'"{word}"',
                    why=f"{name} has no part that looks like it (it has {children})",
                    remedy='use "matmuls", or name operators such as "aten.mm"',
                )
            )
        self._marks.append(word)
        for part in parts:
            self._parts.append((word, part))
            patches.set_method(part, "forward", self._marked(word, part.forward))

    @contextmanager
    def standing(self) -> Iterator[None]:
        """The marks, for the recompute of a forward whose patches may have been undone since."""
        if self._patches.active:
            yield
            return
        again = Patches()
        try:
            for word, part in self._parts:
                again.set_method(part, "forward", self._marked(word, part.forward))
            yield
        finally:
            again.undo()

    def _marked(self, word: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def marked_forward(*args: Any, **kwargs: Any) -> Any:
            self._inside[word] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside[word] -= 1

        return marked_forward

    def wants(self, operator: Any) -> bool:
        """Whether the result of this operator, running now, is saved."""
        if operator in self._quick:
            return True
        return operator in self._products and any(self._inside[word] for word in self._marks)

    def count(self, operator: Any) -> None:
        """Note which of the asked-for names this operator serves."""
        for word, operators in self._always.items():
            self.hits[word] += operator in operators
        for word in self._marks:
            self.hits[word] += self._inside[word] > 0 and operator in self._products

    def require_hits(self, seen: Counter[str]) -> None:
        """Refuse names that nothing in the block's first forward answered to."""
        missing = [w for w in (*self._always, *self._marks) if not self.hits[w]]
        if not missing:
            return
        ran = ", ".join(name for name, _ in seen.most_common(20))
        hint = ""
        if "attention" in missing:
            hint = '; "attention" needs attn_implementation="sdpa" (eager attention is products)'
        raise UnsupportedError(
            Problem(
                where=self._where,
                found=", ".join(f'"{w}"' for w in missing),
                why=f"no such operator ran in {self._name}; these did: {ran}",
                remedy=f"remove it or name one of these{hint}",
            )
        )
