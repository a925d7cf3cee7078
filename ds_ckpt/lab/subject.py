"""The MODEL of a command: from a name to a model and a batch.

MODEL is the built-in model (`demo`), a common model of `hardware.json`, `module:callable`, or a
Hugging Face configuration. That is a file, a directory or a hub name; no weights are read. Models
can be built under any tensor mode, so that a 7B model can consist of fake tensors.
"""

import copy
import difflib
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ds_ckpt.config import load_file
from ds_ckpt.errors import DsCkptError, Problem, UnsupportedError
from ds_ckpt.lab.hosts.hardware import HARDWARE
from ds_ckpt.lab.workload import VOCAB_SIZE, hugging_face, llama
from ds_ckpt.telemetry.memory import tensors_in

DEFAULT = "demo"
_HEADLINE = "the model cannot be used"
_LONGEST = 2048
"""Largest default sequence length, in tokens."""
_UNIFORM = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gpt_neox"}
"""Model types whose blocks are all equal."""
_DEMO_LAYERS = 6
Built = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Sizes:
    """Sequence length in tokens, dtype, attention and number of blocks; None is the model's own."""

    tokens: int | None = None
    dtype: torch.dtype | None = None
    attention: str | None = None
    layers: int | None = None


@dataclass(frozen=True)
class Subject:
    """A model that can be built repeatedly.

    `build` returns a model and a batch of a number of sequences. The number is ignored if the
    subject is not `sized`. `layers` is the number of blocks if all are equal.
    """

    name: str
    build: Callable[[int], Built]
    sized: bool = True
    layers: int | None = None


def _refused(found: str, why: str, remedy: str, where: str = "MODEL") -> UnsupportedError:
    return UnsupportedError(Problem(where, found, why, remedy), headline=_HEADLINE)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}".split("\n")[0]


def run_forward(model: nn.Module, batch: Any) -> Tensor:
    """Return the output's loss, or a scalar output, or the mean of the first floating-point tensor.

    Raises UnsupportedError if the forward fails, or its output cannot be differentiated.
    """
    args, kwargs = arguments_of(batch)
    kind = type(model).__name__
    try:
        output = model(*args, **kwargs)
    except DsCkptError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        of_allocator = type(error) is not RuntimeError or "memory" in str(error)
        if isinstance(error, RuntimeError) and of_allocator:  # or of fake tensors
            raise
        why = f"the forward of {kind} fails on its batch"
        remedy = "make model(**batch), model(*batch) or model(batch) run"
        raise _refused(_short(error), why, remedy) from error
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, Tensor):
        return loss
    for leaf in tensors_in(output):
        if leaf.requires_grad:
            return leaf if leaf.dim() == 0 else leaf.float().mean()
    why, remedy = "no tensor in it needs a gradient", "return a loss or a tensor that needs one"
    raise _refused(f"{kind} returns {type(output).__name__}", why, remedy)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model's forward."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def sequence_length(batch: Any) -> int:
    """Return the tokens of one sequence: the second size of integer tensors, or 1."""
    for leaf in tensors_in(batch):
        if leaf.dim() == 2 and not leaf.is_floating_point():
            return int(leaf.shape[1])
    return 1


def find_subject(name: str, sizes: Sizes) -> Subject:
    """Return the subject of a name. Raises UnsupportedError if there is no such model."""
    if name == DEFAULT:
        return Subject(name, functools.partial(_demo, sizes), layers=_DEMO_LAYERS)
    if Path(name).exists():
        return _hugging_face(name, sizes)
    models = load_file(HARDWARE)["models"]
    common = models.get(name.lower())
    if common is None and ":" in name:
        return _callable(name, sizes)
    close = difflib.get_close_matches(name.lower(), models, cutoff=0.75)
    if common is None and "/" not in name and close:
        why = f"models known by name: {', '.join(models)}"
        raise _refused(f'"{name}"', why, f'write "{close[0]}", or the path of a config.json')
    return _hugging_face(name, sizes, common and common["config"])


def _demo(sizes: Sizes, batch: int) -> Built:
    tokens = sizes.tokens or 256
    model = llama(seed=0, max_positions=max(1024, tokens), layers=sizes.layers or _DEMO_LAYERS)
    ids = _ids(batch, tokens, VOCAB_SIZE)
    return _prepared(model, sizes), {"input_ids": ids, "labels": ids}


def _callable(name: str, sizes: Sizes) -> Subject:
    module_name, _, path = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a command has none, `python -m` does
    try:
        target = operator.attrgetter(path)(importlib.import_module(module_name))
        takes = set(inspect.signature(target).parameters)
    except Exception as error:
        remedy = "name a module that Python finds from this folder and a function: train:make"
        raise _refused(f'"{name}"', f"it cannot be imported: {_short(error)}", remedy) from error

    def build(batch: int) -> Built:
        wanted = {"batch": batch, "tokens": sizes.tokens}
        keywords = {k: v for k, v in wanted.items() if k in takes and v is not None}
        try:
            made = target(**keywords)
        except DsCkptError:
            raise
        except Exception as error:
            why = f"{path} was called with {keywords or 'no arguments'}"
            raise _refused(_short(error), why, f"correct {path}", name) from error
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            remedy = "return (model, batch); the batch is a dict, a tuple or one tensor"
            found = f"it returned {type(made).__name__}"
            raise _refused(found, "a step needs a model and a batch", remedy, name)

        def cast(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(sizes.dtype) if floating and sizes.dtype is not None else leaf

        return _prepared(made[0], sizes), tree_map(cast, made[1])

    return Subject(name, build, sized="batch" in takes)


def _hugging_face(name: str, sizes: Sizes, shape: dict[str, Any] | None = None) -> Subject:
    """Return the subject of a shape, a config.json, a directory with one, or a hub name."""
    transformers = hugging_face(_HEADLINE)
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        if shape is not None:
            config = transformers.AutoConfig.for_model(**shape)
        elif file.suffix == ".json" and not file.exists():
            raise FileNotFoundError(file)  # no hub is asked for it
        else:
            config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        why = f"transformers finds no configuration in it: {_short(error)}"
        known = ", ".join(load_file(HARDWARE)["models"])
        remedy = f'write "demo", {known}, a config.json or its directory, a hub name, or '
        remedy += '"module:function"'
        raise _refused(f'"{name}"', why, remedy) from error

    def build(batch: int) -> Built:
        try:
            model = _hf_model(config, sizes.layers)
            vocabulary = config.get_text_config().vocab_size
        except Exception as error:
            why, remedy = f"no model can be made of it: {_short(error)}", 'write "module:function"'
            raise _refused(f'"{name}"', why, remedy) from error
        _prepared(model, replace(sizes, dtype=sizes.dtype or getattr(config, "dtype", None)))
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or _LONGEST
        ids = _ids(batch, sizes.tokens or min(positions, _LONGEST), vocabulary)
        classifies = type(model).__name__.endswith("SequenceClassification")
        return model, {"input_ids": ids, "labels": ids[:, 0] * 0 if classifies else ids}

    kinds = set(getattr(config, "layer_types", None) or ())
    is_uniform = config.model_type in _UNIFORM and len(kinds) < 2
    return Subject(name, build, layers=config.num_hidden_layers if is_uniform else None)


def _hf_model(config: Any, layers: int | None) -> Any:
    """Build the class that the configuration names, or a causal language model."""
    import transformers

    config = copy.deepcopy(config)
    config.use_cache = False
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    for named in getattr(config, "architectures", None) or ():
        return getattr(transformers, named)._from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _ids(batch: int, tokens: int, vocabulary: int) -> Tensor:
    """Return int64 [batch, tokens] below `vocabulary`; fixed, so that fake tensors have values."""
    return torch.arange(batch * tokens).remainder(vocabulary).view(batch, tokens)


def _prepared(model: nn.Module, sizes: Sizes) -> nn.Module:
    """Set training mode, attention and dtype. Raises UnsupportedError without that attention."""
    model.train()
    if sizes.attention:
        try:
            model.set_attn_implementation(sizes.attention)  # type: ignore[operator]
        except (ValueError, ImportError, AttributeError) as error:
            found = f'"{sizes.attention}" for {type(model).__name__}'
            remedy = 'write "eager" or "sdpa", or leave the option out'
            raise _refused(found, _short(error), remedy, "--attention") from error
    if sizes.dtype is not None:
        # floating-point parameters and buffers, as DeepSpeed does
        model._apply(lambda t: t.to(sizes.dtype) if t.is_floating_point() else t)
    return model
