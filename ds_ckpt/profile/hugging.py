"""Models from Hugging Face configurations, without weights, and a batch for each.

transformers is imported when a model is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.profile.subject import (
    Built,
    Sizes,
    Subject,
    cast,
    counted,
    set_attention,
    short,
    unknown,
)

_LONGEST = 2048
"""Tokens where neither the command line nor the model says less."""


def hugging_face(name: str, sizes: Sizes) -> Subject:
    """From a config.json, a directory with one, or a name on the hub.

    Raises UnsupportedError: transformers is missing, there is no such configuration, or it makes no
    model that can be trained.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where="transformers",
                found="not installed",
                why="the model is a Hugging Face configuration",
                remedy="install the extra: pip install 'ds_ckpt[hf]'",
            ),
            headline="there is no model to profile",
        ) from error
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        raise unknown(name, "the directory holds no config.json", "name a checkpoint's directory")
    if path.suffix == ".json" and not path.exists():
        raise unknown(name, "there is no such file", "check the path")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        why = f"transformers finds no configuration in it: {short(error)}"
        remedy = (
            'the file must name its "model_type", for example "llama"'
            if path.exists()
            else 'check the name, or write "demo", the path of a config.json, or "module:function"'
        )
        raise unknown(name, why, remedy) from error

    def build(batch: int) -> Built:
        model = _model(name, config, sizes)
        return model, _batch(name, model, batch, sizes)

    return Subject(name, build, can_sdpa=True)


def _model(name: str, config: Any, sizes: Sizes) -> nn.Module:
    import copy

    import transformers

    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    heads = [getattr(transformers, n, None) for n in getattr(config, "architectures", None) or ()]
    dtype = sizes.dtype or getattr(config, "dtype", None) or torch.float32
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        if heads and heads[0] is not None:
            model = heads[0]._from_config(config)
        else:
            model = _by_kind(config)
    except Exception as error:
        why = f"the model cannot be made of it: {short(error)}"
        raise unknown(name, why, "correct the configuration") from error
    finally:
        torch.set_default_dtype(before)
    if sizes.attention:
        set_attention(model, sizes.attention)
    return cast(model, dtype).train()


def _by_kind(config: Any) -> Any:
    """For configurations that name no class of model: the first kind that knows them."""
    import transformers

    kinds = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "SequenceClassification")
    for kind in kinds:
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    return transformers.AutoModel.from_config(config)


def _batch(name: str, model: nn.Module, batch: int, sizes: Sizes) -> dict[str, torch.Tensor]:
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(config, "num_channels", 3)
        made = {"pixel_values": torch.randn(batch, channels, height, width, dtype=dtype)}
        if "Classification" in type(model).__name__:
            made["labels"] = torch.zeros(batch, dtype=torch.long)
        return made
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if getattr(model, "main_input_name", "") != "input_ids" or vocabulary is None:
        raise unknown(
            name,
            f"{type(model).__name__} takes {model.main_input_name}, for which no batch is known",
            'write a function that returns (model, batch) and give "module:function"',
        )
    positions = getattr(text, "max_position_embeddings", None) or _LONGEST
    tokens = sizes.tokens or min(int(positions), _LONGEST)
    if sizes.tokens and sizes.tokens > positions and not _any_length(text):
        raise UnsupportedError(
            Problem(
                where="--tokens",
                found=str(sizes.tokens),
                why=f"{type(model).__name__} has {positions} positions",
                remedy=f"write {positions} or less, or raise max_position_embeddings",
            ),
            headline="the model cannot be profiled",
        )
    ids = counted(batch, tokens, vocabulary)
    made = {"input_ids": ids}
    if type(model).__name__.endswith("SequenceClassification"):
        made["labels"] = torch.zeros(batch, dtype=torch.long)
    elif type(model).__name__.endswith(
        ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
    ):
        made["labels"] = ids
    return made


def _any_length(config: Any) -> bool:
    """Rotary positions are computed for any length."""
    return any(hasattr(config, n) for n in ("rope_theta", "rope_parameters", "rope_scaling"))
