"""Rules of the policies "budget" and "auto": what they need, and what says nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_ckpt.activation.policies import PLANNED
from ds_ckpt.config.conflicts import stage_problem
from ds_ckpt.config.paths import lookup, show
from ds_ckpt.config.sections import DEEPSPEEDS, OURS
from ds_ckpt.config.wanted import Wanted
from ds_ckpt.errors import Problem

_HERE = f"{OURS}.activation"


def budget_problems(config: Mapping[str, Any], wanted: Wanted) -> Iterator[Problem]:
    """Keys of a budget without a plan, and a plan without what it needs."""
    activation = lookup(wanted.ours, ("activation",))
    gib, of = lookup(activation, ("budget_gib",)), lookup(activation, ("budget_of",))
    if wanted.policy is None:
        return
    if wanted.policy not in PLANNED:
        for key, value in (("budget_gib", gib), ("budget_of", of)):
            if value is not None:
                why = 'it belongs to the policies "budget" and "auto"'
                remedy = f'remove it, or set {_HERE}.policy to "budget"'
                yield Problem(f"{_HERE}.{key}", show(value), why, remedy)
        return
    if gib is None and wanted.policy == "budget":
        why = "without a number there is nothing to plan for"
        remedy = 'write for example 6.0, or policy "auto", which takes what the accelerator has'
        yield Problem(f"{_HERE}.budget_gib", "nothing", why, remedy)
    elif gib is None and of not in (None, "accelerator"):
        why = "without budget_gib the accelerator's memory is the limit, of everything on it"
        yield Problem(
            f"{_HERE}.budget_of", show(of), why, f"remove it, or write {_HERE}.budget_gib"
        )
    elif of == "accelerator" or gib is None:
        why = "what else is on the accelerator is known for ZeRO stage 3 and no other"
        remedy = f'write 3, or set {_HERE}.budget_of to "activations"'
        if stage := stage_problem(config, why, remedy):
            yield stage
    rules = lookup(activation, ("rules",))
    if rules is not None and rules != [] and rules != ():
        why = "the plan decides for every block"
        remedy = f"remove them, or write another {_HERE}.policy"
        yield Problem(f"{_HERE}.rules", show(rules), why, remedy)
    if lookup(activation, ("partition",)) is True:
        own = lookup(config, ("ds_ckpt", "activation", "partition")) is not None
        where = f"{_HERE}.partition" if own else f"{DEEPSPEEDS}.partition_activations"
        why = "a plan does not count what partitioning saves, and would recompute too much"
        yield Problem(where, "true", why, f'write false, or set {_HERE}.policy to "block"')
