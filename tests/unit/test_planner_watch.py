"""When memory asks for another plan, and that changes stay rare."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.activation.planning.budget import MemoryWatch


def test_more_at_once_and_less_after_some_steps() -> None:
    watch = MemoryWatch(1000)
    assert watch.look(1, 900) is None
    assert watch.look(2, 951) == "more"
    watch.changed(2, "more")
    assert watch.budget_bytes == 900
    words = [watch.look(step, 500) for step in range(3, 9)]
    assert words == [None] * 4 + ["less"] * 2


def test_one_step_above_the_low_mark_begins_the_count_anew() -> None:
    watch = MemoryWatch(1000)
    assert [watch.look(i, used) for i, used in enumerate([700, 700, 800, 700, 700])] == [None] * 5
    assert watch.look(5, 700) == "less"


def test_the_same_plan_is_not_asked_for_again_and_again() -> None:
    watch = MemoryWatch(1000)
    assert [watch.look(i, 100) for i in range(3)][-1] == "less"
    assert not watch.unchanged(2, "less")
    assert [watch.look(i, 100) for i in range(3, 7)] == [None] * 4
    assert watch.look(7, 100) == "less"


def test_more_that_changes_nothing_plans_for_less() -> None:
    watch = MemoryWatch(1000)
    assert watch.look(1, 990) == "more"
    assert watch.unchanged(1, "more")
    assert watch.budget_bytes == 810


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([300, 990]), min_size=200, max_size=400))
def test_to_and_fro_dies_out(used: list[int]) -> None:
    """Whatever the load does, changes in `n` steps grow with its logarithm, not with n."""
    watch = MemoryWatch(1000)
    state, changes, pairs = "more", 0, 0
    for step, load in enumerate(used):
        # what is in use once less is recomputed is too much at heavy steps
        now = load if state == "less" else min(load, 900)
        word = watch.look(step, now)
        if word and word != state:
            watch.changed(step, word)
            pairs += word == "less"
            state, changes = word, changes + 1
    assert changes <= 2 * pairs + 1
    assert pairs <= 16
