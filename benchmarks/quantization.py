"""Cost, error and bytes of few-bit and entropy-coded values, one thread.

    python benchmarks/quantization.py [--elements 8388608] [--repeats 9]
    python benchmarks/quantization.py --codes [--steps 60]

Without `--codes` three tables. Nanoseconds of the thread per element (median of the repeats, rows
timed in turn; `cast to bf16` is torch's own, one call on the same data).
RMS of the rounding error over RMS of the data, by bits and block: normal entries; Student's t with
3 degrees of freedom, the heavy tail; rows of 1024 normal entries whose sizes differ by a log-normal
factor; one entry in 20 not zero. Bytes that one process sends to
all others for each gradient of a Llama of hidden size 1024 in a bucket of its own, packet headers
and dense norms in them, against 16 bits an element for the same shards.

With `--codes` what entropy-coded values cost beside others, on normal entries, on Student's t, and
on what one of four workers had for another (residual and gradient) after `--steps` steps of the
language model that `validate-accuracy` trains. Bits an entry, headers included; the share of the
energy that is left; nanoseconds an entry to pack and to add up. Then how close codes come for the
same places, signs and levels, in bits an entry: entropy, were entries independent of the others;
the code that is used; the same with a k for every 32 numbers; zlib's Huffman code (four entries to
a byte, each none, plus, minus or above level 0; the rest in bytes of their own); `constriction`'s
range coder, where it is installed; and a byte for each place with four bits for sign and level,
without entropy coding.
"""

import argparse
import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from _timing import Work, interleaved_medians_s
from torch import Tensor

from ds_ckpt.compression import Codec, EntropyCoded, Feedback, Quantize, TopK, all_finite
from ds_ckpt.compression.entropy_coded import _lengths, _read, _Sent, _start
from ds_ckpt.compression.entropy_format import SEGMENT
from ds_ckpt.compression.quantize import BITS, BLOCKS
from ds_ckpt.compression.wire import PACKET_HEADER_BYTES, aligned
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings, Rules
from ds_ckpt.lab.validate.task import make_spec, open_task
from ds_ckpt.lab.validate.world import InProcessWorld


def timed_works(elements: int) -> dict[str, Work]:
    """Every row of the first table, over one gradient of `elements` normal entries."""
    gradient = torch.randn(elements)
    feedback = Feedback()
    for _ in range(2):
        pending = feedback.accumulate("w", gradient, 2)
        feedback.commit()
    works: dict[str, Work] = {"cast to bf16": lambda: gradient.to(torch.bfloat16)}
    for row in BITS:
        codec = Quantize(bits=row)
        payload = torch.empty(codec.packed_bytes(elements), dtype=torch.uint8)

        def pack(c: Quantize = codec, p: Tensor = payload) -> None:
            c.pack_rows(pending.copy_(gradient)[None], p[None])

        def unpack(c: Quantize = codec, p: Tensor = payload) -> None:
            c.unpack_add_rows(p[None], pending)

        def whole(c: Quantize = codec, p: Tensor = payload) -> None:
            accumulated = feedback.accumulate("w", gradient, 2)
            assert all_finite(accumulated)
            c.pack_rows(accumulated[None], p[None])
            feedback.commit()

        works |= {f"copy + pack {row}": pack, f"unpack {row}": unpack, f"whole {row}": whole}
    for bits in (1.0, 0.33):
        coder = EntropyCoded(bits=bits)
        coded = torch.empty(coder.packed_bytes(elements), dtype=torch.uint8)

        def pack_coded(c: EntropyCoded = coder, p: Tensor = coded) -> None:
            c.pack_rows(pending.copy_(gradient)[None], p[None])

        def unpack_coded(c: EntropyCoded = coder, p: Tensor = coded) -> None:
            c.unpack_add_rows(p[None], pending)

        works |= {f"copy + pack {bits:g} bits": pack_coded, f"unpack {bits:g} bits": unpack_coded}
    works["copy"] = lambda: pending.copy_(gradient)
    return works


def samples(elements: int) -> dict[str, Tensor]:
    rows = elements // 1024
    return {
        "normal": torch.randn(elements),
        "t with 3": torch.distributions.StudentT(3.0).sample(torch.Size([elements])),
        "uneven rows": (torch.randn(rows, 1024) * torch.randn(rows, 1).exp()).view(-1),
        "mostly zero": torch.randn(elements) * (torch.rand(elements) < 0.05),
    }


def relative_error(codec: Quantize, values: Tensor) -> float:
    left = values.clone()
    codec.pack_rows(
        left[None], torch.empty(1, codec.packed_bytes(values.numel()), dtype=torch.uint8)
    )
    return float(left.norm() / values.norm())


def llama_shapes(hidden: int, layers: int = 24, vocabulary: int = 32_000) -> list[torch.Size]:
    """Weights of a Llama without grouped queries, MLP 2.75 times as wide, head not tied."""
    mlp = hidden * 11 // 4
    block = [(hidden, hidden)] * 4 + [(mlp, hidden)] * 2 + [(hidden, mlp)] + [(hidden,)] * 2
    outside = [(vocabulary, hidden)] * 2 + [(hidden,)]
    return [torch.Size(s) for s in block * layers + outside]


def sent_bytes(settings: MethodSettings, shapes: list[torch.Size], world: int) -> tuple[int, int]:
    """(sent, the same entries in 16 bits) of process 0, dense tensors in bf16."""
    rules = Rules(settings)
    sent = sixteen_bit = 0
    for shape in shapes:
        compressor = rules("", shape)
        codec = compressor.codec if compressor is not None else None
        for owner in range(1, world):
            size = ShardLayout(shape.numel(), world).size(owner)
            sixteen_bit += 2 * size
            packed = aligned(2 * size) if codec is None else codec.packed_bytes(size)
            sent += PACKET_HEADER_BYTES + packed
    return sent, sixteen_bit


CODECS: dict[str, Codec] = {
    "3 bits": Quantize(bits=3),
    "2 bits": Quantize(bits=2),
    "1 bit": EntropyCoded(bits=1.0),
    "1/3 bit": EntropyCoded(bits=0.33),
    "Top-K 1%": TopK(density=0.01),
}


def from_training(codec: str, steps: int) -> list[Tensor]:
    """Return the gradients that the first worker sends to the second owner, by tensor."""
    task = open_task(make_spec("language"))
    compressor = CODECS[codec]
    assert isinstance(compressor, Quantize | EntropyCoded | TopK)
    settings = MethodSettings(compressor.name, **compressor.model_dump())
    task.begin(0)
    world = InProcessWorld(
        task.model,
        task.loss,
        task.spec.recipe(),
        ExchangeSettings(settings, warmup_steps=10),
        workers=task.spec.world,
    )
    seen: dict[str, Tensor] = {}
    first = world.workers.states[0].exchange
    store = first._pack

    def pack(items, finite):  # type: ignore[no-untyped-def]
        for item in items:
            if item.pending is not None:
                seen[item.name] = item.pending[item.layout.shard(1)].clone()
        return store(items, finite)

    first._pack = pack  # type: ignore[method-assign]
    for _ in range(steps):
        world.train_step()
    return list(seen.values())


@dataclass
class Coded:
    """Result of a codec on some tensors, in sums over their entries."""

    entries: int = 0
    sent_bits: float = 0.0
    before: float = 0.0
    left: float = 0.0
    entropy: float = 0.0
    used: float = 0.0
    finer: float = 0.0
    huffman: float = 0.0
    ranged: float = math.nan
    places: float = 0.0

    def add(self, codec: Codec, values: Tensor) -> None:
        """One tensor."""
        numel = values.numel()
        left, payload = values.clone(), torch.empty(codec.packed_bytes(numel), dtype=torch.uint8)
        codec.pack_rows(left[None], payload[None])
        self.entries += numel
        self.sent_bits += 8 * len(payload)
        self.before += float(values.square().sum())
        self.left += float(left.square().sum())
        if isinstance(codec, EntropyCoded) and numel <= SEGMENT:
            code, _ = _read(payload, numel)
            ks = [*payload[8:10].tolist(), 0]
            self.used += 8 * _start(numel) + float(sum(_lengths(code.sequences, ks)))
            self.finer += 8 * _start(numel) + finer_bits(code, ks)
            symbols = torch.zeros(numel, dtype=torch.int64)
            signs = 1 + code.negative.long()
            symbols[code.places] = signs
            symbols[code.places[code.strong]] += 2 * (1 + code.level)
            counts = symbols.bincount().double()
            self.entropy += float(torch.special.entr(counts / numel).sum()) / math.log(2) * numel
            self.huffman += huffman_bits(symbols)
            self.places += 12 * len(signs) + numel / 32
            if range_bits is not None:
                self.ranged = range_bits(symbols) + (0 if math.isnan(self.ranged) else self.ranged)


def finer_bits(code: _Sent, ks: list[int]) -> float:
    """With the best k for every 32 numbers, which takes 3 bits, in the place of one a segment."""
    total = float(_lengths(code.sequences, ks)[2])
    for numbers, (least, most) in zip(code.sequences[:2], ((1, 8), (0, 7)), strict=True):
        runs = torch.nn.functional.pad(numbers, (0, -len(numbers) % 32), value=-1).view(-1, 32)
        there = runs >= 0
        each = [(((runs >> k) + 1 + k) * there).sum(1) for k in range(least, most + 1)]
        total += float(torch.stack(each).amin(0).sum()) + 3 * len(runs)
    return total


def huffman_bits(symbols: Tensor) -> float:
    """Return the bits that zlib's Huffman code alone takes."""
    coarse = torch.nn.functional.pad(symbols.clamp(max=3), (0, -len(symbols) % 4)).view(-1, 4)
    streams = [(coarse << torch.tensor([0, 2, 4, 6])).sum(1), symbols[symbols > 2]]
    total = 0
    for stream in streams:
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        total += len(coder.compress(stream.to(torch.uint8).numpy().tobytes()) + coder.flush())
    return 8.0 * total


def _range_bits() -> Callable[[Tensor], float] | None:
    try:
        import constriction
    except ImportError:
        return None

    def bits(symbols: Tensor) -> float:
        counts = symbols.bincount(minlength=2).double()
        model = constriction.stream.model.Categorical(
            np.asarray(counts / counts.sum(), dtype=np.float32), perfect=False
        )
        encoder = constriction.stream.queue.RangeEncoder()
        encoder.encode(symbols.numpy().astype(np.int32), model)
        return float(encoder.num_bits()) + 16.0 * len(counts)

    return bits


range_bits = _range_bits()


def codes(steps: int, repeats: int) -> None:
    """The tables of `--codes`."""
    size = 1 << 20
    whole = {"normal": torch.randn(size), "t with 3": samples(size)["t with 3"]}
    print(f"{size} entries; torch {torch.__version__}, 1 thread; ns an entry: pack, add up")
    works: dict[str, Work] = {}
    for name, codec in CODECS.items():
        for data, values in whole.items():
            scratch = values.clone()
            payload = torch.empty(codec.packed_bytes(size), dtype=torch.uint8)

            def pack(
                c: Codec = codec, v: Tensor = values, s: Tensor = scratch, p: Tensor = payload
            ) -> None:
                c.pack_rows(s.copy_(v)[None], p[None])

            def unpack(c: Codec = codec, s: Tensor = scratch, p: Tensor = payload) -> None:
                c.unpack_add_rows(p[None], s)

            works |= {f"{name} {data} pack": pack, f"{name} {data} unpack": unpack}
    times_s = interleaved_medians_s(works, repeats)
    head = (
        "",
        "data",
        "bits",
        "left",
        "pack",
        "add up",
        "entropy",
        "this code",
        "k by 32",
        "Huffman",
    )
    print("".join(f"{h:>11s}" for h in (*head, "range", "byte+4")))
    for name, codec in CODECS.items():
        for data in (*whole, "training"):
            coded = Coded()
            for values in (
                whole[data].split(SEGMENT) if data in whole else from_training(name, steps)
            ):
                coded.add(codec, values)
            n = coded.entries
            cells = [coded.sent_bits / n, coded.left / coded.before]
            for what in ("pack", "unpack"):
                median_s = times_s.get(f"{name} {data} {what}", math.nan)
                cells.append(median_s / size * 1e9)
            if isinstance(codec, EntropyCoded):
                some = (coded.entropy, coded.used, coded.finer, coded.huffman, coded.ranged)
                cells += [bits / n for bits in (*some, coded.places)]
            print(
                f"{name:>11s}{data:>11s}" + "".join(f"{cell:11.3f}" for cell in cells), flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--codes", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.codes:
        codes(arguments.steps, arguments.repeats)
        return
    elements = arguments.elements
    medians_s = interleaved_medians_s(timed_works(elements), arguments.repeats)
    print(f"{elements} elements, blocks of 64; torch {torch.__version__}, 1 thread")
    for name, median_s in medians_s.items():
        ratio = median_s / medians_s["cast to bf16"]
        print(f"{name:22s} {median_s / elements * 1e9:6.2f} ns/element  {ratio:5.1f} casts")

    data = samples(1 << 20)
    print(f"\n{'RMS error / RMS':28s}" + "".join(f"{name:>13s}" for name in data))
    for bits, block in itertools.product(BITS, BLOCKS):
        errors = [relative_error(Quantize(bits=bits, block=block), x) for x in data.values()]
        row = "".join(f"{error:13.4f}" for error in errors)
        print(f"{bits} bits, block {block:4d}           " + row)

    print("\nLlama, hidden 1024: bytes of one process against 16 bits an element")
    for bits in BITS:
        for block in BLOCKS:
            settings = MethodSettings("quantize", bits=bits, block=block)
            ratios = []
            for world in (2, 8, 64):
                sent, sixteen_bit = sent_bytes(settings, llama_shapes(1024), world)
                ratios.append(f"{world:3d} processes {sixteen_bit / sent:6.3f}x")
            print(f"{bits} bits, block {block:4d}  " + "  ".join(ratios))


if __name__ == "__main__":
    main()
