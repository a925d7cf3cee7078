"""Parsing of `ds-ckpt measure`'s options."""

from pathlib import Path
from typing import Any

import typer

from ds_ckpt.cli.common import split_names
from ds_ckpt.config import load_file, parse
from ds_ckpt.config.paths import lookup
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.measure.spec import AXES, BASELINES, SHAPE
from ds_ckpt.lab.subject import Sizes, find_subject


def sections_of(**listed: str) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, Any]]]:
    """Parse comma-separated names and DeepSpeed JSON files, by section of `ds_ckpt` as in `AXES`.

    Returns:
        Names by section, and the files' sections by `SECTION/NAME`.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    sections: dict[str, dict[str, Any]] = {}
    for section, words in listed.items():
        for word in split_names(words):
            name = word
            if word.endswith(".json"):
                name = Path(word).stem
                taken = {*AXES[section], *BASELINES, *chosen.get(section, ())}
                sections[f"{section}/{name}"] = _section_in(word, section, taken)
            chosen[section] = (*chosen.get(section, ()), name)
        chosen.setdefault(section, ())
    return chosen, sections


def _section_in(file: str, section: str, taken: set[str]) -> dict[str, Any]:
    content = load_file(file)
    parse(content, source=file)
    found: dict[str, Any] = lookup(content, ("ds_ckpt", section)) or {}
    if Path(file).stem in taken:
        why = "the name identifies a configuration in the report"
        raise ConfigError(Problem(file, f"{Path(file).stem} is a name already", why, "rename it"))
    if not found:
        why, remedy = "it would equal default DeepSpeed", "write one, or name another file"
        raise ConfigError(Problem(file, f"no ds_ckpt.{section} section", why, remedy))
    return found


def model_of(name: str | None) -> str | None:
    """Check a model's name and make a path absolute; UnsupportedError if there is none."""
    if name is None:
        return None
    find_subject(name, Sizes())
    return str(Path(name).absolute()) if Path(name).exists() else name


def shape_of(text: str) -> dict[str, int]:
    """Parse `NAME=NUMBER,...` into arguments of the built-in Llama."""
    found = {}
    for word in split_names(text):
        name, _, value = word.partition("=")
        if name not in SHAPE or not value.isdigit():
            raise typer.BadParameter(f"{word!r}: write NAME=NUMBER with one of {', '.join(SHAPE)}")
        found[name] = int(value)
    return found
