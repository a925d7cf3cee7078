"""Formats numbers for reports, each with its unit."""

import math

GIB = 2**30
MIB = 2**20
MB = 10**6


def number(value: float) -> str:
    """Format with three significant digits, at most four decimals and no exponent."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, 2 - int(f"{value:.2e}".partition("e")[2]))  # of the rounded value
    return f"{value:.{min(decimals, 4)}f}"


def size(nbytes: float) -> str:
    """Format bytes in GiB, MiB or KiB: 23.9 GiB, 0.512 MiB."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB)):
        if abs(nbytes) >= 0.5 * factor:
            return f"{number(nbytes / factor)} {unit}"
    return f"{number(nbytes / 2**10)} KiB" if nbytes else "0"


def count(value: float) -> str:
    """Format a count such as FLOPs: 8.80 G, 1.30 P."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= factor:
            return f"{number(value / factor)} {unit}"
    return f"{value:.0f}"


def times(larger: float, smaller: float) -> str:
    """Format a ratio: 1.25x; "-" if `smaller` is 0."""
    return f"{larger / smaller:.2f}x" if smaller else "-"
