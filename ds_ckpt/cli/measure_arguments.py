"""Parsing of `ds-ckpt measure`'s options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ds_ckpt.cli.common import parse_rate, split_names
from ds_ckpt.config import load_file, parse
from ds_ckpt.config.paths import lookup
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.measure.spec import AXES, BASELINES, SHAPE
from ds_ckpt.lab.subject import Sizes, find_subject


def rates_of(text: str) -> tuple[float | None, ...]:
    """Parse `50mbit,unlimited` into Mbit/s."""
    found = tuple(parse_rate(rate) for rate in text.split(","))
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text!r} names a rate twice")
    return found


def sections_of(**listed: str) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, Any]]]:
    """Parse lists of names and of DeepSpeed JSON files, whose sections are read.

    Args:
        listed: comma-separated, by section of `ds_ckpt` as in `AXES`.

    Returns:
        Names by section, and the files' sections by `SECTION/NAME`.

    Raises:
        ConfigError: a file cannot be used, lacks the section, or has a name that is taken.
    """
    sections: dict[str, dict[str, Any]] = {}
    problems = []

    def name_of(word: str, section: str) -> str:
        if not word.endswith(".json"):
            return word
        content = load_file(Path(word))
        parse(content, source=word)
        name, own = Path(word).stem, lookup(content, ("ds_ckpt", section))
        if name in {*AXES[section], *BASELINES} or f"{section}/{name}" in sections:
            why = "the name identifies a configuration in the report"
            problems.append(Problem(word, f"{name} is a name already", why, "rename it"))
        elif not own:
            found, why = f"no ds_ckpt.{section} section", "it would equal default DeepSpeed"
            problems.append(Problem(word, found, why, "write one, or name another file"))
        else:
            sections[f"{section}/{name}"] = own
        return name

    chosen = {
        section: tuple(name_of(word, section) for word in split_names(words))
        for section, words in listed.items()
    }
    if problems:
        raise ConfigError(problems, headline="these files make no configurations")
    return chosen, sections


def model_of(name: str | None) -> str | None:
    """Check a model's name and make a path absolute; UnsupportedError if there is none."""
    if name is None:
        return None
    find_subject(name, Sizes())
    return str(Path(name).absolute()) if Path(name).exists() else name


def shape_of(text: str) -> dict[str, int]:
    """Parse `NAME=NUMBER,...` into arguments of the built-in Llama."""
    found = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in SHAPE or not value.isdigit():
            raise typer.BadParameter(f"{word!r}: write NAME=NUMBER with one of {', '.join(SHAPE)}")
        found[name] = int(value)
    return found
