"""Compressors by parameter: rules over names, shapes and sizes, and the settings of the exchange.

The first rule that applies decides, else the method of the section. Biases, norms and small tensors
are sent uncompressed, as are matrices too small for the rank. Embeddings with many rows, of which a
batch touches few, use Top-K in place of a low rank.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from ds_ckpt.compression.base import Compressor, Method, methods
from ds_ckpt.compression.error_feedback import Feedback, ResidualDevice
from ds_ckpt.compression.quantize import Quantize
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.metric import PreconditionerEstimate

Choose = Callable[[str, torch.Size], Compressor | None]
"""Returns the compressor of a parameter, agreed across ranks; None: uncompressed."""

Levels = Literal["auto", 1, 2]
WarmupBits = Literal[8, 4, 3]
When = Literal["auto", "micro_step", "accumulation_boundary"]
MANY_ENTRIES = 1 << 30
"""Entries of a rank from which residuals are int8 by default: in fp32 they take 8 GB and more."""
SPARSE_ROWS = 8192
"""Embeddings with at least so many rows use another method in place of a low rank."""


@dataclass(frozen=True, init=False)
class MethodSettings:
    """A method, and the settings of all methods; it ignores those that it does not depend on.

    `values` are settings of the method itself. Methods without `sections` are at their defaults.
    """

    method: str
    sections: Mapping[str, Method]

    def __init__(
        self, method: str, sections: Mapping[str, Method] | None = None, **values: Any
    ) -> None:
        defaults = {
            name: kind(**values if name == method else {}) for name, kind in methods().items()
        }
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "sections", {**defaults, **(sections or {})})

    @property
    def kind(self) -> type[Method]:
        """Class of the method."""
        return methods()[self.method]

    def compressor(self, method: str | None = None) -> Compressor | None:
        """Return the compressor of `method`, by default of this one."""
        return self.sections[method or self.method].build()


@dataclass(frozen=True)
class MethodRule:
    """Tensors that match are compressed with `settings`.

    Attributes:
        where: JSON path, for messages.
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
        """Return whether all conditions hold."""
        numel = shape.numel()
        return (
            fnmatchcase(name, self.match)
            and (self.dims is None or len(shape) == self.dims)
            and numel >= self.min_numel
            and (self.max_numel is None or numel <= self.max_numel)
        )


@dataclass(frozen=True)
class Rules:
    """Chooses compressors; a `Choose`.

    Attributes:
        min_numel: smaller tensors are sent uncompressed unless a rule applies.
        embeddings: names of embedding weights that no other layer shares.
        local: ranks of a node that divide each gradient among them; 1 with one level.
    """

    default: MethodSettings
    min_numel: int = 4096
    rules: tuple[MethodRule, ...] = ()
    embeddings: frozenset[str] = frozenset()
    local: int = 1

    def __call__(self, name: str, shape: torch.Size) -> Compressor | None:
        """Return the compressor of a parameter; None: uncompressed."""
        if not shape.numel():
            return None
        rule = next((rule for rule in self.rules if rule.applies(name, shape)), None)
        if rule is not None:
            compressor = rule.settings.compressor()
        elif len(shape) < 2 or shape.numel() < self.min_numel:
            return None
        else:
            is_sparse = name in self.embeddings and shape[0] >= SPARSE_ROWS
            compressor = self.default.compressor(self.default.kind.sparse if is_sparse else None)
        return compressor.applicable(shape, self.local) if compressor is not None else None

    def check(self, shapes: Iterable[tuple[str, torch.Size]]) -> None:
        """Raise `UnsupportedError` with every rule without parameters, or with unsupported ones."""
        shapes = list(shapes)
        taken: dict[str, list[tuple[str, torch.Size]]] = {rule.where: [] for rule in self.rules}
        for name, shape in shapes:
            first = next((rule for rule in self.rules if rule.applies(name, shape)), None)
            if first is not None:
                taken[first.where].append((name, shape))
        problems = []
        for rule in self.rules:
            matches = taken[rule.where]
            least = rule.settings.kind.least_dims
            flat = next((name for name, shape in matches if len(shape) < least), None)
            method = rule.settings.method
            if not matches:
                found = f"match {rule.match!r} with its bounds"
                why = "no trainable parameter is left for it, so it would have no effect"
                remedy = (
                    f"write a pattern (fnmatch) over parameter names, such as {shapes[0][0]}, put "
                    "it before a rule that takes them all, or remove it"
                )
                problems.append(Problem(rule.where, found, why, remedy))
            elif flat is not None:
                found, why = f"method {method} for {flat}, a vector", f"it needs {least} dimensions"
                remedy = f'add "dims": {least} to the rule, or choose another method'
                problems.append(Problem(rule.where, found, why, remedy))
        if problems:
            raise UnsupportedError(problems)


@dataclass(frozen=True)
class ExchangeSettings:
    """The configuration's `compression` section in plain values, which has these defaults.

    `warmup_bits` None is DeepSpeed's own reduction; `momentum` is the weight of the newest gradient
    beside AdamW's first moment.
    """

    default: MethodSettings
    rules: tuple[MethodRule, ...] = ()
    error_feedback: bool = True
    residual_dtype: ResidualDtype | Literal["auto"] = "auto"
    residual_device: ResidualDevice = "accelerator"
    warmup_steps: int = 0
    min_numel: int = Rules.min_numel
    levels: Levels = "auto"
    autotune: bool = True
    when: When = "auto"
    momentum: Literal["none"] | float = "none"
    warmup_bits: WarmupBits | None = None

    @property
    def lossless(self) -> bool:
        """Return whether everything is sent, without residuals."""
        return all(s.kind.lossless for s in (self.default, *(r.settings for r in self.rules)))

    def defers_exchange(self, accumulation: int) -> bool:
        """Return whether gradients are exchanged once per step of so many micro-steps.

        Earlier micro-steps are added to the residuals. Without residuals: only on request.
        """
        if accumulation == 1 or self.when == "micro_step":
            return False
        return self.when == "accumulation_boundary" or (self.error_feedback and not self.lossless)

    def choose(self, embeddings: frozenset[str] = frozenset(), local: int = 1) -> Rules:
        """Return the rules; arguments as for `Rules`."""
        return Rules(self.default, self.min_numel, self.rules, embeddings, local)

    def warm_up(self, choose: Choose) -> Choose | None:
        """Return the compressors of a warm-up before `choose`; None: DeepSpeed's own reduction."""
        if self.warmup_bits is None or not self.warmup_steps or self.lossless:
            return None
        values = Quantize(bits=self.warmup_bits)

        def in_few_bits(name: str, shape: torch.Size) -> Compressor | None:
            return None if choose(name, shape) is None else values

        return in_few_bits

    def residuals(self, dp_rank: int, *, defers: bool = False, entries: int = 0) -> Feedback | None:
        """Return empty residuals of one rank; None if nothing is left out or accumulated.

        `entries` is about how many a rank will have, the same on every rank.
        """
        if self.lossless and not defers:
            return None
        enabled = self.error_feedback and not self.lossless
        # else nothing would send later what int8 leaves out of the sums of micro-steps
        dtype: ResidualDtype = "int8" if enabled and entries >= MANY_ENTRIES else "fp32"
        if self.residual_dtype != "auto":
            dtype = self.residual_dtype
        return Feedback(
            enabled=enabled,
            accumulates=defers,
            dtype=dtype,
            device=self.residual_device,
            seed=dp_rank,
        )

    @property
    def momentum_correction(self) -> float:
        """Weight of the newest gradient beside AdamW's first moment; 0 without residuals."""
        if self.momentum == "none" or self.lossless or not self.error_feedback:
            return 0.0
        return self.momentum

    def metric(self, all_reduce: Callable[[Tensor], None]) -> PreconditionerEstimate | None:
        """Return the preconditioner estimate if a codec uses it."""
        every = (s.compressor() for s in (self.default, *(r.settings for r in self.rules)))
        wanted = any(
            c is not None and c.codec is not None and c.codec.uses_preconditioner for c in every
        )
        return PreconditionerEstimate(all_reduce) if wanted else None


def embeddings_of(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of embedding weights that no other module uses."""
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
