"""From the activation section to the plan's own words. Not imported by `ds_ckpt.config` itself:
whoever only reads a configuration needs no torch."""

from __future__ import annotations

from ds_ckpt.activation.inputs import Keeping
from ds_ckpt.activation.policies import Policy, PolicySettings, Rule
from ds_ckpt.config.activation import ActivationConfig, ActivationRuleConfig, KeepingConfig


def activation_policy(config: ActivationConfig) -> Policy:
    """What `CheckpointedBlocks` takes; of a plan all but its units, which come later."""
    return Policy(
        settings=PolicySettings("none") if config.planned else _settings(config),
        rules=tuple(Rule(rule.match, _settings(rule)) for rule in config.rules),
        modules=config.modules,
        check_determinism=config.check_every,
    )


def input_keeping(config: ActivationConfig) -> Keeping:
    """What `build_inputs` takes."""
    return Keeping(**{key: getattr(config, key) for key in KeepingConfig.model_fields})


def _settings(config: ActivationConfig | ActivationRuleConfig) -> PolicySettings:
    return PolicySettings(config.policy, config.every_n, config.segment_size, config.save_ops)
