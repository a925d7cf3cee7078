"""Lossless changes of bf16 weights: bits a weight by learning rate, and the time that coding takes.

    python benchmarks/lossless_bits.py [--steps 100] [--after 30]

A Llama of 4.9 million parameters trains on the embedded text with AdamW, in fp32 with a bf16 copy
(as in DeepSpeed): `--steps` at the first rate from scratch, then from there `--after` at each of
the others. The last step's change is coded. Columns: bits a weight; the entropy of the change given
the old weight's exponent, which no code by that context goes below; zlib at level 1 on the
difference of the same bits, high and low bytes apart; nanoseconds an element of one thread, best of
five.
"""

import argparse
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.lab import workload
from ds_ckpt.lab.validate.data import Text
from ds_ckpt.weights import lossless

RATES = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5)


def changed(model: torch.nn.Module, text: Text, rate: float, steps: int) -> tuple[Tensor, Tensor]:
    """The bf16 weights before and after the last of some steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    before = after = torch.empty(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10)
        optimizer.zero_grad()
        model(**text.batch(7, step, 0, 4)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = _flat(model)
        optimizer.step()
        after = _flat(model)
    return before, after


def _flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).bfloat16()


def entropy(old: Tensor, new: Tensor) -> float:
    """Bits an element of the change given the old exponent."""
    bits = old.view(torch.int16).int(), new.view(torch.int16).int()
    before, after = (b ^ ((b >> 31) & 0x7FFF) for b in bits)
    exponent, change, total = (bits[0] >> 7) & 0xFF, after - before, 0.0
    for e in exponent.unique():
        counts = change[exponent == e].unique(return_counts=True)[1].double()
        total -= float((counts * (counts / counts.sum()).log2()).sum())
    return total / old.numel()


def planes(old: Tensor, new: Tensor) -> bytes:
    """The difference of the bits, low bytes first."""
    difference = new.view(torch.int16) - old.view(torch.int16)
    return difference.view(torch.uint8).view(-1, 2).T.contiguous().numpy().tobytes()


def nanoseconds(work: Callable[[], Any], elements: int) -> float:
    times = []
    for _ in range(5):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times) / elements * 1e9


def row(rate: float, old: Tensor, new: Tensor) -> str:
    numel = old.numel()
    payload = lossless.encode(old, new)
    encode_ns = nanoseconds(lambda: lossless.encode(old, new), numel)
    copies = iter([old.clone() for _ in range(5)])
    decode_ns = nanoseconds(lambda: lossless.decode_(next(copies), payload), numel)
    raw = planes(old, new)
    zlib_ns = nanoseconds(lambda: zlib.compress(raw, 1), numel)
    cells = [
        f"{rate:g}",
        f"{8 * payload.numel() / numel:.2f}",
        f"{entropy(old, new):.2f}",
        f"{encode_ns:.0f}",
        f"{decode_ns:.0f}",
        f"{8 * len(zlib.compress(raw, 1)) / numel:.2f}",
        f"{zlib_ns:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--after", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lossless._threads = lambda: 1
    torch.empty(1 << 24)  # once it is freed, malloc keeps what the coder frees, as in training
    torch.set_flush_denormal(True)
    model = workload.llama(seed=0)
    text = Text.of(workload.embedded_corpus(), 128)
    print(f"Llama, {workload.count_parameters(model):,} parameters, torch {torch.__version__}\n")
    print("| learning rate | bits | entropy | encode ns | decode ns | zlib | ns |")
    print("|---|---|---|---|---|---|---|")
    state: dict[str, Tensor] = {}
    for rate in RATES:
        if state:
            model.load_state_dict(state)
        old, new = changed(model, text, rate, options.after if state else options.steps)
        state = state or {name: t.clone() for name, t in model.state_dict().items()}
        print(row(rate, old, new), flush=True)


if __name__ == "__main__":
    main()
