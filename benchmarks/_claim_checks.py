"""Small experiments on the CPU that decide claims about torch, transformers and DeepSpeed.

Each returns figures by name, which `claims.toml` judges. What starts processes gives them a limit
of time, so that a deadlock is a result.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_LIMIT_S = 30.0
"""Of one configuration on two processes, whose step takes milliseconds."""


def trainer_flag() -> dict[str, Any]:
    """What transformers' gradient_checkpointing is, and whether anything reads "auto" there."""
    from dataclasses import fields

    import transformers

    (flag,) = (
        f for f in fields(transformers.TrainingArguments) if f.name == "gradient_checkpointing"
    )
    source = inspect.getsource(transformers.Trainer)
    uses = [line for line in source.splitlines() if "gradient_checkpointing" in line]
    kind = flag.type if isinstance(flag.type, str) else getattr(flag.type, "__name__", flag.type)
    return {"annotation": str(kind), "knows_auto": any('"auto"' in line for line in uses)}


def trainer_kwargs() -> dict[str, Any]:
    """What transformers takes for itself beside torch's own arguments."""
    import transformers

    enable = transformers.PreTrainedModel._activation_checkpointing_enable
    own = [n for n in inspect.signature(enable).parameters if n != "self" and "kwargs" not in n]
    return {"own": ", ".join(own), "chooses_modules": any("module" in name for name in own)}


def offload_wrapper() -> dict[str, Any]:
    """Arguments of torch's checkpoint_wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    arguments = list(inspect.signature(checkpoint_wrapper).parameters)
    return {"arguments": ", ".join(arguments), "has_argument": "offload_to_cpu" in arguments}


def zero3_reduction() -> dict[str, Any]:
    """The collective that DeepSpeed's stage 3 hands a bucket of gradients to."""
    from deepspeed.runtime.zero import stage3

    _, _, source = inspect.getsource(stage3).partition("def __avg_scatter_grads(")
    body, _, _ = source.partition("\n    def ")
    found = [c for c in ("reduce_scatter_coalesced", "all_reduce") if f"{c}(" in body]
    return {"call": found[0] if found else "nothing known"}


def _nodes(tensor: Tensor) -> str:
    """Names of the graph's nodes from the result on, as long as there is one after the other."""
    names, node = [], tensor.grad_fn
    while node is not None and len(names) < 8:
        names.append(type(node).__name__)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return ", ".join(names)


def reentrant() -> dict[str, Any]:
    """torch's two ways to checkpoint: nodes of the graph, the default, keyword arguments."""
    x = torch.ones(2, requires_grad=True)

    def block(x: Tensor, scale: float = 2.0) -> Tensor:
        return (x * scale).exp()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        default = _nodes(checkpoint(block, x))
    raised = "nothing"
    try:
        checkpoint(block, x, use_reentrant=True, scale=3.0)
    except ValueError as error:
        raised = f"ValueError: {str(error).splitlines()[0][:60]}"
    return {
        "nodes_reentrant": _nodes(checkpoint(block, x, use_reentrant=True)),
        "nodes_other": _nodes(checkpoint(block, x, use_reentrant=False)),
        "nodes_default": default,
        "warns": any("use_reentrant" in str(w.message) for w in told),
        "keywords": raised,
        "torch": torch.__version__,
    }


def grad_in_place() -> dict[str, Any]:
    """Storages that .grad has in 100 backwards that nobody clears, and its growth."""
    layer = nn.Linear(256, 256)
    storages, sizes = set(), []
    for _ in range(100):
        layer(torch.randn(4, 256)).sum().backward()
        assert layer.weight.grad is not None
        storages.add(layer.weight.grad.untyped_storage().data_ptr())
        sizes.append(layer.weight.grad.untyped_storage().nbytes())
    return {"storages": len(storages), "growth_bytes": sizes[-1] - sizes[0]}


class _Coupled(torch.autograd.Function):
    """Additive coupling (Gomez et al. 2017, arXiv 1707.04585): y1 = x1 + F(x2), y2 = x2 + G(y1).

    Only the last outputs are kept: backward takes each layer's inputs from them again.
    """

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, layers: Any, *weights: Tensor) -> Any:
        with torch.no_grad():
            for f, g in layers:
                x1 = x1 + f(x2)
                x2 = x2 + g(x1)
        ctx.layers, ctx.weights = layers, weights
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (y1, y2), (d1, d2) = ctx.saved_tensors, gradients
        by_weight: dict[int, Tensor] = {}

        def back(part: nn.Module, given: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
            """The part's result, and the gradient of what it was given."""
            with torch.enable_grad():
                leaf = given.detach().requires_grad_()
                result = part(leaf)
                found = torch.autograd.grad(result, [leaf, *part.parameters()], gradient)
            by_weight.update(zip(map(id, part.parameters()), found[1:], strict=True))
            return result.detach(), found[0]

        for f, g in reversed(ctx.layers):
            result, gradient = back(g, y1, d2)
            y2, d1 = y2 - result, d1 + gradient
            result, gradient = back(f, y2, d1)
            y1, d2 = y1 - result, d2 + gradient
        return d1, d2, None, *(by_weight[id(w)] for w in ctx.weights)


def reversible() -> dict[str, Any]:
    """Llama's attention (grouped queries) and its SwiGLU MLP, coupled: saved bytes, gradients."""
    import transformers
    from transformers.models.llama import modeling_llama as llama

    from ds_ckpt.telemetry.memory import SavedActivations

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=172, num_attention_heads=8, num_key_value_heads=2
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    given = torch.randn(2, 16, 64, dtype=torch.float64)
    rotary = llama.LlamaRotaryEmbedding(config)
    positions = tuple(t.double() for t in rotary(given, torch.arange(16)[None]))

    class Attention(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.inner = llama.LlamaAttention(config, index)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x, positions, attention_mask=None)[0]
            return result

    def run(layers: nn.ModuleList, coupled: bool) -> tuple[int, list[Tensor]]:
        x1, x2 = (given.clone().requires_grad_() for _ in range(2))
        with SavedActivations(layers) as saved:
            if coupled:
                pairs = [tuple(pair) for pair in layers]
                y1, y2 = _Coupled.apply(x1, x2, pairs, *layers.parameters())
            else:
                y1, y2 = x1, x2
                for f, g in layers:
                    y1 = y1 + f(y2)
                    y2 = y2 + g(y1)
            loss = (y1 * y2).sum()
        wanted = [x1, x2, *layers.parameters()]
        return saved.bytes, list(torch.autograd.grad(loss, wanted))

    found: dict[str, Any] = {}
    for depth in (2, 8):
        layers = nn.ModuleList(
            nn.ModuleList([Attention(i), llama.LlamaMLP(config)]) for i in range(depth)
        ).double()
        found[f"saved_bytes_{depth}"], ours = run(layers, coupled=True)
        found[f"plain_bytes_{depth}"], plain = run(layers, coupled=False)
        errors = [
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True)
        ]
        found["gradient_error"] = max(errors)
    return found


def inference() -> dict[str, Any]:
    """A small Llama with all blocks checkpointed, nothing to go backward: operators and FLOPs."""
    import transformers

    from ds_ckpt.activation import CheckpointedBlocks
    from ds_ckpt.activation.planning.costs import flops_of, launches
    from ds_ckpt.telemetry.memory import MemoryTracker, Operator

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4
    )
    config.vocab_size = 256
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(128)[None]

    def answer() -> tuple[int, int, Tensor]:
        counted = [0, 0]

        def count(operator: Operator) -> None:
            counted[0] += launches(operator)
            counted[1] += flops_of(operator)

        with torch.no_grad(), MemoryTracker(model, operator=count):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return counted[0], counted[1], logits

    plain = answer()
    blocks = CheckpointedBlocks(model)
    checkpointed = answer()
    blocks.remove()
    return {
        "blocks": len(blocks.blocks),
        "launches": checkpointed[0] / plain[0],
        "flops": checkpointed[1] / plain[1],
        "equal": torch.equal(plain[2], checkpointed[2]),
    }


def jax_remat() -> dict[str, Any]:
    """Four layers in JAX with and without `jax.checkpoint`: equations of the gradient's program,
    and what is kept for it. Needs `pip install jax`, which nothing else here does."""
    jax = importlib.import_module("jax")
    numpy = jax.numpy
    leaves = jax.tree_util.tree_leaves

    def equations(program: Any) -> int:
        """Those of programs within it, too."""
        found = 0
        for equation in program.eqns:
            values = leaves(list(equation.params.values()), is_leaf=_is_program)
            inner = [getattr(value, "jaxpr", value) for value in values if _is_program(value)]
            found += sum(map(equations, inner)) if inner else 1
        return found

    def layer(x: Any, weights: Any) -> Any:
        return x + numpy.tanh(x @ weights[0]) @ weights[1]

    def loss_of(layer: Any) -> Any:
        def loss(layers: Any, x: Any) -> Any:
            for weights in layers:
                x = layer(x, weights)
            return numpy.sum(x**2)

        return loss

    layers = [(numpy.ones((64, 256)), numpy.ones((256, 64))) for _ in range(4)]
    x = numpy.ones((128, 64))
    found: dict[str, Any] = {"version": jax.__version__}
    for name, one in (("plain", layer), ("remat", jax.checkpoint(layer))):
        found[f"equations_{name}"] = equations(
            jax.make_jaxpr(jax.grad(loss_of(one)))(layers, x).jaxpr
        )
        _, backward = jax.vjp(loss_of(one), layers, x)
        found[f"residuals_{name}"] = len(leaves(backward))
        found[f"residual_bytes_{name}"] = sum(int(kept.nbytes) for kept in leaves(backward))
    return found


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


# FSDP on two processes


def _two_processes(configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each configuration found; {"hung": True} where it did not end in time.

    Two processes work them off one after the other; after a hang two new ones go on.
    """
    found: list[dict[str, Any]] = []
    while len(found) < len(configurations):
        with tempfile.TemporaryDirectory() as folder:
            done = Path(folder) / "done"
            todo = json.dumps(configurations[len(found) :])
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, todo, folder]
            processes = [
                subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)
            ]
            seen, before_s = 0, time.monotonic() + 60  # starting takes longer
            while any(p.poll() is None for p in processes):
                lines = done.read_text().splitlines() if done.exists() else []
                if len(lines) > seen:
                    seen, before_s = len(lines), time.monotonic()
                if time.monotonic() - before_s > _LIMIT_S:
                    break
                time.sleep(0.2)
            for process in processes:
                process.kill()
                process.wait()
            lines = done.read_text().splitlines() if done.exists() else []
            found += map(json.loads, lines)
            if len(found) < len(configurations):
                found.append({"hung": True})
    return found


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def _sharded(configuration: dict[str, Any]) -> dict[str, Any]:
    """One step of four blocks on FSDP against the same without: gradients, and how they nest."""
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    model, plain = nn.Sequential(*(_Block() for _ in range(4))), None
    plain = nn.Sequential(*(_Block() for _ in range(4)))
    plain.load_state_dict(model.state_dict())
    implementation = (
        CheckpointImpl.REENTRANT if configuration["reentrant"] else CheckpointImpl.NO_REENTRANT
    )

    def checkpointed(whole: nn.Module) -> None:
        apply_activation_checkpointing(
            whole,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=implementation),
            check_fn=lambda m: isinstance(m, _Block),
        )

    if configuration["first"] == "checkpoint":
        checkpointed(model)
    sharded = Sharded(
        model,
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        sharding_strategy=ShardingStrategy[configuration["strategy"]],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if configuration["prefetch"] else None,
        use_orig_params=configuration["original"],
        device_id=torch.device("cpu"),
    )
    if configuration["first"] == "shard":
        checkpointed(sharded)
    gathers = 0
    real = {name: getattr(dist, name) for name in ("all_gather", "all_gather_into_tensor")}

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal gathers
            gathers += 1
            return collective(*args, **kwargs)

        return call

    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    given = x.clone().requires_grad_(configuration["reentrant"])
    for name, collective in real.items():
        setattr(dist, name, counted(collective))
    try:
        sharded(given).square().mean().backward()
    finally:
        for name, collective in real.items():
            setattr(dist, name, collective)
    plain(x).square().mean().backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    norm = torch.stack([p.grad.norm() / 2 for p in plain.parameters() if p.grad is not None]).norm()
    ours = sum(p.grad.square().sum() for p in sharded.parameters() if p.grad is not None)
    total = torch.as_tensor(float(ours))
    dist.all_reduce(total)
    kinds = [type(m).__name__ for m in sharded.modules()]
    wrappers = ("FullyShardedDataParallel", "CheckpointWrapper")
    outer = next((kind for kind in kinds[1:] if kind in wrappers), "")
    units = kinds.count("FullyShardedDataParallel")
    equal = bool(abs(float(total.sqrt()) / float(norm) - 1) < 1e-5)
    return {"units": units, "outer": outer, "gathers": gathers, "equal": equal}


def _worker(todo: str, folder: str, rank: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for configuration in json.loads(todo):
        try:
            found = _sharded(configuration)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
        dist.barrier()
        if rank == 0:
            with (Path(folder) / "done").open("a") as file:
                file.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def _configuration(**changed: Any) -> dict[str, Any]:
    return {
        "first": "checkpoint",
        "reentrant": False,
        "strategy": "FULL_SHARD",
        "prefetch": True,
        "original": True,
    } | changed


def fsdp_order() -> dict[str, Any]:
    """Both orders of FSDP's wrapping by class and torch's checkpoint_wrapper."""
    both = {first: _configuration(first=first) for first in ("checkpoint", "shard")}
    found = dict(zip(both, _two_processes(list(both.values())), strict=True))

    def words(first: str) -> str:
        seen = found[first]
        if "units" not in seen:
            return f"{first} first: {seen.get('error', 'hung')}"
        made = f"{seen['units']} units of FSDP, {seen['outer']} outside"
        return f"{first} first: {made}, {seen['gathers']} gathers"

    good = {f: bool(seen.get("equal")) and seen.get("units", 0) > 1 for f, seen in found.items()}
    return {
        "checkpoint_first": words("checkpoint"),
        "shard_first": words("shard"),
        "gradients_equal": "yes" if all(s.get("equal") for s in found.values()) else "no",
        "only_checkpoint_first": good["checkpoint"] and not good["shard"],
    }


def reentrant_fsdp() -> dict[str, Any]:
    """Reentrant checkpointing under FSDP: order x strategy x prefetch x original parameters."""
    configurations = [
        _configuration(first=f, reentrant=True, strategy=s, prefetch=p, original=o)
        for f in ("checkpoint", "shard")
        for s in ("FULL_SHARD", "SHARD_GRAD_OP")
        for p in (True, False)
        for o in (True, False)
    ]
    found = _two_processes(configurations)
    errors = sorted({f["error"] for f in found if "error" in f})
    return {
        "tried": len(found),
        "hung": sum(bool(f.get("hung")) for f in found),
        "failed": sum("error" in f for f in found),
        "equal": sum(bool(f.get("equal")) for f in found),
        "errors": errors,
        "limit_s": _LIMIT_S,
    }


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        trainer_flag,
        trainer_kwargs,
        offload_wrapper,
        zero3_reduction,
        reentrant,
        grad_in_place,
        reversible,
        inference,
        jax_remat,
        fsdp_order,
        reentrant_fsdp,
    )
}

if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))
