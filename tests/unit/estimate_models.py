"""Models for the tests of `ds-ckpt profile`: plain ones, and functions that the command calls."""

import torch
from torch import nn

from ds_ckpt.lab.workload import llama

WIDTH = 32


class Mixer(nn.Module):
    """One block: two products with a GELU between, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(batch: int = 2, tokens: int = 8) -> tuple[nn.Module, torch.Tensor]:
    return Stack(4), torch.randn(batch, tokens, WIDTH, requires_grad=True)


def fixed() -> tuple[nn.Module, torch.Tensor]:
    """Takes no number of sequences."""
    return Stack(2), torch.randn(3, WIDTH)


def needs_values() -> tuple[nn.Module, torch.Tensor]:
    """Build a model whose operators depend on a value of the data."""

    class Choosy(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    return Choosy(2), torch.randn(2, 8, WIDTH)


def low_rank(batch: int = 1, tokens: int = 64) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build the demo's model with LoRA on every matrix of its blocks."""
    from peft import LoraConfig, get_peft_model

    model, ids = llama(seed=0), torch.zeros(batch, tokens, dtype=torch.int64)
    config = LoraConfig(r=16, target_modules="all-linear")
    return get_peft_model(model, config), {"input_ids": ids, "labels": ids}


def only_a_model() -> nn.Module:
    return Stack(1)


def breaks_down() -> None:
    raise ZeroDivisionError("no model today")


def nothing_to_train() -> tuple[nn.Module, torch.Tensor]:
    return Stack(1).requires_grad_(False), torch.randn(2, WIDTH)


def wrong_batch() -> tuple[nn.Module, torch.Tensor]:
    return Stack(1), torch.randn(2, WIDTH + 1)


NUMBER = 3
