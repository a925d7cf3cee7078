"""`ds-ckpt validate` and `ds-ckpt schema`: check configuration files without starting ranks."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import reduce
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_ckpt.cli.common import AsJson, write_output

if TYPE_CHECKING:
    from ds_ckpt.errors import Problem


def validate(
    files: Annotated[list[Path], typer.Argument(help="DeepSpeed JSON files.")],
    ranks: Annotated[
        int | None,
        typer.Option("--world", min=1, help="Number of data-parallel ranks. [default: any]"),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print the conditions of each accuracy verdict.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check configuration files: print the active features, or problems with their remedies.

    A section for `ds-ckpt exec --section` is checked as for ZeRO-3, by the plugin's rules only.

    Both the plugin's rules and the installed DeepSpeed's own are applied, without ranks or a
    device. Lines "at start" are conditions that a launch checks. Exit 1 if any file has a problem.
    """
    results = [check_file(path, ranks, details) for path in files]
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            _print_result(result)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


def check_file(path: Path, ranks: int | None = None, details: bool = False) -> dict[str, Any]:
    """Return the result of one file, as `--json` prints it."""
    from ds_ckpt.config import PluginConfig, load_file, parse
    from ds_ckpt.config.paths import lookup
    from ds_ckpt.config.rules import conditions
    from ds_ckpt.config.verdicts import describe_accuracy, verdicts_on
    from ds_ckpt.errors import DsCkptError
    from ds_ckpt.zero3 import compatibility

    result: dict[str, Any] = {"file": str(path), "ok": False, "summary": None, "problems": []}
    result["warnings"] = []
    problems: list[Problem] = []
    try:
        # DeepSpeed logs to stdout, which --json needs
        with redirect_stdout(sys.__stderr__), _warnings_added_to(result["warnings"]):
            raw = load_file(path)
            if raw and isinstance(raw, Mapping) and raw.keys() <= PluginConfig.model_fields.keys():
                raw = {"zero_optimization": {"stage": 3}, "ds_ckpt": raw}  # of exec --section
            else:
                problems += _deepspeeds_problems(raw, ranks)
            config = parse(raw, source=str(path))
            verdicts = verdicts_on(config.compression, path)
            if config.active or config.telemetry.enabled:
                compatibility.require_torch()
                if lookup(raw, ("zero_optimization", "stage")) == 3:
                    compatibility.require()
            if config.weights.resident:
                compatibility.require_resident_weights(metadata.version("deepspeed"))
    except DsCkptError as error:
        problems = [*error.problems, *problems]
    if problems:
        by_path = {problem.where: asdict(problem) for problem in problems}
        return result | {"problems": list(by_path.values())}
    near = verdicts or verdicts_on(config.compression, path, any_warm_up=True)
    found = {
        "summary": config.summary(),
        "conditions": list(conditions(config, raw)),
        "accuracy": [verdict.model_dump(mode="json", by_alias=True) for verdict in verdicts],
        "accuracy_words": describe_accuracy(config.compression, near, details=details),
    }
    return result | {"ok": True, **found}


_ONE_BIT = (
    'write "AdamW", and "ds_ckpt": {"compression": {"method": "entropy_coded", "entropy_coded": '
    '{"bits": 1.0}}}, as in ds_configs/zero3_1bit.json'
)
_INSIDE_NODES = 'remove it, and write "ds_ckpt": {"weights": {"resident": true}}'
REPLACEMENTS = {
    "onebitadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "zeropp_loco_param": 'remove it, and write "ds_ckpt": {"compression": {"method": "quantize", '
    '"quantize": {"bits": 4}}}, which has error feedback, too',
    "mics_shard_size": _INSIDE_NODES,
    "mics_hierarchical_params_gather": _INSIDE_NODES,
}
"""Remedies for features that DeepSpeed has removed, by optimizer or `zero_optimization` key."""


def _deepspeeds_problems(config: Mapping[str, Any], ranks: int | None) -> Iterator[Problem]:
    """Yield the refusals of the installed DeepSpeed, with remedies."""
    from ds_ckpt.config.paths import join, lookup, nearest, show
    from ds_ckpt.errors import Problem
    from ds_ckpt.fields import warn
    from ds_ckpt.zero3.settings import possible_keys, refusals

    known = possible_keys()
    for key in config:
        if key not in known and (right := nearest(key, known, cutoff=0.82)):
            warn(f'{join("$", key)}: DeepSpeed ignores this key; did you mean "{right}"?')
    for keys, words in refusals(config, ranks):
        value = lookup(config, keys)
        remedy = "correct it, or remove it" if keys else "add what is missing"
        remedy = REPLACEMENTS.get("".join(keys[-1:]), REPLACEMENTS.get(str(value).lower(), remedy))
        why = f"DeepSpeed {metadata.version('deepspeed')} refuses it: {words}"
        yield Problem(reduce(join, keys, "$"), show(value), why, remedy)


@contextmanager
def _warnings_added_to(found: list[str]) -> Iterator[None]:
    """Collect what is logged in place of printing it: of several files each has its own."""
    from ds_ckpt.fields import warn

    def collect(record: logging.LogRecord) -> bool:
        found.append(record.getMessage().removeprefix("ds_ckpt configuration: "))
        return False

    log = logging.getLogger("ds_ckpt")
    log.addFilter(collect)
    warn.cache_clear()  # a file's warnings may be those of another file
    try:
        yield
    finally:
        log.removeFilter(collect)


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    if result["ok"]:
        console.print(Text("OK   ", "bold green"), Text(f"{result['file']}: {result['summary']}"))
        starts = [f"at start: {words}" for words in result["conditions"]]
        for words in (*result["accuracy_words"], *starts):
            console.print(Text(f"      {words}"))
    else:
        console.print(Text("BAD  ", "bold red"), Text(result["file"]))
    for problem in result["problems"]:
        console.print(Text(f"  {problem['where']}", "bold"))
        for label in ("found", "why", "remedy"):
            console.print(Text(f"     {label + ':':8}{problem[label]}"))
    for words in result["warnings"]:
        console.print(Text(f"      warning: {words}", "yellow"))


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
) -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from ds_ckpt.config import json_schema

    text = json.dumps(json_schema(), indent=2)
    if output is None:
        typer.echo(text)
    write_output(output, lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
