"""What a rotation does to few-bit values, `Quantize(rotated=True)`; and three levels, not adopted.

    python benchmarks/rotation.py [--steps 60] [--threads 1]

A rotation (random signs, then a Hadamard transform of each run of B neighbours) makes entries of
any distribution nearly Gaussian, for which 2-bit levels are made, and spreads single large entries
over their run. The codec's runs are 64; others are made here. Three levels, -a, 0 and a, take 1.6
bits (five in a byte) where four take 2, and have a zero.

First table: RMS of what is left over RMS of what was there, once, without feedback. Second: RMS of
the residual after 8 steps of error feedback over RMS of a step's gradient, which is what training
feels. Bits an element include scales. The data: normal entries; Student's t with 3 degrees of
freedom; and gradients of the 4.9-million Llama of the demo on the embedded corpus, AdamW, batches
of 8 windows of 128 bytes, 8 steps in a row from --steps on: matrices of its first two layers, and
both embeddings (input and head). What the rotation costs is in `quantization.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from ds_ckpt.compression import Quantize
from ds_ckpt.harness.corpus import Batches, embedded_corpus
from ds_ckpt.harness.models import llama

Coder = Callable[[Tensor], Tensor]
"""fp32 [n], n a multiple of 1024, to what arrives of it."""

FEEDBACK_STEPS = 8


def plain(bits: int, block: int, *, turned: bool = False) -> Coder:
    codec = Quantize(bits, block, turned)  # type: ignore[arg-type]

    def arrived(values: Tensor) -> Tensor:
        left = values.clone()
        codec.pack(left, torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8))
        return values - left

    return arrived


class Rotation:
    """Orthogonal [B, B]: random signs, then Hadamard; `there` and `back` on runs of B entries."""

    def __init__(self, length: int) -> None:
        hadamard = torch.ones(1, 1)
        while hadamard.shape[0] < length:
            hadamard = torch.cat(
                [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
            )
        signs = torch.randint(0, 2, (length, 1), generator=torch.Generator().manual_seed(7))
        self.matrix = (signs * 2.0 - 1.0) * hadamard / length**0.5
        self.length = length

    def there(self, values: Tensor) -> Tensor:
        return (values.view(-1, self.length) @ self.matrix).view(-1)

    def back(self, values: Tensor) -> Tensor:
        return (values.view(-1, self.length) @ self.matrix.t()).view(-1)


def rotated(coder: Coder, length: int) -> Coder:
    rotation = Rotation(length)
    return lambda values: rotation.back(coder(rotation.there(values)))


def three_levels(block: int, *, border: float | None) -> Coder:
    """Levels -a, 0, a per block, a with the least error; the border at `border` RMS, or the best.

    The best border is found by trying all (a sort of each block): a bound for any cheaper rule.
    """

    def arrived(values: Tensor) -> Tensor:
        blocks = values.view(-1, block)
        magnitudes = blocks.abs()
        if border is None:
            descending = magnitudes.sort(1, descending=True).values
            counts = torch.arange(1, block + 1)
            gains = descending.cumsum(1).square() / counts
            least = descending.gather(1, gains.argmax(1, keepdim=True))
            sent = magnitudes >= least
        else:
            sent = magnitudes > border * blocks.square().mean(1, keepdim=True).sqrt()
        level = (magnitudes * sent).sum(1, keepdim=True) / sent.sum(1, keepdim=True).clamp(min=1)
        return (blocks.sign() * sent * level.bfloat16().float()).view(-1)

    return arrived


def coders() -> dict[str, tuple[float, Coder]]:
    """Bits an element and the coder."""
    found: dict[str, tuple[float, Coder]] = {}
    for bits, block in ((4, 64), (4, 256), (2, 64), (2, 256)):
        name = f"{bits} bits, block {block}"
        cost, coder = bits + 16 / block, plain(bits, block)
        found[name] = cost, coder
        found[f"{name}, rotated"] = cost, plain(bits, block, turned=True)
        for length in (16, 256):
            found[f"{name}, rotated by {length}"] = cost, rotated(coder, length)
    for block in (32, 64, 256):
        found[f"3 levels, block {block}"] = 1.6 + 16 / block, three_levels(block, border=0.612)
    found["3 levels, block 64, best border"] = 1.85, three_levels(64, border=None)
    found["3 levels, block 64, rotated by 256"] = 1.85, rotated(three_levels(64, border=0.612), 256)
    return found


def trained_gradients(steps: int) -> dict[str, list[Tensor]]:
    """Gradients of FEEDBACK_STEPS steps in a row: those of matrices, those of embeddings, flat."""
    model = llama(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    text = embedded_corpus().train
    batches = Batches(text, sequences=8, sequence_length=128, seed=0, process=0)
    wanted = {"Llama matrices": (".0.", ".1."), "Llama embeddings": ("embed", "head")}
    found: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for step in range(steps + FEEDBACK_STEPS):
        tokens = batches.batch(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        if step >= steps:
            weights = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
            for name, kept in found.items():
                parts = [
                    p.grad.view(-1)
                    for n, p in weights
                    if p.grad is not None and any(part in n for part in wanted[name])
                ]
                whole = torch.cat(parts)
                kept.append(whole[: whole.numel() // 1024 * 1024].clone())
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(steps: int) -> dict[str, list[Tensor]]:
    elements = 1 << 18
    student = torch.distributions.StudentT(3.0)
    return {
        "normal": [torch.randn(elements) for _ in range(FEEDBACK_STEPS)],
        "t with 3": [student.sample(torch.Size([elements])) for _ in range(FEEDBACK_STEPS)],
        **trained_gradients(steps),
    }


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def error_once(coder: Coder, steps: list[Tensor]) -> float:
    return rms(steps[-1] - coder(steps[-1])) / rms(steps[-1])


def residual_after(coder: Coder, steps: list[Tensor]) -> float:
    residual = torch.zeros_like(steps[0])
    for gradient in steps:
        pending = residual + gradient
        residual = pending - coder(pending)
    return rms(residual) / rms(torch.stack(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, gradients of steps {arguments.steps} and on")
    data = gradients(arguments.steps)
    for title, measure in (("once", error_once), ("after 8 steps", residual_after)):
        print(f"\n{'left / RMS, ' + title:38s} bits" + "".join(f"{name:>18s}" for name in data))
        for name, (bits, coder) in coders().items():
            row = "".join(f"{measure(coder, steps):18.4f}" for steps in data.values())
            print(f"{name:38s} {bits:4.2f}" + row)


if __name__ == "__main__":
    main()
