"""The MODEL of a command: from a name to a model and a batch.

Four kinds: the built-in model (`demo`), a common model by name, whose configuration is in
`hardware.json`, a Hugging Face configuration (file, directory or hub name; no weights are read),
and `module:callable`. Models can be built under any tensor mode, so that a 7B model can consist of
fake tensors.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_map

from ds_ckpt.config import load_file
from ds_ckpt.errors import DsCkptError, Problem, UnsupportedError
from ds_ckpt.lab.hosts.hardware import HARDWARE
from ds_ckpt.lab.workload import VOCAB_SIZE, hugging_face, llama
from ds_ckpt.telemetry.memory import tensors_in

DEFAULT = "demo"
_MODEL = "MODEL"
_LONGEST = 2048
"""Largest default sequence length, in tokens."""
_NONE = "there is no model to profile"
_NOT_BUILT = "the model cannot be built"
_NOT_PROFILED = "the model cannot be profiled"
_UNIFORM = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gpt_neox"}
"""Model types whose blocks are all equal."""
Built = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes given on the command line; None is the model's own.

    Attributes:
        tokens: sequence length.
        dtype: of parameters and floating-point inputs.
        attention: implementation of attention in transformers.
        layers: number of blocks to build, if `Subject.layers` is known.
    """

    tokens: int | None = None
    dtype: torch.dtype | None = None
    attention: str | None = None
    layers: int | None = None


@dataclass(frozen=True)
class Subject:
    """A model that can be built repeatedly.

    Attributes:
        name: as given on the command line.
        build: returns a model in training mode and a batch of a number of sequences.
        can_sdpa: transformers can set attention to "sdpa".
        sized: the batch has the given number of sequences.
        layers: number of blocks, if all are equal; otherwise None.
    """

    name: str
    build: Callable[[int], Built]
    can_sdpa: bool = False
    sized: bool = True
    layers: int | None = None


def _refused(where: str, found: str, why: str, remedy: str, headline: str) -> UnsupportedError:
    return UnsupportedError(Problem(where, found, why, remedy), headline=headline)


def _unknown(name: str, why: str, remedy: str) -> UnsupportedError:
    return _refused(_MODEL, f'"{name}"', why, remedy, _NONE)


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def run_forward(model: nn.Module, batch: Any) -> Tensor:
    """Run the forward and return a loss.

    It is the output's loss, or a scalar output, or the mean of the first floating-point tensor.
    Raises UnsupportedError if the forward fails, or its output cannot be differentiated.
    """
    output = _output(model, batch)
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, Tensor):
        return loss
    for leaf in tensors_in(output):
        if leaf.requires_grad:
            return leaf if leaf.dim() == 0 else leaf.float().mean()
    raise _refused(
        _MODEL,
        f"{type(model).__name__} returns {type(output).__name__}",
        "no tensor in it needs a gradient, so there is no backward to profile",
        "leave some parameters trainable, and return a loss or a tensor",
        _NOT_PROFILED,
    )


def _output(model: nn.Module, batch: Any) -> Any:
    args, kwargs = arguments_of(batch)
    try:
        return model(*args, **kwargs)
    except DsCkptError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        own = type(error) is RuntimeError and "memory" not in str(error)
        if isinstance(error, RuntimeError) and not own:  # of the allocator, or of fake tensors
            raise
        raise _refused(
            _MODEL,
            _short(error),
            f"the forward of {type(model).__name__} fails on its batch",
            "make model(**batch), model(*batch) or model(batch) run",
            _NOT_PROFILED,
        ) from error


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model's forward."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def tokens_of(batch: Any) -> int:
    """Return the tokens of one sequence: the second size of integer tensors, or 1."""
    for leaf in tensors_in(batch):
        if leaf.dim() == 2 and not leaf.is_floating_point():
            return int(leaf.shape[1])
    return 1


def rows_of(batch: Any) -> int:
    """Return the sequences of a batch: the first size of its first tensor that has one, or 1."""
    return next((int(leaf.shape[0]) for leaf in tensors_in(batch) if leaf.dim()), 1)


def find_subject(name: str, sizes: Sizes) -> Subject:
    """Return the subject of a name. Raises UnsupportedError if there is no such model."""
    if name == DEFAULT:
        return _demo(sizes)
    if (shape := _shapes().get(name.lower())) is not None and not Path(name).exists():
        return _hugging_face(name, sizes, shape)
    if name == "" or name.isspace():
        raise _unknown(
            name,
            "it is empty",
            f'write "{DEFAULT}", a Hugging Face config.json, a checkpoint directory, a hub name, '
            'or "package.module:function"',
        )
    if not Path(name).exists() and ":" in name:
        return _callable(name, sizes)
    return _hugging_face(name, sizes)


def _shapes() -> dict[str, dict[str, Any]]:
    """Return the configurations of common models, by name."""
    models = load_file(HARDWARE)["models"]
    return {name: model["config"] for name, model in models.items()}


def _demo(sizes: Sizes) -> Subject:
    tokens = sizes.tokens or 256
    layers = inspect.signature(llama).parameters["layers"].default

    def build(batch: int) -> Built:
        positions = max(1024, tokens)
        model = llama(seed=0, max_positions=positions, layers=sizes.layers or layers)
        ids = _ids(batch, tokens, VOCAB_SIZE)
        return _prepared(model, sizes), {"input_ids": ids, "labels": ids}

    return Subject(DEFAULT, build, can_sdpa=True, layers=layers)


def _callable(name: str, sizes: Sizes) -> Subject:
    module_name, _, path = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a command has none, `python -m` does
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        remedy = "write a module that Python finds from this folder, for example train:make"
        raise _unknown(name, f"importing {module_name} fails: {_short(error)}", remedy) from error
    try:
        target = operator.attrgetter(path)(module)
    except AttributeError:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        remedy = f"callables there: {', '.join(sorted(names)[:20]) or 'none'}"
        raise _unknown(name, f"{module_name} has no {path}", remedy) from None
    if not callable(target):
        raise _unknown(name, f"{path} is a {type(target).__name__}", "name a function")
    takes = set(inspect.signature(target).parameters)

    def build(batch: int) -> Built:
        wanted = {"batch": batch, "tokens": sizes.tokens}
        keywords = {k: v for k, v in wanted.items() if k in takes and v is not None}
        try:
            made = target(**keywords)
        except DsCkptError:
            raise
        except Exception as error:
            why, remedy = f"{path} was called with {keywords or 'no arguments'}", "correct it"
            if detect_fake_mode() is not None:
                why += " on fake tensors, which hold no values"
                remedy += ", or build without values"
            raise _refused(name, _short(error), why, remedy, _NOT_BUILT) from error
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            kinds = [type(m).__name__ for m in (made if isinstance(made, tuple) else (made,))]
            returned = f"({', '.join(kinds)})" if isinstance(made, tuple) else kinds[0]
            raise _refused(
                name,
                f"it returned {returned}",
                "a model and a batch are needed to run a step",
                "return (model, batch); the batch is a dict, a tuple or one tensor",
                _NOT_BUILT,
            )
        model, given = made

        def cast(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(sizes.dtype) if floating and sizes.dtype is not None else leaf

        return _prepared(model, sizes), tree_map(cast, given)

    return Subject(name, build, sized="batch" in takes)


def _hugging_face(name: str, sizes: Sizes, shape: dict[str, Any] | None = None) -> Subject:
    """Return the subject of a shape, a config.json, a directory with one, or a hub name."""
    transformers = hugging_face(_NONE)
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        raise _unknown(name, "the directory holds no config.json", "name a checkpoint's directory")
    if path.suffix == ".json" and not path.exists():
        raise _unknown(name, "there is no such file", "check the path")
    try:
        if shape is not None:
            config = transformers.AutoConfig.for_model(**shape)
        else:
            config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        why = f"transformers finds no configuration in it: {_short(error)}"
        remedy = (
            'the file must name its "model_type", for example "llama"'
            if path.exists()
            else 'check the name, or write "demo", the path of a config.json, or "module:function"'
        )
        raise _unknown(name, why, remedy) from error

    def build(batch: int) -> Built:
        model = _hf_model(name, config, sizes)
        return model, _hf_batch(name, model, batch, sizes)

    alike = (
        config.model_type in _UNIFORM and len(set(getattr(config, "layer_types", None) or ())) < 2
    )
    return Subject(name, build, can_sdpa=True, layers=config.num_hidden_layers if alike else None)


def _hf_model(name: str, config: Any, sizes: Sizes) -> nn.Module:
    import transformers

    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if sizes.layers is not None:
        config.num_hidden_layers = sizes.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: sizes.layers]
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
        why = f"the model cannot be made of it: {_short(error)}"
        raise _unknown(name, why, "correct the configuration") from error
    finally:
        torch.set_default_dtype(before)
    return _prepared(model, Sizes(dtype=dtype, attention=sizes.attention))


def _by_kind(config: Any) -> Any:
    """Build a configuration that names no class, by the first kind that supports it."""
    import transformers

    kinds = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "SequenceClassification")
    for kind in kinds:
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    return transformers.AutoModel.from_config(config)


def _hf_batch(name: str, model: nn.Module, batch: int, sizes: Sizes) -> dict[str, Tensor]:
    config: Any = model.config
    kind, main_input = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    if main_input == "pixel_values":
        side = config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        made = {main_input: torch.randn(*shape, dtype=next(model.parameters()).dtype)}
        if "Classification" in kind:
            made["labels"] = torch.zeros(batch, dtype=torch.long)
        return made
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not hasattr(model, "main_input_name") or main_input != "input_ids" or vocabulary is None:
        raise _unknown(
            name,
            f"{kind} takes {main_input}, for which no batch is known",
            'write a function that returns (model, batch) and give "module:function"',
        )
    positions = getattr(text, "max_position_embeddings", None) or _LONGEST
    tokens = sizes.tokens or min(int(positions), _LONGEST)
    # rotary positions are computed for any length
    rotary = any(hasattr(text, n) for n in ("rope_theta", "rope_parameters", "rope_scaling"))
    if tokens > positions and not rotary:
        raise _refused(
            "--tokens",
            str(tokens),
            f"{kind} has {positions} positions",
            f"write {positions} or less, or raise max_position_embeddings",
            _NOT_PROFILED,
        )
    ids = _ids(batch, tokens, vocabulary)
    made = {"input_ids": ids}
    if kind.endswith("SequenceClassification"):
        made["labels"] = torch.zeros(batch, dtype=torch.long)
    elif kind.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")):
        made["labels"] = ids
    return made


def _ids(batch: int, tokens: int, vocabulary: int) -> Tensor:
    """Return int64 [batch, tokens] below `vocabulary`; fixed, so that fake tensors have values."""
    return torch.arange(batch * tokens).remainder(vocabulary).view(batch, tokens)


def _prepared(model: nn.Module, sizes: Sizes) -> nn.Module:
    """Set training mode, attention and dtype.

    Raises UnsupportedError if transformers lacks that attention for this model.
    """
    model.train()
    if sizes.attention:
        try:
            model.set_attn_implementation(sizes.attention)  # type: ignore[operator]
        except (ValueError, ImportError, AttributeError) as error:
            raise _refused(
                "--attention",
                f'"{sizes.attention}" for {type(model).__name__}',
                str(error).split("\n")[0],
                'write "eager" or "sdpa", or leave the option out',
                _NOT_PROFILED,
            ) from error
    if sizes.dtype is not None:
        _cast(model, sizes.dtype)
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers, as DeepSpeed does; `Module.to` cannot swap fake tensors."""
    done: dict[Tensor, Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if tensor not in done:
                    done[tensor] = tensor.detach().to(dtype)
                    if isinstance(tensor, nn.Parameter):
                        done[tensor] = nn.Parameter(done[tensor], tensor.requires_grad)
                table[name] = done[tensor]
