"""The report's sentences, computed from the findings. Nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_ckpt.measure.break_even import BreakEven
from ds_ckpt.measure.derive import HEADLINES, Figures
from ds_ckpt.measure.rows import Row
from ds_ckpt.measure.spec import DENSE, STOCK, Spec, link
from ds_ckpt.measure.tables import FIGURE_WORDS, in_unit, number, title


def not_whole(missing: Sequence[str]) -> list[str]:
    """What is missing, as a sentence; nothing of a whole run."""
    if not missing:
        return []
    return [f"NOT WHOLE: {'; '.join(missing)}. Give the command again, and it goes on."]


def headlines(figures: Sequence[Figures]) -> list[str]:
    """Sentences of the figures that are certain enough; and how many are not."""
    found, open_ = [], 0
    for one in figures:
        where = f"{link(one.rate_mbit)}, {title(one, figures)}"
        words = []
        for name in HEADLINES:
            if name not in one.values:
                continue
            if not one.settled(name):
                open_ += 1
                continue
            what, unit = FIGURE_WORDS[name]
            value = in_unit(one.values[name], unit).value
            words.append(f"{what} {number(value)}{f' {unit}' if unit else ''}")
        if words:
            found.append(f"{where}: {'; '.join(words)}.")
    if open_:
        found.append(
            f"{open_} figures have an interval wider than 5% either way: they stand in the tables, "
            "not here. More rounds make them certain."
        )
    return found


def break_even_words(even: BreakEven, *, name_batch: bool) -> str:
    """The two rates; no headline, for they lie between measured ones and have no interval."""
    who = f"{even.policy}, {even.method} against {even.baseline}"
    if name_batch:
        who += f", {even.sequences} sequences"
    pays = (
        f"pays for all recomputation up to about {even.pays_for_recompute_mbit:.0f} Mbit/s"
        if even.pays_for_recompute_mbit
        else "pays for all recomputation at all measured rates or at none (see the table)"
    )
    frees = (
        f"frees no time above about {even.frees_nothing_mbit:.0f} Mbit/s"
        if even.frees_nothing_mbit
        else "has no rate among those measured above which it begins to cost time"
    )
    return f"Break-even, {who}: compression {pays}, and {frees}."


def lossless(losses: Mapping[str, tuple[float, ...]]) -> str:
    """Whether checkpointing changed any training loss, method by method."""
    different = []
    compared = 0
    for cell, values in losses.items():
        policy, _, method = cell.partition("/")
        plain = losses.get(f"none/{method}")
        if policy != "none" and plain is not None:
            compared += 1
            if values != plain:
                different.append(cell)
    if not compared:
        return "No losses were compared."
    if different:
        return (
            f"Exactness: losses differ from those without checkpointing in {', '.join(different)}. "
            "On CPU in fp32 they must be equal: please report it."
        )
    return "Exactness: checkpointing changed no training loss by a single bit, in any method."


def caveats(spec: Spec, rows: Sequence[Row], figures: Sequence[Figures]) -> list[str]:
    """What these numbers cannot say."""
    found = [
        "Gradients are about a third of ZeRO-3's traffic, weights the rest: a step bound by the "
        "network gets at most 1.5 times faster by compressing them. `silent` is that ceiling.",
        f"On gloo, {STOCK} DeepSpeed sends an all-reduce's bytes for its reduce-scatter, twice "
        f"what it needs. Read every gain beside {DENSE}, which sends each gradient once.",
        "fp32 throughout: every dense byte is twice what 16 bits would be, so a link of 200 "
        "Mbit/s is here what one of 100 is there, for weights and for dense gradients.",
        f"Losses: one seed ({spec.seed}), {spec.loss_steps} steps, the compressed methods dense "
        "for the first quarter. A direction, not a verdict: ds-ckpt validate-accuracy gives those.",
        "The gate is off: compression runs also where it loses. As configured by default it "
        "would send such buckets whole.",
        "Steps are as long as the slowest process; waiting for another process counts as network.",
    ]
    if spec.where == "emulated":
        found.append(
            "All hosts share one machine's processor and memory, and their links have no delay of "
            "their own: only bandwidth is emulated."
        )
    if spec.where == "loopback":
        found.append(
            "The link is memory and NOT SHAPED: what compression saves on a network is not here."
        )
    wrong = [r.cell for r in rows if abs(r.parts_over_step - 1) > 0.03]
    if wrong:
        found.append(
            f"The parts miss the median step by more than 3% in {len(wrong)} of {len(rows)} rows "
            f"({', '.join(dict.fromkeys(wrong))}): steps differed much from one another."
        )
    uncounted = [r.cell for r in rows if abs(r.interface_over_purposes - 1) > 0.03]
    if uncounted:
        found.append(
            "The interfaces counted more than 3% more or less than the collectives' payload in "
            f"{len(uncounted)} of {len(rows)} rows ({', '.join(dict.fromkeys(uncounted))}): "
            "headers weigh in a model this small, or something else used the network."
        )
    if not figures:
        found.append("No derived figures: they need a policy beside none and a compressed method.")
    return found
