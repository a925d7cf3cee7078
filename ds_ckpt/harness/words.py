"""What the demo's numbers mean, in sentences computed from them.

Every sentence says what was measured, also where compression loses. Nothing here measures.
1 MB is 10^6 bytes.
"""

from __future__ import annotations

import statistics

from ds_ckpt.harness.results import CellResult, Results


def megabytes(number_of_bytes: float) -> str:
    """In MB, three significant digits where there are three: 0.0612, 4.88, 39.2, 135."""
    value = number_of_bytes / 1e6
    if value == 0:
        return "0"
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{decimals}f}"


def findings(results: Results) -> list[str]:
    """One paragraph a finding, for the terminal and the page."""
    dense, kept = results.cell("dense"), results.cell("dense-checkpointing")
    topk, topk_kept = results.cell("topk"), results.cell("topk-checkpointing")
    return [
        _memory(dense, kept),
        _lossless([(dense, kept), (topk, topk_kept)]),
        _gathers(dense, kept),
        _gradients(results),
        _ceiling(results),
        _time(results, dense, topk),
        _loss(results),
        *_check(results, dense, topk),
    ]


def caveats(results: Results) -> list[str]:
    """What the numbers cannot say."""
    run = results.run
    return [
        f"One seed ({run.seed}), {run.steps} steps, {run.parameters / 1e6:.2f} million parameters:"
        " losses show a direction, not a verdict.",
        _link_words(run.rate_mbit),
        "fp32 throughout. Against 16-bit gradients, which real runs send, each ratio of dense to"
        " compressed gradient bytes is half of what stands here.",
        "The cells take turns in the same processes, step by step, in a rotating order. Times and"
        f" bytes are of the steps from {results.cell('topk').timed_from_step} on, after Top-K's"
        " dense warm-up; those of the reference are of its own few steps.",
        "Activations are what autograd holds between forward and backward on process 0, weights"
        " left out, at the first step; temporary memory inside a block's recompute is not in it.",
    ]


def _link_words(rate_mbit: float | None) -> str:
    if rate_mbit is None:
        return (
            "The processes share one machine, and their link is not shaped: it is faster than any"
            " network between hosts. Step times say what the methods cost in computation;"
            " what they save on a network is not in them."
        )
    return (
        "The two hosts are emulated on one machine and share its processor. Their link has"
        f" {rate_mbit:g} Mbit/s in the timed steps, the last ones, and no delay of its own; the"
        " steps before ran on a link that is not shaped. `ds-ckpt measure` does this at length."
    )


def _ratio(larger: float, smaller: float) -> str:
    if smaller <= 0:
        return "without end"
    value = larger / smaller
    return f"{value:.0f}x" if value >= 20 else f"{value:.1f}x" if value >= 3 else f"{value:.2f}x"


def _paired(new: CellResult, old: CellResult) -> tuple[float, float, float]:
    """Quartiles of the ratio of the two cells' times for the same step.

    The cells take turns, so that a disturbance that lasts falls on both times of a pair.
    """
    start = max(new.timed_from_step, old.timed_from_step)
    pairs = zip(new.step_times_s[start:], old.step_times_s[start:], strict=False)
    ratios = [a / b for a, b in pairs]
    if len(ratios) < 2:
        ratios = ratios * 2
    first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, median, third


def _longer(ratio: float) -> str:
    share = ratio - 1
    return f"{abs(share):.0%} {'longer' if share >= 0 else 'shorter'}"


def _times(new: CellResult, old: CellResult) -> str:
    first, _, third = _paired(new, old)
    return (
        f"{new.step_time_median_s:.3f} s against {old.step_time_median_s:.3f} s; step by step, the"
        f" middle half lies between {_longer(first)} and {_longer(third)}"
    )


def _memory(dense: CellResult, kept: CellResult) -> str:
    held, held_kept = dense.held_activation_bytes, kept.held_activation_bytes
    return (
        f"Memory: with checkpointing autograd holds {megabytes(held_kept)} MB after the forward"
        f" instead of {megabytes(held)} MB, {_ratio(held, held_kept)} less. The price is the second"
        f" forward: a step takes {_longer(_paired(kept, dense)[1])} ({_times(kept, dense)})."
    )


def _lossless(pairs: list[tuple[CellResult, CellResult]]) -> str:
    different = [
        kept.title
        for plain, kept in pairs
        if plain.train_losses != kept.train_losses or plain.weights_sha256 != kept.weights_sha256
    ]
    if not different:
        return (
            "Exactness: checkpointing changed nothing, to the last bit: every loss of every step"
            " and the final weights are equal with and without it, dense and compressed."
        )
    return (
        f"Exactness: NOT met in {' and '.join(different)}: losses or final weights differ from the"
        " same cell without checkpointing. On CPU in fp32 they must be equal: please report it."
    )


def _gathers(dense: CellResult, kept: CellResult) -> str:
    return (
        f"Weights: ZeRO-3 gathers them for the forward and again for the backward,"
        f" {megabytes(dense.traffic.weight_bytes)} MB sent a process and step. With checkpointing"
        f" the recompute's gather ({megabytes(kept.traffic.gather_recompute_bytes)} MB) stays until"
        " backward has used it; with what only backward needs"
        f" ({megabytes(kept.traffic.gather_backward_bytes)} MB) that makes"
        f" {megabytes(kept.traffic.weight_bytes)} MB in all."
    )


def _gradients(results: Results) -> str:
    stock = results.cell("dense").traffic.gradient_bytes
    best = results.cell("all-to-all").traffic.gradient_bytes
    topk = results.cell("topk")
    sent = topk.traffic.gradient_bytes
    sentence = (
        f"Gradients: Top-K sends {megabytes(sent)} MB a process and step, stock DeepSpeed"
        f" {megabytes(stock)} MB ({_ratio(stock, sent)}). "
    )
    if _doubled(results):
        sentence += (
            "That flatters it: gloo's reduce-scatter sends an all-reduce's bytes. The same dense"
            f" gradients sent by all-to-all take {megabytes(best)} MB, and against those Top-K"
            f" sends {_ratio(best, sent)} less."
        )
    else:
        sentence += f"Dense gradients by all-to-all take {megabytes(best)} MB."
    if topk.warmup_traffic is not None:
        sentence += (
            f" In the {results.run.topk_start_step} dense warm-up steps it sent"
            f" {megabytes(topk.warmup_traffic.gradient_bytes)} MB a step."
        )
    return sentence


def _doubled(results: Results) -> bool:
    """Whether stock's reduce-scatter sends about twice what it needs to, as gloo's does."""
    stock, best = results.cell("dense").traffic, results.cell("all-to-all").traffic
    return stock.gradient_bytes > 1.5 * best.gradient_bytes


def _ceiling(results: Results) -> str:
    stock, topk = results.cell("dense").traffic, results.cell("topk").traffic
    reference = results.cell("all-to-all").traffic
    share = reference.gradient_bytes / reference.total_bytes
    return (
        f"The ceiling: weights are most of ZeRO-3's traffic. Sent without waste, gradients are"
        f" {share:.0%} of it, so that a step that does nothing but wait for the network can get at"
        f" most {1 / (1 - share):.2f}x faster by compressing them. In all, Top-K sends"
        f" {megabytes(topk.total_bytes)} MB a step:"
        f" {_ratio(reference.total_bytes, topk.total_bytes)} less than the dense all-to-all's"
        f" {megabytes(reference.total_bytes)} MB,"
        f" {_ratio(stock.total_bytes, topk.total_bytes)} less than stock's"
        f" {megabytes(stock.total_bytes)} MB"
        + (", which has gloo's doubled gradients in it." if _doubled(results) else ".")
    )


def _time(results: Results, dense: CellResult, topk: CellResult) -> str:
    if results.run.rate_mbit is not None:
        return _time_on_hosts(results, dense, topk)
    first, median, third = _paired(topk, dense)
    times = _times(topk, dense)
    if first > 1:
        verdict = (
            f"Top-K loses: its step takes {_longer(median)} ({times}). Choosing what to send"
            " costs time, and inside one machine the bytes saved cost next to nothing."
        )
    elif third < 1:
        verdict = (
            f"Top-K's step is {_longer(median)} ({times}): even inside one machine it saves"
            " copies and sums of the reduce-scatter, more than choosing what to send costs."
            " A faster step is not yet a faster training: see the loss."
        )
    else:
        verdict = f"no difference that stands out of the spread ({times})."
    return f"Time: {verdict} What the bytes are worth, only a slower network can show."


def _time_on_hosts(results: Results, dense: CellResult, topk: CellResult) -> str:
    best, kept = results.cell("all-to-all"), results.cell("topk-checkpointing")
    against_best = best.step_time_median_s / topk.step_time_median_s
    return (
        f"Time: on a link of {results.run.rate_mbit:g} Mbit/s Top-K's step is"
        f" {_longer(_paired(topk, dense)[1])} than stock's ({_times(topk, dense)}), and the dense"
        f" all-to-all's takes {against_best:.2f}x as long as Top-K's. With checkpointing Top-K"
        f" takes {kept.step_time_median_s:.3f} s: dense without checkpointing"
        f" {dense.step_time_median_s:.3f} s."
    )


def _loss(results: Results) -> str:
    dense, topk = results.cell("dense").heldout_loss, results.cell("topk").heldout_loss
    assert dense is not None
    assert topk is not None
    gap = topk / dense - 1
    if gap > 0.001:
        verdict = (
            f"Top-K loses: {topk:.3f} against {dense:.3f} ({gap:.1%} worse). Error feedback"
            " delivers what was held back late and in part, which AdamW's first moment suffers. A"
            " longer dense warm-up and a higher density are what this configuration offers against"
            " it."
        )
    elif gap < -0.001:
        verdict = f"Top-K ends lower here ({topk:.3f} against {dense:.3f}): chance, at one seed."
    else:
        verdict = f"no difference to be seen here ({topk:.3f} against {dense:.3f})."
    return f"Held-out loss: {verdict}"


def _check(results: Results, dense: CellResult, topk: CellResult) -> list[str]:
    if dense.interface_bytes is None or topk.interface_bytes is None:
        return []
    name = "loopback interface" if results.run.rate_mbit is None else "hosts' interfaces"
    parts = [
        f"{cell.title} {megabytes(cell.interface_bytes or 0)} MB where the counters say"
        f" {megabytes(cell.traffic.total_bytes)} MB"
        for cell in (dense, topk)
    ]
    return [
        f"Check: the kernel's own count of the {name}, a process and step: "
        + ", ".join(parts)
        + ". It has packet headers and other programs' traffic in it."
    ]
