"""The configuration: the `ds_ckpt` section, DeepSpeed's `activation_checkpointing`, and rules.

`parse` reports every mistake at once, each with its JSON path. A key is declared once, as a field
of its section's model: type, default, description, and the keys that it requires. `read.py`
converts one section's mistakes, `rules.py` has the rules across sections, `load.py` reads strict
JSON. Nothing here imports DeepSpeed or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.config.compression import (
    CompressionConfig,
    ErrorFeedbackConfig,
    ExchangeConfig,
    GuardConfig,
    RuleConfig,
)
from ds_ckpt.config.load import load_file, with_new_names
from ds_ckpt.config.models import (
    CompatSection,
    PluginConfig,
    TelemetryConfig,
    json_schema,
    plugin_model,
)
from ds_ckpt.config.paths import DEEPSPEEDS, OURS, show
from ds_ckpt.config.read import read
from ds_ckpt.config.rules import (
    RequestedConfig,
    broken_requirements,
    conflicts,
    misplaced,
    with_compat_keys,
)
from ds_ckpt.config.verdicts import guard_without_limits
from ds_ckpt.errors import ConfigError, Problem

__all__ = [
    "ActivationConfig",
    "CompressionConfig",
    "ErrorFeedbackConfig",
    "ExchangeConfig",
    "GuardConfig",
    "PluginConfig",
    "RuleConfig",
    "TelemetryConfig",
    "json_schema",
    "load_file",
    "parse",
]


def parse(config: Mapping[str, Any], *, source: str = "config") -> PluginConfig:
    """Return the plugin's part of a whole DeepSpeed configuration; `config` is not changed.

    `null` leaves a key at its default. If `activation_checkpointing` is present and no policy is
    named, the policy is `block`; an explicit `"policy": "none"` overrides that section, whose keys
    must then be false or null.

    Args:
        config: the DeepSpeed JSON as a dict.
        source: name for the error, usually the file.

    Raises:
        ConfigError: with every problem found.
    """
    if not isinstance(config, Mapping):
        why = "a DeepSpeed configuration is one JSON object"
        problem = Problem("$", show(config), why, 'write {"zero_optimization": {"stage": 3}, ...}')
        raise ConfigError(problem, headline=f"{source} cannot be used: 1 problem")
    deepspeeds = config.get("activation_checkpointing")
    ours, origins, problems = with_compat_keys(with_new_names(config.get("ds_ckpt")), deepspeeds)
    problems += misplaced(config)
    if deepspeeds is not None:
        read(deepspeeds, CompatSection, DEEPSPEEDS, problems)
    plugin = read(ours, plugin_model(), OURS, problems)
    requested = RequestedConfig(config, ours, {problem.where for problem in problems})
    problems += broken_requirements(requested, origins)
    problems += conflicts(requested)
    if isinstance(plugin, PluginConfig):
        problems += guard_without_limits(plugin.compression)
    if problems or not isinstance(plugin, PluginConfig):
        problems = list({p.where: p for p in reversed(problems)}.values())[::-1]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(problems, headline=f"{source} cannot be used: {count}")
    return plugin
