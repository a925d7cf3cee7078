"""Finds attention and MLP inside a block, by what modules are called: no model is known by name.

Attention is a module whose class says so, or that has projections for query, key and value. An MLP
is a module whose class says so, or else a chain of the block's own children that are called one
after the other (BERT: intermediate, output; OPT: fc1, activation_fn, fc2).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

_ATTENTION = re.compile(r"Attention|Attn|SelfAtt", re.I)
_PROJECTIONS = (
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"q", "k", "v"},
    {"to_q", "to_k", "to_v"},
    {"q_lin", "k_lin", "v_lin"},
    {"query_key_value"},
    {"qkv_proj"},
    {"qkv"},
    {"c_attn"},
    {"Wqkv"},
)
_MLP = re.compile(r"MLP|Mlp|FFN|FF$|FeedForward|SparseMoe|Mo[eE](Block|Layer)?$|Experts$")
_NORM = re.compile(r"Norm", re.I)
_MLP_NAMES = {"mlp", "ffn", "feed_forward", "block_sparse_moe", "experts"}
_CHAINS = (
    ("intermediate", "output"),
    ("fc1", "activation_fn", "fc2"),
    ("linear1", "activation", "dropout", "linear2"),
    ("lin1", "activation", "lin2"),
    ("wi", "act", "dropout", "wo"),
)
_GATES = {
    "gate_proj",
    "gate_up_proj",
    "gate",
    "w1",
    "wi_0",
    "wi",
    "fc1",
    "c_fc",
    "dense_h_to_4h",
    "linear1",
    "lin1",
}
"""The first product of an MLP: the gate where there is one, else the widening."""

Part = tuple[str, nn.Module]


def _is_attention(name: str, module: nn.Module) -> bool:
    children = {n for n, _ in module.named_children()}
    if _NORM.search(type(module).__name__):
        return False
    return bool(_ATTENTION.search(type(module).__name__)) or any(
        p <= children for p in _PROJECTIONS
    )


def _is_mlp(name: str, module: nn.Module) -> bool:
    if _is_attention(name, module):  # Qwen3MoeAttention
        return False
    return bool(_MLP.search(type(module).__name__)) or name.rpartition(".")[2] in _MLP_NAMES


def is_norm(class_name: str) -> bool:
    """Whether a class is called like a normalisation."""
    return bool(_NORM.search(class_name))


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _outermost(prefix: str, module: nn.Module, looks_right: object) -> list[Part]:
    """Parts below `module`, none inside another; norms and dropouts beside them do not count."""
    found: list[Part] = []
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}"
        if (
            callable(looks_right)
            and looks_right(name, child)
            and _runs(child)
            and _has_weights(child)
        ):
            found.append((name, child))
        else:
            found += _outermost(name, child, looks_right)
    return found


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def attention_parts(name: str, block: nn.Module) -> list[Part]:
    """Every attention of a block (a decoder's cross-attention is one more), with full names."""
    return _outermost(name, block, _is_attention)


def mlp_parts(name: str, block: nn.Module) -> list[list[Part]]:
    """The MLPs of a block, each as the modules that run one after the other."""

    def mlp(part: str, module: nn.Module) -> bool:
        return _is_mlp(part, module) and not attention_parts(part, module)

    found = [
        [p]
        for p in _outermost(name, block, mlp)
        if not any(p[0].startswith(a + ".") for a, _ in attention_parts(name, block))
    ]
    if found:
        return found
    children = dict(block.named_children())
    for chain in _CHAINS:
        if chain[0] in children and chain[-1] in children:
            return [[(f"{name}.{c}", children[c]) for c in chain if c in children]]
    return []


def gates(parts: Sequence[Sequence[Part]]) -> list[nn.Module]:
    """The first products inside MLPs."""
    found = []
    for chain in parts:
        for name, part in chain:
            if name.rpartition(".")[2] in _GATES and not any(part.children()):
                found.append(part)
            found += [
                m
                for n, m in part.named_modules()
                if n and n.rpartition(".")[2] in _GATES and not any(m.children())
            ]
    return found
