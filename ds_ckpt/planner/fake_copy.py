"""A copy of a model without its memory: the same modules over fake tensors of the full shapes.

Under ZeRO-3 a parameter is an empty tensor that knows its whole shape (`ds_shape`); the copy has it
whole, and nothing is gathered or allocated. Hooks of DeepSpeed and of ds_ckpt are left out, so
running the copy touches no engine; everybody else's run, as they may change what autograd saves
(PEFT lets the embeddings' result ask for a gradient that way). The model itself is not changed.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ds_ckpt.errors import Problem, UnsupportedError

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_DROPPED = ("deepspeed", "ds_ckpt")
_OWN = {"_parameters", "_buffers", "_modules", *_HOOKS}


class FakeCopy:
    """`module` is the copy; `module_of` leads from an original module to its copy.

    Args:
        model: in any state of ZeRO's partitioning.
        mode: the fake tensors' mode.
        device: where parameters are when the model runs; None: where each says it is. Under
            offload of parameters they say "cpu" and run elsewhere.

    Raises:
        UnsupportedError: a parameter of a kind whose memory nobody can foretell from its shape.
    """

    def __init__(
        self, model: nn.Module, mode: FakeTensorMode, device: torch.device | None = None
    ) -> None:
        self._mode, self._device = mode, device
        self._tensors: dict[int, Tensor] = {}
        self._twins = {id(m): type(m).__new__(type(m)) for m in model.modules()}
        for name, module in model.named_modules():
            self._fill(name, module)
        self.module: nn.Module = self._twins[id(model)]

    def module_of(self, original: nn.Module) -> nn.Module:
        """The copy of one of the model's modules."""
        return self._twins[id(original)]

    def _fill(self, name: str, module: nn.Module) -> None:
        twin = self._twins[id(module)]
        own = {k: v for k, v in vars(module).items() if k not in _OWN}
        # `__new__` may have set nothing, and `__setattr__` needs what `nn.Module` sets first
        vars(twin).update(
            _parameters={
                k: self._parameter(f"{name}.{k}", p) for k, p in module._parameters.items()
            },
            _buffers={k: None if b is None else self._plain(b) for k, b in module._buffers.items()},
            _modules={
                k: None if m is None else self._twins[id(m)] for k, m in module._modules.items()
            },
        )
        for key in _HOOKS:
            if key in vars(module):
                vars(twin)[key] = _kept_hooks(vars(module)[key])
        vars(twin).update({k: self._value(v) for k, v in own.items()})
        vars(twin).pop("_compiled_call_impl", None)  # would run the original

    def _parameter(self, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        if parameter is None:
            return None
        known = self._tensors.get(id(parameter))
        if known is not None:
            return known
        plain = type(parameter).__name__ == "Parameter" or isinstance(parameter, FakeTensor)
        if not plain or parameter.layout != torch.strided:
            raise UnsupportedError(
                Problem(
                    where=name,
                    found=f"a {type(parameter).__name__} ({parameter.layout})",
                    why="the model is measured with tensors that have shapes and no memory, and "
                    "this kind of weight cannot be made so",
                    remedy='set "policy" to "block", "selective" or another that measures nothing',
                )
            )
        device = self._device or home_of(parameter)
        shape = getattr(parameter, "ds_shape", None)
        with self._mode:
            if shape is not None:
                data = torch.empty(tuple(shape), dtype=parameter.dtype, device=device)
            else:
                data = torch.empty_strided(
                    parameter.size(), parameter.stride(), dtype=parameter.dtype, device=device
                )
            twin = nn.Parameter(data, requires_grad=parameter.requires_grad)
        self._tensors[id(parameter)] = twin
        return twin

    def _plain(self, tensor: Tensor) -> Tensor:
        known = self._tensors.get(id(tensor))
        if known is None:
            known = faked(tensor, self._mode)
            self._tensors[id(tensor)] = known
        return known

    def _value(self, value: Any) -> Any:
        """An attribute: tensors become fake, modules their copies, containers new ones."""
        if isinstance(value, nn.Module):
            return self._twins.get(id(value), value)
        if isinstance(value, nn.Parameter):
            return self._tensors.get(id(value), value)
        if isinstance(value, Tensor):
            return self._plain(value)
        if type(value) in (list, tuple, set):
            return type(value)(self._value(v) for v in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((k, self._value(v)) for k, v in value.items())
        if isinstance(value, types.MethodType) and id(value.__self__) in self._twins:
            return types.MethodType(value.__func__, self._twins[id(value.__self__)])
        return value


def home_of(tensor: Tensor) -> torch.device:
    """Where a tensor will be when the model runs; one without memory ("meta"): on the CPU."""
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def faked(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A leaf of the mode like `tensor`, which may be real, without memory, or of another mode."""
    if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
        twin: Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    else:
        with mode:
            twin = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=home_of(tensor)
            )
    return twin.requires_grad_(tensor.requires_grad)


def _kept_hooks(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    return OrderedDict((k, h) for k, h in hooks.items() if not _is_dropped(h))


def _is_dropped(hook: Callable[..., Any] | bool) -> bool:
    while hasattr(hook, "func"):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] in _DROPPED
