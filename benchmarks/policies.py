"""Memory and FLOPs of each policy: a Llama of 7B, batch 1, 4,096 tokens, bf16, by fake tensors.

    python benchmarks/policies.py [--layers 32] [--tokens 4096]

Held: bytes that autograd holds between forward and backward, each storage once, without weights.
FLOPs: products of forward, recompute and backward together, attention cores included, against no
checkpointing. No lm_head, no loss. Nothing is allocated; the operators are those of the CPU, whose
attention core keeps the same tensors as the one of a GPU.
"""

import argparse
import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from ds_ckpt.activation import CheckpointedBlocks, Policy, Rule, make_policy
from ds_ckpt.activation.planning.fake import KnownValues, taken_for_real
from ds_ckpt.telemetry.memory import SavedActivations

GIB = 2**30
SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
POLICIES: dict[str, Policy | None] = {
    "none": None,
    "block": Policy(),
    "attention": Policy(make_policy("attention")),
    "mlp": Policy(make_policy("mlp")),
    **{f"every_n {n}": Policy(make_policy("every_n", every_n=n)) for n in (2, 4)},
    **{f"segments of {n}": Policy(make_policy("segments", segment_size=n)) for n in (2, 4)},
    **{
        f"selective {ops}": Policy(make_policy("selective", save_ops=(ops,)))
        for ops in ("attention", "attention+qkvo", "attention+qkvo+gate", "matmuls")
    },
    "rules: 0-11 attention+qkvo, the others +gate": Policy(
        make_policy("selective", save_ops=("attention+qkvo+gate",)),
        (Rule("0-11", make_policy("selective", save_ops=("attention+qkvo",))),),
    ),
}
_CORE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CORE_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# torch's counter knows the cores of GPUs; it hands shapes to the formulas
CORES: dict[Any, Any] = {
    _CORE: lambda q, k, v, *_, **__: sdpa_flop(q, k, v),
    _CORE_BACKWARD: lambda g, q, k, v, *_, **__: sdpa_backward_flop(g, q, k, v),
}


def measure(policy: Policy | None, layers: int, tokens: int) -> tuple[int, int]:
    """Bytes held after the forward, and FLOPs of forward and backward."""
    import transformers

    with KnownValues(), taken_for_real():
        config = transformers.LlamaConfig(
            num_hidden_layers=layers, vocab_size=32000, use_cache=False, **SIZES
        )
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaModel(config).train()
        if policy is not None:
            CheckpointedBlocks(model, policy=policy)
        embedded = torch.empty(1, tokens, SIZES["hidden_size"], dtype=torch.bfloat16)
        embedded.requires_grad_()
        with FlopCounterMode(display=False, custom_mapping=CORES) as counter:
            with SavedActivations(model) as held:
                output = model(inputs_embeds=embedded).last_hidden_state
            output.backward(torch.empty_like(output))
    return held.bytes, counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="policies whose name begins so, and none")
    options = parser.parse_args()
    print(f"Llama, {options.layers} layers, {SIZES}, {options.tokens} tokens, bf16")
    print("\n| policy | held, GiB | of none | FLOPs |\n|---|---|---|---|")
    none: tuple[float, float] = (math.nan, math.nan)
    for name, policy in POLICIES.items():
        if policy is not None and not name.startswith(options.only):
            continue
        held, flops = measure(policy, options.layers, options.tokens)
        if policy is None:
            none = (held, flops)
        print(f"| {name} | {held / GIB:.2f} | {held / none[0]:.2f} | {flops / none[1]:.3f} |")


if __name__ == "__main__":
    main()
