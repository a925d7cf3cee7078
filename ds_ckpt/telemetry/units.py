"""Numbers as people read them, each with its unit. Nothing here measures."""

from __future__ import annotations

GIB = 2**30
MIB = 2**20


def size(nbytes: float) -> str:
    """In GiB, MiB or KiB with three significant digits: 23.9 GiB, 0.512 MiB."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB)):
        if abs(nbytes) >= 0.5 * factor:
            return f"{_three(nbytes / factor)} {unit}"
    return f"{_three(nbytes / 2**10)} KiB" if nbytes else "0"


def count(number: float) -> str:
    """Of FLOPs and the like: 8.80 G, 1.30 P."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(number) >= factor:
            return f"{_three(number / factor)} {unit}"
    return f"{number:.0f}"


def seconds(value_s: float) -> str:
    """In seconds, or milliseconds below one: 1.25 s, 30.0 ms."""
    return f"{_three(value_s)} s" if value_s >= 1 else f"{_three(1e3 * value_s)} ms"


def percent(part: float, whole: float) -> str:
    """A share of a whole; of nothing it is 0%."""
    return f"{part / whole:.0%}" if whole else "0%"


def times(larger: float, smaller: float) -> str:
    """A ratio: 1.25x; "-" where there is nothing to compare with."""
    return f"{larger / smaller:.2f}x" if smaller else "-"


def _three(value: float) -> str:
    """Three significant digits, no exponent."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"
