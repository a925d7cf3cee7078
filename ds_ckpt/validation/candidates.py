"""The configurations that are compared, read from DeepSpeed JSON files.

What is taken from a file is its `ds_ckpt` section. Optimizer, batch and schedule are the task's,
the same for all, so that nothing but compression or checkpointing differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.config.paths import lookup
from ds_ckpt.config.policy import activation_policy, boundary_keeping
from ds_ckpt.config.settings import exchange_settings
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import MethodSettings

DENSE_SETTINGS = ExchangeSettings(MethodSettings("dense"))
WARM_UP_SHARE = 0.25
"""Of a run, at most: a longer dense start would leave little to judge."""


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        name: the file's without its suffix, or `dense`.
        file: as it was given; empty for dense.
        plugin: its `ds_ckpt` section.
        settings: of the exchange; dense where the section has no method.
    """

    name: str
    file: str
    plugin: PluginConfig
    settings: ExchangeSettings

    @property
    def lossy(self) -> bool:
        """Whether gradients may differ from dense ones; if not, every bit of a run is the same."""
        return not self.settings.lossless

    @property
    def checkpoints(self) -> bool:
        """Whether activations are recomputed."""
        return self.plugin.activation.active

    def in_run_of(self, steps: int) -> ExchangeSettings:
        """The settings with the dense warm-up that a run of so many steps has."""
        most = int(WARM_UP_SHARE * steps)
        return dataclasses.replace(self.settings, start_step=min(self.settings.start_step, most))

    def digest(self, steps: int) -> str:
        """Of all that a run of so many steps depends on: equal digests are equal runs."""
        given = self.in_run_of(steps)
        rules = [
            dataclasses.asdict(rule) | {"settings": rule.settings.looked_at()}
            for rule in given.rules
        ]
        settings = dataclasses.asdict(given) | {"default": given.default.looked_at()}
        settings["rules"] = rules
        for name in ("gate", "levels"):  # virtual workers have neither a clock nor hosts
            del settings[name]
        if given.holds_back(2) == dataclasses.replace(given, when="auto").holds_back(2):
            del settings["when"]  # as where a run knows of nothing else
        activation = self.plugin.activation.model_dump(mode="json") if self.checkpoints else None
        method = self.plugin.compression.method
        said = json.dumps([method, settings, activation], sort_keys=True, default=str)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


DENSE = Candidate("dense", "", PluginConfig(), DENSE_SETTINGS)


def read_candidates(files: Sequence[Path]) -> list[Candidate]:
    """Candidates of these files, names made different where files share one.

    Raises:
        ConfigError: a file cannot be used, or would do nothing that could be judged.
    """
    found: list[Candidate] = []
    for path in files:
        config = load_file(path)
        compression = lookup(config, ("ds_ckpt", "compression"))
        if isinstance(compression, dict):
            compression.pop("guard", None)  # validation is what limits come from
        plugin = parse(config, source=str(path))
        if not plugin.active:
            raise ConfigError(
                Problem(
                    where=str(path),
                    found="neither compression nor checkpointing",
                    why="it is plain DeepSpeed, which it would be compared with",
                    remedy="give a file with a ds_ckpt section that switches something on",
                )
            )
        method = plugin.compression.method
        settings = DENSE_SETTINGS if method == "none" else exchange_settings(plugin.compression)
        name, taken = path.stem, {c.name for c in found} | {DENSE.name}
        if name in taken:
            name = next(f"{name}-{i}" for i in range(2, 999) if f"{name}-{i}" not in taken)
        found.append(Candidate(name, str(path), plugin, settings))
    return found


@contextmanager
def checkpointed(model: torch.nn.Module, plugin: PluginConfig, device: str) -> Iterator[None]:
    """The model with the section's checkpointing and offload, as a session would have it.

    Raises:
        ConfigError, UnsupportedError: the policy does not fit the model, or needs an engine.
    """
    config = plugin.activation
    if not config.active:
        yield
        return
    from ds_ckpt.activation import CheckpointedBlocks
    from ds_ckpt.activation.inputs import build_inputs
    from ds_ckpt.activation.policies import make_plan

    if config.planned:
        raise ConfigError(
            Problem(
                where="$.ds_ckpt.activation.policy",
                found=f'"{config.policy}"',
                why="its plan is made from a batch of an engine, which virtual workers have not",
                remedy="validate with --processes 2; the plan changes no number",
            )
        )
    keeping, policy = boundary_keeping(config), activation_policy(config)
    if keeping.partition:
        raise ConfigError(
            Problem(
                where="$.ds_ckpt.activation.partition",
                found="true",
                why="virtual workers have no tensor-parallel group",
                remedy="validate the file without it, it changes no number",
            )
        )
    units = make_plan(model, policy)
    boundaries = build_inputs(keeping, model, units, torch.device(device))
    blocks = CheckpointedBlocks(
        model, policy=policy, units=units, around=boundaries.around if boundaries else None
    )
    try:
        yield
    finally:
        blocks.remove()


def versions() -> dict[str, Any]:
    """Of what results depend on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("ds_ckpt", "torch", "deepspeed", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def virtual_versions() -> dict[str, Any]:
    """Of what runs of virtual workers depend on: DeepSpeed has no part in them."""
    return {name: found for name, found in versions().items() if name != "deepspeed"}
