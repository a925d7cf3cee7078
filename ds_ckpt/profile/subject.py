"""What is profiled: from the MODEL of the command line to a model and a batch.

Four kinds: the embedded default, a Hugging Face configuration (file, directory or hub name; no
weights are read), and `module:callable`. Building happens under whatever tensor mode is on, so that
a 7B model can be built of fake tensors.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.errors import DsCkptError, Problem, UnsupportedError

DEFAULT = "demo"
_MODEL = "MODEL"
Built = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Sizes:
    """What the command line asks for. `tokens` None: what the model suggests.

    `dtype` None leaves the model's own; `attention` None too.
    """

    tokens: int | None = None
    dtype: torch.dtype | None = None
    attention: str | None = None


@dataclass(frozen=True)
class Subject:
    """A model that can be built again and again.

    Attributes:
        name: as it was asked for.
        build: model in training mode and batch, for a number of sequences.
        can_sdpa: whether attention can be set to "sdpa" by transformers.
    """

    name: str
    build: Callable[[int], Built]
    can_sdpa: bool = False
    sized: bool = True
    """Whether the batch follows the number that is asked for."""


def run_forward(model: nn.Module, batch: Any) -> Tensor:
    """The loss: the output's, else a scalar output, else the mean of the first float tensor.

    Raises UnsupportedError where the forward fails, or nothing of its output can be differentiated.
    """
    output = _output(model, batch)
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, Tensor):
        return loss
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf if leaf.dim() == 0 else leaf.float().mean()
    raise UnsupportedError(
        Problem(
            where=_MODEL,
            found=f"{type(model).__name__} returns {type(output).__name__}",
            why="no tensor in it needs a gradient, so there is no backward to profile",
            remedy="leave some parameters trainable, and return a loss or a tensor",
        ),
        headline="the model cannot be profiled",
    )


def _output(model: nn.Module, batch: Any) -> Any:
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)
    except DsCkptError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        own = type(error) is RuntimeError and "memory" not in str(error)
        if isinstance(error, RuntimeError) and not own:  # of the allocator, or of fake tensors
            raise
        raise UnsupportedError(
            Problem(
                where=_MODEL,
                found=short(error),
                why=f"the forward of {type(model).__name__} fails on its batch",
                remedy="make model(**batch), model(*batch) or model(batch) run",
            ),
            headline="the model cannot be profiled",
        ) from error


def tokens_of(batch: Any, count: int) -> int:
    """Tokens of one sequence in a batch of `count`: the second size of integer tensors, else 1."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return int(leaf.shape[1])
    return 1


def find_subject(name: str, sizes: Sizes) -> Subject:
    """Raises UnsupportedError for a name behind which there is no model."""
    if name == DEFAULT:
        return _demo(sizes)
    if name == "" or name.isspace():
        raise unknown(name, "it is empty", _kinds())
    target = Path(name)
    if not target.exists() and ":" in name:
        return _callable(name, sizes)
    from ds_ckpt.profile.hugging import hugging_face

    return hugging_face(name, sizes)


def _kinds() -> str:
    return (
        f'write "{DEFAULT}", a Hugging Face config.json, a checkpoint directory, a hub name, or '
        '"package.module:function"'
    )


def unknown(name: str, why: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(where=_MODEL, found=f'"{name}"', why=why, remedy=remedy),
        headline="there is no model to profile",
    )


def _demo(sizes: Sizes) -> Subject:
    from ds_ckpt.harness.corpus import VOCAB_SIZE
    from ds_ckpt.harness.models import llama

    positions = 1024
    tokens = sizes.tokens or 256

    def build(batch: int) -> Built:
        model = llama(seed=0, max_positions=max(positions, tokens)).train()
        if sizes.attention:
            set_attention(model, sizes.attention)
        ids = counted(batch, tokens, VOCAB_SIZE)
        return cast(model, sizes.dtype), {"input_ids": ids, "labels": ids}

    return Subject(DEFAULT, build, can_sdpa=True)


def counted(batch: int, tokens: int, vocabulary: int) -> Tensor:
    """int64 [batch, tokens] below `vocabulary`: not random, so that fake tensors know them."""
    return torch.arange(batch * tokens).remainder(vocabulary).view(batch, tokens)


def cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """All of it, as DeepSpeed does for bf16 and fp16. `Module.to` cannot swap fake tensors."""
    if dtype is None:
        return model
    done: dict[int, Tensor] = {}

    def other(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:  # tied weights stay tied
            made = tensor.detach().to(dtype)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            done[id(tensor)] = made
        return done[id(tensor)]

    with torch.no_grad():
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in tables:
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                        held[name] = other(tensor)
    return model


def set_attention(model: nn.Module, implementation: str) -> None:
    """Raises UnsupportedError where transformers does not have it for this model."""
    try:
        model.set_attn_implementation(implementation)  # type: ignore[operator]
    except (ValueError, ImportError, AttributeError) as error:
        raise UnsupportedError(
            Problem(
                where="--attention",
                found=f'"{implementation}" for {type(model).__name__}',
                why=str(error).split("\n")[0],
                remedy='write "eager" or "sdpa", or leave the option out',
            ),
            headline="the model cannot be profiled",
        ) from error


def _callable(name: str, sizes: Sizes) -> Subject:
    module_name, _, path = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a command has none, `python -m` does
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        remedy = "write a module that Python finds from this folder, for example train:make"
        raise unknown(name, f"importing {module_name} fails: {short(error)}", remedy) from error
    for part in path.split("."):
        if not hasattr(target, part):
            public = (n for n in dir(target) if not n.startswith("_"))
            names = [n for n in public if callable(getattr(target, n))]
            remedy = f"callables there: {', '.join(names[:20]) or 'none'}"
            raise unknown(name, f"{module_name} has no {path}", remedy)
        target = getattr(target, part)
    if not callable(target):
        raise unknown(name, f"{path} is a {type(target).__name__}", "name a function")
    takes = _accepted(target)

    def build(batch: int) -> Built:
        wanted = {"batch": batch, "tokens": sizes.tokens}
        keywords = {k: v for k, v in wanted.items() if k in takes and v is not None}
        try:
            made = target(**keywords)
        except DsCkptError:
            raise
        except Exception as error:
            raise UnsupportedError(
                Problem(
                    where=name,
                    found=short(error),
                    why=f"{path} was called with {keywords or 'no arguments'}"
                    + (" on fake tensors, which hold no values" if _fake_now() else ""),
                    remedy="mend it" + (", or measure real tensors with --real" * _fake_now()),
                ),
                headline="the model cannot be built",
            ) from error
        pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)
        if not pair:
            raise UnsupportedError(
                Problem(
                    where=name,
                    found=f"it returned {_words(made)}",
                    why="a model and a batch are needed to run a step",
                    remedy="return (model, batch); the batch is a dict, a tuple or one tensor",
                ),
                headline="the model cannot be built",
            )
        model, given = made
        model.train()
        if sizes.attention:
            set_attention(model, sizes.attention)
        return cast(model, sizes.dtype), _cast_batch(given, sizes.dtype)

    return Subject(name, build, can_sdpa=False, sized="batch" in takes)


def _accepted(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    from torch.utils._pytree import tree_map

    def one(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating and dtype is not None else leaf

    return tree_map(one, batch)


def _fake_now() -> bool:
    from torch._guards import detect_fake_mode

    return detect_fake_mode() is not None


def short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _words(made: object) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(m).__name__ for m in made) + ")"
    return type(made).__name__
