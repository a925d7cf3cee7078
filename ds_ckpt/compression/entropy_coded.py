"""About one bit per entry: a quantizer with a dead zone and a Rice code of its positions.

Entries below a threshold t stay as residual. The others are sent as place, sign and level: level 0
up to 2.5 t, then levels whose width grows by half each. Level 0 decodes to the mean magnitude of
its entries. Level i decodes to a * 1.5^i, with a fitted by least squares. The sent values are a
projection: the residual never has more energy than there was. At low rates such a quantizer with an
entropy coder is near the rate-distortion bound (Sullivan, IEEE Trans. Inf. Theory 42, 1996).

t is the smallest for which the code fits its bytes, found in a sample's histogram. So the size
depends on the number of entries alone, and there is no state. If the code turns out longer than the
histogram predicted, entries just above t are left out until it fits; if that would take larger
ones, t is first guessed again for so much less.

The code is Rice's (Golomb 1966): a number v becomes v >> k zeros, a one, and its k low bits. Three
sequences of numbers are coded:

    2 * gap + sign   of the entries that are sent; gap: entries before it that are not
    gap              of those with a level above 0, among them
    level - 1        of those, k = 0

The unary parts of all numbers are one run of bits from the front. Their low bits are another at the
end, with zeros between. That makes both ends parallel: a decoder finds all numbers by the places of
ones, and all places by a cumulative sum. `wire` has the layout of a segment.

Segments are coded one by one. On an accelerator the host waits for their counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression.base import Codec, Method
from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.fields import Expects

SEGMENT = 1 << 20
HEADER_BYTES = 24
LEVELS = 32
_STRONG = 2.5  # where level 1 begins, in thresholds
_GROWTH = 1.5
_LARGEST_K = 7
_SAMPLE = 32768
_SCATTER = 0x9E3779B1  # multiples of it, shifted, are spread evenly and repeat nothing
_OVER_ENTROPY = 1.02
_FP32 = torch.finfo(torch.float32)
_BIN_BITS = 18
_BINS = 512  # 16 octaves: `LEVELS` levels reach as far
_TINY_BIN = 1 << (23 - _BIN_BITS)
_LEVELS_GUESSED = 8
_BINS_A_LEVEL = (1 << (23 - _BIN_BITS)) * math.log2(_GROWTH)
_BANDS = [1.05, 1.2, 1.6, _STRONG, math.inf]
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
        description="Bits per entry, beside 24 bytes for each 2^20 entries of a shard or fewer. "
        "For normal entries 1.0 leaves 36% of the energy for later steps, 0.33 leaves 74%; the "
        "heavier tail of gradients leaves less. Below 2^17 entries each takes longer, because some "
        "hundreds of operators run whatever their number.",
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
        values.nan_to_num_(0.0, 0.0, 0.0)
        for row, payload in zip(values, out, strict=True):
            for first, last, start, stop in self._segments(len(row)):
                _pack(row[first:last], payload[start:stop])

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add the decoded values of each payload."""
        for payload in payloads:
            for first, last, start, stop in self._segments(len(into)):
                code, means = _read(payload[start:stop])
                into[first:last].add_(code.decoded(means, last - first), alpha=scale)

    def _segments(self, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Return (first entry, end, first byte, end) of each segment."""
        length = -(-numel // max(1, -(-numel // SEGMENT)))
        start = 0
        for first in range(0, numel, max(1, length)):
            last = min(first + length, numel)
            stop = start + HEADER_BYTES + aligned(math.ceil((last - first) * self.bits / 8))
            yield first, last, start, stop
            start = stop


@dataclass(frozen=True)
class _Sent:
    """Entries of a segment that are sent.

    `places` (int64, ascending) and `negative` are of all; `strong` and `level` (minus 1) of those
    with a level above 0, by number among the sent ones.
    """

    places: Tensor
    negative: Tensor
    strong: Tensor
    level: Tensor

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three sequences of numbers, int64."""
        return _gaps(self.places) * 2 + self.negative, _gaps(self.strong), self.level

    def decoded(self, means: Tensor, numel: int) -> Tensor:
        """Return fp32 [numel]. Equal at both ends."""
        values = means[:1].repeat(len(self.places))
        levels = (means[1] * _powers(means.device).float()).clamp_(max=_FP32.max)
        values.scatter_(0, self.strong, levels[self.level])
        values *= self.negative.float().mul_(-2).add_(1)
        return values.new_zeros(numel).scatter_(0, self.places, values)


def _powers(device: torch.device) -> Tensor:
    """Return the levels above 0 in units of a: fp64 [LEVELS], exact on every device."""
    return torch.full((LEVELS,), _GROWTH, dtype=torch.float64, device=device).cumprod(0)


def _places(mask: Tensor) -> Tensor:
    """Return the places of ones, int64, ascending."""
    return mask.nonzero().squeeze(1)


def _gaps(places: Tensor) -> Tensor:
    """Return the gaps between ascending places, and before the first."""
    return places.diff(prepend=places.new_full((1,), -1)).sub_(1)


def _pack(values: Tensor, payload: Tensor) -> None:
    """Code a segment, fp32 [n] to uint8 [bytes]; `values` become the residual."""
    numel, budget = len(values), 8 * (len(payload) - HEADER_BYTES)
    magnitude = values.abs()
    edges, guessed = _guess(magnitude)
    goal = float(budget)
    for _ in range(2):
        threshold = _threshold(edges, guessed, goal / numel)
        # an entry takes two bits or more
        code = _choose(values, threshold, _places(magnitude >= threshold)[: budget // 2])
        ks = _parameters(numel, code)
        bits = sum(_lengths(code, ks))
        # more than half of level 0 would have to go, and then the rest whatever its size
        if 2 * (bits - budget) <= (len(code.places) - len(code.strong)) * ks[0]:
            break
        goal = 0.99 * budget / bits * budget
    if bits > budget:
        ks = _parameters(numel, code, budget / bits)
        count = _too_many(numel, budget, code, ks)
        kept = _without_smallest(magnitude[code.places], threshold, count)
        code = _choose(values, threshold, code.places[kept])
    means = _means(magnitude, code)
    _write(payload, code, ks, means)
    values.sub_(code.decoded(means, numel))


def _guess(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending thresholds, fp32, and the bits an entry that each would take.

    From a histogram with 32 bins an octave, by the bits of the floats.
    """
    # one of every so many, at varying offsets: a fixed one would miss most of a matrix's columns if
    # the two have a common divisor
    every, sample = len(magnitude) // _SAMPLE, magnitude
    if every > 1:
        at = torch.arange(len(magnitude) // every, device=magnitude.device)
        scattered = (at * _SCATTER >> 16).bitwise_and_(0xFFFF)
        sample = magnitude[at.mul_(every).add_(scattered.mul_(every) >> 16)]
    top = int(magnitude.max().view(torch.int32)) >> _BIN_BITS
    lowest = max(top - (_BINS - 1), _TINY_BIN)
    bins = (sample.view(torch.int32) >> _BIN_BITS).sub_(lowest - 1).clamp_(0, _BINS)
    counts = torch.bincount(bins, minlength=_BINS + 1)
    # summed as integers: CUDA has no deterministic cumulative sum of floats
    counts = torch.nn.functional.pad(counts[1:], (0, 1)).flip(0).cumsum(0)
    shares, above = (c.flip(0).float() / len(sample) for c in (counts, counts.cumsum(0)))
    # borders of levels, for thresholds at the lower ends of bins
    edges = torch.arange(lowest, lowest + _BINS, 4, dtype=torch.int32, device=magnitude.device)
    edges = (edges << _BIN_BITS).view(torch.float32)
    levels = _powers(magnitude.device)[:_LEVELS_GUESSED].float().mul_(_STRONG / _GROWTH)
    borders = torch.cat([edges[:, None], edges[:, None] * levels], 1)
    at = ((borders.view(torch.int32) >> _BIN_BITS) - lowest).clamp_(0, _BINS)
    shares = shares[at]
    first, second = shares[:, 0], shares[:, 1]
    # levels further up by an integral: the last of these counts half, and bins from there on
    further = above[at[:, -1]].div_(_BINS_A_LEVEL).sub_(shares[:, -1] / 2)
    entropy = torch.special.entr(torch.stack([1 - first, first - second, second])).sum(0)
    bits = entropy.mul_(_OVER_ENTROPY / math.log(2)).add_(first).add_(shares[:, 1:].sum(1))
    return edges, bits.add_(further.clamp_(min=0))


def _threshold(edges: Tensor, bits: Tensor, wanted: float) -> Tensor:
    """Return the smallest magnitude to send, fp32 [] above 0, for `wanted` bits an entry."""
    # the lowest that fits, interpolated by the bits to spare
    fit = min(int((bits > wanted).sum()), len(bits) - 1)
    if fit == 0:
        return edges[0]
    high, low = bits[fit - 1 : fit + 1].tolist()
    part = min(max((wanted - low) / max(high - low, 1e-9), 0.0), 1.0)
    # if most of them are equally large, some of those are left out again
    return edges[fit].lerp(edges[fit - 1], 1.0 if low < wanted / 2 else part)


def _choose(values: Tensor, threshold: Tensor, places: Tensor) -> _Sent:
    """Return the code of these entries."""
    picked = values[places]
    in_borders = picked.abs().div_(threshold * _STRONG)
    strong = _places(in_borders >= 1)
    level = in_borders[strong].log2_().div_(math.log2(_GROWTH)).floor_()
    return _Sent(places, picked < 0, strong, level.clamp_(0, LEVELS - 1).long())


def _parameters(numel: int, code: _Sent, kept: float = 1.0) -> list[int]:
    """Return k of each sequence, if the share `kept` of the chosen is sent.

    It is the best one if entries are equally likely everywhere (Kiely, "Selecting the Golomb
    parameter in Rice coding", JPL IPN 42-159, 2004).
    """

    def best(density: float) -> int:
        density = min(max(density, 1e-9), 1 - 1e-6)
        k = math.log2(math.log((math.sqrt(5) - 1) / 2) / math.log1p(-density))
        return min(max(math.floor(k) + 1, 0), _LARGEST_K)

    sent, above = len(code.places), len(code.strong)
    return [1 + best(sent * kept / numel), best(above / max(sent, 1)), 0]


def _lengths(code: _Sent, ks: Sequence[int]) -> list[int]:
    """Return the bits of each sequence."""
    return [
        int((numbers >> k).sum()) + (1 + k) * len(numbers)
        for numbers, k in zip(code.sequences, ks, strict=True)
    ]


def _too_many(numel: int, budget: int, code: _Sent, ks: Sequence[int]) -> int:
    """Return a number of entries without which the code is sure to fit.

    Each saves its low bits, with the sign, whatever becomes of the gaps around it; one with a level
    above 0 also those of its second gap and a bit of its level. And all gaps together are no longer
    than the segment: m entries take m * (1 + k) bits and that / 2^k'.
    """
    first, *others = _lengths(code, ks)
    sent, weak = len(code.places), len(code.places) - len(code.strong)
    excess = first + sum(others) - budget
    of_strong = max(excess - weak * ks[0], 0)
    by_excess = min(-(-excess // ks[0]), weak - (-of_strong // (ks[0] + ks[1] + 1)))
    fits = (budget - sum(others) - (numel >> (ks[0] - 1))) // (1 + ks[0])
    return min(max(min(by_excess, sent - fits), 0), sent)


def _without_smallest(magnitude: Tensor, threshold: Tensor, count: int) -> Tensor:
    """Return a mask of the entries that are left without `count` of about the smallest."""
    bands = (magnitude < threshold * band for band in _BANDS)
    small = next(band for band in bands if int(band.sum()) >= count)
    return ~(small & (small.cumsum(0) <= count))


def _means(magnitude: Tensor, code: _Sent) -> Tensor:
    """Return the mean of level 0, and a: fp32 [2]."""
    sent = magnitude[code.places].double()
    strong, powers = sent[code.strong], _powers(sent.device)[code.level]
    mean = (sent.sum() - strong.sum()) / max(len(sent) - len(strong), 1)
    a = (strong * powers).sum() / powers.square().sum().clamp(min=1)
    return torch.stack([mean, a]).float()


def _write(payload: Tensor, code: _Sent, ks: Sequence[int], means: Tensor) -> None:
    budget, sequences = 8 * (len(payload) - HEADER_BYTES), code.sequences
    counts = torch.tensor([len(code.places), len(code.strong)], dtype=torch.int32, device="cpu")
    payload[:HEADER_BYTES] = 0
    section(payload, 0, 2, torch.int32).copy_(counts)
    section(payload, 8, 2, torch.float32).copy_(means)
    payload[16:18] = torch.tensor(ks[:2], dtype=torch.uint8, device="cpu")
    bits = payload.new_zeros(budget)
    steps = [(numbers >> k).add_(1) for numbers, k in zip(sequences, ks, strict=True)]
    bits.index_fill_(0, torch.cat(steps).cumsum(0).sub_(1), 1)
    start = _low_bits_start(budget, sequences, ks)
    for numbers, k in zip(sequences, ks, strict=True):
        low, last = bits[start : start + len(numbers) * k], numbers.to(torch.uint8)
        for plane in range(k):
            torch.bitwise_and(last >> plane, 1, out=low.view(-1, k)[:, plane])
        start += len(numbers) * k
    payload[HEADER_BYTES:] = (bits.view(torch.int64) * _TO_BYTE) >> 56


def _low_bits_start(budget: int, sequences: Sequence[Tensor], ks: Sequence[int]) -> int:
    return budget - sum(len(numbers) * k for numbers, k in zip(sequences, ks, strict=True))


def _read(payload: Tensor) -> tuple[_Sent, Tensor]:
    """Return the code of a payload, and the means."""
    budget = 8 * (len(payload) - HEADER_BYTES)
    sent, above = section(payload, 0, 2, torch.int32).tolist()
    ks = [*payload[16:18].tolist(), 0]
    words = payload[HEADER_BYTES:].long()
    bits = (((words & 0x7F) * _TO_BITS) & _LOW_BITS) | ((words >> 7) << 56)
    bits = bits.view(torch.uint8)
    counts = [sent, above, above]
    quotients = _gaps(_places(bits.view(torch.bool))[: sum(counts)]).split(counts)
    start = _low_bits_start(budget, quotients, ks)
    sequences = []
    for quotient, k in zip(quotients, ks, strict=True):
        low, numbers = bits[start : start + len(quotient) * k], quotient << k
        for plane in range(k):
            numbers += low.view(-1, k)[:, plane] << plane
        sequences.append(numbers)
        start += len(quotient) * k
    first, second, level = sequences
    places, strong = ((gaps + 1).cumsum(0).sub_(1) for gaps in (first >> 1, second))
    code = _Sent(places, (first & 1).bool(), strong, level.clamp_(max=LEVELS - 1))
    return code, section(payload, 8, 2, torch.float32).clone()
