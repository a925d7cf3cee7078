"""The report's sentences, computed from the findings, also where compression loses. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ds_ckpt.lab.measure.figures import DERIVED, Row, measured
from ds_ckpt.lab.measure.findings import BreakEven, Comparison, Findings
from ds_ckpt.lab.measure.records import Loss
from ds_ckpt.lab.measure.spec import DENSE, RIVALS, STOCK, Configuration, link
from ds_ckpt.lab.measure.statistics import Estimate
from ds_ckpt.telemetry.units import MB, number


def title(one: Comparison | BreakEven, findings: Findings) -> str:
    """Whose figures, told apart from all others of the same rate."""
    batch = f", {one.sequences} sequences" if len(findings.spec.batches) > 1 else ""
    return f"{one.policy}, {one.method} against {one.baseline}{batch}"


def not_whole(findings: Findings) -> list[str]:
    """What is missing, as a sentence; nothing of a whole run."""
    if not findings.missing:
        return []
    return [f"NOT WHOLE: {'; '.join(findings.missing)}. Give the command again, and it goes on."]


def headlines(findings: Findings) -> list[str]:
    """What is missing, the figures that are certain enough, and how many are not."""
    found, open_ = not_whole(findings), 0
    for one in findings.comparisons:
        wanted = [f for f in DERIVED if f.headline and f.name in one.values]
        certain = [f for f in wanted if one.settled(f.name)]
        open_ += len(wanted) - len(certain)
        if certain:
            said = (f"{f.words} {f.with_unit(one.values[f.name])}" for f in certain)
            where = f"{link(one.rate_mbit)}, {title(one, findings)}"
            found.append(f"{where}: {'; '.join(said)}.")
    if open_:
        found.append(
            f"{open_} figures have an interval wider than 5% either way: they stand in the tables, "
            "not here. The same command with more --repetitions goes on and makes them certain."
        )
    return found


def break_even(even: BreakEven, findings: Findings) -> str:
    """The two rates; no headline, for they lie between measured ones and have no interval."""
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
    return f"Break-even, {title(even, findings)}: compression {pays}, and {frees}."


def lossless(losses: Mapping[str, Loss], rounded: Collection[str] = ()) -> str:
    """Whether checkpointing or resident weights changed any training loss or weight, by method.

    Args:
        rounded: weights whose changes travel in few bits, of which nobody promises it.
    """
    other = {*RIVALS, *rounded}
    exact = {name: one for name in losses if (one := Configuration.of(name)).weights not in other}
    pairs = {
        name: (losses[plain], losses[name])
        for name, one in exact.items()
        if (plain := f"none/{one.method}") in losses and plain != name
    }
    if not pairs:
        return "No losses were compared."
    resident = any(one.weights != STOCK for one in exact.values())
    different = [
        name
        for name, (plain, kept) in pairs.items()
        if kept.train_losses != plain.train_losses
        or len({kept.weights_sha256, plain.weights_sha256} - {""}) > 1
    ]
    if different:
        return (
            "Exactness: NOT met: losses or final weights differ from those without checkpointing"
            f"{' and with weights as ZeRO-3 has them' if resident else ''} in "
            f"{', '.join(different)}. On CPU they must be equal: please report it."
        )
    weights = all(losses[name].weights_sha256 for name in exact)
    who = "neither checkpointing nor keeping weights" if resident else "checkpointing"
    no = "a" if resident else "no"
    return f"Exactness: {who} changed {no} training loss by a single bit, in any method" + (
        "; the final weights are equal, too." if weights else "."
    )


def claims(findings: Findings, policy: str, method: str) -> list[tuple[str, str]]:
    """What the numbers of a policy and a method mean, a head and its sentences each.

    Of the first rate and the usual batch, but for the time, which is said of every rate.
    """
    batch, first = min(findings.spec.batches), findings.usual(findings.rates[0])
    mine = [
        c
        for c in findings.comparisons
        if (c.policy, c.method, c.sequences) == (policy, method, batch)
    ]
    plain, kept, best, sent = (
        first[name]
        for name in (f"none/{STOCK}", f"{policy}/{STOCK}", f"none/{DENSE}", f"none/{method}")
    )
    found = [
        ("Memory", _memory(plain, kept, policy, mine)),
        ("Weights", _weights(plain, kept, policy)),
        ("Gradients", _gradients(plain, best, sent, method)),
        ("The ceiling", _ceiling(best, sent, method)),
        ("Time", " ".join(_time(one, findings.usual(one.rate_mbit)) for one in mine)),
        ("Held-out loss", _loss(plain, sent, method)),
    ]
    return [(head, text) for head, text in found if text]


def weights(findings: Findings, policy: str, name: str) -> list[tuple[str, str]]:
    """What it means to have the weights elsewhere than ZeRO-3 has them, against dense gradients.

    Of the usual batch; what has not been measured is left out.
    """
    method = STOCK if name in RIVALS else DENSE
    mine = [
        c
        for c in findings.comparisons
        if c.policy == policy
        and c.sequences == min(findings.spec.batches)
        and Configuration.of(f"{policy}/{c.method}").weights == name
    ]
    same = [c for c in mine if Configuration.of(f"{policy}/{c.method}").method == method]
    recomputing = (
        f"{link(c.rate_mbit)}: it adds {_seconds(c.values['recompute_compressed_s'])} a step, and "
        f"{_seconds(c.values['recompute_dense_s'])} where ZeRO-3 gathers between hosts."
        for c in same
        if "recompute_compressed_s" in c.values
    )
    found = [
        ("Recomputing", " ".join(recomputing)),
        ("Memory", _freed(same[0], findings.usual(same[0].rate_mbit)) if same else ""),
        ("Time", " ".join(_time(one, findings.usual(one.rate_mbit)) for one in mine)),
    ]
    return [(head, text) for head, text in found if text]


def _freed(one: Comparison, rows: Mapping[str, Row]) -> str:
    """How much of the memory that checkpointing frees the weights take."""
    if "memory_taken" not in one.values:
        return ""
    row, dense = rows[f"{one.policy}/{one.method}"], rows[f"{one.policy}/{one.baseline}"]
    plain = rows[f"none/{one.baseline}"]
    freed = plain.number("peak_bytes") - dense.number("peak_bytes")
    return (
        f"a process keeps {row.text('kept_weight_bytes')} MB of weights, as ZeRO-3 has them "
        f"{dense.text('kept_weight_bytes')} MB. The difference is "
        f"{one.values['memory_taken'].value:.0%} of the {number(freed / MB)} MB of activations "
        f"that {one.policy} frees at the peak."
    )


def _memory(plain: Row, kept: Row, policy: str, mine: Sequence[Comparison]) -> str:
    if plain.memory is None or kept.memory is None:
        return ""
    cost = next((c.values["recompute_dense_s"] for c in mine if c.baseline == STOCK), None)
    price = f" The price, a second forward: {_seconds(cost)} a step." if cost else ""
    return (
        f"with {policy} autograd holds {kept.text('held_bytes')} MB after the forward instead of "
        f"{plain.text('held_bytes')} MB, {_times_less(plain, kept, 'held_bytes')}; at the peak "
        f"activations take {kept.text('peak_bytes')} MB instead of {plain.text('peak_bytes')} MB."
        f"{price}"
    )


def _weights(plain: Row, kept: Row, policy: str) -> str:
    recompute, backward = (
        number(kept.bytes_a_process(f"gather_{phase}") / MB) for phase in ("recompute", "backward")
    )
    return (
        f"ZeRO-3 gathers them for the forward and again for the backward, "
        f"{plain.text('weight_bytes')} MB sent a process and step. With {policy} the recompute's "
        f"gather ({recompute} MB) stays until backward has used it; with what only backward needs "
        f"({backward} MB) that makes {kept.text('weight_bytes')} MB in all."
    )


def _gradients(stock: Row, best: Row, sent: Row, method: str) -> str:
    found = (
        f"{method} sends {sent.text('gradient_bytes')} MB a process and step, stock DeepSpeed "
        f"{stock.text('gradient_bytes')} MB ({_times_less(stock, sent, 'gradient_bytes')})."
    )
    if stock.number("gradient_bytes") > 1.5 * best.number("gradient_bytes"):
        found += " That flatters it: gloo's reduce-scatter sends an all-reduce's bytes."
    return (
        f"{found} Dense gradients sent once, by all-to-all, take {best.text('gradient_bytes')} MB, "
        f"and against those it is {_times_less(best, sent, 'gradient_bytes')}."
    )


def _ceiling(best: Row, sent: Row, method: str) -> str:
    gradients, weights = best.number("gradient_bytes"), best.number("weight_bytes")
    share = gradients / (gradients + weights)
    total = sent.number("gradient_bytes") + sent.number("weight_bytes")
    return (
        f"weights are most of ZeRO-3's traffic. Sent without waste, gradients are {share:.0%} of "
        "it, so that a step that does nothing but wait for the network can get at most "
        f"{1 / (1 - share):.2f}x faster by compressing them. In all, {method} sends "
        f"{number(total / MB)} MB a process and step, the dense all-to-all "
        f"{number((gradients + weights) / MB)} MB."
    )


def _time(one: Comparison, rows: Mapping[str, Row]) -> str:
    """Of one rate against one baseline; what the interval does not tell apart is no difference."""
    faster = one.values["faster"]
    interval = f"{number(faster.low)} to {number(faster.high)}"
    if one.repetitions < 2:
        interval = "once, without an interval"
    ratio = f"{number(faster.value)}x ({interval})"
    if faster.low > 1:
        verdict = f"is {ratio} faster than {one.baseline}'s"
    elif faster.high < 1:
        gradients = Configuration.of(f"{one.policy}/{one.method}").weights == STOCK
        why = "choosing what to send takes longer than sending it" if gradients else "it is slower"
        verdict = f"LOSES: {why}, {ratio} as fast as {one.baseline}'s"
    else:
        verdict = f"shows no difference to {one.baseline}'s that stands out of the spread, {ratio}"
    return (
        f"{link(one.rate_mbit)}: {one.method}'s step with {one.policy} {verdict}; "
        f"{_seconds(rows[f'{one.policy}/{one.method}'].step_s)}, and {one.baseline} without "
        f"checkpointing {_seconds(rows[f'none/{one.baseline}'].step_s)}."
    )


def _loss(stock: Row, sent: Row, method: str) -> str:
    if stock.loss is None or sent.loss is None:
        return ""
    dense, found = stock.loss.heldout_loss, sent.loss.heldout_loss
    gap, against = found / dense - 1, f"{found:.3f} against {dense:.3f}"
    if gap > 0.001:
        return (
            f"{method} loses: {against} ({gap:.1%} worse). Error feedback delivers what was held "
            "back late and in part, which AdamW's first moment suffers. A longer dense warm-up and "
            "more bits or a higher density are what the configuration offers against it."
        )
    if gap < -0.001:
        return f"{method} ends lower here ({against}): chance, at one seed."
    return f"no difference to be seen here ({against})."


def _times_less(larger: Row, smaller: Row, name: str) -> str:
    """How much less one row has of a figure than another."""
    one, other = larger.number(name), smaller.number(name)
    return f"{number(one / other)}x less" if other > 0 else "nothing"


def _seconds(value: Estimate | float) -> str:
    return measured("step_s").with_unit(value)


def caveats(findings: Findings) -> list[str]:
    """What these numbers cannot say."""
    spec, rows = findings.spec, findings.rows
    found = [
        f"On gloo, {STOCK} DeepSpeed sends an all-reduce's bytes for its reduce-scatter, twice "
        f"what it needs. Read every gain beside {DENSE}, which sends each gradient once.",
        f"Losses: one seed ({spec.seed}), {spec.loss_steps} steps, the compressed methods dense "
        "for the first quarter. A direction, not a verdict: ds-ckpt validate-accuracy gives those.",
        "The autotuner is off: compression runs also where it loses. As configured by default it "
        "would leave such gradients to DeepSpeed's own reduction.",
        "Steps are as long as the slowest process; waiting for another process counts as network.",
    ]
    if not spec.bf16:
        found.insert(
            1,
            "fp32 throughout: every dense byte is twice what 16 bits would be, so a link of 200 "
            "Mbit/s is here what one of 100 is there, for weights and for dense gradients.",
        )
    if spec.accumulation > 1:
        found.append(
            f"{DENSE} and compressed gradients send the sum of {spec.accumulation} micro-steps, "
            f"once; {STOCK} sends every micro-step's, as DeepSpeed does."
        )
    if "lossless" in spec.weights:
        found.append(
            "Lossless changes take the more bits the higher the learning rate. Trials run in the "
            "first steps of a warm-up, which rises by 2e-5 a step."
        )
    if {"zero1", "zero2"} & set(spec.rivals):
        found.append(
            "Below stage 3 every process has all weights, and in ZeRO-1 all gradients beside them, "
            "which the kept weights do not count."
        )
    if spec.where == "emulated":
        found.append(
            "All hosts share one machine's processor and memory, and their links have no delay of "
            "their own: only bandwidth is emulated."
        )
    if spec.where == "loopback":
        found.append(
            "The link is memory and NOT SHAPED: what compression saves on a network is not here."
        )
    for share, what, why in (
        (
            "parts_over_step",
            "The parts miss the median step by more than 3%",
            "steps differed much from one another",
        ),
        (
            "interface_over_purposes",
            "The interfaces counted more than 3% more or less than the collectives' payload",
            "headers weigh in a model this small, or something else used the network",
        ),
    ):
        if wrong := [r.configuration for r in rows if abs(r.number(share) - 1) > 0.03]:
            which = ", ".join(dict.fromkeys(wrong))
            found.append(f"{what} in {len(wrong)} of {len(rows)} rows ({which}): {why}.")
    if not findings.comparisons:
        found.append("No derived figures: they need a policy beside none and a compressed method.")
    return found
