"""Checkpoints of Hugging Face that a user names; transformers is imported when one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_ckpt.errors import Problem, UnsupportedError


def pretrained(auto: Any, name: str, **options: Any) -> Callable[[int], torch.nn.Module]:
    """The checkpoint's weights; what it has none of (a new head) is drawn by the seed."""

    def build(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = loaded(auto, name, dtype=torch.float32, **options)
        return model

    return build


def loaded(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained(name)`. Raises UnsupportedError where there is no such checkpoint."""
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            Problem(
                where="--model",
                found=name,
                why=f"{auto.__name__} cannot load it: {error}",
                remedy="give a checkpoint's folder, or a name that transformers finds",
            )
        ) from error


def transformers_for(model: str) -> Any:
    """The package. Raises UnsupportedError where it is missing."""
    try:
        import transformers
    except ImportError as error:
        why = "checkpoints are loaded with transformers, which is not installed"
        raise UnsupportedError(
            Problem("--model", model, why, "pip install 'ds_ckpt[hf]'")
        ) from error
    return transformers
