"""Numbers as people read them."""

from __future__ import annotations

import pytest

from ds_ckpt.telemetry import units


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (units.number(0.01234), "0.0123"),
        (units.number(0.00001234), "0.0000"),
        (units.number(0.0999999999), "0.100"),
        (units.number(float("nan")), "-"),
        (units.number(float("inf")), "-"),
        (units.size(0), "0"),
        (units.size(1536), "1.50 KiB"),
        (units.size(0.512 * units.MIB), "0.512 MiB"),
        (units.size(23.94 * units.GIB), "23.9 GiB"),
        (units.size(-200 * units.GIB), "-200 GiB"),
        (units.count(999), "999"),
        (units.count(8.8e9), "8.80 G"),
        (units.count(1.3e15), "1.30 P"),
        (units.times(5, 4), "1.25x"),
        (units.times(5, 0), "-"),
    ],
)
def test_three_digits_and_a_unit(text: str, words: str) -> None:
    assert text == words
