"""Attributes that ZeRO-3 sets on parameters and modules, for rooms that do not import `zero3`."""

from typing import Any

import torch

_OF_MODULES = {"_original_parameters", "_external_params", "pre_bwd_fn", "post_bwd_fn"}


def full_shape(parameter: Any) -> torch.Size | None:
    """Return the shape of a sharded parameter when it is gathered; None if it is not sharded."""
    return getattr(parameter, "ds_shape", None)


def is_bookkeeping(name: str) -> bool:
    """Return whether DeepSpeed sets a module's attribute of this name, in step with its hooks."""
    return name in _OF_MODULES or name.startswith(("ds_", "applied_"))
