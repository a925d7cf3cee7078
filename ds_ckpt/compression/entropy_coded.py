"""About one bit per entry: a quantizer with a dead zone and a Rice code of its positions.

Entries below a threshold t stay as residual. The others are sent as place, sign and level. Level 0
reaches to about 2.5 t, then two levels span an octave. Level 0 decodes to the mean magnitude of its
entries. A level above it decodes to its lower border plus the mean distance from there. The
residual never has more energy than there was. At low rates such a quantizer with an entropy coder
is near the rate-distortion bound (Sullivan, IEEE Trans. Inf. Theory 42, 1996).

The bits of positive floats are ordered as the floats are. Thresholds, levels and bins are
differences of those bits, and everything is counted in whole numbers. So operators and the kernels
of `entropy_kernels` write the same bytes.

A histogram of a sample predicts thresholds at which the code takes about the bits that there are.
Taken is the lowest of them at which the code fits, counted. Entries between it and the next lower
one are sent, spread evenly, as many as still fit for sure. So the size depends on the number of
entries alone, and there is no state.

The code is Rice's (Golomb 1966): a number v becomes v >> k zeros, a one, and its k low bits. Three
sequences of numbers are coded:

    2 * gap + sign   of the entries that are sent; gap: entries before it that are not
    gap              of those with a level above 0, among them
    level - 1        of those, k = 0

Each part of `PART` entries is coded by itself: the unary parts of all numbers, then all low bits. A
decoder finds the numbers by the places of ones, and the places of entries by a cumulative sum.
`wire` has the layout of a segment.

Operators code segments one by one, and the host waits for their counts. Kernels code all at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression import entropy_format as fmt
from ds_ckpt.compression import fused
from ds_ckpt.compression.base import Codec, Method, row_groups
from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.fields import Expects

_DECODED_AT_ONCE = 1 << 24  # entries on a device, or one row: each takes 6 to 9 bytes
_TO_BYTE = sum(1 << (56 - 7 * i) for i in range(8))
_TO_BITS = sum(1 << 7 * i for i in range(8))
_LOW_BITS = sum(1 << 8 * i for i in range(8))


class EntropyCoded(Method, Codec):
    """Entropy-coded values: the larger entries in a few levels, at fixed bits per entry."""

    name = "entropy_coded"
    about = "the larger entries in a few levels, entropy-coded in about one bit per entry or less"
    example = '{"bits": 1.0}'
    presets = {
        "1bit": {"entropy_coded": {"bits": 1.0}},
        "third_bit": {"entropy_coded": {"bits": 0.33}},
    }
    bits: Annotated[float, Expects("a number from 0.05 to 2", "1.0")] = Field(
        default=1.0,
        ge=0.05,
        le=2,
        allow_inf_nan=False,
        description="Bits per entry, beside 16 bytes for each 2^20 entries of a shard or less and "
        "8 for each 2^15. For normal entries 1.0 leaves 36% of the energy for later steps, 0.33 "
        "leaves 73%; the heavier tail of gradients leaves less. On a CPU entries of shards below "
        "2^17 take longer, because some hundreds of operators run whatever their number.",
    )

    metric: Annotated[Literal["energy", "steps"], Expects('"energy" or "steps"', '"steps"')] = (
        Field(
            default="steps",
            description='Measure that selects the entries. "energy": their size. "steps": their '
            "size in the steps of an optimizer of Adam's kind, estimated from row and column sums; "
            "costs an all-reduce of a number per row and column in every 20th step.",
        )
    )

    @property
    def uses_preconditioner(self) -> bool:
        """True with the metric of steps."""
        return self.metric == "steps"

    def describe(self) -> str:
        """Return bits and metric."""
        steps = ", in the metric of steps" if self.uses_preconditioner else ""
        return f"entropy-coded values in {self.bits:g} bits{steps}"

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of all segments."""
        return sum(stop - start for _, _, start, stop in self._segments(numel))

    def pack_rows(self, values: Tensor, out: Tensor) -> None:
        """Code each row; `values` become the residual."""
        if fused.is_supported(values.device, _try_kernels):
            self._pack_with_kernels(values, out)
            return
        values.nan_to_num_(0.0, 0.0, 0.0)
        for row, payload in zip(values, out, strict=True):
            for first, last, start, stop in self._segments(len(row)):
                _pack(row[first:last], payload[start:stop])

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add the decoded values of each payload."""
        if fused.is_supported(into.device, _try_kernels):
            self._unpack_add_with_kernels(payloads, into, scale)
            return
        for payload in payloads:
            for first, last, start, stop in self._segments(len(into)):
                code, means = _read(payload[start:stop], last - first)
                into[first:last].add_(code.decoded(means, last - first), alpha=scale)

    def _pack_with_kernels(self, values: Tensor, out: Tensor) -> None:
        from ds_ckpt.compression import entropy_kernels as kernels

        rows, numel = values.shape
        if not values.numel():
            return
        parts, segments, sizes = self._grid(numel)
        grid, stride = (parts, rows * segments), values.stride(0)
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=values.device)
        empty = functools.partial(torch.empty, dtype=torch.int32, device=values.device)
        histograms, guessed = zeros(grid[1], fmt.BINS), empty(grid[1], 8)
        tried, counts = empty(*grid, 16), empty(*grid, 8)
        sums = empty(*grid, 2, dtype=torch.float64)
        scratch = empty(*grid, len(fmt.SHARES) - 1, fmt.TILE, dtype=torch.int16)
        out.zero_()
        payloads = out, out.stride(0), segments, *sizes
        sampled = min(parts * fmt.PART, 2 * fmt.SAMPLE) // fmt.TILE
        kernels.sample[(sampled, grid[1])](values, histograms, numel, stride, segments)
        kernels.guess[(1, grid[1])](histograms, guessed, numel, *payloads)
        tensors = values, guessed, tried, counts, sums, scratch
        for stage in ("try", "count", "write"):
            kernels.code[grid](*tensors, numel, stride, *payloads, STAGE=stage)

    def _unpack_add_with_kernels(self, payloads: Tensor, into: Tensor, scale: float) -> None:
        from ds_ckpt.compression import entropy_kernels as kernels

        numel, stride = len(into), payloads.stride(0)
        if not numel * len(payloads):
            return
        parts, segments, sizes = self._grid(numel)
        for (some,) in row_groups(numel, _DECODED_AT_ONCE, payloads):
            grid = parts, len(some) * segments
            ones = torch.empty(grid[1], 6 * sizes[1], dtype=torch.int32, device=into.device)
            places = torch.empty(*grid, fmt.PART, dtype=torch.int16, device=into.device)
            codes = payloads.new_zeros(len(some), numel)
            kernels.read[grid](ones, places, codes, numel, some, stride, segments, *sizes)
            args = codes, into, len(some), numel, some, stride, segments, sizes[1], float(scale)
            kernels.add[(parts * fmt.PART // fmt.TILE, segments)](*args, enable_fp_fusion=False)

    def _grid(self, numel: int) -> tuple[int, int, tuple[int, int]]:
        """Return parts of a segment, segments, and the bytes of a row and of a segment."""
        first, *others = self._segments(numel)
        last = others[-1] if others else first
        return -(-first[1] // fmt.PART), 1 + len(others), (last[3], first[3])

    def _segments(self, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Return (first entry, end, first byte, end) of each segment."""
        length = -(-numel // max(1, -(-numel // fmt.SEGMENT)))
        start = 0
        for first in range(0, numel, max(1, length)):
            last = min(first + length, numel)
            stop = start + _start(last - first) + aligned(math.ceil((last - first) * self.bits / 8))
            yield first, last, start, stop
            start = stop


def _start(numel: int) -> int:
    """Return the bytes before the code of a segment."""
    return fmt.HEADER_BYTES + fmt.PART_BYTES * -(-numel // fmt.PART)


@dataclass(frozen=True)
class _Sent:
    """Entries of a segment that are sent.

    `places` (int64, ascending) and `negative` are of all. `strong` and `level` (minus 1) are of
    those with a level above 0, by number among the sent ones. `first` has the number of the first
    of each part, and how many there are.
    """

    places: Tensor
    negative: Tensor
    strong: Tensor
    level: Tensor
    first: Tensor

    @functools.cached_property
    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three sequences of numbers, int64."""
        in_part = self.strong - self.first[self.places[self.strong] // fmt.PART]
        gaps = torch.minimum(_gaps(self.places), self.places & (fmt.PART - 1))
        return gaps * 2 + self.negative, torch.minimum(_gaps(self.strong), in_part), self.level

    def counts(self) -> tuple[list[int], list[int]]:
        """Return entries of each part, and those with a level above 0."""
        above = torch.searchsorted(self.strong, self.first)
        return self.first.diff().tolist(), above.diff().tolist()

    def tails(self, numel: int, k: int) -> int:
        """Return the zeros that the rests of all parts would take as gaps."""
        starts = torch.arange(0, numel, fmt.PART, device=self.first.device)
        last = torch.nn.functional.pad(self.places, (1, 0), value=-1)[self.first[1:]]
        return int(
            ((starts + fmt.PART).clamp_(max=numel) - 1 - last.maximum(starts - 1) >> k).sum()
        )

    def decoded(self, means: Tensor, numel: int) -> Tensor:
        """Return fp32 [numel]. Equal at both ends."""
        mean, unit = means.view(torch.float32)[:1], means[1:]
        values = mean.repeat(len(self.places))
        levels = (unit + self.level * fmt.LEVEL).clamp_(max=fmt.INFINITE - 1).int()
        values.scatter_(0, self.strong, levels.view(torch.float32))
        values *= self.negative.float().mul_(-2).add_(1)
        return values.new_zeros(numel).scatter_(0, self.places, values)


def _places(mask: Tensor) -> Tensor:
    """Return the places of ones, int64, ascending."""
    return mask.nonzero().squeeze(1)


def _gaps(places: Tensor) -> Tensor:
    """Return the gaps between ascending places, and before the first."""
    return places.diff(prepend=places.new_full((1,), -1)).sub_(1)


def _pack(values: Tensor, payload: Tensor) -> None:
    """Code a segment, fp32 [n] to uint8 [bytes]; `values` become the residual."""
    numel, magnitude = len(values), values.abs().view(torch.int32)
    budget = 8 * (len(payload) - _start(numel))
    (lower, *thresholds), ks = _guess(magnitude, budget)
    candidates = _places(magnitude >= lower)
    picked = magnitude[candidates]
    for threshold in thresholds:
        sent = picked >= threshold
        code = _choose(values, magnitude, candidates[sent], threshold)
        spare = budget - sum(_lengths(code.sequences, ks)) - code.tails(numel, ks[0] - 1)
        if spare >= 0:
            break
        lower = threshold
    between = _places((picked >= lower) & (picked < threshold))
    # one more costs its low bits and two: it parts a gap, or the rest of a part, and may lengthen
    # one of the second sequence by 1
    room = min(max(spare, 0) // (ks[0] + 2), len(between))
    sent.index_fill_(0, between[_is_spread(candidates[between], room)], 1)
    code = _choose(values, magnitude, candidates[sent], threshold)
    means = _means(values, magnitude, code, threshold)
    _write(payload, code, ks, means)
    values.sub_(code.decoded(means, numel))


def _try_kernels(device: torch.device) -> None:
    some, values = EntropyCoded(), torch.zeros(1, fmt.TILE, device=device)
    packed = values.new_empty(1, some.packed_bytes(fmt.TILE), dtype=torch.uint8)
    some._pack_with_kernels(values, packed)
    some._unpack_add_with_kernels(packed, values[0], 1.0)


def _guess(magnitude: Tensor, budget: int) -> tuple[list[int], list[int]]:
    """Return thresholds, ascending, the last infinite, and k of each sequence."""
    # one of every so many, at varying offsets: a fixed one would miss most of a matrix's columns if
    # the two have a common divisor
    numel = len(magnitude)
    every, sample = numel // fmt.SAMPLE, magnitude
    if every > 1:
        at = torch.arange(numel // every, device=magnitude.device)
        scattered = (at * fmt.SCATTER >> 16).bitwise_and_(0xFFFF)
        sample = magnitude[at.mul_(every).add_(scattered.mul_(every) >> 16)]
    counts, total = torch.bincount(sample // fmt.BIN, minlength=fmt.BINS), len(sample)
    # sampled entries of each bin or above, and those of a level above 0, if the bin is a threshold
    lowest = max(int(_places(counts)[-1]) + 2 - fmt.WINDOW, 1)
    counts = torch.nn.functional.pad(counts, (0, fmt.BINS)).flip(0).cumsum(0).flip(0)
    borders = [0, *((fmt.STRONG + fmt.LEVEL * level) // fmt.BIN for level in range(fmt.LEVELS))]
    sent, *above = [counts[lowest + border :][: fmt.WINDOW] for border in borders]
    bits = _predicted(sent, total)[0] + sent + _predicted(above[0], sent)[0] + sum(above)
    thresholds = [fmt.INFINITE]
    for share in reversed(fmt.SHARES):
        wanted = budget * total * share // (64 * numel)
        fit = max(int((bits > wanted).sum()), 1)
        high, low = bits[fit - 1 : fit + 1].tolist()
        # the lower end of the bin, if entries are equally large
        part = (
            fmt.BIN
            if share == fmt.SHARES[0]
            else min((wanted - low) * fmt.BIN // max(high - low, 1), fmt.BIN)
        )
        thresholds.insert(0, (lowest + fit) * fmt.BIN - part)
        if share == fmt.K_SHARE:
            m, s = (c[fit] + (c[fit - 1] - c[fit]) * part // fmt.BIN for c in (sent, above[0]))
            # if many are equally large, no more than fit anywhere
            fits = max((wanted - (total >> k)) // (2 + k) for k in range(fmt.K_LIMIT))
            m = m.clamp(max=max(fits, 0))
    return thresholds, [1 + int(_predicted(m, total)[1]), int(_predicted(s, m)[1]), 0]


def _predicted(count: Tensor, total: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the bits of `count` gaps, evenly spread over `total`, at the best k, and this k.

    The quotients add up to the sum of the gaps over 2^k, less the mean of what is rounded off.
    """
    least, best = count + (total - count), torch.zeros_like(count)
    for k in range(1, fmt.K_LIMIT):
        rounded_off = (count - (count >> k)) * 7 >> 4
        bits = count * (1 + k) + ((total - count) >> k) - rounded_off
        least, best = torch.minimum(bits, least), torch.where(bits < least, k, best)
    return least, best


def _is_spread(places: Tensor, room: int) -> Tensor:
    """Return a mask of `room` ascending places or fewer, evenly spread over those of each tile."""
    tile, found = places // fmt.TILE, max(len(places), 1)
    rank = torch.arange(len(places), device=places.device) - torch.searchsorted(tile, tile)
    return (rank + 1) * room // found > rank * room // found


def _choose(values: Tensor, magnitude: Tensor, places: Tensor, threshold: int) -> _Sent:
    above = magnitude[places].sub_(threshold)
    strong = _places(above >= fmt.STRONG)
    level = above[strong].sub_(fmt.STRONG).div_(fmt.LEVEL, rounding_mode="floor").long()
    parts = torch.arange(1 + -(-len(values) // fmt.PART), device=places.device)
    first = torch.searchsorted(places, parts * fmt.PART)
    return _Sent(places, values[places] < 0, strong, level.clamp_(max=fmt.LEVELS - 1), first)


def _lengths(sequences: Sequence[Tensor], ks: Sequence[int]) -> list[int]:
    return [
        int((numbers >> k).sum()) + (1 + k) * len(numbers)
        for numbers, k in zip(sequences, ks, strict=True)
    ]


def _means(values: Tensor, magnitude: Tensor, code: _Sent, threshold: int) -> Tensor:
    """Return the mean of level 0 as fp32, and the first level above it: bits, int32 [2]."""
    sent, strong = values[code.places].abs().double(), code.places[code.strong]
    count = len(code.places) - len(strong)
    mean = (sent.sum() - sent[code.strong].sum()) / max(count, 1)
    within = magnitude[strong].long() - (threshold + fmt.STRONG) - code.level * fmt.LEVEL
    unit = threshold + fmt.STRONG + within.clamp_(max=fmt.LEVEL - 1).sum() // max(len(strong), 1)
    return torch.stack([mean.float().view(torch.int32), unit.clamp(max=fmt.INFINITE - 1).int()])


def _write(payload: Tensor, code: _Sent, ks: Sequence[int], means: Tensor) -> None:
    parts = list(zip(*code.counts(), strict=True))
    start, lows = fmt.HEADER_BYTES + fmt.PART_BYTES * len(parts), _low_sizes(parts, ks)
    bits = payload.new_zeros(8 * (len(payload) - start))
    steps = [(numbers >> k).add_(1) for numbers, k in zip(code.sequences, ks, strict=True)]
    split = [s.split([p[min(i, 1)] for p in parts]) for i, s in enumerate(steps)]
    unary = torch.cat([piece for part in zip(*split, strict=True) for piece in part]).cumsum(0)
    numbers = torch.tensor([0, *(s + 2 * a for s, a in parts)], device=unary.device).cumsum(0)
    ends = torch.nn.functional.pad(unary, (1, 0))[numbers].tolist()
    bits.index_fill_(0, unary.sub_(1).add_(_low_bits_before(parts, lows, unary.device)), 1)
    index, low = [], [_planes(n, k) for n, k in zip(code.sequences[:2], ks[:2], strict=True)]
    of_parts = [n.split([p[i] * ks[i] for p in parts]) for i, n in enumerate(low)]
    written = 0
    for part, first, second in zip(range(len(parts)), *of_parts, strict=True):
        written += lows[part]
        end = ends[part + 1] + written
        torch.cat([first, second], out=bits[end - lows[part] : end])
        index += [parts[part][0] | parts[part][1] << 16, end]
    payload[:start] = 0
    section(payload, 0, 2, torch.int32).copy_(means)
    payload[8:10] = torch.tensor(ks[:2], dtype=torch.uint8, device="cpu")
    table = section(payload, fmt.HEADER_BYTES, len(index), torch.int32)
    table.copy_(torch.tensor(index, device="cpu"))
    payload[start:] = (bits.view(torch.int64) * _TO_BYTE) >> 56


def _low_sizes(parts: Sequence[tuple[int, int]], ks: Sequence[int]) -> list[int]:
    return [sent * ks[0] + above * ks[1] for sent, above in parts]


def _low_bits_before(
    parts: Sequence[tuple[int, int]], lows: Sequence[int], device: torch.device
) -> Tensor:
    """Return for each number, part after part, the low bits of earlier parts."""
    before = torch.tensor([0, *lows[:-1]], device=device).cumsum(0)
    numbers = torch.tensor([sent + 2 * above for sent, above in parts], device=device)
    return before.repeat_interleave(numbers)


def _planes(numbers: Tensor, k: int) -> Tensor:
    """Return the low bits of numbers, one after another."""
    shifts = torch.arange(k, dtype=torch.uint8, device=numbers.device)
    return (numbers.to(torch.uint8)[:, None] >> shifts).bitwise_and_(1).view(-1)


def _read(payload: Tensor, numel: int) -> tuple[_Sent, Tensor]:
    """Return the code of a payload, and the means."""
    start, ks = _start(numel), payload[8:10].tolist()
    words = payload[start:].long()
    bits = (((words & 0x7F) * _TO_BITS) & _LOW_BITS) | ((words >> 7) << 56)
    bits = bits.view(torch.uint8)
    table = section(payload, fmt.HEADER_BYTES, (start - fmt.HEADER_BYTES) // 4, torch.int32)
    index = table.tolist()
    parts = [(n & 0xFFFF, n >> 16 & 0xFFFF) for n in index[::2]]
    lows = _low_sizes(parts, ks)
    low_bits = torch.cat([bits[end - n : end] for n, end in zip(lows, index[1::2], strict=True)])
    for n, end in zip(lows, index[1::2], strict=True):
        bits[end - n : end] = 0
    ones = _places(bits.view(torch.bool))
    ones -= _low_bits_before(parts, lows, ones.device)
    sizes = [n for sent, above in parts for n in (sent, above, above)]
    split = _gaps(ones).split(sizes)
    gaps, strong_gaps, level = (torch.cat(split[i::3]) for i in range(3))
    split = low_bits.split([n * k for part in parts for n, k in zip(part, ks, strict=True)])
    for numbers, low, k in zip((gaps, strong_gaps), (split[::2], split[1::2]), ks, strict=True):
        numbers <<= k
        planes = torch.cat(low).view(-1, k) if k else low_bits[:0]
        for plane in range(k):
            numbers += planes[:, plane] << plane
    sent, above = torch.tensor(parts, device=ones.device).unbind(1)
    first = torch.nn.functional.pad(sent.cumsum(0), (1, 0))
    places = _from_gaps(gaps >> 1, sent, torch.arange(0, numel, fmt.PART, device=ones.device))
    strong = _from_gaps(strong_gaps, above, first[:-1])
    code = _Sent(places, (gaps & 1).bool(), strong, level.clamp_(max=fmt.LEVELS - 1), first)
    return code, section(payload, 0, 2, torch.int32).clone()


def _from_gaps(gaps: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
    """Return the places after gaps, which begin anew at the start of each part."""
    ends = (gaps + 1).cumsum(0)
    before = torch.nn.functional.pad(ends, (1, 0))[counts.cumsum(0) - counts]
    return ends.sub_(1).add_((starts - before).repeat_interleave(counts))
