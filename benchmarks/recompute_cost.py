"""What checkpointing costs a step in Python: none, torch's own checkpoint, ds_ckpt's policies.

    python benchmarks/recompute_cost.py [--size 4x32x16] [--repeats 30]

A Llama in fp32 on one CPU thread, forward and backward, LAYERSxHIDDENxTOKENS, so small that Python
is what a step is made of. Calls: of functions in one step, built-in ones included, as cProfile
counts them; the same on every machine. Times are the process's own, medians of steps in turns.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import logging
import pstats
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings, make_plan
from ds_ckpt.activation.inputs import Keeping, build_inputs

STOCK = ("none", "torch's checkpoint")
POLICIES = {
    "block": Policy(),
    "segments of 2": Policy(PolicySettings("segments")),
    "selective, attention": Policy(PolicySettings("selective", save_ops=("attention",))),
    "selective, matmuls": Policy(PolicySettings("selective")),
    "block, check_determinism": Policy(check_determinism=1),
    "block, offload": Policy(),
}


def step_of(row: str, layers: int, hidden: int, tokens: int) -> Callable[[], None]:
    """One training step of a fresh model that is checkpointed in the way of `row`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaModel(config).train()
    embedded = torch.randn(1, tokens, hidden)
    if row == STOCK[1]:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    elif row in POLICIES:
        units, around = make_plan(model, POLICIES[row]), None
        if row.endswith("offload"):
            kept = build_inputs(Keeping(offload=True), model, units, torch.device("cpu"))
            assert kept is not None
            around = kept.around
        CheckpointedBlocks(model, policy=POLICIES[row], units=units, around=around)

    def step() -> None:
        model(inputs_embeds=embedded).last_hidden_state.square().mean().backward()
        model.zero_grad()

    return step


def calls_in(step: Callable[[], None]) -> int:
    with cProfile.Profile() as profile:
        step()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="4x32x16", metavar="LAYERSxHIDDENxTOKENS")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    layers, hidden, tokens = map(int, options.size.split("x"))
    rows = (*STOCK, *POLICIES)
    steps = {row: step_of(row, layers, hidden, tokens) for row in rows}
    taken_ms: dict[str, list[float]] = {row: [] for row in rows}
    for repeat in range(options.repeats + 3):
        for row, step in steps.items():
            start_s = time.process_time()
            step()
            if repeat >= 3:
                taken_ms[row].append(1e3 * (time.process_time() - start_s))
    print(f"torch {torch.__version__}, Llama {options.size}\n{'':<28}{'calls':>9}{'ms':>9}")
    for row, step in steps.items():
        print(f"{row:<28}{calls_in(step):>9,}{statistics.median(taken_ms[row]):>9.2f}")


if __name__ == "__main__":
    main()
