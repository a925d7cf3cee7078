"""Numbers as people read them. Nothing here measures."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """In GiB, MiB or KiB with three significant digits: 23.9 GiB, 0.512 MiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(nbytes) >= 0.5 * factor:
            return f"{_three(nbytes / factor)} {unit}"
    return f"{_three(nbytes / 2**10)} KiB" if nbytes else "0"


def gib(nbytes: float) -> str:
    return _three(nbytes / 2**30)


def count(number: float) -> str:
    """Of FLOPs and the like: 8.80 G, 1.3 P."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(number) >= factor:
            return f"{_three(number / factor)} {unit}"
    return f"{number:.0f}"


def seconds(value: float) -> str:
    return f"{_three(value)} s" if value >= 1 else f"{_three(1e3 * value)} ms"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def times(larger: float, smaller: float) -> str:
    return f"{larger / smaller:.2f}x" if smaller else "-"
