"""Constants of `entropy_coded`, for its operators and kernels."""

SEGMENT = 1 << 20
PART = 1 << 15
"""Entries that are coded by themselves; their places fit in int16."""
TILE = 1024
"""Entries of a part among which those just below the threshold are spread evenly."""
HEADER_BYTES, PART_BYTES = 16, 8
K_LIMIT = 7
INFINITE = 0x7F800000
STRONG = 5 << 21
"""Where level 1 begins above the threshold, as a difference of the bits of floats: 1.25 octaves."""
LEVELS, LEVEL = 64, 1 << 22
"""Levels above 0, and the width of one: half an octave."""
SAMPLE, SCATTER = 32768, 0x9E3779B1
"""Multiples of `SCATTER`, shifted, are spread evenly and repeat nothing."""
BINS, BIN = 2048, 1 << 20
"""Eight bins an octave, over all positive floats."""
WINDOW = 128
"""Bins up to the largest entry that thresholds are predicted in."""
SHARES, K_SHARE = (80, 64, 62, 57, 40), 62
"""64ths of the bits that there are, as predicted for the thresholds that are tried.

The first is not tried: entries above it may be sent if at the second there are bits to spare. At
`K_SHARE` k is chosen.
"""
