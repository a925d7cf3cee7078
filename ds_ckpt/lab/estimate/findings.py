"""What the measurements mean, each with the setting that acts on it. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_ckpt.lab.estimate.profiles import NONE, PARTS, Best, Finding, Footprint, Profile
from ds_ckpt.telemetry.units import GIB, percent, size, times

_OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}

_NO_HOST_COPY = {
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1},
    "ds_ckpt": {"weights": {"resident": False}},
}


@dataclass(frozen=True)
class Settings:
    """What findings need beside the profile.

    Attributes:
        sections: the activation section of each policy; None for the step without one.
        sdpa: the first step with attention "sdpa", where the model stores attention weights.
        trainable_count: elements of parameters that get gradients.
        modules: of a plain model's blocks.
        accumulation: micro-steps of a step, in the configuration.
        resident: whether the configuration has resident weights.
        resident_bytes: what they take of a process, beside what hpZ takes already; None: it is not
            known, or they are refused beside the other settings.
    """

    sections: Mapping[str, Mapping[str, Any] | None]
    sdpa: Footprint | None = None
    trainable_count: int = 0
    modules: Any = None
    accumulation: int = 1
    resident: bool = False
    resident_bytes: int | None = None

    def config(self, policy: str) -> dict[str, Any] | None:
        section = self.sections.get(policy)
        return None if section is None else {"ds_ckpt": {"activation": dict(section)}}

    def section(self, **keys: Any) -> dict[str, Any]:
        """A configuration for blocks of this model."""
        modules = {"modules": list(self.modules)} if self.modules else {}
        return {"ds_ckpt": {"activation": {**keys, **modules}}}


def attention_of(first: Footprint) -> str:
    """What computes attention in a step without a policy."""
    stored, avoided = first.score_bytes > 0, first.core_avoided_bytes > 0
    if stored:
        return "mixed" if avoided else "eager"
    return "core" if avoided else "none"


def best_of(profile: Profile) -> Best | None:
    """The most tokens a second under the limit; the largest batch where nothing was timed."""
    limit = profile.limit_bytes
    fits = [f for f in profile.footprints if limit is None or profile.total_bytes(f) <= limit]
    timed = [f for f in fits if f.times is not None]
    if timed:
        best = max(timed, key=lambda f: f.tokens_per_s or 0.0)
    elif limit is not None and fits:
        best = max(fits, key=lambda f: (f.batch, -f.flops))
    else:
        return None
    return Best(best.policy, best.batch, profile.total_bytes(best), best.tokens_per_s)


def findings_of(profile: Profile, settings: Settings) -> Iterator[Finding]:
    """The most telling ones first."""
    yield _where(profile)
    for find in (
        _attention,
        _free,
        _smallest,
        _peak,
        _inputs,
        _weights,
        _buffers,
        _compiled,
        _limit,
    ):
        yield from find(profile, settings)


def _where(profile: Profile) -> Finding:
    first = profile.first
    parts = {p: first.part_bytes(p) for p in (*PARTS, "outside")}
    words = ", ".join(
        f"{'outside the blocks' if p == 'outside' else p} {percent(n, first.held_bytes)}"
        for p, n in parts.items()
        if n
    )
    return Finding(f"Without a policy {size(first.held_bytes)} wait for backward: {words}.")


def _attention(profile: Profile, settings: Settings) -> Iterator[Finding]:
    first = profile.first
    if first.core_avoided_bytes:
        text = (
            "Attention runs in a core (SDPA, flash) that recomputes by itself:"
            f" {size(first.core_avoided_bytes)} of attention weights are never stored. What is left"
            f" to gain in attention is {size(first.part_bytes('attention'))}: its inputs,"
            " projections and results."
        )
        if without := profile.at_first.get("attention"):
            text += (
                f' Policy "attention" frees {size(first.held_bytes - without.held_bytes)} of it for'
                f" {_costs(without, first)}."
            )
        yield Finding(text, settings.config("attention"))
    if first.score_bytes:
        text = (
            f"Attention is eager: {size(first.score_bytes)} of the saved activations are attention"
            " weights (every token against every other)."
        )
        if settings.sdpa is not None:
            text += (
                ' attn_implementation="sdpa" when the model is loaded would save'
                f" {size(first.held_bytes - settings.sdpa.held_bytes)} and costs nothing."
            )
        else:
            text += ' An attention core (SDPA) would store none; this model has no "sdpa" to set.'
        text += " Where eager attention must stay, recompute it:"
        # of a plain model "attention" would have to name the parts, which nobody knows here
        yield Finding(text, settings.section(policy="block" if settings.modules else "attention"))


def _costs(footprint: Footprint, first: Footprint) -> str:
    """Of a policy, against none."""
    return (
        f"{times(footprint.flops, first.flops)} the FLOPs and"
        f" {times(footprint.launches, first.launches)} the operator launches"
    )


def _free(profile: Profile, settings: Settings) -> Iterator[Finding]:
    first, free = profile.first, profile.at_first.get("selective")
    if free is None or free.flops > 1.001 * first.flops:
        return
    saved = first.held_bytes - free.held_bytes
    yield Finding(
        f'"selective" repeats no product: {size(saved)} less ({percent(saved, first.held_bytes)})'
        f" for the FLOPs of no policy and {times(free.launches, first.launches)} the operator"
        " launches.",
        settings.config("selective"),
    )


def _smallest(profile: Profile, settings: Settings) -> Iterator[Finding]:
    first = profile.first
    found = [f for f in profile.at_first.values() if f.recompute.launches]
    if not found:
        return
    small = min(found, key=lambda f: f.held_bytes)
    text = (
        f'"{small.policy}" keeps least: {size(small.held_bytes)}'
        f" ({percent(small.held_bytes, first.held_bytes)}). It costs {_costs(small, first)}"
        f" ({small.launches} instead of {first.launches}), which is what a model of small kernels"
        " pays."
    )
    if small.times and first.times:
        text += (
            f" A step takes {times(small.times.step_s, first.times.step_s)} the time here"
            f" ({small.times.device})."
        )
    yield Finding(text, settings.config(small.policy))


def _peak(profile: Profile, settings: Settings) -> Iterator[Finding]:
    first = profile.first
    small = min(profile.at_first.values(), key=lambda f: f.peak.live_bytes)
    outside = small.part_bytes("outside")
    text = (
        f"The peak of activations and temporaries is {size(first.peak.live_bytes)} in the"
        f' {first.peak.words()}; with "{small.policy}" {size(small.peak.live_bytes)} in the'
        f" {small.peak.words()}."
    )
    config = settings.config(small.policy)
    if small.policy != NONE and outside > 0.5 * small.held_bytes and first.batch > 1:
        smaller = next(n for n in range(first.batch // 2, 0, -1) if first.batch % n == 0)
        text += (
            f" {size(outside)} of what is then saved lie outside the blocks (head, loss),"
            " where no policy reaches; a smaller micro-batch does."
        )
        config = {
            "train_micro_batch_size_per_gpu": smaller,
            "gradient_accumulation_steps": settings.accumulation * first.batch // smaller,
        }
    yield Finding(text, config)


def _inputs(profile: Profile, settings: Settings) -> Iterator[Finding]:
    block, section = profile.at_first.get("block"), settings.sections.get("block")
    if block is None or section is None:
        return
    kept = block.part_bytes("checkpointed")
    blocks = sum(b.checkpointed_bytes > 0 for b in block.blocks)
    if blocks < 2:
        return
    yield Finding(
        f'Of the {size(block.held_bytes)} of "block", {size(kept)} are checkpointed inputs. Offload'
        f" moves about {size(kept * (blocks - 1) // blocks)} of them to host memory and back each"
        " step; it pays where sequences are long.",
        {"ds_ckpt": {"activation": {**section, "offload": True}}},
    )


def _weights(profile: Profile, settings: Settings) -> Iterator[Finding]:
    """Resident weights against the memory that checkpointing frees."""
    taken, limit = settings.resident_bytes, profile.limit_bytes
    small = min(profile.at_first.values(), key=lambda f: f.peak.live_bytes)
    freed = profile.first.peak.live_bytes - small.peak.live_bytes
    if taken is None or not freed:
        return
    cost = (
        f"{size(taken)} a process, {percent(taken, freed)} of the {size(freed)} that"
        f' "{small.policy}" frees'
    )
    policy = (settings.config(small.policy) or {}).get("ds_ckpt", {})
    config = {"ds_ckpt": {**policy, "weights": {"resident": True}}}
    if settings.resident:
        yield Finding(f"Resident weights take {cost}.", config)
        return
    text = f"On {profile.states.hosts} hosts resident weights would keep gathers inside each, for "
    text += cost if taken else "the memory that hpZ takes already"
    needed = profile.total_bytes(small) + taken
    if limit is not None and needed > limit:
        yield Finding(f"{text}. {size(needed)} in all are more than {size(limit)}.")
    elif taken > freed:
        yield Finding(f"{text}, so checkpointing does not pay for them.")
    else:
        yield Finding(f"{text}.", config)


def _buffers(profile: Profile, settings: Settings) -> Iterator[Finding]:
    states, held_bytes = profile.states, profile.first.held_bytes
    if states.zero_stage != 3:
        return
    if _bucket_too_large(profile):
        yield Finding(
            f"DeepSpeed allocates its reduce bucket whole: {size(states.reduce_bucket_bytes)} for"
            f" {size(states.trainable_bytes)} of gradients.",
            _smaller_bucket(settings),
        )
    if states.optimizer_bytes > max(held_bytes, states.parameters_bytes):
        yield Finding(
            f"The optimizer's state ({states.optimizer}: {size(states.optimizer_bytes)} a process"
            f" at {states.world}) is more than all activations without a policy"
            f" ({size(held_bytes)}): more processes or offload save more than any policy can.",
            _OFFLOADED,
        )


def _bucket_too_large(profile: Profile) -> bool:
    return profile.states.reduce_bucket_bytes > profile.states.trainable_bytes > 0


def _smaller_bucket(settings: Settings) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "reduce_bucket_size": settings.trainable_count}}


def _compiled(profile: Profile, settings: Settings) -> Iterator[Finding]:
    report = profile.compiled
    if report is None:
        return
    text = (
        f"torch.compile captures {percent(report.captured_flops, report.flops)} of the forward's"
        f" FLOPs and {percent(report.captured_operators, report.operators)} of its operators"
        f" in {report.graphs} graph{'s' if report.graphs != 1 else ''}."
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
            f" compiler the whole model saves {size(report.eager_held_bytes)}."
        )
    needy = [i for i, b in enumerate(report.blocks) if b.needs_policy]
    if not needy:
        yield Finding(text + " No block needs a policy besides.")
        return
    text += f" {len(needy)} of {len(report.blocks)} blocks still need a policy:"
    if len(needy) == len(report.blocks):
        yield Finding(text, settings.section(policy="block"))
    else:
        rules = [{"match": span, "policy": "block"} for span in _spans(needy)]
        yield Finding(text, settings.section(policy="none", rules=rules))


def _spans(indices: list[int]) -> list[str]:
    """[0, 1, 2, 5] -> ["0-2", "5"]."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [str(a) if a == b else f"{a}-{b}" for a, b in spans]


def _limit(profile: Profile, settings: Settings) -> Iterator[Finding]:
    """What fits; where a policy does and none does not, the cheapest that fits lies between."""
    limit, best, states = profile.limit_bytes, best_of(profile), profile.states
    if limit is None:
        return
    stage3 = states.zero_stage == 3
    if best is None:
        least = min(profile.footprints, key=profile.total_bytes)
        needed, copy = profile.total_bytes(least), states.host_copy_bytes
        text = (
            f"Nothing that was measured fits into {size(limit)}: the least is {size(needed)} (batch"
            f' {least.batch}, "{least.policy}"), of which {size(states.resident_bytes)} are states.'
        )
        if copy and needed - copy <= limit:
            text += (
                f" Without a host's copy of the weights ({size(copy)}) {size(needed - copy)} fit:"
            )
            yield Finding(text, _NO_HOST_COPY)
        elif stage3 and _bucket_too_large(profile):
            yield Finding(f"{text} A smaller reduce bucket:", _smaller_bucket(settings))
        elif states.optimizer_bytes:
            yield Finding(f"{text} More processes, or offload:", _OFFLOADED)
        else:
            yield Finding(f"{text} More processes, or shorter sequences, would help.")
        return
    rate = f"{best.tokens_per_s:.0f} tokens/s" if best.tokens_per_s else "not timed"
    yield Finding(
        f"Under {size(limit)} the best that was measured is batch {best.batch} with"
        f' "{best.policy}": {size(best.total_bytes)}, {rate}.',
        {
            "train_micro_batch_size_per_gpu": best.batch,
            **(settings.config(best.policy) or {}),
        },
    )
    needed = profile.total_bytes(profile.first)
    least = min(profile.at_first.values(), key=profile.total_bytes)
    # what is resident is on the accelerator too; only of ZeRO-3 a plan knows how much it is
    left = limit if stage3 else limit - states.resident_bytes
    budget_gib = math.floor(left / GIB * 1000) / 1000
    if needed <= limit or profile.total_bytes(least) > limit or not budget_gib:
        return
    yield Finding(
        f"Without a policy a batch of {profile.first.batch} needs {size(needed)}, more"
        f" than {size(limit)}. A budget recomputes no more than it takes to fit: less than"
        f' "{least.policy}", which needs {size(profile.total_bytes(least))}.',
        settings.section(
            policy="budget",
            budget_gib=budget_gib,
            budget_of="accelerator" if stage3 else "activations",
        ),
    )
