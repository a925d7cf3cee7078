"""Parsing of `ds-ckpt measure`'s options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from ds_ckpt.cli.common import parse_rate, split_names
from ds_ckpt.config import load_file, parse
from ds_ckpt.config.paths import BF16, is_auto, join, lookup, show
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.measure.spec import AXES, BASELINES, SHAPE
from ds_ckpt.lab.subject import Sizes, find_subject


def rates_of(text: str) -> tuple[float | None, ...]:
    """Parse `50mbit,unlimited` into Mbit/s."""
    found = tuple(parse_rate(rate) for rate in text.split(","))
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text!r} names a rate twice")
    return found


def batches_of(text: str) -> tuple[int, ...]:
    """Parse `2,4` into distinct numbers, the smallest first."""
    try:
        return tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write numbers with commas, such as 2,4") from None


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


def deepspeed_of(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a user's DeepSpeed file; return it without its batch settings, and those.

    Raises ConfigError if it cannot be the base of all configurations.
    """
    content = load_file(path)
    parse(content, source=str(path))
    problems = []

    def wrong(key: str, *words: str) -> None:
        problems.append(Problem(f"{path}: $.{key}", *words))

    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if "ds_ckpt" in content:
        why = "policies, methods and weights are compared"
        remedy = f"move it to an option: --policies, --methods or --weights {path}"
        wrong("ds_ckpt", "a section", why, remedy)
    if lookup(content, ("zero_optimization", "stage")) != 3:
        why = "configurations of ZeRO-3 are compared"
        wrong("zero_optimization.stage", "not 3", why, 'write "zero_optimization": {"stage": 3}')
    if lookup(content, ("fp16", "enabled")) is True:
        why = "steps that a loss scale skips cannot be timed; runs are bf16 or fp32"
        wrong("fp16.enabled", "true", why, "use bf16, which sends as many bytes")
    for key in BF16:
        enabled = lookup(content, (key, "enabled"))
        if not (enabled is None or isinstance(enabled, bool) or is_auto(enabled)):
            wrong(f"{key}.enabled", show(enabled), "expected a boolean", "write true or false")
    rest = {key: value for key, value in content.items() if key not in (*names, "train_batch_size")}
    for where in _autos(rest, "$"):
        why = "only the HF Trainer and accelerate fill it in"
        problems.append(Problem(f"{path}: {where}", '"auto"', why, "write a value"))
    total = content.pop("train_batch_size", None)  # follows from the others
    if total is not None and names[0] not in content:
        why = "the micro-batch would depend on the number of nodes"
        wrong("train_batch_size", str(total), why, f"write {names[0]}")
    if problems:
        raise ConfigError(problems, headline="this file cannot be the base of all configurations")
    batch = {name: content.pop(name) for name in names if name in content}
    return content, {name: n for name, n in batch.items() if isinstance(n, int)}


def _autos(value: Any, path: str) -> Iterator[str]:
    if is_auto(value):
        yield path
    elif isinstance(value, Mapping | list):
        for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _autos(below, join(path, key))


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
