"""Intervals, equivalence and planned seeds: the error rates are what they are said to be."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.lab.validate.equivalence import Judgement, judge, more_seeds, paired

TRIALS = 2000
MARGIN = 0.005


def trials(mean: float, spread: float, seeds: int, *, start: int = 0) -> list[Judgement]:
    """Verdicts on so many repetitions of a whole experiment."""
    rng = random.Random(f"{mean} {spread} {seeds} {start}")
    return [judge([rng.gauss(mean, spread) for _ in range(seeds)], MARGIN) for _ in range(TRIALS)]


def share(judgements: list[Judgement], verdict: str) -> float:
    return sum(j.verdict == verdict for j in judgements) / len(judgements)


def three_sigma(rate: float) -> float:
    """How far a share of so many trials may be from its expectation."""
    return 3 * math.sqrt(rate * (1 - rate) / TRIALS)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("side", [1, -1])
def test_a_difference_as_large_as_the_margin_passes_in_one_of_twenty(seeds: int, side: int) -> None:
    # a spread well below the margin, so that the other side plays no part: the rate is alpha itself
    found = share(trials(side * MARGIN, MARGIN / 20, seeds), "equivalent")
    assert found == pytest.approx(0.05, abs=three_sigma(0.05))


@pytest.mark.parametrize(("held_out", "seeds"), [(450, 2), (450, 3), (800, 2), (800, 5)])
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5, 1.0, 2.0])
def test_nor_where_accuracies_are_counts(held_out: int, seeds: int, spread: float) -> None:
    """Rounded to examples, differences often agree: 2 seeds of 450 passed one of four before."""
    rng, margin, step = random.Random(f"{held_out} {seeds} {spread}"), 0.01, 1 / held_out
    judgements = []
    for _ in range(TRIALS):
        drawn = [rng.gauss(margin, spread * step) for _ in range(seeds)]
        on_grid = [round(one * held_out) / held_out for one in drawn]
        judgements.append(judge(on_grid, margin, step=step))
    assert share(judgements, "equivalent") < 0.055 + three_sigma(0.055)


@pytest.mark.parametrize("spread", [MARGIN / 4, MARGIN, 4 * MARGIN])
@pytest.mark.parametrize("mean", [MARGIN, 1.5 * MARGIN, -MARGIN])
def test_and_never_more_often(mean: float, spread: float) -> None:
    assert share(trials(mean, spread, 4), "equivalent") < 0.05 + three_sigma(0.05)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_false_alarms_are_as_rare_as_said(seeds: int) -> None:
    # at the margin itself "worse" is wrong in one of twenty
    at_the_margin = share(trials(MARGIN, MARGIN / 3, seeds), "worse")
    assert at_the_margin == pytest.approx(0.05, abs=three_sigma(0.05))
    # dense against dense with other seeds: no true difference
    for spread in (MARGIN / 4, MARGIN, 4 * MARGIN):
        same = trials(0.0, spread, seeds)
        assert share(same, "worse") < 0.05 + three_sigma(0.05)
        assert share(same, "better") < 0.05 + three_sigma(0.05)


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_intervals_cover_as_often_as_they_say(seeds: int) -> None:
    rng = random.Random(seeds)
    inside = 0
    for _ in range(TRIALS):
        interval = paired([rng.gauss(0.3, 2.0) for _ in range(seeds)], 0.9)
        inside += interval.low <= 0.3 <= interval.high
    assert inside / TRIALS == pytest.approx(0.9, abs=three_sigma(0.9))


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.0, 0.0], "equivalent"),
        ([0.001, 0.0012, 0.0011], "equivalent"),
        ([0.02, 0.021, 0.022], "worse"),
        ([-0.02, -0.021, -0.022], "better"),
        ([0.004, 0.006], "inconclusive"),
        ([0.001, math.inf, 0.001], "worse"),
        ([math.nan], "worse"),
        ([0.02], "inconclusive"),
        ([], "inconclusive"),
    ],
)
def test_verdicts(differences: list[float], verdict: str) -> None:
    assert judge(differences, MARGIN).verdict == verdict


def test_seeds_that_are_still_needed() -> None:
    assert judge([], MARGIN).more_seeds == 3
    assert judge([0.02], MARGIN).more_seeds == 2
    assert judge([0.001, 0.0011], MARGIN).more_seeds == 0
    close = judge([0.004999, 0.005001], MARGIN)
    assert close.verdict == "inconclusive"
    assert close.more_seeds is None or close.more_seeds > 100


@pytest.mark.parametrize("mean", [0.0, 0.3 * MARGIN, 0.7 * MARGIN, 1.6 * MARGIN])
@pytest.mark.parametrize("spread", [0.5 * MARGIN, 1.5 * MARGIN])
def test_so_many_seeds_do_decide(mean: float, spread: float) -> None:
    # an experiment of three whose mean and spread are the true ones
    step = spread  # -step, 0, step has this standard deviation
    interval = paired([mean - step, mean, mean + step], 0.9)
    more = more_seeds(interval, MARGIN)
    assert more is not None
    wanted = "equivalent" if mean < MARGIN else "worse"
    decided = share(trials(mean, spread, 3 + more, start=1), wanted)
    assert 0.76 < decided < 0.93
    if more > 4:  # and about so many are needed
        assert share(trials(mean, spread, 3 + more // 2, start=2), wanted) < 0.7


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.floats(0.001, 1))
def test_verdict_and_interval_agree(differences: list[float], margin: float) -> None:
    found = judge(differences, margin)
    assert found.interval is not None
    low, high = found.interval.low, found.interval.high
    assert low <= found.interval.mean <= high
    assert (found.verdict == "equivalent") == (-margin < low and high < margin)
    mirrored = judge([-d for d in differences], margin).verdict
    turned = {"worse": "better", "better": "worse"}
    assert mirrored == turned.get(found.verdict, found.verdict)


@pytest.mark.parametrize(
    "call",
    [
        lambda: paired([1.0]),
        lambda: paired([1.0, math.nan]),
        lambda: paired([1.0, 2.0], 1.0),
        lambda: judge([1.0, 2.0], 0.0),
        lambda: judge([1.0, 2.0], 1.0, alpha=0.5),
    ],
)
def test_what_makes_no_sense_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r"must be|takes two"):
        call()
