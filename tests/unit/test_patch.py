"""Attributes set on live objects are taken back, in any order."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.patch import Patches


@given(inherited=st.booleans(), order=st.permutations(range(4)))
def test_those_that_share_an_attribute_may_end_in_any_order(
    inherited: bool, order: list[int]
) -> None:
    class Owner(SimpleNamespace):
        word = "first"

    target = Owner() if inherited else Owner(word="own")
    before = dict(vars(target))
    every = [Patches() for _ in order]
    for number, patches in enumerate(every):
        patches.set(target, "word", number)
    left = set(order)
    for number in order:
        every[number].undo()
        left.discard(number)
        assert not every[number].active
        if left:
            assert target.word == max(left)
    assert vars(target) == before


def test_what_is_dropped_without_an_undo_is_freed() -> None:
    class Owner:
        pass

    def patched() -> weakref.ref[Owner]:
        target = Owner()
        patches = Patches()
        patches.set(target, "word", lambda: patches)
        patches.set(target, "word", lambda: target)
        return weakref.ref(target)

    target = patched()
    gc.collect()
    assert target() is None
