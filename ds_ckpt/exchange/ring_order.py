"""The order in which gloo's ring all-reduce adds the processes' values, element by element.

Sums of three or more floats depend on their order. An exchange that adds in gloo's order is
bit-equal to a stock reduce-scatter on gloo (which runs the ring all-reduce, gloo/allreduce.cc).
Pure arithmetic: where gloo cuts a buffer, and who starts each piece.
"""

from __future__ import annotations

from collections.abc import Iterator

_MAX_SEGMENT_BYTES = 1024 * 1024


def ring_chunk_elements(numel: int, itemsize: int, world: int) -> int:
    """Elements of one ring chunk of a buffer of `numel` elements."""
    total_bytes = numel * itemsize
    segments_each = max(2, -(-total_bytes // (world * _MAX_SEGMENT_BYTES)))
    segment_bytes = -(-total_bytes // (segments_each * world))
    return segments_each * -(-segment_bytes // itemsize)


def ring_pieces(
    numel: int, itemsize: int, world: int, start: int, stop: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Cut `[start, stop)` of a buffer of `numel` elements where the order of summation changes.

    Yields `(start, stop, order)`: processes in the order in which they are added. Chunk `c` starts
    its way round the ring at process `c - 1` and ends at `c`.
    """
    chunk = max(1, ring_chunk_elements(numel, itemsize, world))
    while start < stop:
        index = min(start // chunk, world - 1)
        end = stop if index == world - 1 else min(stop, (index + 1) * chunk)
        yield start, end, [(index - 1 - hop) % world for hop in range(world)]
        start = end
