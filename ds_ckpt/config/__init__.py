"""The configuration: the `ds_ckpt` section, DeepSpeed's `activation_checkpointing`, and the rules.

`parse` reports every mistake at once, each with its JSON path. The models are in `models.py`, one
section's mistakes in `sections.py`, rules across sections in `conflicts.py` and `unused.py`, strict
JSON and former names in `load.py`, the editors' schema in `schema.py`. What single methods of
compression take is asked of their registry. Nothing here imports DeepSpeed or transformers.
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
from ds_ckpt.config.conflicts import Wanted, across_sections, misplaced
from ds_ckpt.config.load import load_file, with_new_names
from ds_ckpt.config.models import (
    DeepSpeedActivationSection,
    PluginConfig,
    TelemetryConfig,
    follow_registry,
)
from ds_ckpt.config.paths import show
from ds_ckpt.config.schema import json_schema
from ds_ckpt.config.sections import DEEPSPEEDS, OURS, read
from ds_ckpt.config.unused import with_deepspeeds_keys, would_do_nothing
from ds_ckpt.config.verdicts import without_range
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
    """Read the plugin's part of a whole DeepSpeed configuration; `config` is not changed.

    `null` leaves a key at its default. Where `activation_checkpointing` stands and no policy is
    named, the policy is `block`; an explicit `"policy": "none"` wins over that section, whose keys
    may then only be false or null.

    Args:
        config: the DeepSpeed JSON as a dict.
        source: named in the error, usually the file.

    Raises:
        ConfigError: with every problem found.
    """
    follow_registry()
    problems: list[Problem] = []
    if not isinstance(config, Mapping):
        why = "a DeepSpeed configuration is one JSON object"
        problem = Problem("$", show(config), why, 'write {"zero_optimization": {"stage": 3}, ...}')
        raise ConfigError(problem, headline=f"{source} cannot be used: 1 problem")
    config = dict(config)
    if "ds_ckpt" in config:
        config["ds_ckpt"] = with_new_names(config["ds_ckpt"])
    ours, deepspeeds = config.get("ds_ckpt"), config.get("activation_checkpointing")
    problems += misplaced(config)
    if deepspeeds is not None:
        read(deepspeeds, DeepSpeedActivationSection, DEEPSPEEDS, problems)
    ours = _with_policy(ours, section_stands=deepspeeds is not None)
    ours = with_deepspeeds_keys(ours, deepspeeds)
    plugin = read(ours, PluginConfig, OURS, problems)
    wanted = Wanted.of(ours)
    problems += would_do_nothing(config, wanted)
    problems += across_sections(config, wanted)
    if isinstance(plugin, PluginConfig):
        problems += without_range(plugin.compression)
    if problems:
        problems = list({p.where: p for p in reversed(problems)}.values())[::-1]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(problems, headline=f"{source} cannot be used: {count}")
    assert isinstance(plugin, PluginConfig)
    return plugin


def _with_policy(ours: Any, *, section_stands: bool) -> Any:
    """The section with policy `block` filled in where DeepSpeed's section asks for it."""
    ours = {} if ours is None else ours
    if not section_stands or not isinstance(ours, Mapping):
        return ours
    activation = {} if ours.get("activation") is None else ours["activation"]
    if not isinstance(activation, Mapping) or activation.get("policy") is not None:
        return ours
    return {**ours, "activation": {**activation, "policy": "block"}}
