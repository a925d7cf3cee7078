"""Plans within a budget for a Llama of 7B, batch 1, 4,096 tokens, bf16, by fake tensors.

    python benchmarks/planning.py [--layers 32] [--tokens 4096] [--budgets 2 4 7.85 11.6 16]

For each budget: what the plan says that is held, what `SavedActivations` measures when the planned
units run, and products of forward, recompute and backward together against no checkpointing, with
attention cores counted. Seconds are this process's computing time, which other load does not
change: of measuring the model once, and of each plan. Nothing is allocated.

The plan weighs products against memory traffic by rates of the device that trains; here they are
arguments, since no device runs. No lm_head, no loss. No mask is made, as in training (`policies.py`
holds one for each layer without checkpointing: transformers takes fake tensors for tracing).
"""

import argparse
import time
from collections import Counter

import torch

from ds_ckpt.activation.planning.budget import Allowance, Planner
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.activation.planning.trace import survey, trace_fake_step
from ds_ckpt.errors import UnsupportedError

GIB = 2**30
SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--flops-per-byte", type=float, default=150.0)
    parser.add_argument("--budgets", type=float, nargs="*", default=[1, 2, 4, 7.85, 11.6, 16, 24])
    options = parser.parse_args()
    import transformers

    torch.set_num_threads(2)
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers, vocab_size=32000, use_cache=False, **SIZES
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = transformers.LlamaModel(config).train()
        embedded = torch.empty(1, options.tokens, SIZES["hidden_size"]).requires_grad_()
    batch = {"inputs_embeds": embedded}
    survey(Forward(model, (), batch))  # the first one imports
    start_s = time.process_time()
    found = survey(Forward(model, (), batch))
    rates = Rates(options.flops_per_byte * 1e12, 1e12, 5e10)
    planner = Planner(found, rates, options.tokens)
    measured_s = time.process_time() - start_s
    none = trace_fake_step(Forward(model, (), batch), [])
    print(f"Llama, {options.layers} layers, {SIZES}, {options.tokens} tokens, bf16")
    print(f"rates: {options.flops_per_byte:g} FLOP for a byte")
    print(
        f"measuring the model: {measured_s:.2f} s; without recompute {none.saved.bytes / GIB:.2f}"
    )
    print(
        "\n| budget | held, GiB: planned | measured | needed at most | FLOPs | planning, s "
        "| treatments |\n|---|---|---|---|---|---|---|"
    )
    for budget in options.budgets:
        start_s = time.process_time()
        try:
            plan = planner.plan(Allowance(int(budget * GIB), "activations"))
        except UnsupportedError as error:
            print(f"| {budget:g} | refused: {error.problems[0].remedy} | | | | | |")
            continue
        planned_s = time.process_time() - start_s
        real = trace_fake_step(Forward(model, (), batch), plan.units(model))
        words = ", ".join(f"{n} x {w}" for w, n in Counter(plan.choices).most_common())
        with_plan, without = (sum(w.flops for w in step.work.values()) for step in (real, none))
        print(
            f"| {budget:g} | {plan.held_bytes / GIB:.3f} | {real.saved.bytes / GIB:.3f} "
            f"| {plan.needed_bytes / GIB:.3f} | {with_plan / without:.3f} "
            f"| {planned_s:.2f} | {words} |"
        )


if __name__ == "__main__":
    main()
