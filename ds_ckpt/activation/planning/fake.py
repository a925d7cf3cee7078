"""Models and batches without memory: fake tensors of the full shapes.

A fake tensor has no values, but models read some. A padding mask of ones decides which attention
runs, and so what autograd saves. Small integers and booleans keep theirs (`KnownValues`), and so do
tensors that are computed from them and from constants alone.

`fake_run` copies an existing model, in any state of ZeRO's partitioning; `FakeModel` builds one.
Random states stay as they are.
"""

from __future__ import annotations

import logging
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    disable_fake_tensor_cache,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.patch import PatchedMethod, patched
from ds_ckpt.sharded import full_shape
from ds_ckpt.telemetry.memory import NO_WORK, tensors_in

MOST_ELEMENTS = 2**20
"""Largest tensor whose values are kept: beyond it are attention masks of all pairs of positions."""


class KnownValues(TorchDispatchMode):
    """Fake tensors; operators on known values alone are computed for real."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # models keep constants of their own
        self._known = WeakTensorKeyDictionary()

    def __enter__(self) -> KnownValues:
        self.mode.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.mode.__exit__(*error)

    def fake(self, leaf: Any) -> Any:
        """Return a fake tensor for a tensor, and remember the values of small integers."""
        if not isinstance(leaf, Tensor):
            return leaf
        copy = _faked(leaf, self.mode)
        is_integer = not leaf.is_floating_point() and not leaf.is_complex()
        if _is_real(leaf) and is_integer and _is_small(leaf):
            self._known[copy] = leaf.detach().clone()  # a forward may write into it
        return copy

    def known(self, leaf: Any) -> Any:
        """Return the known values of a fake tensor; anything else as it is."""
        return self._known.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NO_WORK:
            return func(*args, **kwargs)
        if func._schema.name == "aten::set_":  # torch's cache would keep the storage alive
            with disable_fake_tensor_cache(self.mode):
                return func(*args, **kwargs)
        name, tensors = func._schema.name, tensors_in((args, kwargs))
        # random integers and constants: masks are made of them
        lifted = name == "aten::lift_fresh" and not isinstance(args[0], FakeTensor)
        if name == "aten::randint" or (lifted and not args[0].is_floating_point()):
            with unset_fake_temporarily():
                return self.fake(func(*args, **kwargs))
        is_known = all(t in self._known for t in tensors)
        try:
            if name == "aten::_grouped_mm":  # torch infers its shape for bf16 alone
                dtype = args[0].dtype
                args, kwargs = tree_map(_in_bf16, (args, kwargs))
                return func(*args, **kwargs).to(dtype)
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not is_known:
                raise
            return tree_map(self.fake, self._really(func, args, kwargs))
        results = tensors_in(out)
        if is_known and self._keeps(func, tensors, results):
            real = tensors_in(self._really(func, args, kwargs))
            for result, value in zip(results, real, strict=True):
                self._known[result] = value
        elif func._schema.is_mutable:  # any view of the storage may have been written over
            storages = {t.untyped_storage()._cdata for t in tensors}
            for tensor in list(self._known.keys()):
                if tensor.untyped_storage()._cdata in storages:
                    del self._known[tensor]
        return out

    def _keeps(self, func: Any, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            # one number that decides: whether LayerDrop leaves out a layer
            return not tensors and all(t.numel() == 1 for t in results)
        # memory that nobody has written has no values
        return "empty" not in func._schema.name and all(_is_small(t) for t in results)

    def _really(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            return func(*tree_map(self.known, args), **tree_map(self.known, kwargs))


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= MOST_ELEMENTS and tensor.layout == torch.strided


def _is_real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _in_bf16(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.bfloat16) if floating else leaf


def _faked(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None = None) -> Tensor:
    """Make a leaf of the mode like `tensor`; "meta" becomes the CPU."""
    if _is_real(tensor) and device is None:
        copy: Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    else:
        home = "cpu" if tensor.device.type == "meta" else tensor.device
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        with mode:
            copy = torch.empty_strided(size, stride, dtype=dtype, device=device or home)
    return copy.requires_grad_(tensor.requires_grad)


def taken_for_real() -> AbstractContextManager[None]:
    """Have transformers treat fake tensors as real ones: else it would trace, not train."""
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        return nullcontext()
    return patched(utils, "is_fake_tensor", lambda _: False)


@contextmanager
def unknown_values_refused(where: str) -> Iterator[None]:
    """Turn torch's errors on fake tensors into one with a remedy."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    ) as error:
        found = f"{getattr(error, 'func', None) or error}, which needs the value of a tensor"
        why = "the model is measured with fake tensors, which have shapes and no values"
        remedy = (
            "replace the code that reads the value (.item(), nonzero, an if on a tensor), or set "
            '"policy" to "block", "selective" or another that measures nothing'
        )
        problem = Problem(where, found, why, remedy)
        raise UnsupportedError(problem, headline="the model cannot be measured") from error


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | None = None
) -> nn.Module:
    """Copy the modules over fake tensors, with the full shapes of partitioned parameters.

    Hooks of DeepSpeed and of ds_ckpt are left out. Other hooks run, as they may change what
    autograd saves (PEFT's makes the embeddings' result require a gradient).
    """
    tensors = {id(p): _fake_parameter(n, p, mode, device) for n, p in model.named_parameters()}
    modules = {id(m): type(m).__new__(type(m)) for m in model.modules()}

    def copied(value: Any) -> Any:
        """Return a fake tensor, the copy of a module, or a new container."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return modules.get(id(value), value)
        if isinstance(value, Tensor):
            if id(value) not in tensors and not isinstance(value, nn.Parameter):
                tensors[id(value)] = _faked(value, mode)
            return tensors.get(id(value), value)
        if kind in (list, tuple, set):
            return kind(map(copied, value))
        if kind in (dict, OrderedDict):
            return kind((k, copied(v)) for k, v in value.items())
        if isinstance(value, PatchedMethod):  # patched by a session
            return copied(value.original)
        if isinstance(value, types.MethodType) and id(value.__self__) in modules:
            return types.MethodType(value.__func__, modules[id(value.__self__)])
        return value

    for module in model.modules():
        own = vars(modules[id(module)])
        for key, value in vars(module).items():
            if key.startswith("_") and "_hooks" in key and isinstance(value, OrderedDict):
                own[key] = OrderedDict((k, h) for k, h in value.items() if not _is_dropped(h))
            elif key in ("_parameters", "_buffers", "_modules"):  # ZeRO-3 has a class of its own
                own[key] = {k: copied(v) for k, v in value.items()}
            elif key != "_compiled_call_impl":  # would run the original
                own[key] = copied(value)
    return modules[id(model)]


def _fake_parameter(
    name: str, parameter: nn.Parameter, mode: FakeTensorMode, device: torch.device | None
) -> Tensor:
    is_plain = type(parameter).__name__ == "Parameter" or isinstance(parameter, FakeTensor)
    if not is_plain or parameter.layout != torch.strided:
        kind = f"a {type(parameter).__name__} ({parameter.layout})"
        why = "the model is measured with tensors without memory, and this weight cannot be one"
        remedy = 'set "policy" to "block", "selective" or another that measures nothing'
        raise UnsupportedError(Problem(name, kind, why, remedy))
    home = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
    shape = full_shape(parameter)
    like = parameter if shape is None else torch.empty(shape, dtype=parameter.dtype, device="meta")
    data = _faked(like.detach(), mode, device or home)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _is_dropped(hook: Any) -> bool:
    while hasattr(hook, "func"):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] in ("deepspeed", "ds_ckpt")


class Forward(NamedTuple):
    """A forward to measure, with parameters on `device`: DeepSpeed's offload keeps them elsewhere.

    Without a `device` they are where the model has them.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    device: torch.device | None = None


@contextmanager
def fake_run(forward: Forward) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Copy the model and its arguments; inside, every operator is fake."""
    values = KnownValues()
    copy = fake_copy(forward.model, values.mode, forward.device)
    fake_args, fake_kwargs = tree_map(values.fake, (list(forward.args), dict(forward.kwargs)))
    state = random.getstate()
    on_cuda = any(p.device.type == "cuda" for p in copy.parameters())
    devices = list(range(torch.cuda.device_count())) if on_cuda else []
    try:
        with unknown_values_refused("the forward"), torch.random.fork_rng(devices):
            with values, taken_for_real(), torch.enable_grad():
                yield copy, fake_args, fake_kwargs
    finally:
        random.setstate(state)


@dataclass(frozen=True)
class FakeModel:
    """A model and a batch that were built without memory; they run inside `entered`."""

    name: str
    model: nn.Module
    batch: Any
    values: KnownValues

    @classmethod
    def build(cls, name: str, make: Callable[[], tuple[nn.Module, Any]]) -> FakeModel:
        """Call `make`, and allocate nothing but small integers."""
        values = KnownValues()
        # torch's truncated normal reads its bounds from tensors
        unasked = patched(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
        # Module.to swaps fake parameters, which the mode's weak references forbid
        in_place = patched(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new))
        with unknown_values_refused(name), taken_for_real(), unasked, in_place, values:
            model, batch = make()
        return cls(name, model, batch, values)

    def known_batch(self) -> Any:
        """Return the batch with real tensors where their values are known."""
        return tree_map(self.values.known, self.batch)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the modes in which the model can run."""
        # torch logs what operators raise; the error repeats it
        quiet = patched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        with unknown_values_refused(self.name), quiet, taken_for_real(), self.values:
            yield
