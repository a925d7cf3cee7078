"""What the measurements mean, each with the setting that acts on it. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_ckpt.profile.policies import NONE
from ds_ckpt.profile.records import Best, Compiled, Finding, Footprint, States
from ds_ckpt.telemetry.units import GIB, percent, size, times

_OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
_PARTS = ("attention", "mlp", "norm", "other")


@dataclass(frozen=True)
class Facts:
    """What findings are drawn from.

    Attributes:
        sections: the activation section of each policy; None for the step without one.
        sdpa: the same step with attention "sdpa", where the model stores attention weights.
        trainable_count: elements of parameters that get gradients.
        modules: of a plain model's blocks.
    """

    states: States
    footprints: tuple[Footprint, ...]
    sections: Mapping[str, Mapping[str, Any] | None]
    limit_bytes: int | None
    compiled: Compiled | None
    sdpa: Footprint | None
    trainable_count: int
    modules: Any = None

    @property
    def first(self) -> Footprint:
        """No policy, at the first batch."""
        return next(f for f in self.footprints if f.policy == NONE)

    def at_first(self, policy: str) -> Footprint | None:
        """A policy's step at the first batch; None where it was not compared."""
        wanted = (policy, self.first.batch)
        return next((f for f in self.footprints if (f.policy, f.batch) == wanted), None)

    @property
    def attention(self) -> str:
        """What computes attention."""
        stored, avoided = self.first.score_bytes > 0, self.first.core_avoided_bytes > 0
        return {
            (True, True): "mixed",
            (True, False): "eager",
            (False, True): "core",
            (False, False): "none",
        }[stored, avoided]

    def config(self, policy: str) -> dict[str, Any] | None:
        section = self.sections.get(policy)
        return None if section is None else {"ds_ckpt": {"activation": dict(section)}}

    def total_bytes(self, footprint: Footprint) -> int:
        """What a process has at the peak: resident states and what the step makes."""
        return self.states.resident_bytes + footprint.peak.live_bytes

    @property
    def best(self) -> Best | None:
        """The most tokens a second under the limit; the largest batch where nothing was timed."""
        limit = self.limit_bytes
        fits = [f for f in self.footprints if limit is None or self.total_bytes(f) <= limit]
        timed = [f for f in fits if f.times is not None]
        if not timed and (limit is None or not fits):
            return None
        if timed:
            best = max(timed, key=lambda f: f.tokens_per_s or 0.0)
        else:
            best = max(fits, key=lambda f: (f.batch, -f.flops))
        return Best(best.policy, best.batch, self.total_bytes(best), best.tokens_per_s)


def findings_of(facts: Facts) -> Iterator[Finding]:
    """The most telling ones first."""
    yield from _where(facts)
    yield from _attention(facts)
    yield from _free(facts)
    yield from _smallest(facts)
    yield from _peak(facts)
    yield from _boundaries(facts)
    yield from _buffers(facts)
    yield from _compiled(facts)
    yield from _limit(facts)
    yield from _budget(facts)


def _where(facts: Facts) -> Iterator[Finding]:
    first = facts.first
    parts = {p: first.part_bytes(p) for p in (*_PARTS, "outside")}
    most = max(parts, key=lambda p: parts[p])
    words = ", ".join(
        f"{'outside the blocks' if p == 'outside' else p} {percent(n, first.held_bytes)}"
        for p, n in parts.items()
        if n
    )
    candidates = [
        f
        for f in facts.footprints
        if f.batch == first.batch and f.policy in (most, "selective") and f.policy != NONE
    ]
    best = min(candidates, key=lambda f: f.held_bytes, default=None)
    text = f"Without a policy {size(first.held_bytes)} wait for backward: {words}."
    if best is None or most == "outside":
        yield Finding(text)
        return
    text += (
        f' "{best.policy}" leaves {size(best.held_bytes)} of it for'
        f" {times(best.flops, first.flops)} the FLOPs."
    )
    yield Finding(text, facts.config(best.policy))


def _attention(facts: Facts) -> Iterator[Finding]:
    first = facts.first
    if first.core_avoided_bytes:
        left = first.part_bytes("attention")
        without = facts.at_first("attention")
        text = (
            "Attention runs in a core (SDPA, flash) that recomputes by itself:"
            f" {size(first.core_avoided_bytes)} of attention weights are never stored. What is left"
            f" to gain in attention is {size(left)}: its inputs, projections and results."
        )
        if without is not None:
            text += (
                f' Policy "attention" frees {size(first.held_bytes - without.held_bytes)} of it for'
                f" {times(without.flops, first.flops)} the FLOPs and"
                f" {times(without.launches, first.launches)} the launches."
            )
        yield Finding(text, facts.config("attention"))
    if first.score_bytes:
        text = (
            f"Attention is eager: {size(first.score_bytes)} of what is held are attention weights"
            " (every token against every other)."
        )
        if facts.sdpa is not None:
            text += (
                ' attn_implementation="sdpa" when the model is loaded would save'
                f" {size(first.held_bytes - facts.sdpa.held_bytes)} and costs nothing."
            )
        else:
            text += ' An attention core (SDPA) would store none; this model has no "sdpa" to set.'
        text += " Where eager attention must stay, recompute it:"
        # of a plain model "attention" would have to name the parts, which nobody knows here
        policy = "block" if facts.modules else "attention"
        yield Finding(text, {"ds_ckpt": {"activation": _section(facts, policy=policy)}})


def _free(facts: Facts) -> Iterator[Finding]:
    first, free = facts.first, facts.at_first("selective")
    if free is None or free.flops > 1.001 * first.flops:
        return
    yield Finding(
        f'"selective" repeats no product: {size(first.held_bytes - free.held_bytes)} less'
        f" ({percent(first.held_bytes - free.held_bytes, first.held_bytes)}) for the FLOPs of no"
        f" policy and {times(free.launches, first.launches)} the operator launches.",
        facts.config("selective"),
    )


def _smallest(facts: Facts) -> Iterator[Finding]:
    first = facts.first
    found = [f for f in facts.footprints if f.batch == first.batch and f.recompute.launches]
    if not found:
        return
    small = min(found, key=lambda f: f.held_bytes)
    text = (
        f'"{small.policy}" keeps least: {size(small.held_bytes)}'
        f" ({percent(small.held_bytes, first.held_bytes)}). It costs"
        f" {times(small.flops, first.flops)} the FLOPs and"
        f" {times(small.launches, first.launches)} the operator launches"
        f" ({small.launches} instead of {first.launches}), which is what a model of small kernels"
        " pays."
    )
    if small.times and first.times:
        text += (
            f" A step takes {times(small.times.step_s, first.times.step_s)} the time here"
            f" ({small.times.device})."
        )
    yield Finding(text, facts.config(small.policy))


def _peak(facts: Facts) -> Iterator[Finding]:
    first = facts.first
    found = [f for f in facts.footprints if f.batch == first.batch]
    small = min(found, key=lambda f: f.peak.live_bytes)
    outside = small.part_bytes("outside")
    text = (
        f"The peak of activations and temporaries is {size(first.peak.live_bytes)} in the"
        f' {first.peak.words()}; with "{small.policy}" {size(small.peak.live_bytes)} in the'
        f" {small.peak.words()}."
    )
    if small.policy != NONE and outside > 0.5 * small.held_bytes and first.batch > 1:
        half = first.batch // 2
        yield Finding(
            text + f" {size(outside)} of what is then held lie outside the blocks (head, loss),"
            " where no policy reaches; a smaller micro-batch does.",
            {
                "train_micro_batch_size_per_gpu": half,
                "gradient_accumulation_steps": -(-first.batch // half),
            },
        )
        return
    yield Finding(text, facts.config(small.policy))


def _boundaries(facts: Facts) -> Iterator[Finding]:
    block = facts.at_first("block")
    section = facts.sections.get("block")
    if block is None or section is None:
        return
    boundary = block.part_bytes("boundary")
    blocks = sum(b.boundary_bytes > 0 for b in block.blocks)
    if blocks < 2:
        return
    moved = boundary * (blocks - 1) // blocks
    yield Finding(
        f'Of the {size(block.held_bytes)} of "block", {size(boundary)} are the blocks\' inputs.'
        f" Offload moves about {size(moved)} of them to host memory and back each step; it pays"
        " where sequences are long.",
        {"ds_ckpt": {"activation": {**section, "offload": True}}},
    )


def _buffers(facts: Facts) -> Iterator[Finding]:
    states = facts.states
    if states.zero_stage != 3:
        return
    if _bucket_too_large(facts):
        yield Finding(
            f"DeepSpeed allocates its reduce bucket whole: {size(states.reduce_bucket_bytes)} for"
            f" {size(states.trainable_bytes)} of gradients.",
            _smaller_bucket(facts),
        )
    if states.optimizer_bytes > max(facts.first.held_bytes, states.parameters_bytes):
        yield Finding(
            f"The optimizer's state ({states.optimizer}: {size(states.optimizer_bytes)} a process"
            f" at {states.world}) is more than all activations without a policy"
            f" ({size(facts.first.held_bytes)}): more processes or offload save more than any"
            " policy can.",
            _OFFLOADED,
        )


def _bucket_too_large(facts: Facts) -> bool:
    return facts.states.reduce_bucket_bytes > facts.states.trainable_bytes > 0


def _smaller_bucket(facts: Facts) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "reduce_bucket_size": facts.trainable_count}}


def _compiled(facts: Facts) -> Iterator[Finding]:
    report = facts.compiled
    if report is None:
        return
    where = f" in {report.graphs} graph{'s' if report.graphs != 1 else ''}"
    text = (
        f"torch.compile captures {percent(report.captured_flops, report.flops)} of the forward's"
        f" FLOPs and {percent(report.captured_operators, report.operators)} of its operators"
        f"{where}."
    )
    for broken in report.breaks[:3]:
        text += f" A graph ends: {broken.reason}" + (f" ({broken.where})." if broken.where else ".")
    saved = report.eager_held_bytes - report.min_cut_bytes
    if report.captured_flops >= report.flops:
        text += (
            f" Its partitioner recomputes by itself: {size(report.min_cut_bytes)} wait for backward"
            f" instead of {size(report.eager_held_bytes)}"
            f" ({percent(saved, report.eager_held_bytes)} less)."
        )
    else:
        text += (
            f" The captured graphs save {size(report.min_cut_bytes)} for backward; without the"
            f" compiler the whole model holds {size(report.eager_held_bytes)}."
        )
    needy = [i for i, b in enumerate(report.blocks) if b.needs_policy]
    if not needy:
        yield Finding(text + " No block needs a policy besides.")
        return
    text += f" {len(needy)} of {len(report.blocks)} blocks still need a policy:"
    if len(needy) == len(report.blocks):
        yield Finding(text, {"ds_ckpt": {"activation": _section(facts, policy="block")}})
        return
    rules = [{"match": span, "policy": "block"} for span in _spans(needy)]
    yield Finding(text, {"ds_ckpt": {"activation": _section(facts, policy="none", rules=rules)}})


def _section(facts: Facts, **keys: Any) -> dict[str, Any]:
    return {**keys, **({"modules": list(facts.modules)} if facts.modules else {})}


def _spans(indices: list[int]) -> list[str]:
    """[0, 1, 2, 5] -> ["0-2", "5"]."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [str(a) if a == b else f"{a}-{b}" for a, b in spans]


def _limit(facts: Facts) -> Iterator[Finding]:
    if facts.limit_bytes is None:
        return
    best = facts.best
    limit = size(facts.limit_bytes)
    if best is None:
        bucket = facts.states.zero_stage == 3 and _bucket_too_large(facts)
        least = min(facts.footprints, key=lambda f: facts.total_bytes(f))
        yield Finding(
            f"Nothing that was measured fits into {limit}: the least is"
            f' {size(facts.total_bytes(least))} (batch {least.batch}, "{least.policy}"), of which'
            f" {size(facts.states.resident_bytes)} are states. "
            + ("A smaller reduce bucket:" if bucket else "More processes, or offload:"),
            _smaller_bucket(facts) if bucket else _OFFLOADED,
        )
        return
    rate = f"{best.tokens_per_s:.0f} tokens/s" if best.tokens_per_s else "not timed"
    yield Finding(
        f'Under {limit} the best that was measured is batch {best.batch} with "{best.policy}":'
        f" {size(best.total_bytes)}, {rate}.",
        {
            "train_micro_batch_size_per_gpu": best.batch,
            **(facts.config(best.policy) or {}),
        },
    )


def _budget(facts: Facts) -> Iterator[Finding]:
    """Where no policy is too much and some policy fits: the cheapest that does lies between."""
    first, limit = facts.first, facts.limit_bytes
    if limit is None or facts.total_bytes(first) <= limit:
        return
    measured = [f for f in facts.footprints if f.batch == first.batch]
    least = min(measured, key=lambda f: facts.total_bytes(f))
    if facts.total_bytes(least) > limit:
        return
    stage3 = facts.states.zero_stage == 3
    # what is resident is on the accelerator too; only of ZeRO-3 a plan knows how much it is
    left = limit if stage3 else limit - facts.states.resident_bytes
    keys = {
        "policy": "budget",
        "budget_gib": math.floor(left / GIB * 1000) / 1000,
        "budget_of": "accelerator" if stage3 else "activations",
    }
    if keys["budget_gib"] == 0:
        return
    yield Finding(
        f"Without a policy a batch of {first.batch} needs {size(facts.total_bytes(first))}, more"
        f" than {size(limit)}. A budget recomputes no more than it takes to fit: less than"
        f' "{least.policy}", which needs {size(facts.total_bytes(least))}.',
        {"ds_ckpt": {"activation": _section(facts, **keys)}},
    )
