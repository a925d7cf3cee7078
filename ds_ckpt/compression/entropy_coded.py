"""About one bit an entry: a quantizer with a dead zone and a Rice code of its positions.

Entries below a threshold t stay as residual. Of the others the place, the sign and a level are
sent: level 0 up to 2.5 t, then levels whose width grows by half each. Level 0 decodes to the mean
magnitude of its entries, level i to a * 1.5^i with a fitted by least squares. What is sent is then
a projection: the residual never has more energy than there was. At low rates such a quantizer with
an entropy coder is near the rate-distortion bound (Sullivan, IEEE Trans. Inf. Theory 42, 1996).

t is the smallest for which the code fits its bytes, found in a sample's histogram. So the size
depends on the number of entries alone, and there is no state. If the code turns out longer than the
histogram predicted, entries just above t are left out until it fits; if that would take larger
ones, t is first guessed again for so much less.

The code is Rice's (Golomb 1966): a number v becomes v >> k zeros, a one, and its k low bits. Three
sequences of numbers are coded:

    2 * gap + sign   of the entries that are sent; gap: entries before it that are not
    gap              of those with a level above 0, among them
    level - 1        of those, k = 0

The unary parts of all numbers are one run of bits from the front, their low bits another at the
end, with zeros between. That makes both ends parallel: a decoder finds all numbers by the places of
ones, and all places by a cumulative sum. `wire` has the layout of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression.base import Codec, Method, add_rows, on_host, row_groups
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
_TILE_ACCELERATOR = 1 << 22
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
    """Entropy-coded values: the larger entries in a few levels, at fixed bits an entry."""

    name = "entropy_coded"
    about = "the larger entries in a few levels, entropy-coded in about one bit an entry or less"
    example = '{"bits": 1.0}'
    presets = {
        "1bit": {"entropy_coded": {"bits": 1.0}},
        "third_bit": {"entropy_coded": {"bits": 0.33}},
    }
    aliases = {"num_bits": "bits", "bits_per_element": "bits"}

    bits: Annotated[float, Expects("a number from 0.05 to 2", "1.0")] = Field(
        default=1.0,
        ge=0.05,
        le=2,
        allow_inf_nan=False,
        description="Bits an entry, beside 24 bytes for each 2^20 entries of a shard or fewer. Of "
        "normal entries 1.0 leaves 36% of the energy for later steps, 0.33 leaves 74%; a heavier "
        "tail, as gradients have it, leaves less. Below 2^17 entries each takes longer, as some "
        "hundreds of operators run whatever their number.",
    )

    metric: Annotated[Literal["energy", "steps"], Expects('"energy" or "steps"', '"steps"')] = (
        Field(
            default="steps",
            description='What decides which entries are sent. "energy": their size. "steps": their '
            "size in the steps of an optimizer of Adam's kind, as far as rows and columns of the "
            "gradients tell; an all-reduce of a number for each row and column in every 20th step.",
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
        for first, last, start, stop in self._segments(values.shape[1]):
            parts = values[:, first:last], out[:, start:stop]
            for some, payloads in row_groups(last - first, _tile(values.device), *parts):
                _pack(some, payloads)

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add the decoded values of each payload."""
        for first, last, start, stop in self._segments(into.shape[0]):
            for (some,) in row_groups(last - first, _tile(into.device), payloads[:, start:stop]):
                code, means = _read(some, last - first)
                add_rows(into[first:last], code.decoded(means, last - first), scale)

    def _segments(self, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Return (first entry, end, first byte, end) of each segment."""
        length = -(-numel // max(1, -(-numel // SEGMENT)))
        start = 0
        for first in range(0, numel, max(1, length)):
            last = min(first + length, numel)
            stop = start + HEADER_BYTES + aligned(math.ceil((last - first) * self.bits / 8))
            yield first, last, start, stop
            start = stop


def _tile(device: torch.device) -> int:
    """Return the number of entries to code at a time: on the CPU a single row."""
    return 1 if on_host(device) else _TILE_ACCELERATOR


@dataclass(frozen=True)
class _Filled:
    """Rows of unequal length: count, int64 [rows, 1], and mask, bool [rows, columns].

    A mask of None means all columns: the single row of the CPU, which takes half the time then.
    """

    count: Tensor
    mask: Tensor | None

    def only(self, values: Tensor, other: int | float = 0) -> Tensor:
        """Return `values`, and `other` behind the end of a row."""
        return values if self.mask is None else torch.where(self.mask, values, other)


def _places(mask: Tensor, capacity: int) -> tuple[Tensor, _Filled]:
    """Return the places of the first `capacity` ones in each row of bool [rows, n].

    int64 [rows, columns], ascending, 0 behind them. On the CPU the columns are as few as possible;
    elsewhere `capacity`, so that the host does not wait for a count.
    """
    rows, numel = mask.shape
    capacity = min(capacity, numel)
    if on_host(mask.device) and rows == 1:
        # torch's nonzero takes twice the time of the whole codec
        found = torch.from_numpy(np.flatnonzero(mask.numpy()))[:capacity]
        return found.unsqueeze(0), _Filled(torch.tensor([[len(found)]], device="cpu"), None)
    rank = mask.cumsum(1)
    count = rank[:, -1:].clamp(max=capacity)
    rank = torch.where(mask, rank - 1, capacity).clamp_(max=capacity)
    every = torch.arange(numel, device=mask.device).expand(rows, -1)
    places = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=mask.device)
    places = places.scatter_(1, rank, every)[:, :capacity]
    filled = _Filled(count, torch.arange(capacity, device=mask.device) < count)
    return filled.only(places), filled


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Return the entries of each row [rows, n] at `index` [rows, columns]."""
    return values.index_select(1, index[0]) if len(index) == 1 else values.gather(1, index)


@dataclass(frozen=True)
class _Sent:
    """Entries of a segment that are sent.

    Attributes:
        places: int64 [rows, columns].
        sent: filled columns.
        negative: bool [rows, columns].
        strong: columns with a level above 0.
        above: filled entries of `strong`.
        level: level - 1 of those, int64.
    """

    places: Tensor
    sent: _Filled
    negative: Tensor
    strong: Tensor
    above: _Filled
    level: Tensor

    @cached_property
    def counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers of each sequence."""
        return self.sent.count, self.above.count, self.above.count

    @cached_property
    def sequences(self) -> tuple[tuple[Tensor, _Filled], ...]:
        """The three sequences of numbers: int64 [rows, columns]."""
        return (
            (_gaps(self.places, self.sent).mul_(2).add_(self.negative), self.sent),
            (_gaps(self.strong, self.above), self.above),
            (self.level, self.above),
        )

    def decoded(self, means: Tensor, numel: int) -> Tensor:
        """Return fp32 [rows, numel]. Equal at both ends."""
        values = means[:, :1].expand(self.places.shape).contiguous()
        levels = (means[:, 1:] * _powers(means.device).float()).clamp_(max=_FP32.max)
        values = _put(values, self.strong, self.above, levels.gather(1, self.level))
        values = values * self.negative.float().mul_(-2).add_(1)
        return _put(values.new_zeros(len(values), numel), self.places, self.sent, values)


def _powers(device: torch.device) -> Tensor:
    """Return the levels above 0 in units of a: fp64 [LEVELS], exact on every device."""
    return torch.full((LEVELS,), _GROWTH, dtype=torch.float64, device=device).cumprod(0)


def _put(into: Tensor, places: Tensor, filled: _Filled, values: Tensor) -> Tensor:
    """Return `into` [rows, n], overwritten, with `values` at their places in each row."""
    if filled.mask is None:
        return into.scatter_(1, places, values)
    numel = into.shape[1]
    wide = torch.nn.functional.pad(into, (0, 1))  # for what is behind the end of a row
    return wide.scatter_(1, filled.only(places, numel), values)[:, :numel]


def _gaps(places: Tensor, filled: _Filled) -> Tensor:
    """Return the gaps between ascending places, and before the first."""
    if places.shape[1] == 0:
        return places
    gaps = places.diff(dim=1, prepend=places.new_full((len(places), 1), -1)).sub_(1)
    return filled.only(gaps)


def _pack(values: Tensor, payload: Tensor) -> None:
    """Code fp32 [rows, n] to uint8 [rows, bytes], a segment a row; `values` become the residual."""
    numel, budget = values.shape[1], 8 * (payload.shape[1] - HEADER_BYTES)
    magnitude = values.abs()
    edges, guessed = _guess(magnitude)
    goal = magnitude.new_full((len(values), 1), budget)
    for _ in range(2):
        threshold = _threshold(edges, guessed, goal / numel)
        # an entry takes two bits or more
        places, sent = _places(magnitude >= threshold, budget // 2)
        code, picked = _choose(values, threshold, places, sent)
        ks = _parameters(numel, code)
        bits = torch.stack(_lengths(code, ks)).sum(0)
        # more than half of level 0 would have to go, and then the rest whatever its size
        weak = code.counts[0] - code.counts[1]
        far_over = 2 * (bits - budget) > weak * ks[0]
        if on_host(values.device) and not bool(far_over.any()):
            break
        goal = torch.where(far_over, 0.99 * budget / bits.float().clamp(min=1), 1) * budget
    if not on_host(values.device) or bool((bits > budget).any()):
        ks = _parameters(numel, code, (budget / bits.clamp(min=1).double()).clamp_(max=1))
        count = _too_many(numel, budget, code, ks)
        kept, sent = _places(_without_smallest(picked, sent, threshold, count), budget // 2)
        code, picked = _choose(values, threshold, sent.only(_take(places, kept)), sent)
    means = _means(picked, code)
    _write(payload, code, ks, means)
    values.sub_(code.decoded(means, numel))


def _guess(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending thresholds and the bits an entry that each would take.

    From a histogram with 32 bins an octave, by the bits of the floats. Thresholds are bits of
    floats (int32), both are [rows, thresholds].
    """
    rows, numel = magnitude.shape
    # one of every so many, at varying offsets: a fixed one would miss most of a matrix's columns if
    # the two have a common divisor
    every, sample = numel // _SAMPLE, magnitude
    if every > 1:
        at = torch.arange(numel // every, device=magnitude.device)
        scattered = (at * _SCATTER >> 16).bitwise_and_(0xFFFF)
        at = at.mul_(every).add_(scattered.mul_(every) >> 16)
        sample = _take(magnitude, at.expand(rows, -1))
    sample = sample.contiguous().view(torch.int32) >> _BIN_BITS
    top = magnitude.amax(1, keepdim=True).view(torch.int32) >> _BIN_BITS
    lowest = (top - (_BINS - 1)).clamp_(min=_TINY_BIN)
    bins = (sample - lowest).add_(1).clamp_(0, _BINS).long()
    counts = torch.zeros(rows, _BINS + 1, dtype=torch.int64, device=magnitude.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins[:1, :1]).expand_as(bins))
    shares = counts.flip(1).cumsum(1).flip(1).float() / sample.shape[1]
    shares = torch.nn.functional.pad(shares[:, 1:], (0, 1))
    above = shares.flip(1).cumsum(1).flip(1)
    # borders of levels, for thresholds at the lower ends of bins
    edges = torch.arange(0, _BINS, 4, dtype=torch.int32, device=magnitude.device)
    edges = (edges + lowest) << _BIN_BITS
    borders = edges.view(torch.float32).unsqueeze(2)
    levels = _powers(magnitude.device)[:_LEVELS_GUESSED].float().mul_(_STRONG / _GROWTH)
    at = torch.cat([borders, borders * levels], 2).view(torch.int32) >> _BIN_BITS
    at = (at - lowest.unsqueeze(2)).clamp_(0, _BINS).long()
    shares = shares.gather(1, at.flatten(1)).view(at.shape)
    first, second = shares[..., 0], shares[..., 1]
    # levels further up by an integral: the last of these counts half, and bins from there on
    further = above.gather(1, at[..., -1]).div_(_BINS_A_LEVEL).sub_(shares[..., -1] / 2)
    entropy = torch.special.entr(torch.stack([1 - first, first - second, second])).sum(0)
    bits = entropy.mul_(_OVER_ENTROPY / math.log(2)).add_(first).add_(shares[..., 1:].sum(-1))
    return edges, bits.add_(further.clamp_(min=0))


def _threshold(edges: Tensor, bits: Tensor, wanted: Tensor) -> Tensor:
    """Return the smallest magnitude to send, fp32 [rows, 1] above 0, for `wanted` bits an entry."""
    # the lowest that fits, interpolated by the bits to spare
    fit = (bits > wanted).sum(1, keepdim=True).clamp_(max=bits.shape[1] - 1)
    before = (fit - 1).clamp_(min=0)
    low, high = bits.gather(1, fit), bits.gather(1, before)
    part = ((wanted - low) / (high - low).clamp(min=1e-9)).clamp_(0, 1)
    # if most of them are equally large, some of those are left out again
    part = torch.where(low < wanted / 2, 1.0, part).mul_(fit > 0)
    threshold = edges.gather(1, fit).view(torch.float32)
    return threshold.lerp(edges.gather(1, before).view(torch.float32), part)


def _choose(
    values: Tensor, threshold: Tensor, places: Tensor, sent: _Filled
) -> tuple[_Sent, Tensor]:
    """Return the code of these entries, and their magnitudes: fp32 [rows, columns]."""
    picked = sent.only(_take(values, places))
    magnitude, border = picked.abs(), threshold * _STRONG
    strong, above = _places(magnitude >= border, picked.shape[1])
    level = (_take(magnitude, strong) / border).log2_().div_(math.log2(_GROWTH))
    level = above.only(level).floor_().clamp_(0, LEVELS - 1).long()
    return _Sent(places, sent, picked < 0, strong, above, level), magnitude


def _parameters(numel: int, code: _Sent, kept: Tensor | float = 1.0) -> list[Tensor]:
    """Return k of each sequence, int64 [rows, 1], if the share `kept` of the chosen is sent.

    It is the best for gaps between entries that are equally likely everywhere (Kiely, "Selecting
    the Golomb parameter in Rice coding", JPL IPN 42-159, 2004).
    """
    sent, above, _ = code.counts
    density = torch.cat([sent.double() * kept / numel, above.double() / sent.clamp(min=1)], 1)
    density = density.clamp_(1e-9, 1 - 1e-6)
    k = torch.log2(math.log((math.sqrt(5) - 1) / 2) / torch.log1p(-density)).floor_().add_(1)
    of_sent, of_above = k.clamp_(0, _LARGEST_K).long().split(1, 1)
    return [of_sent + 1, of_above, torch.zeros_like(of_above)]


def _lengths(code: _Sent, ks: Sequence[Tensor]) -> list[Tensor]:
    """Return the bits of each sequence: int64 [rows, 1]."""
    return [
        (numbers >> k).sum(1, keepdim=True) + (1 + k) * filled.count
        for (numbers, filled), k in zip(code.sequences, ks, strict=True)
    ]


def _too_many(numel: int, budget: int, code: _Sent, ks: Sequence[Tensor]) -> Tensor:
    """Return a number of entries without which the code is sure to fit: int64 [rows, 1].

    Each saves its low bits, with the sign, whatever becomes of the gaps around it; one with a level
    above 0 also those of its second gap and a bit of its level. And all gaps together are no longer
    than the segment: m entries take m * (1 + k) bits and that / 2^k'.
    """
    first, *others = _lengths(code, ks)
    others_bits, (sent, above, _) = torch.stack(others).sum(0), code.counts
    excess, weak = first + others_bits - budget, sent - above
    of_strong = (excess - weak * ks[0]).clamp_(min=0)
    by_excess = torch.minimum(-(-excess // ks[0]), weak - (-of_strong // (ks[0] + ks[1] + 1)))
    fits = (budget - others_bits - (numel >> (ks[0] - 1))) // (1 + ks[0])
    return torch.minimum(by_excess, sent - fits).clamp_(min=0).minimum(sent)


def _without_smallest(magnitude: Tensor, sent: _Filled, threshold: Tensor, count: Tensor) -> Tensor:
    """Return the columns that are left without `count` of about the smallest: bool."""
    limits = torch.cat([threshold * band for band in _BANDS], 1)
    magnitude = sent.only(magnitude, torch.inf)
    below = [(magnitude < limit).sum(1, keepdim=True) for limit in limits.split(1, 1)]
    enough = torch.cat(below, 1) >= count
    band = (~enough[:, :-1]).long().cumprod(1).sum(1, keepdim=True)
    small = magnitude < limits.gather(1, band)
    gone = small & (small.cumsum(1) <= count)
    return sent.only(torch.ones_like(gone), False) & ~gone


def _means(magnitude: Tensor, code: _Sent) -> Tensor:
    """Return the mean of level 0, and a: fp32 [rows, 2]."""
    sent, above, _ = code.counts
    strong = code.above.only(_take(magnitude, code.strong)).double()
    powers = code.above.only(_powers(magnitude.device)[code.level])
    total = magnitude.sum(1, keepdim=True, dtype=torch.float64)
    mean = (total - strong.sum(1, keepdim=True)) / (sent - above).clamp(min=1)
    a = (strong * powers).sum(1, keepdim=True) / powers.square().sum(1, keepdim=True).clamp(min=1)
    return torch.cat([mean, a], 1).float()


def _write(payload: Tensor, code: _Sent, ks: Sequence[Tensor], means: Tensor) -> None:
    rows, budget = len(payload), 8 * (payload.shape[1] - HEADER_BYTES)
    section(payload, 0, 2, torch.int32).copy_(torch.cat(code.counts[:2], 1))
    section(payload, 8, 2, torch.float32).copy_(means)
    payload[:, 16:HEADER_BYTES] = 0
    payload[:, 16:18] = torch.cat(list(ks[:2]), 1)
    bits = payload.new_zeros(rows, budget + 8)  # the last takes what is behind a row's end
    both = list(zip(code.sequences, ks, strict=True))
    steps = [filled.only((numbers >> k).add_(1)) for (numbers, filled), k in both]
    ends = torch.cat(steps, 1).cumsum(1).sub_(1).split([step.shape[1] for step in steps], 1)
    ends = [f.only(end, budget) for end, (_, f) in zip(ends, code.sequences, strict=True)]
    bits.scatter_(1, torch.cat(ends, 1), 1)
    start = _low_bits_start(budget, code.counts, ks)
    for (numbers, filled), k in both[:2]:
        planes, last = _planes(k), numbers.to(torch.uint8)
        low = last.new_empty(*last.shape, planes)
        if filled.mask is None:
            low = bits[:, int(start) : int(start) + low.numel()].view(low.shape)
        for plane in range(planes):
            torch.bitwise_and(last >> plane, 1, out=low[:, :, plane])
        if filled.mask is not None:
            at = _low_bits_at(start, filled, k, planes, budget)
            bits.scatter_(1, at.flatten(1), low.flatten(1))
        start = start + filled.count * k
    payload[:, HEADER_BYTES:] = (bits.view(torch.int64)[:, :-1] * _TO_BYTE) >> 56


def _planes(k: Tensor) -> int:
    """Return the most low bits of a number."""
    return int(k.max()) if on_host(k.device) else _LARGEST_K + 1


def _low_bits_at(start: Tensor, filled: _Filled, k: Tensor, planes: int, other: int) -> Tensor:
    """Return the places of low bits, int64 [rows, columns, planes]; `other` if there is none."""
    assert filled.mask is not None
    plane = torch.arange(planes, device=k.device)
    numbers = torch.arange(filled.mask.shape[1], device=k.device)
    at = (start + numbers * k).unsqueeze(2) + plane
    return torch.where(filled.mask.unsqueeze(2) & (plane < k.unsqueeze(2)), at, other)


def _low_bits_start(budget: int, counts: Sequence[Tensor], ks: Sequence[Tensor]) -> Tensor:
    """Return the first of the low bits: int64 [rows, 1]."""
    return budget - torch.stack([n * k for n, k in zip(counts, ks, strict=True)]).sum(0)


def _read(payload: Tensor, numel: int) -> tuple[_Sent, Tensor]:
    """Return the code of a payload, and the means."""
    budget = 8 * (payload.shape[1] - HEADER_BYTES)
    header = section(payload, 0, 2, torch.int32).long()
    means = section(payload, 8, 2, torch.float32).clone()
    ks = [*payload[:, 16:18].long().split(1, 1), torch.zeros_like(header[:, :1])]
    counts = [header[:, :1], header[:, 1:], header[:, 1:]]
    words = torch.nn.functional.pad(payload[:, HEADER_BYTES:], (0, 1)).long()  # a zero at `budget`
    bits = (((words & 0x7F) * _TO_BITS) & _LOW_BITS) | ((words >> 7) << 56)
    bits = bits.view(torch.uint8)
    total = header[:, :1] + 2 * header[:, 1:]
    most = int(total.max()) if on_host(payload.device) else budget
    ends, filled = _places(bits.view(torch.bool), most)
    quotients = _gaps(ends, filled)
    front, start = torch.zeros_like(total), _low_bits_start(budget, counts, ks)
    sequences = []
    for k, count, most in zip(ks, counts, (budget // 2, budget // 4, budget // 4), strict=True):
        numbers, filled = _run(quotients, front, count, most)
        planes = _planes(k)
        if filled.mask is None:
            low = bits[:, int(start) : int(start) + numbers.shape[1] * planes]
            low = low.view(*numbers.shape, planes)
        else:
            at = _low_bits_at(start, filled, k, planes, budget)
            low = bits.gather(1, at.flatten(1)).view(at.shape)
        numbers = numbers << k
        for plane in range(planes):
            numbers += low[:, :, plane] << plane
        sequences.append((filled.only(numbers), filled))
        front, start = front + count, start + count * k
    (first, sent), (second, above), (level, _) = sequences
    places, strong = ((n + 1).cumsum(1).sub_(1) for n in (first >> 1, second))
    places, strong = sent.only(places), above.only(strong)
    code = _Sent(places, sent, (first & 1).bool(), strong, above, level.clamp_(max=LEVELS - 1))
    return code, means


def _run(values: Tensor, start: Tensor, count: Tensor, most: int) -> tuple[Tensor, _Filled]:
    """Return `count` entries of each row from `start`: [rows, columns], padded like `_places`."""
    numel = values.shape[1]
    if on_host(values.device):
        return values[:, int(start) : int(start) + int(count)], _Filled(count, None)
    columns = torch.arange(most, device=values.device)
    index = (start + columns).clamp_(max=numel - 1)
    return values.gather(1, index), _Filled(count, columns < count)
