"""Cost of `check_determinism`: fingerprints as a share of a step of some Llama layers.

    python benchmarks/determinism.py [--hidden 1024] [--tokens 512]

The model is four Llama layers (no head), policy `block`; a step is forward and backward. The share
falls with the width: fingerprints read what is saved, products grow with the square. The thread's
own time inside fingerprints is set against that of the rest of the same step, so that a busy
machine slows both alike; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ds_ckpt.activation import CheckpointedBlocks, Policy, checkpoint
from ds_ckpt.activation.fingerprints import FingerprintCache


class Timed(FingerprintCache):
    """Counts the time that fingerprints take."""

    spent_s = 0.0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        start_s = time.thread_time()
        try:
            return super().__call__(tensor)
        finally:
            Timed.spent_s += time.thread_time() - start_s


def step_of(hidden: int, tokens: int) -> Callable[[], object]:
    """One training step of a fresh model whose forwards are all checked."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=hidden // 64,
        num_hidden_layers=4,
        vocab_size=64,
        use_cache=False,
    )
    model = transformers.LlamaModel(config).train()
    CheckpointedBlocks(model, policy=Policy(check_determinism=1))
    embedded = torch.randn(1, tokens, hidden)

    def step() -> None:
        model(inputs_embeds=embedded).last_hidden_state.square().mean().backward()
        model.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint.FingerprintCache = Timed  # type: ignore[attr-defined, misc]
    print(f"four Llama layers, {options.tokens} tokens, fp32, one thread")
    print("\n| hidden | step, ms | checked | every 4th forward |\n|---|---|---|---|")
    for hidden in options.hidden:
        step = step_of(hidden, options.tokens)
        shares, times = [], []
        for repeat in range(options.repeats + 1):
            Timed.spent_s = 0.0
            start_s = time.thread_time()
            step()
            if repeat:  # the first one warms up
                times.append(time.thread_time() - start_s - Timed.spent_s)
                shares.append(Timed.spent_s / times[-1])
        share = statistics.median(shares)
        row = (
            f"| {hidden} | {1000 * statistics.median(times):.0f} | {share:.2%} | {share / 4:.2%} |"
        )
        print(row, flush=True)


if __name__ == "__main__":
    main()
