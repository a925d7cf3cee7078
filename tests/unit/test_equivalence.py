"""Intervals, equivalence and planned seeds: the error rates are the stated ones."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.lab.validate.equivalence import judge, more_seeds, paired

TRIALS = 2000
MARGIN = 0.005


def share(wanted: str, mean: float, spread: float, seeds: int, *, held_out: int = 0) -> float:
    """Share of a verdict in repetitions of a whole experiment; accuracies are counts."""
    rng = random.Random(f"{mean} {spread} {seeds} {held_out}")
    found = 0
    for _ in range(TRIALS):
        drawn = [rng.gauss(mean, spread) for _ in range(seeds)]
        if held_out:
            drawn = [round(one * held_out) / held_out for one in drawn]
        step = 1 / held_out if held_out else 0.0
        found += judge(drawn, 0.01 if held_out else MARGIN, step=step)[0] == wanted
    return found / TRIALS


def three_sigma(rate: float) -> float:
    """Largest expected distance of a share in so many trials."""
    return 3 * math.sqrt(rate * (1 - rate) / TRIALS)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("side", [1, -1])
def test_a_difference_as_large_as_the_margin_passes_in_one_of_twenty(seeds: int, side: int) -> None:
    # a spread well below the margin, so that the other side plays no part: the rate is alpha itself
    found = share("equivalent", side * MARGIN, MARGIN / 20, seeds)
    assert found == pytest.approx(0.05, abs=three_sigma(0.05))


@pytest.mark.parametrize(("held_out", "seeds"), [(450, 2), (450, 3), (800, 2), (800, 5)])
@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_counted_accuracies_pass_no_more_often(held_out: int, seeds: int, spread: float) -> None:
    found = share("equivalent", 0.01, spread / held_out, seeds, held_out=held_out)
    assert found < 0.055 + three_sigma(0.055)


@pytest.mark.parametrize("spread", [MARGIN / 4, MARGIN, 4 * MARGIN])
def test_errors_are_never_more_often(spread: float) -> None:
    for mean in (MARGIN, 1.5 * MARGIN, -MARGIN):
        assert share("equivalent", mean, spread, 4) < 0.05 + three_sigma(0.05)
    for verdict in ("worse", "better"):  # dense against dense: no true difference
        assert share(verdict, 0.0, spread, 3) < 0.05 + three_sigma(0.05)
    at_the_margin = share("worse", MARGIN, MARGIN / 3, 3)
    assert at_the_margin == pytest.approx(0.05, abs=three_sigma(0.05))


def test_verdicts() -> None:
    rows = {"equivalent": [[0.0, 0.0]], "inconclusive": [[0.004, 0.006], [0.02], []]}
    rows["worse"] = [[0.001, math.inf, 0.001], [math.nan]]
    for verdict, cases in rows.items():
        assert {judge(differences, MARGIN)[0] for differences in cases} == {verdict}


@pytest.mark.parametrize("mean", [0.0, 0.3 * MARGIN, 0.7 * MARGIN, 1.6 * MARGIN])
@pytest.mark.parametrize("spread", [0.5 * MARGIN, 1.5 * MARGIN])
def test_so_many_seeds_do_decide(mean: float, spread: float) -> None:
    # an experiment of three whose mean and spread are the true ones
    interval = paired([mean - spread, mean, mean + spread], 0.9)
    more = more_seeds(interval, MARGIN)
    assert more is not None
    wanted = "equivalent" if mean < MARGIN else "worse"
    assert 0.76 < share(wanted, mean, spread, 3 + more) < 0.97
    if more > 4:  # and about so many are needed
        assert share(wanted, mean, spread, 3 + more // 2) < 0.75
    assert more_seeds(paired([0.004999, 0.005001, 0.005], 0.9), 0.005) is None


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.floats(0.001, 1))
def test_verdict_and_interval_agree(differences: list[float], margin: float) -> None:
    verdict, interval = judge(differences, margin)
    assert interval is not None
    assert interval.low <= interval.mean <= interval.high
    assert (verdict == "equivalent") == (-margin < interval.low and interval.high < margin)
    turned = {"worse": "better", "better": "worse"}
    assert judge([-d for d in differences], margin)[0] == turned.get(verdict, verdict)


def test_intervals_of_nothing_are_refused() -> None:
    for differences, confidence in (([1.0], 0.9), ([1.0, math.nan], 0.9), ([1.0, 2.0], 1.0)):
        with pytest.raises(ValueError, match="no interval"):
            paired(differences, confidence)
