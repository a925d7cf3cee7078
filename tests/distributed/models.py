"""Small real models, configurations and a training loop for the multi-process cases."""

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.offload_models import equal as equal

VOCAB = 64
PLAIN = {"plain": "PlainBlock", "nested": "NestedBlock", "shared": "PlainBlock"}
"""Models without Hugging Face's hook, and the class of their blocks."""
_TINY = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 72, "use_cache": False}
_TINY |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
_TINY |= {"num_hidden_layers": 3, "max_position_embeddings": 64}


class PlainBlock(nn.Module):
    """A block of a plain model; odd sizes, so that shards do not divide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class PlainModel(nn.Module):
    """The first block gets its input from the data, which needs no gradient."""

    def __init__(self, block: type[nn.Module] = PlainBlock, width: int = 17) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


class NestedBlock(PlainBlock):
    """Checkpoints a part of itself, inside the block that the plugin checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: torch.relu(self.up(self.norm(y))), x, use_reentrant=False)
        return x + self.dropout(self.down(inner))


class SharedBlockModel(nn.Module):
    """One block used three times (ALBERT's way), so its weights are used again in one forward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.block = PlainBlock(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def build(kind: str) -> nn.Module:
    """A model by name; the same weights in every process and every call."""
    torch.manual_seed(0)
    if kind == "shared":
        return SharedBlockModel()
    if kind in PLAIN:
        return PlainModel(NestedBlock if kind == "nested" else PlainBlock)
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    if kind == "mixtral":
        config = MixtralConfig(
            num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **_TINY
        )
        return MixtralForCausalLM(config)
    if kind == "llama-wide":
        return LlamaForCausalLM(LlamaConfig(**{**_TINY, "intermediate_size": 80}))
    tied = kind == "llama-tied"
    attention_dropout = 0.1 if kind == "llama-dropout" else 0.0
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(**_TINY, tie_word_embeddings=tied, attention_dropout=attention_dropout)
    )
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj", "down_proj"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    return model


def batch(kind: str, step: int, dp_rank: int) -> dict[str, torch.Tensor]:
    """Data that depends on the step and the process alone."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    if kind in PLAIN:
        x = torch.randn(6, 16 if kind == "shared" else 17, generator=generator)
        return {"x": x, "labels": torch.randint(0, 5, (6,), generator=generator)}
    tokens = torch.randint(0, VOCAB, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def zero3_config(
    *,
    reuse: float = 1e9,
    accumulation: int = 1,
    clip: float = 0.0,
    offload_optimizer: bool = False,
    offload_param: bool = False,
    bucket: int = 5000,
    lr: float = 1e-2,
    **sections: Any,
) -> dict[str, Any]:
    """A ZeRO-3 configuration that behaves as for a model larger than memory at `reuse=0`."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero |= {"stage3_max_reuse_distance": int(reuse), "reduce_bucket_size": bucket}
    if reuse == 0:
        zero["stage3_prefetch_bucket_size"] = 0
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_param:
        zero["offload_param"] = {"device": "cpu"}
    optimizer: dict[str, Any] = {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {"gradient_clipping": clip, "optimizer": optimizer, "zero_optimization": zero}
    return {**config, **sections}


def topk_section(**compression: Any) -> dict[str, Any]:
    """A `ds_ckpt` section with Top-K from the first step on."""
    values = {"method": "topk", "warmup_steps": 0, "min_numel": 0, **compression}
    if values["method"] != "dense":
        values["exchange"] = {"autotune": False, **values.get("exchange", {})}
    return {"compression": values}


def quantize_section(**compression: Any) -> dict[str, Any]:
    """A `ds_ckpt` section with 4-bit values from the first step on."""
    return topk_section(**{"method": "quantize", "quantize": {"bits": 4}, **compression})


def start(model: Any, config: dict[str, Any], *, plugin: bool = True, **more: Any) -> Any:
    """The engine of a model, or of a fresh one of a kind, with or without the plugin."""
    import ds_ckpt

    model = build(model) if isinstance(model, str) else model
    trainable = [p for p in model.parameters() if p.requires_grad]
    initialize = ds_ckpt.initialize if plugin else deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=trainable, config=config, **more)
    engine.train()
    return engine


def set_clock(tuner: Any, seconds: Callable[[], float]) -> None:
    """Let each step that the tuner times take `seconds()`."""
    tuner._clock = itertools.accumulate(iter(seconds, None)).__next__


def loss_of(output: Any) -> torch.Tensor:
    return output if torch.is_tensor(output) else output.loss


def train(engine: Any, kind: str, steps: int, *, first: int = 0, spoil: Any = None) -> list[float]:
    """Losses of `steps` optimizer steps; `spoil(engine, step, micro)` runs before each forward."""
    losses = []
    accumulation = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        for micro in range(accumulation):
            torch.manual_seed(7919 * step + micro + torch.distributed.get_rank())
            if spoil is not None:
                spoil(engine, step, micro)
            data = batch(kind, step * accumulation + micro, torch.distributed.get_rank())
            loss = loss_of(engine(**data))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    return losses


def gradients(engine: Any) -> list[torch.Tensor]:
    """Copies of this process's parts of the averaged gradients."""
    groups = engine.optimizer.averaged_gradients.values()
    return [g.detach().clone() for group in groups for g in group]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().contiguous().view(torch.uint8)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """One digest over tensors, bit for bit."""
    return hashlib.sha256(b"".join(bits(t).numpy().tobytes() for t in tensors)).hexdigest()


def weights_digest(engine: Any) -> str:
    """One digest over this process's partitions of all weights.

    Padding is left out: DeepSpeed leaves it uninitialised.
    """
    parts, rank = [], torch.distributed.get_rank()
    for _, parameter in sorted(engine.module.named_parameters()):
        part = parameter.ds_tensor.detach().flatten()
        parts.append(part[: max(0, parameter.ds_numel - rank * part.numel())])
    return digest(parts)


def is_layer(module: nn.Module) -> bool:
    return any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
