"""The configuration: the `ds_ckpt` section, DeepSpeed's `activation_checkpointing`, and rules.

`parse` reports mistakes together, each with its JSON path. It reports mistakes across keys only if
single keys have none. A key is declared once, as a field of its section's model, with type,
default, description and required keys. Nothing here imports DeepSpeed or transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_ckpt.config import load, rules
from ds_ckpt.config.models import PluginConfig, json_schema, plugin_model
from ds_ckpt.config.paths import DEEPSPEEDS, OURS, is_auto, show
from ds_ckpt.config.read import no_object, read
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.fields import warn

__all__ = ["PluginConfig", "json_schema", "load_file", "parse"]

AUTO: Mapping[str, Any] = {
    "activation": {"policy": "block"},
    "compression": {"method": "quantize", "quantize": {"bits": 3, "block": 64}},
    "weights": {"resident": "auto"},
}


def load_file(path: str | Path) -> dict[str, Any]:
    """Return a file's JSON object with the section "auto" filled in; ConfigError if it has none."""
    return _filled_in(load.read_file(path))


def _filled_in(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the section "auto" by the parts of `AUTO` that DeepSpeed's settings allow."""
    if not is_auto(config.get("ds_ckpt")):
        return config
    section = {}
    for part, content in AUTO.items():
        plugin = plugin_model().model_validate({part: content})
        if problem := next(rules.conflicts(plugin, config), None):
            warn(f'"auto" has no {part}: {problem.where} is {problem.found}')
        else:
            section[part] = content
    return {**config, "ds_ckpt": section}


def parse(
    config: Mapping[str, Any], *, source: str = "config", given: Mapping[str, Any] | None = None
) -> PluginConfig:
    """Return the plugin's part of a DeepSpeed configuration; ConfigError has all problems.

    If `activation_checkpointing` is present and no policy is named, the policy is `block`. `source`
    is the name for the error, usually the file. `given`: see `rules.unfilled`.
    """
    problems: list[Problem] = []
    plugin = None
    if isinstance(config, Mapping):
        config = _filled_in(dict(config))
        ours, theirs = config.get("ds_ckpt"), config.get("activation_checkpointing")
        problems += [*rules.misspelt(config), *rules.unfilled(config, given)]
        if theirs is not None and not isinstance(theirs, Mapping):
            problems.append(no_object(DEEPSPEEDS, theirs))
        plugin = read({} if ours is None else ours, plugin_model(), OURS, problems)
    else:
        why = "a DeepSpeed configuration is one JSON object"
        remedy = 'write {"zero_optimization": {"stage": 3}, ...}'
        problems.append(Problem("$", show(config), why, remedy))
    if plugin is not None and not problems:
        if theirs is not None:
            plugin = rules.with_compat_keys(plugin, theirs)
        problems += rules.broken_requirements(plugin)
        problems += rules.conflicts(plugin, config)
    if plugin is None or problems:
        problems = list({p.where: p for p in reversed(problems)}.values())[::-1]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(problems, headline=f"{source} cannot be used: {count}")
    return plugin
