"""Costs of a model: two of its blocks are surveyed on fake tensors, and the last one multiplied.

A model whose blocks are not known to be alike is surveyed in full. Backward takes twice the
forward's time: two products for each one.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ds_ckpt.activation.planning.budget import ActivationPlan, Allowance, Planner, temporary_bytes
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.activation.planning.fake import FakeModel, Forward
from ds_ckpt.activation.planning.trace import Survey, survey
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab.estimate.memory_model import ZERO_DEFAULTS, Parameters
from ds_ckpt.lab.estimate.profile import blocks_of, built_fake
from ds_ckpt.lab.estimate.simulate import TimedBlock
from ds_ckpt.lab.subject import Sizes, arguments_of, find_subject, sequence_length

SURVEYED = 2
"""Blocks: the first may hold what all share, such as rotary tables."""
ACTIVATIONS = Allowance(0, "activations")


@dataclass(frozen=True)
class Stretch:
    """Shapes that are gathered in turn: a block, or a part beside; `tied`: elements of another."""

    shapes: tuple[tuple[str, torch.Size], ...]
    trained: int
    tied: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], tied: int = 0) -> Stretch:
        """Read its parameters."""
        trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        return cls(tuple((name, p.shape) for name, p in parameters.items()), trained, tied)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def block(
        self, forward_s: float, recompute_s: float, offloaded: int, persistent: int
    ) -> TimedBlock:
        """Make the block of a simulated step; `persistent`: smaller parameters stay gathered."""
        modules = Counter({"": self.tied})
        for name, shape in self.shapes:
            modules[name.rpartition(".")[0] or name] += shape.numel()
        gathered = sum(shape.numel() for _, shape in self.shapes if shape.numel() > persistent)
        return TimedBlock(
            gathered + self.tied,
            self.trained,
            forward_s,
            2 * forward_s,
            recompute_s,
            calls=max(1, sum(n > persistent for n in modules.values())),
            offloaded_bytes=offloaded,
        )


class Model:
    """One model, for any number of sequences in a micro-batch; `name` is `ds-ckpt profile`'s.

    `modules` are class names or patterns of a plain model's blocks. Raises UnsupportedError if it
    does not exist, does not run on fake tensors, or has a fixed batch.
    """

    def __init__(self, name: str, sizes: Sizes, modules: Sequence[str] | None = None) -> None:
        self._subject = find_subject(name, sizes)
        self.name, self._repeated, self._given = name, 1, (name, sizes, modules)
        if not self._subject.sized:
            why = "a plan chooses the number of sequences"
            remedy = "give the function an argument named batch"
            raise UnsupportedError(Problem("MODEL", name, why, remedy))
        if (self._subject.layers or 0) > SURVEYED:
            self._repeated += self._subject.layers - SURVEYED  # type: ignore[operator]
            self._subject = find_subject(name, replace(sizes, layers=SURVEYED))
        made = built_fake(self._subject, 1)
        model, self.tokens = made.model, sequence_length(made.batch)
        self.has_own_checkpointing = getattr(model, "supports_gradient_checkpointing", False)
        blocks, self._modules = blocks_of(model, modules)
        blocks = [b for b in blocks if not any(b.name.startswith(f"{o.name}.") for o in blocks)]
        names = {id(p): n for n, p in model.named_parameters()}
        inside = {id(p) for b in blocks for p in b.module.parameters()}
        first = next((place for place, i in enumerate(names) if i in inside), len(names))
        head, tail = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
        for place, (name, parameter) in enumerate(model.named_parameters()):
            if id(parameter) not in inside:
                (head if place < first else tail)[name] = parameter
        self.head = Stretch.of(head)
        users = [id(p) for m in model.modules() for p in m.parameters(recurse=False)]
        tied = sum(p.numel() for p in head.values() if users.count(id(p)) > 1)
        self.tail = Stretch.of(tail, tied)
        found = [Stretch.of({names[id(p)]: p for p in b.module.parameters()}) for b in blocks]
        self.blocks = [*found, *found[-1:] * (self._repeated - 1)]
        stored = Parameters.of(model, blocks)
        repeated = tuple(s for b in found[-1:] for s in b.shapes) * (self._repeated - 1)
        trained = tuple(one for one in repeated if one in stored.shapes)
        self.parameters = replace(
            stored,
            counts=(*stored.counts, *(shape.numel() for _, shape in repeated)),
            trainable=(*stored.trainable, *(shape.numel() for _, shape in trained)),
            shapes=stored.shapes + trained,
        )
        self.elements = sum(self.parameters.counts)
        self.trained = sum(self.parameters.trainable)
        self.planner = functools.cache(self._planner)
        self._surveyed = functools.cache(self._survey)

    def with_tokens(self, tokens: int) -> Model:
        """Return the model with sequences of another length."""
        name, sizes, modules = self._given
        return Model(name, replace(sizes, tokens=tokens), modules)

    def _planner(self, sequences: int, rates: Rates) -> Planner:
        found, tokens = self._surveyed(sequences)[1], self.tokens * sequences
        return Planner(found, rates, tokens, repeated=self._repeated)

    def _survey(self, sequences: int) -> tuple[FakeModel, Survey]:
        made = built_fake(self._subject, sequences)
        with made.entered():
            return made, survey(_forward(made), self._modules)

    def temporary_bytes(self, sequences: int) -> int:
        """Bytes of gradients of activations and temporaries, which grow with the micro-batch."""
        return sequences * self._temporary_bytes

    @functools.cached_property
    def _temporary_bytes(self) -> int:
        made, found = self._surveyed(1)
        planner = Planner(found, Rates(1.0, 1.0, 1.0), 0)
        recomputed = planner.way_names[min(1, len(planner.way_names) - 1)]
        plan = planner.uniform_plan(recomputed, ACTIVATIONS)
        with made.entered():
            return temporary_bytes(_forward(made), plan)

    @functools.cached_property
    def work(self) -> tuple[float, float]:
        """FLOPs of one sequence's forward, and bytes that other operators move."""
        found = self._surveyed(1)[1]
        products = Planner(found, Rates(1.0, math.inf, math.inf), 0, repeated=self._repeated)
        others = Planner(found, Rates(math.inf, 1.0, math.inf), 0, repeated=self._repeated)
        return sum(products.forward_s), sum(others.forward_s)

    def simulated(
        self,
        forward_s: Sequence[float],
        plan: ActivationPlan,
        *,
        persistent: int = ZERO_DEFAULTS["stage3_param_persistence_threshold"],
        reuse: int = ZERO_DEFAULTS["stage3_max_reuse_distance"],
    ) -> list[TimedBlock]:
        """Make the blocks of a simulated step, with the parts before and after them.

        `forward_s` ends with the time outside of blocks. A block is used again once all that comes
        behind it was gathered twice. Within `reuse` elements it stays gathered.
        """
        *inside_s, outside_s = forward_s
        found = [self.head.block(0.0, 0.0, 0, persistent)]
        for stretch, block, seconds in zip(self.blocks, plan.blocks, inside_s, strict=True):
            recompute_s, moved = block.recompute_s, block.offloaded_bytes
            found.append(stretch.block(seconds, recompute_s, moved, persistent))
        found.append(self.tail.block(outside_s, 0.0, 0, persistent))
        behind = 0
        for number in reversed(range(len(found))):
            found[number] = replace(found[number], kept=2 * behind + found[number].elements < reuse)
            behind += found[number].elements
        return found


def _forward(made: FakeModel) -> Forward:
    return Forward(made.model, *arguments_of(made.known_batch()))
