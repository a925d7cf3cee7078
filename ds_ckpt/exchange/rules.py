"""Which tensor travels how: rules over names, shapes and sizes.

The first rule whose conditions all hold decides; where none does, the method decides, with what is
known to be right built in: biases, norms and small tensors uncompressed; matrices too small for the
rank uncompressed; embeddings with many rows, of which a batch touches few, by
Top-K rather than low rank.
"""

from __future__ import annotations

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
from ds_ckpt.exchange.metric import StepMetric

Choose = Callable[[str, torch.Size], Compressor | None]
"""How a parameter travels, by name and shape, the same on every process; None: uncompressed."""

Levels = Literal["auto", 1, 2]
WarmupBits = Literal[8, 4, 3]
When = Literal["auto", "micro_step", "accumulation_boundary"]
SPARSE_ROWS = 8192
"""Embeddings of at least so many rows go by another method where theirs is a low rank."""


@dataclass(frozen=True, init=False)
class MethodSettings:
    """A method and the settings of all; those that it does not look at are passed over.

    Args:
        method: its name.
        sections: settings by name of the method that they are of; others are at their defaults.
        values: single settings by their own name: of the method itself, else of one that it looks
            at, else of whichever has it.

    Raises:
        TypeError: nothing has a setting of that name.
    """

    method: str
    sections: Mapping[str, Method]

    def __init__(
        self, method: str, sections: Mapping[str, Method] | None = None, **values: Any
    ) -> None:
        known = methods()
        given = dict(sections or {})
        single: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            order = dict.fromkeys([*known[method].depends_on(), *known])
            of = next((name for name in order if key in known[name].model_fields), None)
            if of is None:
                raise TypeError(f"no method has a setting {key!r}")
            single.setdefault(of, {})[key] = value
        object.__setattr__(self, "method", method)
        object.__setattr__(
            self,
            "sections",
            {
                name: given[name] if name in given else kind(**single.get(name, {}))
                for name, kind in known.items()
            },
        )

    @property
    def kind(self) -> type[Method]:
        return methods()[self.method]

    def looked_at(self) -> dict[str, Any]:
        """The method and the settings that it looks at, by name: what a run is known by.

        Settings that are gone are in it as they always are now, so that older runs are found.
        """
        found: dict[str, Any] = {"method": self.method}
        for name in self.kind.depends_on():
            section = self.sections[name]
            constants = section.removed.items()
            found |= {key: one.stays for key, one in constants if not one.values}
            found |= section.model_dump(mode="json")
        return found

    def compressor(self, method: str | None = None) -> Compressor | None:
        """What `method` (default: this one) does to a tensor."""
        return self.sections[method or self.method].build()


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
    """How each parameter travels; a `Choose`.

    Attributes:
        default: for what no rule takes.
        min_numel: smaller tensors travel uncompressed unless a rule takes them.
        rules: in order.
        embeddings: names of embedding weights that no other layer shares.
        local: processes of a host that divide each gradient among them; 1 with one level.
    """

    default: MethodSettings
    min_numel: int = 4096
    rules: tuple[Rule, ...] = ()
    embeddings: frozenset[str] = frozenset()
    local: int = 1

    def __call__(self, name: str, shape: torch.Size) -> Compressor | None:
        if not shape.numel():
            return None
        for rule in self.rules:
            if rule.applies(name, shape):
                return self._suited(rule.settings.compressor(), shape)
        if len(shape) < 2 or shape.numel() < self.min_numel:
            return None
        sparse = name in self.embeddings and shape[0] >= SPARSE_ROWS
        method = self.default.kind.sparse if sparse else None
        return self._suited(self.default.compressor(method), shape)

    def _suited(self, compressor: Compressor | None, shape: torch.Size) -> Compressor | None:
        return compressor.applicable(shape, self.local) if compressor is not None else None

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
            kind = rule.settings.kind
            flat = [name for name, shape in taken[i] if len(shape) < kind.least_dims]
            if flat:
                others = [f'"{n}"' for n, m in methods().items() if m.least_dims < kind.least_dims]
                problems.append(
                    Problem(
                        where=rule.where,
                        found=f"method {rule.settings.method} for {flat[0]}, a vector",
                        why=f"{rule.settings.method} needs {kind.least_dims} dimensions",
                        remedy=f'add "dims": {kind.least_dims} to the rule, or choose '
                        f"{' or '.join(others)}",
                    )
                )
        if problems:
            raise UnsupportedError(problems)


@dataclass(frozen=True)
class ExchangeSettings:
    """The configuration's `compression` section in plain values.

    Attributes:
        warmup_bits: bits of a value during the warm-up, of tensors that are compressed after it;
            None: the warm-up is DeepSpeed's own reduction.
        when: see `holds_back`.
        momentum: weight of the newest gradient beside AdamW's first moment.
    """

    default: MethodSettings
    rules: tuple[Rule, ...] = ()
    error_feedback: bool = True
    residual_dtype: ResidualDtype = "fp32"
    residual_device: ResidualDevice = "accelerator"
    warmup_steps: int = 0
    min_numel: int = 4096
    levels: Levels = "auto"
    autotune: bool = True
    when: When = "auto"
    momentum: Literal["none"] | float = "none"
    warmup_bits: WarmupBits | None = None

    @property
    def lossless(self) -> bool:
        """Whether everything is sent, without residuals."""
        return all(s.kind.lossless for s in (self.default, *(r.settings for r in self.rules)))

    def holds_back(self, accumulation: int) -> bool:
        """Return whether gradients are exchanged once a step, of so many micro-steps.

        Earlier micro-steps are added to the residuals. Without residuals this takes memory of their
        size, so it has to be asked for.
        """
        if accumulation == 1 or self.when == "micro_step":
            return False
        return self.when == "accumulation_boundary" or (self.error_feedback and not self.lossless)

    def choose(self, embeddings: frozenset[str] = frozenset(), local: int = 1) -> Rules:
        """Return the rules; arguments as for `Rules`."""
        return Rules(self.default, self.min_numel, self.rules, embeddings, local)

    def warm_up(self, choose: Choose) -> Choose | None:
        """Return the compressors of the warm-up; None: DeepSpeed's own reduction.

        Args:
            choose: compressors after it.
        """
        if self.warmup_bits is None or not self.warmup_steps or self.lossless:
            return None
        values = Quantize(bits=self.warmup_bits)

        def in_few_bits(name: str, shape: torch.Size) -> Compressor | None:
            return None if choose(name, shape) is None else values

        return in_few_bits

    def residuals(self, dp_rank: int, *, holds: bool = False) -> Feedback | None:
        """Return empty residuals of one rank; None if nothing is left out or accumulated.

        Args:
            holds: whether micro-steps are accumulated in them.
        """
        if self.lossless and not holds:
            return None
        return Feedback(
            enabled=self.error_feedback and not self.lossless,
            accumulates=holds,
            dtype=self.residual_dtype,
            device=self.residual_device,
            seed=dp_rank,
        )

    @property
    def momentum_correction(self) -> float:
        """Weight of the newest gradient beside AdamW's first moment; 0 without residuals."""
        if self.momentum == "none" or self.lossless or not self.error_feedback:
            return 0.0
        return self.momentum

    def metric(self, add_up: Callable[[Tensor], None]) -> StepMetric | None:
        """Return the preconditioner metric if a codec uses it. Argument as for `StepMetric`."""
        every = (s.compressor() for s in (self.default, *(r.settings for r in self.rules)))
        wanted = any(
            c is not None and c.codec is not None and c.codec.uses_preconditioner for c in every
        )
        return StepMetric(add_up) if wanted else None


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
