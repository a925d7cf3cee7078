"""Models of many kinds for the cases of the ecosystem: vision, experts, LoRA, plain torch."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import architectures


@dataclass(frozen=True)
class Kind:
    """A model, its data, and the keys that a policy needs.

    Attributes:
        build: gives the model.
        batch: data by seed.
        modules: of its blocks, where they have no hook of transformers.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    modules: tuple[str, ...] = ()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(seed: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(4, 3, 32, 32, generator=_generator(seed)),
        "labels": torch.randint(0, 3, (4,), generator=_generator(seed)),
    }


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes))


def _llava() -> nn.Module:
    """Images as tokens among the words of a language model."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    heads = {"intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 3}
    vision = CLIPVisionConfig(hidden_size=24, image_size=32, patch_size=16, **heads)
    text = LlamaConfig(hidden_size=16, vocab_size=architectures.VOCAB, use_cache=False, **heads)
    return Llava(LlavaConfig(vision_config=vision, text_config=text, image_token_id=3))


def _image_and_words(seed: int) -> dict[str, Any]:
    tokens = torch.randint(4, architectures.VOCAB, (4, 9), generator=_generator(seed))
    tokens[:, 1:5] = 3  # four patches
    return {"input_ids": tokens, "labels": tokens, "pixel_values": _images(seed)["pixel_values"]}


def _tokens(seed: int) -> dict[str, Any]:
    return architectures.batch("llama", seed)


def _with_decoder_inputs(seed: int) -> dict[str, Any]:
    """The decoder gets other tokens than the labels, and a mask of its own."""
    data = architectures.batch("bart", seed)
    words = torch.randint(3, architectures.VOCAB, (2, 7), generator=_generator(seed + 1))
    mask = torch.ones_like(words)
    mask[0, -2:] = 0
    return {**data, "labels": words, "decoder_input_ids": words, "decoder_attention_mask": mask}


def _lora(ready: bool) -> Callable[[], nn.Module]:
    """Llama with LoRA; the input of the first block needs no gradient unless `ready`."""

    def build() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj", "down_proj"]
        model: Any = architectures.build("llama", 3, use_cache=False)
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.1))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros would leave lora_A without a gradient at first
                nn.init.normal_(parameter, std=0.02)
        if ready:
            model.enable_input_require_grads()
        return model  # type: ignore[no-any-return]

    return build


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Runs the expert that a token chose, and none that no token of this process chose."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), -1)
        best = shares.argmax(-1)
        self.auxiliary = shares.mean(0).square().sum()
        out = torch.zeros_like(x)
        for index in best.unique().tolist():
            chosen = best == index
            y = self.experts[index](x[chosen]) * shares[chosen, index, None]
            out = out.masked_scatter(chosen[:, None], y)
        return out


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(width), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))  # type: ignore[no-any-return]


class ExpertModel(nn.Module):
    """The loss that balances the experts is picked up from the modules, as in many codes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(ExpertBlock(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        balance = sum(block.experts.auxiliary for block in self.blocks)
        return x.square().mean() + 0.1 * balance  # type: ignore[no-any-return]


def _rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(9, 16, generator=_generator(seed))}


def _experts() -> nn.Module:
    from deepspeed.utils import set_z3_leaf_modules

    model = ExpertModel()
    set_z3_leaf_modules(model, [Experts])  # their weights come together, whoever runs
    return model


class TorchsTransformer(nn.Module):
    """`nn.Transformer`: an encoder and a decoder that transformers has never seen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 40}
        self.transformer = nn.Transformer(width, 2, dropout=0.1, batch_first=True, **sizes)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer(source, target, tgt_mask=mask).square().mean()  # type: ignore[no-any-return]


def _vectors(seed: int) -> dict[str, Tensor]:
    return {
        "source": torch.randn(2, 5, 16, generator=_generator(seed)),
        "target": torch.randn(2, 4, 16, generator=_generator(seed + 1)),
    }


KINDS: dict[str, Kind] = {
    "resnet": Kind(_resnet, _images, ("ResNetBasicLayer",)),
    "llava": Kind(_llava, _image_and_words),
    "bart": Kind(lambda: architectures.build("bart", 2, dropout=0.1), _with_decoder_inputs),
    "experts": Kind(_experts, _rows, ("ExpertBlock",)),
    "lora": Kind(_lora(False), _tokens),
    "lora-ready": Kind(_lora(True), _tokens),
    "nn.Transformer": Kind(
        TorchsTransformer, _vectors, ("TransformerEncoderLayer", "TransformerDecoderLayer")
    ),
}


def build(name: str) -> nn.Module:
    """The same weights in every process and every call; in training mode."""
    torch.manual_seed(0)
    return KINDS[name].build().train()
