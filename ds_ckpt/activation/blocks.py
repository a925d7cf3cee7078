"""Find the blocks of a model, and attention and MLP inside them, by their names.

Attention is a module with such a class name, or with projections for query, key and value. An MLP
is a module with such a class name. If there is none, it is a chain of the block's own children
(BERT: intermediate, output; OPT: fc1, activation_fn, fc2).
"""

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ds_ckpt.errors import ConfigError, Problem

_PATH = "$.ds_ckpt.activation.modules"
_ATTENTION = re.compile(r"Attention|Attn|SelfAtt", re.I)
_PROJECTIONS = [
    set(names.split())
    for names in ("q_proj k_proj v_proj", "query key value", "q k v", "to_q to_k to_v")
    + ("q_lin k_lin v_lin", "query_key_value", "qkv_proj", "qkv", "c_attn", "Wqkv")
]
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
_GATES = {"gate_proj", "gate_up_proj", "gate", "w1", "wi_0", "wi", "fc1", "c_fc"}
_GATES |= {"dense_h_to_4h", "linear1", "lin1"}
"""The first product of an MLP: the gate where there is one, else the widening."""

Part = tuple[str, nn.Module]


@dataclass(frozen=True)
class Block:
    """One module that is recomputed as a whole."""

    name: str
    module: nn.Module


def is_hf_layer(module: nn.Module) -> bool:
    """Return whether Hugging Face declares the module as a layer to checkpoint."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _runs(module: nn.Module) -> bool:
    """Return whether the module has a forward of its own; containers have none."""
    return type(module).forward is not nn.Module.forward


def repeated_classes(model: nn.Module) -> list[str]:
    """Return class names with several modules beside each other in one container."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            names = Counter(type(child).__name__ for child in module if any(child.children()))
            counts.update({name: n for name, n in names.items() if n > 1})
    return [name for name, _ in counts.most_common()]


def by_pattern(model: nn.Module, patterns: Sequence[str]) -> list[Block]:
    """Return the outermost modules that a pattern names; ConfigError if one names nothing."""
    unused = set(patterns)
    found: list[Block] = []
    for name, module in model.named_modules():
        hits = {p for p in patterns if p == type(module).__name__ or fnmatch.fnmatchcase(name, p)}
        if not hits or not name or not _runs(module):
            continue
        unused -= hits
        if not any(name.startswith(b.name + ".") for b in found):  # a part of a found block
            found.append(Block(name, module))
    if unused:
        classes = repeated_classes(model) or sorted({type(m).__name__ for m in model.modules()})
        found_none = ", ".join(f'"{pattern}"' for pattern in sorted(unused))
        why = (
            "no module with a forward has this class name or matches this pattern (of a list of "
            "blocks name the items: layers.*)"
        )
        remedy = f"classes of this model: {', '.join(classes[:20])}"
        raise ConfigError(Problem(_PATH, found_none, why, remedy))
    return found


def find_blocks(model: nn.Module, patterns: Sequence[str] | None) -> list[Block]:
    """Return the model's blocks, in the order of `named_modules`.

    `patterns` are class names or fnmatch patterns; None takes the layers that Hugging Face
    declares. Raises ConfigError if a pattern matches nothing, or there is neither pattern nor
    declared layer.
    """
    if patterns is not None:
        blocks = by_pattern(model, patterns)
    else:
        blocks = [Block(n, m) for n, m in model.named_modules() if is_hf_layer(m)]
    if not blocks:
        likely = repeated_classes(model)
        example = f'["{likely[0]}"]' if likely else '["MyBlock", "encoder.layers.*"]'
        why = f"{type(model).__name__} declares no layers to Hugging Face; its blocks must be named"
        remedy = f'write "modules": {example} in "ds_ckpt": {{"activation": ...}}'
        raise ConfigError(Problem(_PATH, "null", why, remedy))
    return blocks


# parts of blocks


def _is_attention(name: str, module: nn.Module) -> bool:
    children = {n for n, _ in module.named_children()}
    if is_norm(type(module).__name__):
        return False
    named = bool(_ATTENTION.search(type(module).__name__))
    return named or any(projections <= children for projections in _PROJECTIONS)


def _is_mlp(name: str, module: nn.Module) -> bool:
    if _is_attention(name, module) or attention_parts(name, module):  # Qwen3MoeAttention
        return False
    return bool(_MLP.search(type(module).__name__)) or name.rpartition(".")[2] in _MLP_NAMES


def is_norm(class_name: str) -> bool:
    """Return whether a class is named like a normalization."""
    return bool(_NORM.search(class_name))


def _outermost(
    prefix: str, module: nn.Module, fits: Callable[[str, nn.Module], bool]
) -> list[Part]:
    """Return parts below `module` with a forward and weights, none inside another."""
    found: list[Part] = []
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}"
        if fits(name, child) and _runs(child) and next(child.parameters(), None) is not None:
            found.append((name, child))
        else:
            found += _outermost(name, child, fits)
    return found


def attention_parts(name: str, block: nn.Module) -> list[Part]:
    """Return every attention of a block, with full names."""
    return _outermost(name, block, _is_attention)


def mlp_parts(name: str, block: nn.Module) -> list[list[Part]]:
    """Return the MLPs of a block, each as the modules that run one after the other."""
    attention = tuple(f"{part}." for part, _ in attention_parts(name, block))
    found = [[p] for p in _outermost(name, block, _is_mlp) if not p[0].startswith(attention)]
    if found:
        return found
    children = dict(block.named_children())
    for chain in _CHAINS:
        if chain[0] in children and chain[-1] in children:
            return [[(f"{name}.{c}", children[c]) for c in chain if c in children]]
    return []


def gates(parts: Sequence[Sequence[Part]]) -> list[nn.Module]:
    """Return the first products inside MLPs, but of routers and of experts without modules."""
    found = []
    for chain in parts:
        inside = [pair for name, part in chain for pair in part.named_modules(prefix=name)]
        routing = {name for name, module in inside if "experts" in dict(module.named_children())}
        leaves = [
            (name.rpartition(".")[2], module)
            for name, module in inside
            if not any(module.children()) and name.rpartition(".")[0] not in routing
        ]
        known = [module for name, module in leaves if name in _GATES]
        widening = (module for _, module in leaves if isinstance(module, nn.Linear))
        found += known or [*itertools.islice(widening, 1)]
    return found
