"""Our sections under a wrong name or in a wrong place: DeepSpeed passes over unknown keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.paths import join, plain, show
from ds_ckpt.config.sections import OURS
from ds_ckpt.errors import Problem

_MISSPELT = {
    "ds_ckpt": ("dsckpt", "dscheckpoint", "dscheckpointing", "deepspeedckpt", "ckptds"),
    "activation_checkpointing": (
        "activationcheckpointing",
        "gradientcheckpointing",
        "actckpt",
        "actcheckpointing",
        "activationckpt",
    ),
}
_OUR_PARTS = {
    "activation": set(ActivationConfig.model_fields),
    "compression": set(CompressionConfig.model_fields),
    "telemetry": {"every_n_steps"},
}
_DEEPSPEED_SECTIONS = (
    "zero_optimization",
    "optimizer",
    "checkpoint",
    "compile",
    "fp16",
    "bf16",
    "data_types",
)


def _meant_section(key: object) -> str | None:
    if key in _MISSPELT:
        return None
    word = plain(key)
    for section, spellings in _MISSPELT.items():
        if word in spellings or _close(word, spellings[0]):
            return section
    return None


def _close(word: str, target: str) -> bool:
    return SequenceMatcher(None, word, target).ratio() > 0.82


def misplaced(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Our sections under a wrong name or in a wrong place: DeepSpeed would pass over them."""
    for key, value in config.items():
        if section := _meant_section(key):
            why = f'nothing reads this key; did you mean "{section}"?'
            yield Problem(join("$", str(key)), show(value), why, f'rename it to "{section}"')
        parts = _OUR_PARTS.get(str(key), set())
        if isinstance(value, Mapping) and parts & {str(k) for k in value}:
            why = f"nothing reads this section here; it is a part of {OURS}"
            yield Problem(join("$", key), show(value), why, f"move it to {OURS}.{key}")
        if key in _DEEPSPEED_SECTIONS and isinstance(value, Mapping):
            for section in set(_MISSPELT) & {str(k) for k in value}:
                why = f"nothing reads this section inside {key}: it stands at the top of the file"
                where = join(join("$", key), section)
                yield Problem(where, show(value[section]), why, f"move it to $.{section}")
